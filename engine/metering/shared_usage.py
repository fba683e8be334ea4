"""Copies of usage in the catalog that machines share, so that a disk that is lost takes no bill with it.

A usage log is copied by its hourly sums and by what is open in each hour, in the background and when its
engine ends; no request waits for it. Requests that are open in a log that has not been heard of for
`SILENT_S` count at what they reserved. A log that comes back says what became of them.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, case, delete, extract, func, literal, select

from engine.catalog import tables
from engine.catalog.access import Access
from engine.metering.usage_rows import begin, connect

# A log without news says so this often; one that has not for SILENT_S is lost, or its machine is off.
BEAT_S, SILENT_S = 60.0, 600.0
# Rows of one statement.
ROWS = 5_000
# What a row's numbers are for, and the numbers.
SUBJECT = ("hour", "tenant", "key", "policy", "revision", "purpose")
SUMS = ("requests", "prompt", "completion", "unknown", "open", "reserved")
NOW = f"""
    SELECT {", ".join(SUBJECT)}, {", ".join(f"sum({name})" for name in SUMS)} FROM (
        SELECT {", ".join(SUBJECT)}, requests, prompt, completion, unknown, 0 AS open, 0 AS reserved
        FROM hours WHERE hour >= ?
        UNION ALL
        SELECT CAST(at / 3600 AS INTEGER), tenant, key, policy, revision, purpose, 0, 0, 0, 0, NOT repeated,
            CASE WHEN repeated THEN 0 ELSE reserved END
        FROM requests WHERE state = 'admitted'
    ) GROUP BY {", ".join(SUBJECT)}
"""
KEEP = f"INSERT OR REPLACE INTO copied VALUES ({', '.join('?' * (len(SUBJECT) + len(SUMS)))})"
FORGET = f"DELETE FROM copied WHERE {' AND '.join(f'{name} = ?' for name in SUBJECT)}"

# The subject, then the sums.
Row = tuple[Any, ...]


class SharedUsage:
    """One machine's copy of its usage log in the directory `root`. For one thread at a time."""

    def __init__(self, root: Path, access: Access):
        self._root, self._access = root, access
        self._told_at: float | None = None

    def copy(self, wait_s: float = 0.0) -> bool:
        """Copy what has changed since the last time; False when another process of this machine does.

        Raises `ServiceError` when the catalog does not answer; the next call copies what this one did not.
        """
        lock = FileLock(self._root / "copy.lock", timeout=wait_s)
        with suppress(Timeout), lock, closing(connect(self._root / "usage.db")) as local:
            self._copy(local)
            return True
        return False

    def _copy(self, local: sqlite3.Connection) -> None:
        log, turn, since = local.execute("SELECT id, turn, since FROM log").fetchone()
        # One snapshot: a request is either open in it or closed.
        local.execute("BEGIN")
        next_since = _since(local)
        copied = {row[: len(SUBJECT)]: row for row in local.execute("SELECT * FROM copied")}
        changed = [
            row for row in local.execute(NOW, (since,)) if copied.pop(row[: len(SUBJECT)], None) != row
        ]
        gone = [subject for subject in copied if subject[0] >= since]
        now = time.monotonic()
        if not changed and not gone and self._told_at is not None and now - self._told_at < BEAT_S:
            local.execute("COMMIT")
            return
        with self._access.write(is_alone=False) as remote:
            remote_turn = remote.execute(
                select(tables.usage_logs.c.turn).where(tables.usage_logs.c.id == log)
            ).scalar()
            if remote_turn == turn:
                self._remove(remote, log, gone)
                self._put(remote, log, iter(changed))
            else:
                # A new log, a catalog of a backup, or a crash after the last commit there.
                remote.execute(delete(tables.usage_hours).where(tables.usage_hours.c.log == log))
                self._put(remote, log, local.execute(NOW, (0,)))
                changed = [*local.execute(NOW, (next_since,))]
            self._tell(remote, log, turn + 1)
        local.execute("COMMIT")
        self._told_at = now
        with begin(local):
            local.executemany(FORGET, gone)
            local.executemany(KEEP, changed)
            local.execute("DELETE FROM copied WHERE hour < ?", (next_since,))
            local.execute("UPDATE log SET turn = ?, since = ?", (turn + 1, next_since))

    def _put(self, remote: Connection, log: str, rows: Iterator[Row]) -> None:
        names = (*SUBJECT, *SUMS)
        new = self._access.insert(tables.usage_hours)
        put = new.on_conflict_do_update(
            index_elements=["log", *SUBJECT], set_={name: new.excluded[name] for name in SUMS}
        )
        while some := [{"log": log} | dict(zip(names, row, strict=True)) for row in islice(rows, ROWS)]:
            remote.execute(put, some)

    def _remove(self, remote: Connection, log: str, subjects: Sequence[Row]) -> None:
        """Remove rows that were open only, and are closed under another revision."""
        table = tables.usage_hours.c
        for subject in subjects:
            is_it = [table[name] == value for name, value in zip(SUBJECT, subject, strict=True)]
            remote.execute(delete(tables.usage_hours).where(table.log == log, *is_it))

    def _tell(self, remote: Connection, log: str, turn: int) -> None:
        new = self._access.insert(tables.usage_logs).values(id=log, turn=turn, seen_at=_clock(self._access))
        changed = {"turn": new.excluded.turn, "seen_at": new.excluded.seen_at}
        remote.execute(new.on_conflict_do_update(index_elements=["id"], set_=changed))


def sums_by(access: Access, by: str, begin: int, end: int) -> list[Row]:
    """Return (subject, purpose, requests, prompt, completion, unknown) of all machines, by `by`.

    The hours (since the epoch) from `begin` on and before `end` count.
    """
    hours, logs = tables.usage_hours.c, tables.usage_logs.c
    lost = case((logs.seen_at < _clock(access) - SILENT_S, 1), else_=0)
    numbers = (
        hours.requests + hours.open * lost, hours.prompt, hours.completion,
        hours.unknown + hours.reserved * lost,
    )  # fmt: skip
    query = (
        select(hours[by], hours.purpose, *(func.sum(number) for number in numbers))
        .select_from(tables.usage_hours.join(tables.usage_logs, hours.log == logs.id))
        .where(hours.hour >= begin, hours.hour < end)
        .group_by(hours[by], hours.purpose)
    )
    with access.read() as connection:
        rows = connection.execute(query).all()
    return [(*row[:2], *map(int, row[2:])) for row in rows if any(row[2:])]


def _since(local: sqlite3.Connection) -> int:
    """Return the first hour whose rows may still change: of a request that is open, or comes from now on."""
    (oldest,) = local.execute("SELECT min(at) FROM requests WHERE state = 'admitted'").fetchone()
    now = time.time()
    # A request is admitted as of a moment before it is recorded.
    return int(min(now, oldest or now) // 3600) - 1


def _clock(access: Access) -> Any:
    """Return the time of the database's server (epoch seconds)."""
    return literal(time.time()) if access.is_sqlite else extract("epoch", func.clock_timestamp())
