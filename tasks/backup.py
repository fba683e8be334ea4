"""Backs up an installation while everything runs: rows first, then the bytes that they name.

Bytes are in the store before a row names them, never change, and are not removed while the backup holds its
lease in the catalog. So the catalog is copied first, as of one moment, and what it names can be copied after
it; the other way round a row could name bytes that the backup does not have. MLflow's database and the ledger
come after the catalog: they may know more, never less. Aliases that differ by then are noted as ours, so that
the restored routes decide.

The manifest is written last, and alone makes a backup. What a kill leaves are parts of files, which the next
backup to the same place uses or removes.
"""

import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.backup.manifest import FORMAT, BackupManifest, StoredFile, find, missing_parts, publish, read
from engine.backup.place import BACKED_UP, MANIFESTS, OWNER, BackupPlace
from engine.backup.writer import BackupWriter, OnFile
from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog
from engine.catalog.copying import copy_sqlite, snapshot
from engine.catalog.leases import BACKUP, SKEW_S
from engine.catalog.opening import open_catalog
from engine.catalog.records import SCHEMA_VERSION
from engine.errors import ConfigError, Conflict, DamagedBytes, NotFound, ServiceError
from engine.file_lock import alone_in
from engine.metering.dead_gateways import JOURNALS
from engine.settings.params import Params, Paths
from engine.store.open import open_store
from engine.threads import PeriodicThread
from engine.version import code_version
from tasks.purge import CONTROLLER_S, HANDED_OVER_S
from tasks.purge_record import purges
from tasks.release import controller

# Longer than clocks of machines that share a catalog may differ; and how often it is renewed.
LEASE_S, RENEW_S = SKEW_S + 60.0, 10.0
STAGING = ".backup"
# What says that MLflow's database was finished, without which a start sets it aside.
MLFLOW_FINISHED = "mlflow.db.finished"
OPEN_GATEWAYS = "SELECT gateway FROM gateways UNION SELECT gateway FROM requests WHERE state = 'admitted'"
ENDS = 'SELECT name, max("offset" + length) FROM revisions JOIN names ON names.id = segment GROUP BY segment'
# In a copy of the catalog: what MLflow's copy says counts as written by us, so that it moves no route.
NOTE_ALIASES = """
    DELETE FROM aliases WHERE alias IN ('champion', 'canary', 'previous');
    INSERT OR REPLACE INTO aliases (policy, alias, version, digest, at)
    SELECT name, alias, CAST(version AS TEXT), '', unixepoch() FROM mlflow.registered_model_aliases
    WHERE alias IN ('champion', 'canary', 'previous') AND name IN (SELECT policy FROM routes);
"""


@dataclass(frozen=True)
class BackupResult:
    """A finished backup: `new_bytes` of its `bytes` were written, the rest was there.

    `digest` is its manifest's, `missing` are segments that the catalog names and the store does not have,
    `mlflow` is what was done with MLflow's database.
    """

    place: str
    name: str
    digest: str
    files: int
    bytes: int
    new_bytes: int
    removed: int
    kept: int
    mlflow: str
    missing: list[str]


