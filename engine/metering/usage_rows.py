"""Rows of the usage log: what a request's row says, and the statements that write rows and counters."""

import calendar
import sqlite3
import time
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

BUSY_TIMEOUT_MS = 5000
DAY, MONTH = "day", "month"
# Days for which counters are kept: a month and its last requests.
KEPT_DAYS = 40
CLOSE = """
    UPDATE requests SET state = ?, status = ?, prompt = ?, completion = ?, settled_at = ?, revision = ?
    WHERE seq = ? AND state = 'admitted'
"""
HAS_BEGUN = "UPDATE requests SET repeated = 0 WHERE seq = ? AND state = 'admitted'"
# Of a key or a tenant, for a day or a month.
COUNT = """
    INSERT INTO spent (subject, period, used, reserved) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET used = used + excluded.used, reserved = reserved + excluded.reserved
"""
ADD = f"""
    INSERT INTO requests (id, gateway, at, tenant, key, policy, revision, purpose, reserved, repeated, state,
        status, prompt, completion, settled_at)
    VALUES ({", ".join("?" * 15)})
"""
ROLL_UP = """
    INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
        completion = completion + excluded.completion, unknown = unknown + excluded.unknown
"""


class Metered(NamedTuple):
    """A request to meter; `revision` is a digest, empty for the base. `reserved` is its bound in tokens.

    `repeated`: where this engine dies before it answers, the proxy in front asks another one, which bills it.
    The row of a stream says so until its beginning was sent.
    """

    id: str
    tenant: str
    key: str
    policy: str
    revision: str
    purpose: str
    at: float
    reserved: int
    repeated: int = 0


class Budget(NamedTuple):
    """A limit of tokens for one day or month; `subject` is `key:ID` or `tenant:NAME`."""

    subject: str
    period: str
    tokens: float


def periods(at: float) -> tuple[str, str]:
    """Return the day and the month (UTC) of a time: `2026-11-23`, `2026-11`."""
    return _periods(int(at // 3600))


@lru_cache(64)
def _periods(hour: int) -> tuple[str, str]:
    day = time.strftime("%Y-%m-%d", time.gmtime(hour * 3600))
    return day, day[:7]


def remaining_s(at: float, period: str) -> float:
    """Return the seconds until the day or the month of `at` ends."""
    moment = time.gmtime(at)
    if period == DAY:
        return 86400 - at % 86400
    year, month = (moment.tm_year + 1, 1) if moment.tm_mon == 12 else (moment.tm_year, moment.tm_mon + 1)
    return calendar.timegm((year, month, 1, 0, 0, 0)) - at


def counters(request: Metered) -> tuple[tuple[str, str], ...]:
    """Return subject and period of the counters of a request's key and tenant."""
    day, month = periods(request.at)
    key, tenant = f"key:{request.key}", f"tenant:{request.tenant}"
    return (key, day), (key, month), (tenant, day), (tenant, month)


class Spending:
    """What one transaction changes of the counters of keys and tenants, and of the hours; written at its end.

    Many requests are of one key: their changes are added up before they are written.
    """

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        # By subject and period: tokens used and reserved.
        self._counts: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        # By the columns of the key of `hours`: requests, and tokens of prompts, completions and unknown ones.
        self._hours: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def reserve(self, subject: str, period: str, tokens: int) -> None:
        """Count tokens that a gateway holds, or, below 0, gives back."""
        self._counts[subject, period][1] += tokens

    def spend(self, request: Metered, used: tuple[int, int] | None, requests: int = 1) -> None:
        """Count what a request has used, for the periods in which it was admitted; None: as reserved.

        It counts as so many `requests`: as none where another engine counts it.
        """
        tokens = request.reserved if used is None else sum(used)
        for subject in counters(request):
            self._counts[subject][0] += tokens
        _, tenant, key, policy, revision, purpose, at, reserved, _ = request
        sums = self._hours[int(at // 3600), tenant, key, policy, revision, purpose]
        sums[0] += requests
        if used is None:
            sums[3] += reserved
        else:
            sums[1] += used[0]
            sums[2] += used[1]

    def write(self) -> None:
        """Write the counters."""
        for statement, changes in ((COUNT, self._counts), (ROLL_UP, self._hours)):
            if changes:
                self._connection.executemany(statement, [(*row, *sums) for row, sums in changes.items()])


def connect(path: Path) -> sqlite3.Connection:
    """Open the database. Checkpoints, which wait for the disk, are the background thread's."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def begin(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Take the write lock; `with begin(connection):` commits at its end, or rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    return connection


# The state of a row, status, tokens of prompt and completion, and when it was closed.
End = tuple[str, int | None, int | None, int | None, float | None]
OPEN: End = ("admitted", None, None, None, None)


def end_of(status: int | None, used: tuple[int, int] | None) -> End:
    """Return the end of a request that has used this; None: what it used is not known."""
    prompt, completion = used or (None, None)
    return "unknown" if used is None else "settled", status, prompt, completion, time.time()


def add_row(connection: sqlite3.Connection, gateway: str, request: Metered, end: End = OPEN) -> int:
    """Write the row of a request; return its number."""
    values = (
        request.id, gateway, request.at, request.tenant, request.key, request.policy, request.revision,
        request.purpose, request.reserved, request.repeated, *end,
    )  # fmt: skip
    row = connection.execute(ADD, values).lastrowid
    assert row is not None
    return row


def close_row(
    connection: sqlite3.Connection,
    spending: Spending,
    row: int,
    request: Metered,
    status: int | None,
    used: tuple[int, int] | None,
    requests: int = 1,
) -> None:
    """Close an open row, counters and roll-up included; a row that is closed already stays as it is."""
    if connection.execute(CLOSE, (*end_of(status, used), request.revision, row)).rowcount:
        spending.spend(request, used, requests)
