"""Purges a policy: removes it from every place and leaves a marker on its name.

Resumable: each finished place is noted in a record under `purges/`, and a second call continues after a
crash. Checks that may refuse run first. Then the name is marked, which stops serving and publishing; then the
data that the policy's rows reference are removed, then the rows. The person's own data in `eval_suites/NAME`
stay.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout

from engine.catalog.catalog import Catalog
from engine.catalog.opening import open_catalog
from engine.controller.route_changes import alone, controller_serves
from engine.errors import ConfigError, Conflict, GraftworkError, NotRunning, ServiceError
from engine.files import replacing
from engine.publishing.ownership import require
from engine.settings.params import DIGEST12, POLICY_NAME, Params
from engine.store.open import open_store
from engine.store.segments import Location
from engine.training.service.client import TrainerClient
from tasks.purge_mlflow import purge_mlflow
from tasks.purge_record import Counts, Record, purges, recorded
from tasks.release import controller

if TYPE_CHECKING:
    from engine.clients.controller import ControllerClient
    from engine.ledger.purge import Removal

PAGE = 1_000
CONTROLLER_S = 310.0
# Longer than two flushes of a spool.
HANDED_OVER_S = 0.6


def purge(
    params: Params, policy: str, by: str, reason: str, on_place: Callable[[str, Counts], object]
) -> Record:
    """Remove a policy from every place, calling `on_place` after each. Idempotent and resumable.

    Raises `NotFound` for an unknown policy, and `Conflict` while a release of it runs, a session is open, or
    another purge of it is running; then nothing is removed.
    """
    if not POLICY_NAME.fullmatch(policy):
        raise ConfigError(f"{policy!r} is not a policy's name. `graftwork ls` lists the policies.")
    if not by.strip() or not reason.strip():
        raise ConfigError("Give --by (your name) and --reason. Both are recorded with the purged name.")
    folder = purges(params)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{policy}.lock", timeout=0), open_catalog(params.paths) as catalog:
            return _purge_alone(params, catalog, folder / f"{policy}.json", policy, by, reason, on_place)
    except Timeout:
        raise Conflict(f"Another purge of {policy!r} is running. Wait for its end.") from None


def _purge_alone(
    params: Params,
    catalog: Catalog,
    file: Path,
    policy: str,
    by: str,
    reason: str,
    on_place: Callable[[str, Counts], object],
) -> Record:
    record = _begun(catalog, file, policy, by, reason)
    if record.finished_at is not None:
        return record
    if "name" not in record.places:
        _refuse_while_released(catalog, policy)
        # Check the store's owner before rows are removed: the store may belong to another catalog.
        with closing(open_store(params)) as store:
            require(catalog, store)
        _sessions(params, policy, only_ask=True)
        # While this record is unfinished the name cannot be reused, even after a crash.
        record.write(file)
    places: dict[str, Callable[[], Counts]] = {
        "name": lambda: _purge_catalog(params, catalog, record, "name"),
        "sessions": lambda: _sessions(params, policy),
        "segments": lambda: _collect(params, catalog, record, file),
        "catalog": lambda: _purge_catalog(params, catalog, record, "catalog"),
        "store": lambda: _store(params, catalog, record),
        "cache": lambda: _cache(params, file),
        "files": lambda: _files(params, policy),
        "mlflow": lambda: _mlflow(params, record, file),
        # Last: requests that were running are spooled by now.
        "ledger": lambda: _ledger(params, catalog, record),
    }
    for place, remove in places.items():
        if place not in record.places:
            record.places[place] = remove()
            record.write(file)
        on_place(place, record.places[place])
    _listed(file).unlink(missing_ok=True)
    record.finished_at = time.time()
    record.write(file)
    return record


def _begun(catalog: Catalog, file: Path, policy: str, by: str, reason: str) -> Record:
    """Return the record to continue: a new one, that of an interrupted purge, or a finished one.

    A record's finished places count only while the name is marked and not reused. Otherwise every place is
    done again, including the segments that the interrupted purge had found.
    """
    record = recorded(file)
    is_marked = catalog.purges.find(policy) is not None
    if record is None and not is_marked:
        # Raises `NotFound` for an unknown policy.
        catalog.policies.get(policy)
    if record and is_marked and not catalog.policies.owners([policy]):
        return record
    fresh = Record(policy, by, reason, time.time())
    if record and record.finished_at is None:
        fresh.segments, fresh.elsewhere = record.segments, record.elsewhere
    return fresh


def _purge_catalog(
    params: Params, catalog: Catalog, record: Record, place: Literal["name", "catalog"]
) -> Counts:
    """Purge the catalog: through the controller when it runs, else here under its lease."""
    if controller_serves(catalog):
        return _ask_controller(params, record, place)
    with alone(params, catalog) as changes:
        return changes.purge(record.policy, place, record.by)


def _refuse_while_released(catalog: Catalog, policy: str) -> None:
    for release in catalog.releases.all(policy, open_only=True):
        raise Conflict(
            f"A release of {policy!r} is running, at step {release.step!r}. Wait for its verdict, or end it "
            f"with `graftwork decide hold {policy} --reason ...`. Then purge again."
        )


def _sessions(params: Params, policy: str, only_ask: bool = False) -> Counts:
    """Delete the policy's sessions, through the trainer when it runs.

    Raises `Conflict` while a session is open; with `only_ask` it only checks this.
    """
    from engine.training.service.session_deletion import refuse_open, remove_sessions

    # One attempt: a trainer that is down is not waited for.
    with TrainerClient.of(params, patience_s=0.0) as trainer, suppress(NotRunning):
        return trainer.forget_policy(policy, only_ask)
    if only_ask:
        refuse_open(params.paths.sessions, policy)
        return {}
    return remove_sessions(params.paths.sessions, policy)


def _collect(params: Params, catalog: Catalog, record: Record, file: Path) -> Counts:
    """Record where the policy's bytes are before the rows that say so are removed."""
    # An interrupted purge may have recorded segments whose rows are gone.
    segments = set(record.segments)
    count = size = 0
    with replacing(_listed(file)) as draft:
        if _listed(file).is_file():
            shutil.copyfile(_listed(file), draft)
        with draft.open("a") as listed:
            for row in _rows(catalog, record.policy):
                segments.add(row.segment)
                count, size = count + 1, size + row.length
                listed.write(f"{row.segment} {row.offset} {row.length} {row.checksum}\n")
    record.segments = sorted(segments)
    return {"revisions": count, "bytes": size, "segments": len(segments)}


