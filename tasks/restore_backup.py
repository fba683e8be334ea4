"""Restores a backup as a new installation: into an empty state directory, on this machine or another.

All is written beside the state directory and renamed at the end; a catalog in Postgres is filled in one
transaction before that. A state directory that exists may be a mount point, which cannot be replaced: then
all is written inside of it, in a folder whose presence keeps every process from the catalog until all has
been moved out. What a kill leaves is used by the next restore of the same backup.

It begins with what it undoes: a backup is older than the decisions that were made after it.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.backup.manifest import (
    FOLDERS,
    PART,
    BackupManifest,
    StoredFile,
    checked_digest,
    find,
    missing_parts,
    read,
)
from engine.backup.place import BackupPlace
from engine.catalog.access import sqlite_path
from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.copying import copy_catalog, require_empty
from engine.catalog.opening import whole_catalog
from engine.catalog.records import OLDEST_SCHEMA, SCHEMA_VERSION
from engine.errors import ConfigError, Conflict, GraftworkError, MissingBytes, ServiceError
from engine.file_lock import alone_in
from engine.files import replacing, sync, write_whole
from engine.settings.params import Params
from engine.store.open import open_store
from engine.store.segments import CATALOG_ID, Store, checksum_of
from tasks.backup import ledger_schemas
from tasks.restore_undone import address_of, find_undone, meaning

ACTION = "restore"
# Which backup a state directory was restored from; written first, so that leftovers of a kill have a name.
MARKER = "restored.json"
# Where suites are written before they appear, under their directory.
DRAFTS = ".restoring"
OnBytes = Callable[[int, int], object]
Tell = Callable[[str], object]


@dataclass(frozen=True)
class RestoreResult:
    """What was restored; `mlflow` is what the backup has of MLflow's database.

    `revoked` is how many keys were revoked; None when that was not asked for.
    """

    place: str
    name: str
    state_dir: str
    files: int
    bytes: int
    mlflow: str
    revoked: int | None = None


def restore_backup(
    params: Params,
    address: str,
    on_bytes: OnBytes = lambda done, size: None,
    *,
    expect: str | None = None,
    compare_with: str | None = None,
    revoke_all_keys: bool = False,
    tell: Tell = lambda sentence: None,
) -> RestoreResult:
    """Restore the newest backup at `address`, or the one whose manifest it names.

    `on_bytes` is called with the bytes done and their sum. Before anything is written, `tell` is called with
    what the restore undoes: in general, and by name where `compare_with` (a URL, a file or a state directory)
    or the settings name a catalog that knows. `expect` is how the manifest's digest has to begin. With
    `revoke_all_keys` no key of the backup is in force in what is restored.

    Idempotent until it has succeeded: killed at any moment and started again, it goes on.

    Raises `NotFound` where there is no finished backup, `DamagedBytes` or `MissingBytes` for a damaged one,
    `ConfigError` for one of a newer or too old a version, or when its suites cannot be written, `Conflict`
    when it is not the expected one, or when the state directory, the store, the catalog's database or a suite
    of the same name is in use.
    """
    expected = checked_digest(expect) if expect is not None else ""
    place, name = find(address)
    manifest = read(place, name, expected)
    _refuse_other_schemas(name, manifest)
    if missing := missing_parts(place, manifest):
        raise MissingBytes(
            f"The backup {name} at {place.address} is damaged: {len(missing)} of its objects are missing or "
            f"cut short, such as {min(missing)}. Nothing was changed. Restore an older one, by its address "
            f"{place.address}/backups/NAME."
        )
    tell(meaning(name, manifest.created_at, revoke_all_keys))
    _tell_undone(params, place, manifest, compare_with, tell)
    state_dir = params.state_dir
    if _held(params) and not params.paths.restoring.is_dir():
        raise Conflict(
            f"The state directory {state_dir} is not empty, and a restore writes over nothing. Nothing was "
            "changed. Set another `state_dir`, or move it away."
        )
    with _draft_of(params, f"{place.address}/{name}", manifest) as (draft, goes_on):
        done = _Progress(sum(file.size for file in manifest.files), on_bytes)
        files = {kind: _of_kind(manifest, kind) for kind in FOLDERS}
        _refuse_suites_dir(params, files["suites"])
        if params.catalog.url and not goes_on:
            require_empty(params.catalog.url)
        _bring_store(params, place, manifest, files["store"], draft, goes_on, done)
        for inside, file in files["state"].items():
            _bring_file(place, file, draft / inside)
            done.add(file.size)
        _bring_suites(params, place, files["suites"], done)
        revoked = _bring_catalog(params, place, name, draft, goes_on, revoke_all_keys)
        try:
            _appear(draft, state_dir)
        except OSError as error:
            raise ServiceError(
                f"{draft} could not be renamed to {state_dir}: {error.strerror}. Run the restore again: it "
                "goes on where it stopped."
            ) from None
    return RestoreResult(
        place.address, name, str(state_dir), len(manifest.files), done.size, manifest.mlflow, revoked
    )


class _Progress:
    """Counts the bytes that are restored."""

    def __init__(self, size: int, on_bytes: OnBytes):
        self.size, self._done, self._on_bytes = size, 0, on_bytes

    def add(self, size: int) -> None:
        self._done += size
        self._on_bytes(self._done, self.size)


def _tell_undone(
    params: Params, place: BackupPlace, manifest: BackupManifest, compare_with: str | None, tell: Tell
) -> None:
    """Tell by name what is undone, where a catalog knows it.

    The catalog that the settings name is there only where this restore will be refused, or was killed before;
    then a comparison that fails is told, and is no reason to stop.
    """
    if compare_with is not None:
        undone = _undone(place, manifest, address_of(compare_with))
    elif (url := _present(params)) is None:
        tell(
            "Which keys, revisions, policies and tenants these are is listed here with --compare-with and "
            "the catalog of the installation that is replaced."
        )
        return
    else:
        try:
            undone = _undone(place, manifest, url)
        except (GraftworkError, OSError) as error:
            tell(f"Which ones these are is not known: {error}")
            return
    for line in undone:
        tell(line)


def _present(params: Params) -> str | None:
    """Return the URL of the catalog that the settings name; None while there is none, or an empty one."""
    if not params.paths.has_catalog:
        return None
    try:
        require_empty(params.paths.catalog_url)
    except Conflict:
        return params.paths.catalog_url
    return None


def _undone(place: BackupPlace, manifest: BackupManifest, present_url: str) -> list[str]:
    """Compare a passing copy of the backup's catalog with the present one."""
    # Not in the draft of the state directory: nothing is written there before this has been told.
    with tempfile.TemporaryDirectory(prefix="graftwork-") as folder:
        copy = Path(folder) / "catalog.db"
        _bring_file(place, _of_kind(manifest, "state")["catalog.db"], copy)
        migrate(f"sqlite:///{copy}")
        return list(find_undone(f"sqlite:///{copy}", present_url))