def backup(
    params: Params, address: str, keep: int | None = None, on_file: OnFile = lambda writer: None
) -> BackupResult:
    """Write a backup of the installation to a directory or URL.

    `keep` is how many backups stay there, the newest; None: all. While segments are missing, all stay.
    `on_file` is called after each file.
    Idempotent: killed at any moment and started again, it goes on from the parts that are there.

    Raises `Conflict` while another backup runs or when the place has another catalog's backups, `NotFound`
    without a catalog, `ConfigError` for a directory inside of what is backed up, `ServiceError` when a
    service, a disk or the place fails.
    """
    place = BackupPlace(address)
    if place.directory and any(
        place.directory.resolve().is_relative_to(inside.resolve())
        for inside in (params.state_dir, params.suites_dir)
    ):
        raise ConfigError(
            f"{place.directory} lies inside of what is backed up, and would be lost with it. Name a "
            "directory outside, best on another disk."
        )
    if not params.paths.has_catalog:
        raise NotFound(f"There is nothing to back up: {params.state_dir} has no catalog.")
    with (
        _staging(params.paths) as staging,
        open_catalog(params.paths) as catalog,
        _pinned(catalog, params) as hold,
    ):
        if place.owner() not in (None, catalog.id):
            raise Conflict(
                f"{place.address} has backups of another installation. Nothing was changed. Name another "
                "place."
            )
        place.write(OWNER, catalog.id.encode())
        writer = BackupWriter(place, on_file)
        mlflow = _copy_databases(params, staging, writer)
        _copy_ledger(params, catalog, writer)
        _copy_segments(params, staging, writer, _before(place))
        _copy_files(params, writer)
        manifest = BackupManifest(
            FORMAT, code_version(), time.time(), catalog.id, SCHEMA_VERSION, ledger_schemas()[1], mlflow,
            tuple(writer.files),
        )  # fmt: skip
        hold()
        if missing_parts(place, manifest):
            raise ServiceError(
                f"Somebody removed files from {place.address} while the backup was written there. Nothing "
                "was published. Run it again."
            )
        name, digest = publish(place, manifest)
        # What this one lacks may be in an older one alone.
        kept, removed = _tidy(place, None if writer.missing else keep, hold)
        result = BackupResult(
            place.address, name, digest, len(writer.files), writer.size, writer.new, removed, kept, mlflow,
            writer.missing,
        )  # fmt: skip
        noted = {"name": name, "digest": digest, "bytes": writer.size, "new": writer.new}
        catalog.note(BACKED_UP, place.address, noted)
    return result


