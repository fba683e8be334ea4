"""The ledger and its archive, for a person: what is in it, and a turn by hand."""

from typing import Any

from engine.backup.ledger_archive import Archiver, read_state
from engine.backup.place import BackupPlace
from engine.catalog.opening import open_catalog
from engine.errors import ConfigError
from engine.ledger.ledger import Ledger, open_snapshot
from engine.report.why import moment
from engine.settings.params import Params


def ingest(params: Params) -> int:
    """Insert spooled events into the ledger, where no controller runs; return how many there were."""
    ledger = Ledger(params.paths.ledger)
    with open_catalog(params.paths, migrated=True) as catalog:
        count = ledger.ingest(params.paths.spool, catalog.purges.gone)
    ledger.snapshot(params.paths.ledger_snapshot)
    return count


def archive_now(params: Params) -> None:
    """Bring the archive up to date with the ledger's snapshot, in this process.

    Raises `ConfigError` without a place, `NotFound` without a snapshot, and what `archive` raises.
    """
    address = params.controller.archive
    if address is None:
        raise ConfigError("There is no archive. Set controller.archive to a directory or URL.")
    paths = params.paths
    open_snapshot(paths.ledger_snapshot).close()
    with open_catalog(paths) as catalog:
        place = BackupPlace(address, "The ledger's archive")
        Archiver(paths.ledger_snapshot, place, catalog.id, paths.ledger_archive, lambda _: None).turn()


def archived(params: Params) -> dict[str, Any]:
    """Return the archive's place and its last turn: `at`, `files`, `rows`, `newest_day`, `error`..."""
    empty = dict.fromkeys(("at", "files", "rows", "newest_day", "error", "error_at"))
    return {**empty, **read_state(params.paths.ledger_archive), "place": params.controller.archive}


def sentences(archive: dict[str, Any]) -> list[str]:
    """Return what `archived` found, in words."""
    if archive["place"] is None:
        return ["There is no archive. Set controller.archive to a directory or URL."]
    if archive["at"] is None:
        said = [f"Nothing is archived at {archive['place']} yet. A running controller does it."]
    else:
        said = [
            f"{archive['rows']:,} rows in {archive['files']} files at {archive['place']}, up to "
            f"{archive['newest_day']}, complete at {moment(archive['at'])}."
        ]
    if archive["error"]:
        said.append(
            f"The last turn failed at {moment(archive['error_at'])}; it is retried: {archive['error']}"
        )
    return said