def _refuse_other_schemas(name: str, manifest: BackupManifest) -> None:
    for what, schema, (oldest, newest) in (
        ("catalog", int(manifest.catalog_schema), (int(OLDEST_SCHEMA), int(SCHEMA_VERSION))),
        ("ledger", manifest.ledger_schema, ledger_schemas()),
    ):
        told = f"The {what} of the backup {name} has schema {schema}"
        if schema > newest:
            raise ConfigError(
                f"{told}, newer than this code's {newest}: it was made by {manifest.code}. Nothing was "
                "changed. Restore it with that version, or a newer one."
            )
        if schema < oldest:
            raise ConfigError(
                f"{told}, older than {oldest}: it was made by {manifest.code}. Nothing was changed. Restore "
                "it with commit 265b009, and back that up."
            )


def _of_kind(manifest: BackupManifest, kind: str) -> dict[str, StoredFile]:
    """Return the files under one of the manifest's folders, by their names in it."""
    files_inside = {}
    for file in manifest.files:
        folder, _, inside = file.name.partition("/")
        if folder == kind:
            files_inside[inside] = file
    return files_inside


def _held(params: Params) -> list[Path]:
    """Return what a state directory holds, beside what an empty one may: its suites, a disk's lost+found."""
    root = params.state_dir
    free = {root / "lost+found", params.paths.restoring, params.suites_dir, *params.suites_dir.parents}
    return [path for path in root.iterdir() if path not in free] if root.is_dir() else []


def _appear(draft: Path, state_dir: Path) -> None:
    """Make the installation visible at once: by one rename, or by the end of the folder it was written in."""
    if draft.parent == state_dir:
        for path in list(draft.iterdir()):
            path.rename(state_dir / path.name)
        sync(state_dir)
        draft.rmdir()
    else:
        draft.rename(state_dir)
    sync(draft.parent)


@contextmanager
def _draft_of(params: Params, backup: str, manifest: BackupManifest) -> Iterator[tuple[Path, bool]]:
    """Yield the directory that becomes `state_dir`, and whether a restore of this backup began in it before.

    Then it holds whole files alone.

    Raises `Conflict` while another restore runs there, or when the directory is not one of a restore.
    """
    state_dir = params.state_dir
    beside = state_dir.with_name(f"{state_dir.name}.restoring")
    draft = params.paths.restoring if state_dir.is_dir() else beside
    marker = draft / MARKER
    names = {MARKER, f"store/{CATALOG_ID}"} | {file.name.removeprefix("state/") for file in manifest.files}
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone_in(draft) as is_alone:
        if not is_alone:
            raise Conflict(f"Another restore to {state_dir} is running. Wait for its end.")
        for path in _held(params):
            # What was moved out before a kill.
            if path.name in {name.partition("/")[0] for name in names}:
                path.rename(draft / path.name)
        if any(draft.iterdir()) and not marker.is_file():
            raise Conflict(f"{draft} is in the way, and no restore has made it. Move it away.")
        goes_on = marker.is_file() and json.loads(marker.read_text())["backup"] == backup
        if not goes_on:
            for path in draft.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_whole(marker, json.dumps({"backup": backup}), durable=True)
        # What a kill left half written, or the log of a database, which would be applied to its next copy.
        for path in [path for path in draft.rglob("*") if path.is_file()]:
            if path.relative_to(draft).as_posix() not in names:
                path.unlink()
        yield draft, goes_on


