"""How long a thread waits for one answer of a Postgres server."""

import threading

# How long a gateway's threads wait.
ANSWER_S = 2.0


class Waits(threading.local):
    """The most seconds that a thread waits for one answer of a Postgres server; None: the default."""

    limit_s: float | None = None


WAITS = Waits()


def limit_waits(limit_s: float) -> None:
    """Have this thread wait at most so long for one answer of a Postgres server."""
    WAITS.limit_s = limit_s
