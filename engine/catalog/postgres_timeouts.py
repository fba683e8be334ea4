"""A Postgres connection whose every wait has a limit, also when the server process hangs.

The server's timeouts end long statements, and the kernel's end connections that are not acknowledged. Neither
covers a hung server process: its kernel goes on acknowledging.
"""

import asyncio
import math
import time
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from engine.catalog.waits import WAITS

# Limits on an event loop, which all streams of a gateway share, and in threads: longer than the server's own.
LOOP_S, THREAD_S = 2.0, 125.0


class TimeoutConnection(psycopg.Connection[Any]):
    """A connection that fails and closes when the server does not answer in time."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for an operation's generator; return its result, or raise `OperationalError` at the limit."""
        limit_s = min(_timeout_s(), math.inf if timeout is None else timeout)
        began = time.monotonic()
        try:
            return super().wait(gen, interval, limit_s)
        except psycopg.OperationalError:
            is_late = time.monotonic() - began >= limit_s
            if not is_late or self.pgconn.transaction_status != TransactionStatus.ACTIVE:
                raise
            # A late answer would be taken for that of the next query.
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the server said nothing for {limit_s:g} s") from None


def _timeout_s() -> float:
    if WAITS.limit_s is not None:
        return WAITS.limit_s
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return THREAD_S
    return LOOP_S