def _bring_store(
    params: Params,
    place: BackupPlace,
    manifest: BackupManifest,
    files: dict[str, StoredFile],
    draft: Path,
    goes_on: bool,
    done: _Progress,
) -> None:
    """Write the segments to the draft, or to the store behind `store.url`, which must be empty."""
    with closing(open_store(params) if params.store.url else Store(draft / "store")) as store:
        owner, there = store.catalog_id(), dict(store.segments())
        if not (goes_on and owner == manifest.catalog) and (owner or there):
            raise Conflict(
                f"The store {store.place} is not empty. A restored catalog and the living one would remove "
                "each other's adapters there. Nothing was changed. Set another `store.url`."
            )
        store.belong_to(manifest.catalog)
        for segment, file in files.items():
            # A segment is there whole or not at all.
            if there.get(segment) != file.size:
                store.bring(segment, _parts(place, file))
            done.add(file.size)


def _bring_file(place: BackupPlace, file: StoredFile, target: Path) -> None:
    """Write a file whole, unless it is there already."""
    if not _is_there(file, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=True) as draft, draft.open("wb") as written:
            written.writelines(_parts(place, file))


def _is_there(file: StoredFile, path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return all(checksum_of(opened.read(PART)) == part for part in file.parts)


def _parts(place: BackupPlace, file: StoredFile) -> Iterator[bytes]:
    return map(place.object, file.parts)


def _refuse_suites_dir(params: Params, files: dict[str, StoredFile]) -> None:
    for inside, file in files.items():
        path = params.suites_dir / inside
        if path.exists() and not _is_there(file, path):
            raise Conflict(
                f"{path} differs from the file in the backup, and a restore writes over nothing. Nothing was "
                "changed. Set another `suites_dir`, or move it away."
            )
    root = params.suites_dir
    if all((root / inside).exists() for inside in files):
        return
    try:
        with tempfile.TemporaryFile(dir=next(path for path in (root, *root.parents) if path.exists())):
            pass
    except OSError as error:
        raise ConfigError(
            f"The backup has suites, and {root} cannot be written: {error.strerror}. Nothing was changed. "
            "Set another `suites_dir`."
        ) from None


def _bring_suites(params: Params, place: BackupPlace, files: dict[str, StoredFile], done: _Progress) -> None:
    """Write the suites that are not there, each appearing whole, and missing files of those that are."""
    root = params.suites_dir
    drafts = root / DRAFTS
    shutil.rmtree(drafts, ignore_errors=True)
    for inside, file in files.items():
        if not (root / inside).exists():
            _bring_file(place, file, drafts / inside)
        done.add(file.size)
    for draft in sorted(drafts.glob("*")):
        if (root / draft.name).exists():
            for path in [path for path in draft.rglob("*") if path.is_file()]:
                target = root / path.relative_to(drafts)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
        else:
            draft.rename(root / draft.name)
    shutil.rmtree(drafts, ignore_errors=True)


def _bring_catalog(
    params: Params, place: BackupPlace, name: str, draft: Path, goes_on: bool, revoke_all_keys: bool
) -> int | None:
    """Migrate the restored catalog, note the restore in its audit log, and move its rows to `catalog.url`.

    Keys are revoked, if they are to be, before anybody can open that catalog. Return how many were.
    """
    file = draft / "catalog.db"
    url = f"sqlite:///{file}"
    migrate(url)
    with whole_catalog(url) as catalog:
        catalog.note(ACTION, place.address, {"name": name})
        revoked = catalog.keys.revoke_all() if revoke_all_keys else None
        catalog.shorten_log()
    (draft / "catalog.lock").unlink(missing_ok=True)
    if not params.catalog.url:
        return revoked
    try:
        copy_catalog(url, params.catalog.url, known_alone=True)
    except Conflict:
        # Filled by this restore, before a kill?
        if not (goes_on and _is_same(url, params.catalog.url)):
            raise
    for path in draft.glob("catalog.db*"):
        path.unlink()
    return revoked


def _is_same(url: str, other: str) -> bool:
    """Say whether two catalogs have one id, and the second has changed nothing since the first."""
    if sqlite_path(other) is not None and not Path(str(sqlite_path(other))).is_file():
        return False
    with Catalog(url) as one, Catalog(other) as two:
        return one.id == two.id and Audit(one.access).newest(1)[0].id == Audit(two.access).newest(1)[0].id
