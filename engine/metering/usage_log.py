"""The usage log: one SQLite database of requests, of what tenants and keys have spent, and hourly roll-ups.

A request is a row `admitted`, written with its reservation before the request is forwarded, and `settled`
with what it used. Both are one transaction with the budgets' counters and the roll-ups, so that none of the
three can differ from the others. A commit survives a kill of the process; a power failure loses at most
`SYNC_S`.

Each gateway holds a lock on a file of its own. Once a gateway is dead, its open rows are closed as `unknown`
at what they had reserved.
"""

import logging
import os
import uuid
from contextlib import closing
from pathlib import Path

from engine.catalog.waits import limit_waits
from engine.metering.dead_gateways import alive_file, close_dead
from engine.metering.raw_usage import export
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.shared_usage import SharedUsage
from engine.metering.usage_rows import Shortage, UsageRows, begin, connect
from engine.metering.usage_schema import create
from engine.threads import PeriodicThread

SYNC_S = 0.25
CHECK_S = 5.0
EXPORT_S = 60.0
# How often what other machines need goes to the shared catalog; for one answer there, and for another
# process of this machine at the end.
SHARE_S, ANSWER_S, TURN_S, LOCK_S = 5.0, 2.0, 3.0, 20.0
DRAW = """
    INSERT INTO drawn VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens
"""
# Drawn tokens that no request has used or reserved.
SPARE = """
    SELECT subject, period, drawn.tokens - coalesce(used + reserved, 0) AS spare
    FROM drawn LEFT JOIN spent USING (subject, period) WHERE spare > 0
"""

log = logging.getLogger("graftwork.usage")


class UsageLog(UsageRows):
    """One gateway's access to the log in the directory `root`; for one thread, beside its own.

    `shared`: budgets are shared with other machines, and usage is copied there.
    """

    def __init__(self, root: Path, shared: SharedBudgets | None = None):
        create(root / "usage.db")
        super().__init__(root / "usage.db", uuid.uuid4().hex, shared is not None)
        self.root, self.shared = root, shared
        self._alive = alive_file(root, self.gateway)
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
        self._syncing.work.turn(self._sync)
        self._connection.close()
        os.close(self._alive)

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
        """Write the log's pages to the disk; SQLite itself does so at checkpoints alone."""
        if not self._dirty:
            return
        self._dirty = False
        try:
            file = os.open(f"{self.path}-wal", os.O_RDONLY)
            try:
                os.fdatasync(file)
            finally:
                os.close(file)
        except OSError:
            self._dirty = True
            raise

    def _close_dead(self) -> None:
        with closing(connect(self.path)) as connection:
            close_dead(self.root, connection)
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
