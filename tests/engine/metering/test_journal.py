"""A gateway's journal: what a kill, a full disk or a crash between two writes leaves is counted once."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import orjson
import pytest

from engine.ledger import spool
from engine.ledger.spool import LineFile
from engine.metering.dead_gateways import ADMITTED, BEGUN, ENDED, close_dead, lines
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import Budget, Metered, add_row, connect, periods
from engine.metering.usage_schema import VERSION, create
from tests.helpers.children import children

NOON = 1_790_000_000.0


def asked(number: int, repeated: int = 0) -> Metered:
    return Metered(f"r{number}", "acme", "k", "acme-sums", "a" * 64, "user", NOON, 10, repeated)


def closed(root: Path) -> dict[str, tuple[str, int | None, str]]:
    """Close what dead gateways left; return state, completion and revision of each request."""
    with closing(connect(root / "usage.db")) as connection:
        close_dead(root, connection)
        found = connection.execute("SELECT id, state, completion, revision FROM requests").fetchall()
        for table in ("held", "gateways"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        (reserved,) = connection.execute("SELECT total(reserved) FROM spent").fetchone()
    assert reserved == 0
    assert len(found) == len({row[0] for row in found})
    return {row[0]: row[1:] for row in found}


def die_within(root: Path, when: str) -> None:
    """A gateway with requests of every kind that dies before, within or after a write to the database."""
    log = UsageLog(root)
    budgets = [Budget("tenant:acme", "day", 1000)]
    early = [log.admit(asked(number, repeated=number % 2), budgets) for number in range(4)]
    log.flush()
    log.settle(early[0], 200, (1, 2), "b" * 64)
    log.note_beginning(early[1])
    late = [log.admit(asked(number, repeated=number % 2), budgets) for number in range(4, 8)]
    log.settle(late[0], 200, (1, 3))
    log.note_beginning(late[1])
    if when == "before the journal is cleared":
        spool.os.ftruncate = lambda *_: os._exit(9)
    if when != "before a write":
        log.flush()
    os._exit(9)


@pytest.mark.parametrize("when", ["before a write", "before the journal is cleared", "after it"])
def test_a_gateway_that_dies_has_each_request_counted_once(tmp_path: Path, when: str) -> None:
    child = children.Process(target=die_within, args=(tmp_path, when))
    child.start()
    child.join(60)
    assert child.exitcode == 9
    found = closed(tmp_path)
    assert found.keys() == {f"r{number}" for number in range(8)}
    assert (found["r0"], found["r4"]) == (("settled", 2, "b" * 64), ("settled", 3, "a" * 64))
    # Streams that had begun are billed here; of the others, whose proxy asks elsewhere, nothing.
    assert {name for name, row in found.items() if row[0] == "unknown"} == {"r1", "r2", "r5", "r6"}
    assert (found["r3"][:2], found["r7"][:2]) == (("settled", 0), ("settled", 0))
    assert list((tmp_path / "gateways").iterdir()) == []


def test_a_line_that_a_crash_has_cut_off_is_none(tmp_path: Path) -> None:
    with closing(UsageLog(tmp_path)) as log:
        log.admit(asked(1))
        log.admit(asked(2))
        file = tmp_path / "gateways" / log.gateway
        os.truncate(file, file.stat().st_size - 3)
        assert list(lines(file, 0)) == [(1, ADMITTED, [*asked(1)])]
        assert list(lines(file, 1)) == []


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(UsageLog(tmp_path)) as log:
        log.admit(asked(1))
        write = os.write
        monkeypatch.setattr(spool.os, "write", lambda file, line: write(file, line[:5]))
        with pytest.raises(OSError, match="No space"):
            log.admit(asked(2))
        monkeypatch.undo()
        assert log.admit(asked(3)).number == 2
        kept = [fields for *_, fields in lines(tmp_path / "gateways" / log.gateway, 0)]
    assert kept == [[*asked(1)], [*asked(3)]]


def test_an_end_that_the_journal_cannot_take_reaches_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(UsageLog(tmp_path)) as log:
        entry = log.admit(asked(1))
        monkeypatch.setattr(LineFile, "append", Mock(side_effect=OSError("No space left on device")))
        log.settle(entry, 200, (1, 2))
        log.flush()
    assert closed(tmp_path) == {"r1": ("settled", 2, "a" * 64)}


def test_what_a_power_failure_leaves_is_counted_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """The commit of row 1 is undone, and its number given again; the end of the journal is zeros."""
    create(tmp_path / "usage.db")
    with closing(connect(tmp_path / "usage.db")) as connection:
        connection.execute("INSERT INTO gateways VALUES ('dead', 0)")
        row = add_row(connection, "living", asked(1))
    whole = [
        (2, BEGUN, 1, row),
        (3, ENDED, 1, row, "", 200, (1, 2)),
        (4, ADMITTED, *asked(2)),
        (5, ADMITTED, *asked(3)),
        (6, ENDED, 4, None, "", 200, (1, 3)),
    ]
    (tmp_path / "gateways").mkdir()
    (tmp_path / "gateways" / "dead").write_bytes(
        b"".join(orjson.dumps(line) + b"\n" for line in whole)
        + bytes(100)
        + orjson.dumps((7, ENDED, 5, None, "", 200, (1, 4)))
        + b"\n"
    )
    assert closed(tmp_path) == {
        "r1": ("admitted", None, "a" * 64),
        "r2": ("settled", 3, ""),
        "r3": ("unknown", None, "a" * 64),
    }
    assert list((tmp_path / "gateways").iterdir()) == []


def test_a_log_of_version_3_opens_with_what_its_gateways_left(tmp_path: Path) -> None:
    """There each request was reserved by itself, and a gateway's file was empty."""
    create(tmp_path / "usage.db")
    day, month = periods(NOON)
    with closing(sqlite3.connect(tmp_path / "usage.db")) as connection:
        connection.executescript("DROP TABLE held; DROP TABLE gateways; PRAGMA user_version = 3;")
        connection.execute(
            "INSERT INTO requests (id, gateway, at, tenant, key, policy, revision, purpose, reserved, state)"
            " VALUES ('r1', 'old', ?, 'acme', 'k', 'acme-sums', '', 'user', 10, 'admitted')",
            (NOON,),
        )
        rows = [(subject, period, 5, 10) for subject in ("key:k", "tenant:acme") for period in (day, month)]
        connection.executemany("INSERT INTO spent VALUES (?, ?, ?, ?)", rows)
        connection.commit()
    (tmp_path / "gateways").mkdir()
    (tmp_path / "gateways" / "old").touch()
    create(tmp_path / "usage.db")
    assert closed(tmp_path) == {"r1": ("unknown", None, "")}
    with closing(connect(tmp_path / "usage.db")) as connection:
        assert set(connection.execute("SELECT used, reserved FROM spent")) == {(15, 0)}
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
