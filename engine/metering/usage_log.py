"""The usage log: one SQLite database of requests, of what tenants and keys have spent, and hourly roll-ups.

A request is a line of its gateway's journal before it is forwarded, and another one at its end. From there
it becomes a row, `admitted` or `settled`, in one transaction with the budgets' counters and the roll-ups, so
that none of the three can differ from the others. Many requests become rows in one commit, `WRITTEN_S` after
the first of them: a line costs one system call, a commit several times that, and more where a model's work
has emptied the core's caches. A line survives a kill of the process as a commit does; a power failure loses
at most the last two `SYNC_S` of `usage_upkeep.py`.
"""

import asyncio
import logging
import os
import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from prometheus_client import Counter

from engine.ledger.spool import LineFile
from engine.metering.dead_gateways import ADMITTED, BEGUN, ENDED, JOURNALS
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.usage_rows import (
    HAS_BEGUN,
    IDLE_S,
    Budget,
    HeldBudgets,
    Hold,
    Metered,
    Shortage,
    Spending,
    add_row,
    begin,
    close_row,
    connect,
    end_of,
)
from engine.metering.usage_schema import create
from engine.metering.usage_upkeep import UsageUpkeep

# What is recorded waits this long for others, to be written in one commit.
WRITTEN_S = 0.1
# When a write that failed is tried again, if no request comes before.
AGAIN_S = 1.0
NOTE_WRITTEN = "UPDATE gateways SET written = ? WHERE gateway = ?"
UNSETTLED = Counter("graftwork_usage_unsettled", "Failed attempts to write usage to journal or database.")
log = logging.getLogger("graftwork.usage")


@dataclass(slots=True, eq=False)
class UsageEntry:
    """A request in the log: the number of its first line in the journal, and its row in the database, if any.

    `used`: (prompt, completion) tokens of one that has ended; None: not known, so what it reserved.
    """

    request: Metered
    holds: Sequence[Hold]
    number: int
    row: int | None = None
    status: int | None = None
    used: tuple[int, int] | None = None
    has_ended: bool = False


