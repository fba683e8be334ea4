"""What is done for a usage log in threads: by clocks, and with other machines.

Once a gateway is dead, what its journal still has is written, and its open rows are closed as `unknown` at
what they had reserved. Settled rows move to Parquet. What machines share goes to their catalog.
"""

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from engine.catalog.waits import limit_waits
from engine.metering.dead_gateways import close_dead
from engine.metering.raw_usage import export
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.shared_usage import SharedUsage
from engine.metering.usage_rows import Shortage, begin, connect
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


class UsageUpkeep:
    """The upkeep of the usage log in the directory `root`, from now on.

    `sync` writes the log to the disk. `shared`: budgets are shared with other machines, and usage is copied
    there.
    """

    def __init__(self, root: Path, sync: Callable[[], None], shared: SharedBudgets | None):
        self._root, self._path, self._sync, self.shared = root, root / "usage.db", sync, shared
        self._is_closed = False
        self._syncing = PeriodicThread("usage-sync", SYNC_S, sync)
        self._threads = [
            self._syncing,
            PeriodicThread("usage-export", EXPORT_S, self._export, at_once=False),
            PeriodicThread("usage-close-dead", CHECK_S, self._close_dead),
        ]
        self._sharing: PeriodicThread | None = None
        if shared is not None:
            self._copies = SharedUsage(root, shared.access)
            self._sharing = PeriodicThread("usage-share", SHARE_S, self._share)
            self._threads.append(self._sharing)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop."""
        self._is_closed = True
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join()

    def sync(self) -> None:
        """Write the log to the disk now."""
        self._syncing.work.turn(self._sync)

    def draw(self, short: Shortage) -> bool:
        """Draw what a request lacks from the shared budgets; return whether there was enough.

        Waits for the database, so it is called in another thread. Raises `ServiceError` as it does.
        """
        assert self.shared is not None
        budget = short.budget
        block = self.shared.draw(budget.subject, short.period, int(budget.tokens), short.missing)
        if block:
            with closing(connect(self._path)) as connection, begin(connection):
                connection.execute(DRAW, (budget.subject, short.period, block))
        return block > 0

    def hand_over(self) -> None:
        """Leave the shared catalog all that others need of this machine, at its end.

        For a thread of its own: it waits for the catalog.
        """
        if self._sharing is not None:
            self._sharing.work.turn(lambda: self._share(TURN_S))

    def give_back(self) -> None:
        """Give back what this machine has drawn and does not need."""
        assert self.shared is not None
        with closing(connect(self._path)) as connection:
            for subject, period, _ in connection.execute(SPARE).fetchall():
                # Away from here before it is there: a crash between loses tokens and never spends them twice.
                with begin(connection):
                    query = f"SELECT spare FROM ({SPARE}) WHERE subject = ? AND period = ?"
                    row = connection.execute(query, (subject, period)).fetchone()
                    tokens = row[0] if row else 0
                    connection.execute(DRAW, (subject, period, -tokens))
                if tokens:
                    self.shared.give_back(subject, period, tokens)

    def _share(self, wait_s: float = 0.0) -> None:
        limit_waits(ANSWER_S)
        if not self._copies.copy(wait_s) and wait_s:
            log.warning("Another process of this machine copies the usage; its next turn has this one's.")
        # It waits for the writers' lock, which may take long; at the end there is no time.
        limit_waits(ANSWER_S if wait_s else LOCK_S)
        self.give_back()

    def _export(self) -> None:
        export(self._root, go_on=lambda: not self._is_closed)

    def _close_dead(self) -> None:
        with closing(connect(self._path)) as connection:
            close_dead(self._root, connection)
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
