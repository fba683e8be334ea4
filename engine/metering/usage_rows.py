"""Rows of the usage log: what a request's row says, the transactions that write rows, and when they do.

Where requests come together, those of one turn of the event loop are admitted in one commit, since a commit
costs most of an admission. It also writes the ends of earlier requests, which otherwise wait for each other.
"""

import asyncio
import calendar
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Counter

from engine.errors import LimitReached

BUSY_TIMEOUT_MS = 5000
# The end of a request whose client has left.
LEFT = 499
# The usage of a request that has ended waits this long for others, to be written in one commit.
SETTLED_S = 0.02
# When a write that failed is tried again, if no request comes before.
AGAIN_S = 1.0
UNSETTLED = Counter("graftwork_usage_unsettled", "Failed attempts to write the usage of ended requests.")
log = logging.getLogger("graftwork.meter")
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
ADMIT = """
    INSERT INTO requests (id, gateway, at, tenant, key, policy, revision, purpose, reserved, repeated, state)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'admitted')
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


# Number, request, status and used tokens of a request that has ended; a request that asks, and its budgets.
Ended = tuple[int, Metered, int, tuple[int, int] | None]
Asked = tuple[Metered, Sequence[Budget]]


class Shortage(Exception):
    """This machine has drawn `missing` tokens too few of a budget that it shares."""

    def __init__(self, budget: Budget, period: str, missing: int, refusal: LimitReached):
        super().__init__(budget, period, missing, refusal)
        self.budget, self.period, self.missing, self.refusal = budget, period, missing, refusal


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


class Spending:
    """What one transaction changes of the counters of keys and tenants, and of the hours; written at its end.

    Many requests are of one key: their changes are added up before they are written.
    """

    def __init__(self, connection: sqlite3.Connection, is_shared: bool = False):
        self._connection, self._is_shared = connection, is_shared
        # By subject and period: tokens used and reserved.
        self._counts: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        # By the columns of the key of `hours`: requests, and tokens of prompts, completions and unknown ones.
        self._hours: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def reserve(self, request: Metered) -> None:
        """Count a request that is admitted."""
        self._count(request, 0, request.reserved)

    def spend(self, request: Metered, used: tuple[int, int] | None, requests: int = 1) -> None:
        """Count what a request has used, for the periods in which it was admitted; None: as reserved.

        It counts as so many `requests`: as none where another engine counts it.
        """
        self._count(request, request.reserved if used is None else sum(used), -request.reserved)
        _, tenant, key, policy, revision, purpose, at, reserved, _ = request
        sums = self._hours[int(at // 3600), tenant, key, policy, revision, purpose]
        sums[0] += requests
        if used is None:
            sums[3] += reserved
        else:
            sums[1] += used[0]
            sums[2] += used[1]

    def _count(self, request: Metered, used: int, reserved: int) -> None:
        day, month = periods(request.at)
        key, tenant = f"key:{request.key}", f"tenant:{request.tenant}"
        for subject in ((key, day), (key, month), (tenant, day), (tenant, month)):
            sums = self._counts[subject]
            sums[0] += used
            sums[1] += reserved

    def refusal(self, request: Metered, budgets: Sequence[Budget]) -> LimitReached | Shortage | None:
        """Return why a budget does not admit a request, or None."""
        for budget in budgets:
            if (why := self._refusal(request, budget)) is not None:
                return why
        return None

    def _refusal(self, request: Metered, budget: Budget) -> LimitReached | Shortage | None:
        period = periods(request.at)[budget.period == MONTH]
        subject = budget.subject, period
        query = "SELECT used + reserved FROM spent WHERE subject = ? AND period = ?"
        spent = self._connection.execute(query, subject).fetchone()
        most = budget.tokens
        if self._is_shared:
            query = "SELECT tokens FROM drawn WHERE subject = ? AND period = ?"
            drawn = self._connection.execute(query, subject).fetchone()
            most = min(most, drawn[0] if drawn else 0)
        left = int(most - (spent[0] if spent else 0) - sum(self._counts.get(subject, ())))
        if request.reserved <= left:
            return None
        kind, _, name = budget.subject.partition(":")
        refusal = LimitReached(
            f"The {kind} {name!r} has {max(0, left)} of {int(budget.tokens)} tokens left in {period}, and "
            f"this request may take {request.reserved}: its prompt and n times max_tokens. Ask for fewer, or "
            "wait for the next period.",
            remaining_s(request.at, budget.period),
            code="insufficient_quota",
        )
        if not self._is_shared:
            return refusal
        return Shortage(budget, period, request.reserved - left, refusal)

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


def admit_row(connection: sqlite3.Connection, spending: Spending, gateway: str, request: Metered) -> int:
    """Write the row of a request that is admitted; return its number."""
    values = (
        request.id, gateway, request.at, request.tenant, request.key, request.policy, request.revision,
        request.purpose, request.reserved, request.repeated,
    )  # fmt: skip
    number = connection.execute(ADMIT, values).lastrowid
    assert number is not None
    spending.reserve(request)
    return number


def close_row(
    connection: sqlite3.Connection,
    spending: Spending,
    number: int,
    request: Metered,
    status: int | None,
    used: tuple[int, int] | None,
    requests: int = 1,
) -> None:
    """Close an open row, counters and roll-up included; a row that is closed already stays as it is."""
    prompt, completion = used or (None, None)
    state = "unknown" if used is None else "settled"
    values = (state, status, prompt, completion, time.time(), request.revision, number)
    if not connection.execute(CLOSE, values).rowcount:
        return
    spending.spend(request, used, requests)


class UsageRows:
    """One gateway's rows in the log at `path`; for one thread. `is_shared`: machines share the budgets."""

    def __init__(self, path: Path, gateway: str, is_shared: bool):
        self.path, self.gateway, self._is_shared = path, gateway, is_shared
        self._connection = connect(path)
        # Something is committed that a power failure may undo.
        self._dirty = False

    def record(
        self, ended: Iterable[Ended], asking: Iterable[Asked], begun: Iterable[int] = ()
    ) -> list[int | LimitReached | Shortage]:
        """Settle requests that have ended and admit those that ask, in one commit, which costs most of it.

        `begun` are the numbers of streams whose beginning was sent: no other engine is asked for them.

        Return of each that asks its number for `settle`, or why it is refused: a budget has less left than it
        reserves (`LimitReached`), or it is shared and this machine has drawn less (`Shortage`).
        """
        with begin(self._connection) as connection:
            spending = Spending(connection, self._is_shared)
            connection.executemany(HAS_BEGUN, ((number,) for number in begun))
            for number, request, status, used in ended:
                close_row(connection, spending, number, request, status, used)
            answers = [
                spending.refusal(request, budgets) or admit_row(connection, spending, self.gateway, request)
                for request, budgets in asking
            ]
            spending.write()
        self._dirty = True
        return answers

    def admit(self, request: Metered, budgets: Sequence[Budget] = ()) -> int:
        """Record a request and reserve its tokens; return its number for `settle`.

        Raises why it is refused, as `record` returns it. Nothing is then recorded.
        """
        (answer,) = self.record((), [(request, budgets)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def settle(self, number: int, request: Metered, status: int, used: tuple[int, int] | None) -> None:
        """Record what a request used: (prompt, completion) tokens; None: not known, so what it reserved."""
        self.record([(number, request, status, used)], ())


@dataclass(slots=True)
class Asking:
    """A request that waits to be recorded; `number` becomes its number, or why it is refused."""

    request: Metered
    budgets: Sequence[Budget]
    number: asyncio.Future[int]


class UsageWriter:
    """When the rows of one gateway are written. For one event loop."""

    def __init__(self, usage: UsageRows, draw: Callable[[Shortage], bool]):
        """`draw` draws from shared budgets; it waits for their database, in a thread."""
        self._usage, self._draw = usage, draw
        # What is to be written: who asks in this turn of the event loop, and what has begun and ended since.
        self._asking: list[Asking] = []
        self._begun: list[int] = []
        self._ended: list[Ended] = []
        self._timer: asyncio.TimerHandle | None = None

    async def admit(self, request: Metered, budgets: Sequence[Budget], is_alone: bool) -> int:
        """Record a request and reserve its tokens; return its number for `end`.

        Where it `is_alone`, it waits for no other. What this machine lacks of shared budgets is drawn. Raises
        `LimitReached`, and `sqlite3.Error` where it cannot be written.
        """
        while True:
            try:
                return await self._written(request, budgets, is_alone)
            except Shortage as short:
                if not await asyncio.to_thread(self._draw, short):
                    raise short.refusal from None

    async def _written(self, request: Metered, budgets: Sequence[Budget], is_alone: bool) -> int:
        if is_alone:
            (answer,) = self._record([(request, budgets)], has_ends=False)
            if self._ended and isinstance(answer, LimitReached | Shortage):
                # What has ended may give back what it lacks.
                (answer,) = self._record([(request, budgets)])
            if isinstance(answer, Exception):
                raise answer
            return answer
        loop = asyncio.get_running_loop()
        asking = Asking(request, budgets, loop.create_future())
        if not self._asking:
            loop.call_soon(self._write)
        self._asking.append(asking)
        try:
            return await asking.number
        except asyncio.CancelledError:
            if asking.number.done() and not asking.number.cancelled() and not asking.number.exception():
                self.end(asking.number.result(), request, LEFT, (0, 0))
            raise

    def end(self, number: int, request: Metered, status: int, used: tuple[int, int] | None) -> None:
        """Have the end of a request recorded soon, with those of others; `used` as of `Ended`."""
        self._ended.append((number, request, status, used))
        self._flush_within(SETTLED_S)

    def note_beginning(self, number: int) -> None:
        """Have it recorded soon that the beginning of a stream was sent."""
        self._begun.append(number)
        self._flush_within(SETTLED_S)

    def _flush_within(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Record what has begun and ended now. On the event loop."""
        try:
            if self._begun or self._ended:
                self._usage.record(self._ended, (), self._begun)
        except sqlite3.Error as error:
            UNSETTLED.inc()
            self._flush_within(AGAIN_S)
            log.warning("The usage of %d requests could not be written: %s", len(self._ended), error)
        else:
            self._begun.clear()
            self._ended.clear()

    def _write(self) -> None:
        # A client may have left since.
        asking = [entry for entry in self._asking if not entry.number.cancelled()]
        self._asking.clear()
        answers = self._record([(entry.request, entry.budgets) for entry in asking])
        for entry, answer in zip(asking, answers, strict=True):
            if isinstance(answer, Exception):
                entry.number.set_exception(answer)
            else:
                entry.number.set_result(answer)

    def _record(self, asking: Sequence[Asked], has_ends: bool = True) -> Sequence[int | Exception]:
        """Record requests in one commit, with what has begun and ended where it `has_ends`.

        Return each one's number, or why it is refused. What cannot be written of ends refuses nobody.
        """
        ended, begun = (self._ended, self._begun) if has_ends else ([], [])
        try:
            answers = self._usage.record(ended, asking, begun)
        except sqlite3.Error as error:
            return self._record(asking, has_ends=False) if has_ends else [error] * len(asking)
        ended.clear()
        begun.clear()
        return answers