class UsageLog:
    """One gateway's access to the log in the directory `root`; for one thread, beside those of its upkeep.

    On an event loop, always the same one, it writes to the database by itself; elsewhere `flush` does.
    """

    def __init__(self, root: Path, shared: SharedBudgets | None = None):
        create(root / "usage.db")
        self.path, self.gateway = root / "usage.db", uuid.uuid4().hex
        self._connection = connect(self.path)
        folder = root / JOURNALS
        folder.mkdir(exist_ok=True, mode=0o700)
        self._journal = LineFile(root / f"{self.gateway}.new", folder / self.gateway)
        # The number of the journal's last line.
        self._last = 0
        self._connection.execute("INSERT INTO gateways VALUES (?, 0)", (self.gateway,))
        self._held = HeldBudgets(self._connection, self.gateway, shared is not None)
        # What the database does not have yet, by number; whether the last write failed.
        self._changed: dict[int, UsageEntry] = {}
        self._has_failed = False
        # When the event loop writes it.
        self._timer: asyncio.TimerHandle | None = None
        # Something was written that a power failure may undo.
        self._dirty = False
        self.upkeep = UsageUpkeep(root, self._sync, shared)

    def close(self) -> None:
        """Stop; open rows stay and are closed by the next gateway."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.upkeep.close()
        try:
            self.flush(gives_back=True)
        except sqlite3.Error as error:
            log.warning("The next gateway writes the last usage of this one, whose journal stays: %s", error)
        self.upkeep.sync()
        self._connection.close()
        self._journal.close()

    async def admit_or_draw(self, request: Metered, budgets: Sequence[Budget]) -> UsageEntry:
        """Admit a request as `admit` does, but draw what this machine lacks of a shared budget.

        Raises `LimitReached`, `ServiceError` where the shared catalog does not answer, and `sqlite3.Error` or
        `OSError` where the request cannot be recorded.
        """
        while True:
            try:
                return self.admit(request, budgets)
            except Shortage as short:
                if not await asyncio.to_thread(self.upkeep.draw, short):
                    raise short.refusal from None
            except (sqlite3.Error, OSError):
                UNSETTLED.inc()
                raise

    def admit(self, request: Metered, budgets: Sequence[Budget] = ()) -> UsageEntry:
        """Record a request and reserve its tokens; return its entry for `settle`.

        Raises `LimitReached` or `Shortage` where a budget does not admit it, and `sqlite3.Error` or `OSError`
        where it cannot be recorded. Nothing is then recorded.
        """
        if self._has_failed:
            self.flush()
        holds = self._held.reserve(request, budgets)
        try:
            number = self._append_line(ADMITTED, *request)
        except OSError:
            self._held.end(holds, request.reserved, 0)
            raise
        entry = self._changed[number] = UsageEntry(request, holds, number)
        self._dirty = True
        self._write_within(WRITTEN_S)
        return entry

    def note_beginning(self, entry: UsageEntry) -> None:
        """Record that the beginning of a stream was sent: no proxy asks another engine for it any more.

        Changes nothing once the request has ended.
        """
        if entry.has_ended:
            return
        entry.request = entry.request._replace(repeated=0)
        self._note(entry, BEGUN)

    def settle(
        self, entry: UsageEntry, status: int, used: tuple[int, int] | None, revision: str | None = None
    ) -> None:
        """Record the end of a request, and the revision that answered it if it is another one.

        `used`: (prompt, completion) tokens; None: not known, so what it reserved. A second time changes
        nothing. Raises `ValueError` for tokens below 0 or more than it reserved.
        """
        if entry.has_ended:
            return
        if used is not None and (min(used) < 0 or sum(used) > entry.request.reserved):
            raise ValueError(f"{used} are no tokens of a request that reserved {entry.request.reserved}")
        if revision is not None:
            entry.request = entry.request._replace(revision=revision)
        entry.status, entry.used, entry.has_ended = status, used, True
        reserved = entry.request.reserved
        self._held.end(entry.holds, reserved, reserved if used is None else sum(used))
        self._note(entry, ENDED, entry.request.revision, status, used)

    def _append_line(self, kind: str, *fields: object) -> int:
        """Write a line to the journal; return its number. Raises `OSError`; nothing is then written."""
        self._journal.append(orjson.dumps((self._last + 1, kind, *fields), option=orjson.OPT_APPEND_NEWLINE))
        self._last += 1
        return self._last

    def _note(self, entry: UsageEntry, kind: str, *fields: object) -> None:
        self._changed[entry.number] = entry
        try:
            self._append_line(kind, entry.number, entry.row, *fields)
        except OSError as error:
            # The database is told of it soon; until then a kill of the process counts it as reserved.
            log.warning("The journal of usage cannot be written: %s", error)
        self._dirty = True
        self._write_within(WRITTEN_S)

    def flush(self, gives_back: bool = False) -> None:
        """Write what has changed to the database in one commit, and what is held idle, or all that is free.

        Raises `sqlite3.Error`; the next call then writes it, and no request is admitted before.
        """
        if not self._changed and not self._held:
            return
        added: list[tuple[UsageEntry, int]] = []
        self._has_failed = True
        with begin(self._connection) as connection:
            spending = Spending(connection)
            for entry in self._changed.values():
                if entry.row is None and not entry.has_ended:
                    added.append((entry, add_row(connection, self.gateway, entry.request)))
                elif entry.row is None:
                    add_row(connection, self.gateway, entry.request, end_of(entry.status, entry.used))
                    spending.spend(entry.request, entry.used)
                elif entry.has_ended:
                    close_row(connection, spending, entry.row, entry.request, entry.status, entry.used)
                else:
                    connection.execute(HAS_BEGUN, (entry.row,))
            with self._held.writing(spending, gives_back):
                spending.write()
                connection.execute(NOTE_WRITTEN, (self._last, self.gateway))
                connection.commit()
        for entry, row in added:
            entry.row = row
        self._changed.clear()
        self._has_failed, self._dirty = False, True
        self._journal.clear()

    def write(self, gives_back: bool = False) -> None:
        """Flush, or say why not and try it again later; on an event loop."""
        try:
            self.flush(gives_back)
        except sqlite3.Error as error:
            UNSETTLED.inc()
            self._write_within(AGAIN_S)
            log.warning("Usage stays in its journal, since the database cannot be written: %s", error)
        else:
            if self._held:
                # What is idle then goes back.
                self._write_within(IDLE_S)

    def _write_within(self, seconds: float) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._write_now)

    def _write_now(self) -> None:
        self._timer = None
        self.write()

    def _sync(self) -> None:
        """Write the journal and the log's pages to the disk; SQLite itself does so at checkpoints alone."""
        if not self._dirty:
            return
        self._dirty = False
        try:
            file = os.open(f"{self.path}-wal", os.O_RDONLY)
            try:
                os.fdatasync(file)
            finally:
                os.close(file)
            # Afterwards, since lines that are gone from it are in the log.
            self._journal.sync()
        except OSError:
            self._dirty = True
            raise
