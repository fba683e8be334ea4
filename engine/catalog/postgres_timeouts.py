"""A connection to Postgres on which nobody waits without a limit, also when the server stands still.

The server's own limits end what it computes too long, and the kernel's end what nobody acknowledges. Neither
helps with a server that stands still: its kernel goes on to acknowledge whatever is sent.
"""

import asyncio
import math
import time
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

# On a loop, which all streams of a gateway run on, and elsewhere: longer than the server's own limit.
LOOP_S, THREAD_S = 2.0, 125.0


class TimeoutConnection(psycopg.Connection[Any]):
    """Fails, and is of no more use, when the server does not answer in time."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Return what the generator of an operation returns; `OperationalError` when it takes too long."""
        limit_s = min(_timeout_s(), math.inf if timeout is None else timeout)
        began = time.monotonic()
        try:
            return super().wait(gen, interval, limit_s)
        except psycopg.OperationalError:
            is_late = time.monotonic() - began >= limit_s
            if not is_late or self.pgconn.transaction_status != TransactionStatus.ACTIVE:
                raise
            # What it still says would be taken for an answer to the next question.
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the server said nothing for {limit_s:g} s") from None


def _timeout_s() -> float:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return THREAD_S
    return LOOP_S