def _rows(catalog: Catalog, policy: str) -> Iterator[Any]:
    last = None
    while rows := catalog.revisions.page(policy, last, PAGE, retired=True):
        yield from rows
        last = rows[-1]


def _listed(file: Path) -> Path:
    return file.with_suffix(".places")


def _ledger(params: Params, catalog: Catalog, record: Record) -> Counts:
    """Purge the ledger: through the controller when it runs, since the ledger has one writer, else here."""
    from engine.ledger.purge import of_policy

    time.sleep(HANDED_OVER_S)
    if controller_serves(catalog):
        return _ask_controller(params, record, "ledger")
    return purge_ledger_here(params, of_policy(params.paths.ledger, record.policy))


def purge_ledger_here(params: Params, removal: "Removal") -> Counts:
    """Do a removal where no controller holds the ledger; nothing while there is none."""
    from engine.ledger.ledger import Ledger
    from engine.ledger.purge import purge as purge_ledger

    paths = params.paths
    if not paths.ledger.is_file() and not any(paths.spool.glob("*")):
        return {}
    with closing(Ledger(paths.ledger)) as ledger:
        return purge_ledger(ledger, paths.spool, paths.ledger_snapshot, removal)


def long_controller(params: Params) -> "ControllerClient":
    """Return a client for what may take minutes, in one attempt."""
    return controller(params, timeout_s=CONTROLLER_S, patience_s=0.0)


def _ask_controller(params: Params, record: Record, place: str) -> Counts:
    with long_controller(params) as client:
        try:
            return client.purge(record.policy, place, record.by)
        except GraftworkError as error:
            raise ServiceError(
                f"The controller did not purge the {place}: {error} Then purge again; it continues from here."
            ) from None


def _store(params: Params, catalog: Catalog, record: Record) -> Counts:
    """Rewrite every segment with unreferenced bytes; `ServiceError` while one of the policy's remains.

    The policy's current bytes are in the recorded segments. Its expired snapshots may be in any other, so all
    of them are compacted.
    """
    from engine.publishing.maintenance import compact

    with closing(open_store(params)) as store:
        report = compact(catalog, store, threshold=1.0, segments=record.segments)
        left = set(record.segments).intersection(segment for segment, _ in store.segments())
    if left and report.examples:
        names = ", ".join(example["revision"] for example in report.examples)
        raise ServiceError(
            f"{len(left)} segments with bytes of {record.policy!r} cannot be rewritten: they hold revisions "
            f"whose bytes are damaged or unreadable ({names}). Import or export those again, or let them "
            "be removed with `graftwork adapters retire --in`. Then purge again; it continues from here."
        )
    if left:
        raise ServiceError(
            f"{len(left)} segments with bytes of {record.policy!r} are still in use by a training run, an "
            "import or a backup. Purge again when it has ended; it continues from here."
        )
    return {"segments": report.removed, "moved": report.moved, "bytes": report.freed, "held": report.held}


def _cache(params: Params, file: Path) -> Counts:
    """Drop the policy's copies from the read-through cache; bytes shared with another policy too."""
    if params.store.url is None or not _listed(file).is_file():
        return {}
    dropped = 0
    with closing(open_store(params)) as store, _listed(file).open() as listed:
        for line in listed:
            segment, offset, length, checksum = line.split()
            dropped += store.drop_cached(Location(segment, int(offset), int(length), checksum))
    return {"copies": dropped}


def _files(params: Params, policy: str) -> Counts:
    """Remove the policy's revision directories and progress files, and all reports."""
    paths = params.paths
    folder = paths.revisions / policy
    directories = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    if folder.is_dir():
        shutil.rmtree(folder)
    own = re.compile(rf"{re.escape(policy)}-[0-9a-f]{{{DIGEST12}}}\.json")
    progress = [file for file in paths.runs.glob("*.json") if own.fullmatch(file.name)]
    reports = list(paths.runs.glob("report*.html"))
    for file in (*progress, *reports):
        file.unlink(missing_ok=True)
    # Names of adapters that were popular, which engines of earlier versions kept.
    shutil.rmtree(paths.root / "warm", ignore_errors=True)
    return {"revision_directories": directories, "progress": len(progress), "reports": len(reports)}


def _mlflow(params: Params, record: Record, file: Path) -> Counts:
    def note(address: str) -> None:
        if address not in record.elsewhere:
            record.elsewhere.append(address)
            record.write(file)

    return purge_mlflow(params, record.policy, note)
