"""A backup's manifest: the files in it, each as checksummed parts, and what a restore must know before it.

Its name holds the checksum of its text, so that a damaged one is found. Its digest, kept elsewhere, finds one
that somebody wrote in its place, name and all.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from engine.backup.place import MANIFESTS, BackupPlace
from engine.errors import ConfigError, Conflict, DamagedBytes, NotFound
from engine.store.segments import checksum_of

FORMAT = 1
# Bytes of a part; the last one of a file may be shorter.
PART = 32 << 20
DIGEST16 = 16
# The first part of a file's name says where it is restored to.
FOLDERS = ("state", "store", "suites")
# The beginning of a manifest's digest, or all of it.
DIGEST = re.compile(r"[0-9a-f]{12,64}")


class Published(NamedTuple):
    """A finished backup's name, and the sha256 of its manifest, as `sha256sum` prints it for the file."""

    name: str
    digest: str


class StoredFile(NamedTuple):
    """A file of a backup: its name within it, its bytes, and the checksums of its parts."""

    name: str
    size: int
    parts: tuple[str, ...]

    def sizes(self) -> Iterable[tuple[str, int]]:
        """Yield each part's checksum with its size."""
        for number, part in enumerate(self.parts):
            yield part, min(PART, self.size - number * PART)


@dataclass(frozen=True)
class BackupManifest:
    """One backup. `catalog` is the catalog's id, `mlflow` says what was done with MLflow's database."""

    format: int
    code: str
    created_at: float
    catalog: str
    catalog_schema: str
    ledger_schema: int
    mlflow: str
    files: tuple[StoredFile, ...]


def publish(place: BackupPlace, manifest: BackupManifest) -> Published:
    """Write a manifest, which finishes its backup; return its name and digest."""
    text = json.dumps(asdict(manifest) | {"files": manifest.files}, separators=(",", ":")).encode()
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(manifest.created_at))
    # Microseconds, so that names sort by time.
    moment += f".{int(manifest.created_at % 1 * 1e6):06}Z"
    name = f"{moment}-{checksum_of(text)[:DIGEST16]}.json"
    place.write(f"{MANIFESTS}/{name}", text)
    return Published(name, hashlib.sha256(text).hexdigest())


def checked_digest(digest: str) -> str:
    """Return the beginning of a digest in small letters; `ConfigError` for what is none, or too short."""
    if not DIGEST.fullmatch(digest.lower()):
        raise ConfigError(
            f"{digest!r} is not the digest of a manifest. Give the 64 hexadecimal digits that `graftwork "
            "backup` printed, or at least the first 12."
        )
    return digest.lower()


def read(place: BackupPlace, name: str, expected: str = "") -> BackupManifest:
    """Return a backup's manifest; `expected` is how its digest has to begin.

    Raises `DamagedBytes` when its text is not the one that was written, `Conflict` when it has another
    digest, `ConfigError` when this version does not know its format, or when it names a file that a restore
    would write elsewhere.
    """
    text = place.read(f"{MANIFESTS}/{name}")
    if not name.endswith(f"-{checksum_of(text)[:DIGEST16]}.json"):
        raise DamagedBytes(
            f"The manifest {MANIFESTS}/{name} at {place.address} is damaged: remove it. Other backups there "
            f"are not affected; `ls` their names, and restore one by {place.address}/{MANIFESTS}/NAME."
        )
    digest = hashlib.sha256(text).hexdigest()
    if not digest.startswith(expected):
        raise Conflict(
            f"The manifest of the backup {name} at {place.address} has the digest {digest}, and {expected} "
            "was expected: it is another backup, or somebody has exchanged it. Nothing was changed. Name the "
            f"backup that you mean by {place.address}/{MANIFESTS}/NAME.json, or restore one of another place."
        )
    row = json.loads(text)
    if row["format"] != FORMAT:
        raise ConfigError(
            f"The backup {name} has format {row['format']}, this code reads {FORMAT}. "
            "Restore it with the version of Graftwork that made it, or a newer one."
        )
    files = tuple(StoredFile(path, size, tuple(parts)) for path, size, parts in row.pop("files"))
    for file in files:
        if not _is_inside(file.name):
            raise ConfigError(
                f"The backup {name} names the file {file.name!r}, which no backup of Graftwork has: somebody "
                "else wrote it. Nothing was restored."
            )
    return BackupManifest(**row, files=files)


def _is_inside(name: str) -> bool:
    """Return whether a name is a file's in one of the folders, and in no other place."""
    path = PurePosixPath(name)
    is_plain = str(path) == name and ".." not in path.parts and "\0" not in name
    return is_plain and len(path.parts) > 1 and path.parts[0] in FOLDERS


def find(address: str) -> tuple[BackupPlace, str]:
    """Return the place of a backup and its name: the newest one, or the manifest that `address` names.

    Raises `NotFound` when there is no finished backup.
    """
    root, folder, name = address.rpartition(f"/{MANIFESTS}/")
    chosen = name if folder and name.endswith(".json") else None
    place = BackupPlace(root if chosen else address)
    names = place.manifests()
    if chosen in names:
        return place, chosen
    if chosen or not names:
        others = f" Backups there: {', '.join(names)}." if names else ""
        raise NotFound(
            f"There is no finished backup at {address}. One that was cut off has no manifest and is not "
            f"restored; `graftwork backup create` there goes on with it.{others}"
        )
    return place, names[-1]


def missing_parts(place: BackupPlace, manifest: BackupManifest) -> set[str]:
    """Return the parts of a backup that the place does not have, or not of their size."""
    there = place.objects()
    return {part for file in manifest.files for part, size in file.sizes() if there.get(part) != size}
