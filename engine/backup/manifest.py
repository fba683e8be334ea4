"""A backup's manifest: the files in it, each as checksummed parts, and what a restore must know before it.

Its name holds the checksum of its text, so that a damaged one is found.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from engine.backup.place import MANIFESTS, BackupPlace
from engine.errors import ConfigError, DamagedBytes, NotFound
from engine.store.checksums import checksum_of

FORMAT = 1
# Bytes of a part; the last one of a file may be shorter.
PART = 32 << 20
DIGEST16 = 16
# The first part of a file's name says where it is restored to.
FOLDERS = ("state", "store", "suites")


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


def publish(place: BackupPlace, manifest: BackupManifest) -> str:
    """Write a manifest, which finishes its backup; return its name."""
    text = json.dumps(asdict(manifest) | {"files": manifest.files}, separators=(",", ":")).encode()
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(manifest.created_at))
    # Microseconds, so that names sort by time.
    moment += f".{int(manifest.created_at % 1 * 1e6):06}Z"
    name = f"{moment}-{checksum_of(text)[:DIGEST16]}.json"
    place.write(f"{MANIFESTS}/{name}", text)
    return name


def read(place: BackupPlace, name: str) -> BackupManifest:
    """Return a backup's manifest.

    Raises `DamagedBytes` when its text is not the one that was written, `ConfigError` when this version does
    not know its format, or when it names a file that a restore would write elsewhere.
    """
    text = place.read(f"{MANIFESTS}/{name}")
    if not name.endswith(f"-{checksum_of(text)[:DIGEST16]}.json"):
        raise DamagedBytes(
            f"The manifest {MANIFESTS}/{name} at {place.address} is damaged: remove it. Other backups there "
            f"are not affected; `ls` their names, and restore one by {place.address}/{MANIFESTS}/NAME."
        )
    found = json.loads(text)
    if found["format"] != FORMAT:
        raise ConfigError(
            f"The backup {name} has format {found['format']}, this code reads {FORMAT}. "
            "Restore it with the version of Graftwork that made it, or a newer one."
        )
    files = tuple(StoredFile(path, size, tuple(parts)) for path, size, parts in found.pop("files"))
    for file in files:
        if not _is_inside(file.name):
            raise ConfigError(
                f"The backup {name} names the file {file.name!r}, which no backup of Graftwork has: somebody "
                "else wrote it. Nothing was restored."
            )
    return BackupManifest(**found, files=files)


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
        known = f" Backups there: {', '.join(names)}." if names else ""
        raise NotFound(
            f"There is no finished backup at {address}. One that was cut off has no manifest and is not "
            f"restored; `graftwork backup` there goes on with it.{known}"
        )
    return place, names[-1]


def missing_parts(place: BackupPlace, manifest: BackupManifest) -> set[str]:
    """Return the parts of a backup that the place does not have, or not of their size."""
    there = place.objects()
    return {part for file in manifest.files for part, size in file.sizes() if there.get(part) != size}