@contextmanager
def _staging(paths: Paths) -> Iterator[Path]:
    """Yield an empty directory for copies of databases; `Conflict` while another backup runs here."""
    folder = paths.root / STAGING
    folder.mkdir(mode=0o700, exist_ok=True)
    with alone_in(folder) as is_alone:
        if not is_alone:
            raise Conflict(f"Another backup of {paths.root} is running. Wait for its end.")
        try:
            # A kill leaves what it held.
            _empty(folder)
            yield folder
        finally:
            _empty(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@contextmanager
def _pinned(catalog: Catalog, params: Params) -> Iterator[Callable[[], None]]:
    """Hold the lease under which no segment is removed; yields a function that raises once it was lost."""
    # The same after a kill, so that the next backup need not wait for the end of the lease.
    holder = f"{socket.gethostname()}:{params.paths.root}"
    fence = catalog.leases.acquire(BACKUP, holder, LEASE_S)
    if fence is None:
        raise Conflict(
            "Another machine backs up this catalog now. Wait for its end; each needs a place of its own."
        )

    def hold() -> None:
        if not catalog.leases.renew(BACKUP, holder, fence, LEASE_S):
            raise ServiceError(
                "The backup was stopped for so long that another one has begun. Nothing was published. "
                "Run it again: what was copied is used."
            )

    keeper = PeriodicThread("backup-lease", RENEW_S, hold)
    keeper.start()
    try:
        yield hold
    finally:
        keeper.stop()
        keeper.join()
        catalog.leases.release(BACKUP, holder)


def _copy_databases(params: Params, staging: Path, writer: BackupWriter) -> str:
    """Copy the databases, the catalog first; return what was done with MLflow's."""
    paths = params.paths
    catalog = staging / "catalog.db"
    snapshot(paths.catalog_url, catalog)
    if params.mlflow.backend:
        mlflow = "not in the backup, since `mlflow.backend` is set: back that database up by its own means"
    elif params.mlflow.at:
        mlflow = "not in the backup, since MLflow runs elsewhere: back its database up by its own means"
    elif paths.mlflow_db.is_file() and (paths.root / MLFLOW_FINISHED).is_file():
        copy_sqlite(paths.mlflow_db, staging / "mlflow.db")
        with closing(sqlite3.connect(catalog)) as copy:
            copy.execute("ATTACH ? AS mlflow", (str(staging / "mlflow.db"),))
            copy.executescript(NOTE_ALIASES)
        writer.add_file("state/mlflow.db", staging / "mlflow.db")
        writer.add_file(f"state/{MLFLOW_FINISHED}", paths.root / MLFLOW_FINISHED)
        mlflow = "in the backup"
    else:
        mlflow = "there is none yet"
    writer.add_file("state/catalog.db", catalog)
    if (paths.usage / "usage.db").is_file():
        # What leaves a journal is in the database, and what leaves that in Parquet.
        journals = {file.name: file.read_bytes() for file in (paths.usage / JOURNALS).glob("*")}
        copy_sqlite(paths.usage / "usage.db", staging / "usage.db")
        writer.add_file("state/usage/usage.db", staging / "usage.db")
        with closing(sqlite3.connect(staging / "usage.db")) as copy:
            noted = [file for (file,) in copy.execute("SELECT file FROM exported ORDER BY file")]
            gateways = [name for (name,) in copy.execute(OPEN_GATEWAYS)]
        for file in noted:
            writer.add_file(f"state/usage/raw/{file}", paths.usage / "raw" / file)
        for name in gateways:
            # As of a dead gateway: its open requests are closed.
            writer.add_parts(f"state/usage/{JOURNALS}/{name}", filter(None, [journals.get(name)]))
    return mlflow


def _copy_ledger(params: Params, catalog: Catalog, writer: BackupWriter) -> None:
    """Bring what has been spooled so far into the ledger, and copy its snapshot."""
    paths = params.paths
    if params.controller.at:
        # The ledger is in the backup of the controller's machine, which is sent what is spooled here.
        return
    if not paths.ledger.is_file() and not any(paths.spool.glob("*")):
        return
    from engine.ledger.ledger import Ledger

    time.sleep(HANDED_OVER_S)
    try:
        with closing(Ledger(paths.ledger)) as ledger:
            ledger.ingest(paths.spool, catalog.purges.gone)
            ledger.snapshot(paths.ledger_snapshot)
    except Conflict:
        # Its one writer is the controller.
        with controller(params, timeout_s=CONTROLLER_S) as client:
            client.publish_ledger()
    writer.add_file("state/ledger.snapshot.duckdb", paths.ledger_snapshot)
    writer.add_again("state/ledger.duckdb", "state/ledger.snapshot.duckdb")


def ledger_schemas() -> tuple[int, int]:
    """Return the oldest and the newest version of the ledger's schema that this code knows."""
    from engine.ledger.ledger import MIGRATIONS

    versions = [int(file.name[:4]) for file in MIGRATIONS.glob("*.sql")]
    return min(versions), max(versions)


def _before(place: BackupPlace) -> dict[str, StoredFile]:
    """Return the files of the newest backup at a place, by name."""
    with suppress(NotFound, DamagedBytes):
        _, name = find(place.address)
        return {file.name: file for file in read(place, name).files}
    return {}


def _copy_segments(
    params: Params, staging: Path, writer: BackupWriter, before: dict[str, StoredFile]
) -> None:
    with closing(sqlite3.connect(staging / "catalog.db")) as copy:
        ends = copy.execute(ENDS).fetchall()
    with closing(open_store(params)) as store:
        for segment, end in sorted(ends):
            writer.add_segment(store, segment, end, before.get(f"store/{segment}"))


def _copy_files(params: Params, writer: BackupWriter) -> None:
    paths = params.paths
    for folder in (paths.revisions, paths.mlartifacts, purges(params)):
        _add_tree(writer, f"state/{folder.name}", folder)
    for session in sorted(paths.sessions.glob("[!.]*/")):
        # The state before the journal, of which it says how many bytes count.
        for file in (*sorted(session.glob("*.state")), *sorted(session.glob("*.jsonl"))):
            writer.add_file(f"state/sessions/{session.name}/{file.name}", file)
    for file in sorted(paths.runs.glob("*.json")):
        writer.add_file(f"state/runs/{file.name}", file)
    _add_tree(writer, "suites", params.suites_dir)


def _add_tree(writer: BackupWriter, name: str, folder: Path) -> None:
    """Add a tree's files, drafts excepted, whose names begin with a dot."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            writer.add_file(f"{name}/{inside.as_posix()}", path)


def _tidy(place: BackupPlace, keep: int | None, hold: Callable[[], None]) -> tuple[int, int]:
    """Remove backups beyond the newest `keep`, and objects of none; return how many backups and objects."""
    names = place.manifests()
    kept = names[-keep:] if keep else names
    hold()
    for name in set(names) - set(kept):
        place.remove(f"{MANIFESTS}/{name}")
    used: set[str] = set()
    for name in kept:
        used |= {part for file in read(place, name).files for part in file.parts}
    return len(kept), place.drop_objects(used)


def newest(catalog: Catalog) -> tuple[float, str] | None:
    """Return when the installation was last backed up (epoch seconds) and where; None: never."""
    entry = Audit(catalog.access).newest_of(BACKED_UP)
    return (entry.at, entry.subject) if entry else None
