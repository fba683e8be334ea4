"""The usage log: one SQLite database of requests, of what tenants and keys have spent, and hourly roll-ups.

A request is a line of its gateway's journal before it is forwarded, and another one at its end. From there
it becomes a row, `admitted` or `settled`, in one transaction with the budgets' counters and the roll-ups, so
that none of the three can differ from the others. A line survives a kill of the process; a power failure
loses at most the last two `SYNC_S`.

Once a gateway is dead, what its journal still has is written, and its open rows are closed as `unknown` at
what they had reserved.
"""

import logging
import os
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from engine.catalog.waits import limit_waits
from engine.metering.dead_gateways import close_dead
from engine.metering.held_budgets import HeldBudgets, Hold, Shortage
from engine.metering.journal import ADMITTED, BEGUN, ENDED, UsageJournal
from engine.metering.raw_usage import export
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.shared_usage import SharedUsage
from engine.metering.usage_rows import (
    HAS_BEGUN,
    Budget,
    Metered,
    Spending,
    add_row,
    begin,
    close_row,
    connect,
    end_of,
)
from engine.metering.usage_schema import create
from engine.threads import PeriodicThread

SYNC_S = 0.25
CHECK_S = 5.0
EXPORT_S = 60.0
# How often what other machines need goes to the shared catalog; for one answer there, and for another
# process of this machine at the end.
SHARE_S, ANSWER_S, TURN_S, LOCK_S = 5.0, 2.0, 3.0, 20.0
WRITTEN = "UPDATE gateways SET written = ? WHERE gateway = ?"
DRAW = """
    INSERT INTO drawn VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens
"""
# Drawn tokens that no request has used or reserved.
SPARE = """
    SELECT subject, period, drawn.tokens - coalesce(used + reserved, 0) AS spare
    FROM drawn LEFT JOIN spent USING (subject, period) WHERE spare > 0
"""

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
    """One gateway's access to the log in the directory `root`; for one thread, beside its own.

    `shared`: budgets are shared with other machines, and usage is copied there.
    """

    def __init__(self, root: Path, shared: SharedBudgets | None = None):
        create(root / "usage.db")
        self.root, self.path, self.shared, self.gateway = root, root / "usage.db", shared, uuid.uuid4().hex
        self._connection = connect(self.path)
        self._journal = UsageJournal(root, self.gateway)
        self._connection.execute("INSERT INTO gateways VALUES (?, 0)", (self.gateway,))
        self._held = HeldBudgets(self._connection, self.gateway, shared is not None)
        # What the database does not have yet, by number; whether the last write failed.
        self._changed: dict[int, UsageEntry] = {}
        self._has_failed = False
        # Something was written that a power failure may undo.
        self._dirty = False
        self._is_closed = False
        self._syncing = PeriodicThread("usage-sync", SYNC_S, self._sync)
        self._keeping = [
            self._syncing,
            PeriodicThread("usage-export", EXPORT_S, self._export, at_once=False),
            PeriodicThread("usage-close-dead", CHECK_S, self._close_dead),
        ]
        self._sharing: PeriodicThread | None = None
        if shared is not None:
            self._copies = SharedUsage(root, shared.access)
            self._sharing = PeriodicThread("usage-share", SHARE_S, self._share)
            self._keeping.append(self._sharing)
        for thread in self._keeping:
            thread.start()

    def close(self) -> None:
        """Stop; open rows stay and are closed by the next gateway."""
        self._is_closed = True
        for thread in self._keeping:
            thread.stop()
        for thread in self._keeping:
            thread.join()
        try:
            self.flush(gives_back=True)
        except sqlite3.Error as error:
            log.warning("The next gateway writes the last usage of this one, whose journal stays: %s", error)
        self._syncing.work.turn(self._sync)
        self._connection.close()
        self._journal.close()

    def admit(self, request: Metered, budgets: Sequence[Budget] = ()) -> UsageEntry:
        """Record a request and reserve its tokens; return its entry for `settle`.

        Raises `LimitReached` or `Shortage` where a budget does not admit it, and `sqlite3.Error` or `OSError`
        where it cannot be recorded. Nothing is then recorded.
        """
        if self._has_failed:
            self.flush()
        holds = self._held.reserve(request, budgets)
        try:
            number = self._journal.append(ADMITTED, *request)
        except OSError:
            self._held.end(holds, request.reserved, 0)
            raise
        entry = self._changed[number] = UsageEntry(request, holds, number)
        self._dirty = True
        return entry

    def note_beginning(self, entry: UsageEntry) -> None:
        """Record that the beginning of a stream was sent: no proxy asks another engine for it any more."""
        entry.request = entry.request._replace(repeated=0)
        self._append(entry, BEGUN)

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
        self._append(entry, ENDED, entry.request.revision, status, used)

    @property
    def holds_budgets(self) -> bool:
        """Whether it holds tokens of budgets."""
        return bool(self._held)

    def _append(self, entry: UsageEntry, kind: str, *fields: object) -> None:
        self._changed[entry.number] = entry
        try:
            self._journal.append(kind, entry.number, entry.row, *fields)
        except OSError as error:
            # The database is told of it soon; until then a kill of the process counts it as reserved.
            log.warning("The journal of usage cannot be written: %s", error)
        self._dirty = True

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
                connection.execute(WRITTEN, (self._journal.last, self.gateway))
                connection.commit()
        for entry, row in added:
            entry.row = row
        self._changed.clear()
        self._has_failed, self._dirty = False, True
        self._journal.clear()

    def draw(self, short: Shortage) -> bool:
        """Draw what a request lacks from the shared budgets; return whether there was enough.

        Waits for the database, so it is called in another thread. Raises `ServiceError` as it does.
        """
        assert self.shared is not None
        budget = short.budget
        block = self.shared.draw(budget.subject, short.period, int(budget.tokens), short.missing)
        if block:
            with closing(connect(self.path)) as connection, begin(connection):
                connection.execute(DRAW, (budget.subject, short.period, block))
        return block > 0

    def hand_over(self) -> None:
        """Leave the shared catalog all that others need of this machine, at its end.

        For a thread of its own: it waits for the catalog.
        """
        if self._sharing is not None:
            self._sharing.work.turn(lambda: self._share(TURN_S))

    def _share(self, wait_s: float = 0.0) -> None:
        limit_waits(ANSWER_S)
        if not self._copies.copy(wait_s) and wait_s:
            log.warning("Another process of this machine copies the usage; its next turn has this one's.")
        # It waits for the writers' lock, which may take long; at the end there is no time.
        limit_waits(ANSWER_S if wait_s else LOCK_S)
        self.give_back()

    def give_back(self) -> None:
        """Give back what this machine has drawn and does not need."""
        assert self.shared is not None
        with closing(connect(self.path)) as connection:
            for subject, period, _ in connection.execute(SPARE).fetchall():
                # Away from here before it is there: a crash between loses tokens and never spends them twice.
                with begin(connection):
                    query = f"SELECT spare FROM ({SPARE}) WHERE subject = ? AND period = ?"
                    row = connection.execute(query, (subject, period)).fetchone()
                    tokens = row[0] if row else 0
                    connection.execute(DRAW, (subject, period, -tokens))
                if tokens:
                    self.shared.give_back(subject, period, tokens)

    def _export(self) -> None:
        export(self.root, go_on=lambda: not self._is_closed)

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

    def _close_dead(self) -> None:
        with closing(connect(self.path)) as connection:
            close_dead(self.root, connection)
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
