"""When a gateway's usage leaves its journal for the database: many requests in one commit."""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence

from prometheus_client import Counter

from engine.metering.held_budgets import IDLE_S, Shortage
from engine.metering.usage_log import UsageEntry, UsageLog
from engine.metering.usage_rows import Budget, Metered

# What is recorded waits this long for others, to be written in one commit.
WRITTEN_S = 0.1
# When a write that failed is tried again, if no request comes before.
AGAIN_S = 1.0
UNSETTLED = Counter("graftwork_usage_unsettled", "Failed attempts to write usage to journal or database.")
log = logging.getLogger("graftwork.meter")


class UsageWriter:
    """The usage log of one gateway, for one event loop."""

    def __init__(self, usage: UsageLog):
        self._usage = usage
        self._timer: asyncio.TimerHandle | None = None

    async def admit(self, request: Metered, budgets: Sequence[Budget]) -> UsageEntry:
        """Record a request and reserve its tokens; return its entry. What this machine lacks is drawn.

        Raises `LimitReached`, and `sqlite3.Error` or `OSError` where it cannot be recorded.
        """
        while True:
            try:
                entry = self._usage.admit(request, budgets)
            except Shortage as short:
                if not await asyncio.to_thread(self._usage.draw, short):
                    raise short.refusal from None
            except (sqlite3.Error, OSError):
                UNSETTLED.inc()
                raise
            else:
                self._flush_within(WRITTEN_S)
                return entry

    def note_beginning(self, entry: UsageEntry) -> None:
        """Record that the beginning of a stream was sent."""
        self._usage.note_beginning(entry)
        self._flush_within(WRITTEN_S)

    def settle(self, entry: UsageEntry, status: int, used: tuple[int, int] | None, revision: str) -> None:
        """Record the end of a request, as `UsageLog.settle`."""
        self._usage.settle(entry, status, used, revision)
        self._flush_within(WRITTEN_S)

    def flush(self, gives_back: bool = False) -> None:
        """Write to the database now; `gives_back`: all that is held free, too. On the event loop."""
        try:
            self._usage.flush(gives_back)
        except sqlite3.Error as error:
            UNSETTLED.inc()
            self._flush_within(AGAIN_S)
            log.warning("Usage stays in its journal, since the database cannot be written: %s", error)
        else:
            if self._usage.holds_budgets:
                # What is idle then goes back.
                self._flush_within(IDLE_S)

    def _flush_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self.flush()
