"""Rows of the usage log: requests, what keys and tenants have spent, and what gateways hold of budgets.

A gateway draws a share of what is left of a budget, in one commit with its note of what it holds, and admits
requests within that, so that a request reserves its tokens without a commit. Shares shrink with what is left:
near its end a budget is drawn request by request. What is held counts as reserved for every other gateway, so
that a budget is never exceeded; what a gateway has not used for `IDLE_S` goes back.
"""

import calendar
import sqlite3
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import LimitReached

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
# What is drawn at once, of what is left.
SHARE = 16
IDLE_S = 60.0
HOLD = """
    INSERT INTO held VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens
"""
OF_HOLD = "WHERE gateway = ? AND subject = ? AND period = ?"


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


class Shortage(Exception):
    """This machine has drawn `missing` tokens too few of a budget that it shares."""

    def __init__(self, budget: Budget, period: str, missing: int, refusal: LimitReached):
        super().__init__(budget, period, missing, refusal)
        self.budget, self.period, self.missing, self.refusal = budget, period, missing, refusal


@dataclass(slots=True)
class Hold:
    """What a gateway holds of a budget of `most` tokens in a period.

    `left`: free tokens; `spent`: used ones that the database still counts as reserved; `under_way`: requests
    that have reserved some.
    """

    subject: str
    period: str
    most: float
    used_at: float
    left: int = 0
    spent: int = 0
    under_way: int = 0


class HeldBudgets:
    """What one gateway holds; for one thread. `is_shared`: machines share the budgets."""

    def __init__(self, connection: sqlite3.Connection, gateway: str, is_shared: bool):
        self._connection, self._gateway, self._is_shared = connection, gateway, is_shared
        # The one that was used last is at the end.
        self._holds: OrderedDict[tuple[str, str], Hold] = OrderedDict()
        self._spent: list[Hold] = []

    def reserve(self, request: Metered, budgets: Sequence[Budget]) -> Sequence[Hold]:
        """Reserve a request's tokens of each budget, or of none; return what they were taken from.

        Raises `LimitReached` where a budget has too little left, `Shortage` where this machine has drawn too
        little of a shared one, and `sqlite3.Error`.
        """
        holds = [self._with_enough(request, budget) for budget in budgets]
        for hold in holds:
            hold.left -= request.reserved
            hold.under_way += 1
        return holds

    def end(self, holds: Sequence[Hold], reserved: int, used: int) -> None:
        """End a request that has used so many of the tokens that it reserved."""
        for hold in holds:
            if used and not hold.spent:
                self._spent.append(hold)
            hold.left += reserved - used
            hold.spent += used
            hold.under_way -= 1

    @contextmanager
    def writing(self, spending: Spending, everything: bool = False) -> Iterator[None]:
        """Within this transaction, note what was spent and give back what is idle; or `everything` free."""
        idle = list(self._idle(time.monotonic() - (0.0 if everything else IDLE_S)))
        for hold in self._spent:
            self._add(spending, hold, -hold.spent)
        for hold in idle:
            self._add(spending, hold, -hold.left)
            self._connection.execute(f"DELETE FROM held {OF_HOLD}", self._name(hold))
        yield
        for hold in self._spent:
            hold.spent = 0
        self._spent.clear()
        for hold in idle:
            del self._holds[hold.subject, hold.period]

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self._holds)

    def _idle(self, since: float) -> Iterator[Hold]:
        for hold in self._holds.values():
            if hold.used_at > since:
                return
            if not hold.under_way:
                yield hold

    def _with_enough(self, request: Metered, budget: Budget) -> Hold:
        name = budget.subject, periods(request.at)[budget.period == MONTH]
        hold = self._holds.get(name)
        if hold is None:
            hold = self._holds[name] = Hold(*name, budget.tokens, 0.0)
        hold.used_at = time.monotonic()
        self._holds.move_to_end(name)
        # Of a budget that has changed, nothing that was drawn before counts.
        if hold.left < request.reserved or hold.most != budget.tokens:
            self._draw(hold, budget, request)
        return hold

    def _draw(self, hold: Hold, budget: Budget, request: Metered) -> None:
        with begin(self._connection) as connection:
            spending = Spending(connection)
            most = budget.tokens
            if self._is_shared:
                most = min(most, _number(connection, "SELECT tokens FROM drawn", hold))
            # What is free here is drawn anew.
            left = int(most - _number(connection, "SELECT used + reserved FROM spent", hold)) + hold.left
            is_enough = request.reserved <= left
            block = max(request.reserved, left // SHARE) if is_enough else 0
            if block != hold.left:
                self._add(spending, hold, block - hold.left)
                spending.write()
        hold.left, hold.most = block, budget.tokens
        if not is_enough:
            raise self._refusal(hold, budget, request, left)

    def _refusal(self, hold: Hold, budget: Budget, request: Metered, left: int) -> LimitReached | Shortage:
        kind, _, name = hold.subject.partition(":")
        refusal = LimitReached(
            f"The {kind} {name!r} has {max(0, left)} of {int(budget.tokens)} tokens left in {hold.period}, "
            f"and this request may take {request.reserved}: its prompt and n times max_tokens. Ask for "
            "fewer, or wait for the next period.",
            remaining_s(request.at, budget.period),
            code="insufficient_quota",
        )
        if not self._is_shared:
            return refusal
        return Shortage(budget, hold.period, request.reserved - left, refusal)

    def _add(self, spending: Spending, hold: Hold, tokens: int) -> None:
        spending.reserve(hold.subject, hold.period, tokens)
        self._connection.execute(HOLD, (*self._name(hold), tokens))

    def _name(self, hold: Hold) -> tuple[str, str, str]:
        return self._gateway, hold.subject, hold.period


def _number(connection: sqlite3.Connection, query: str, hold: Hold) -> int:
    """Return the number of this subject and period; 0 without a row."""
    row = connection.execute(
        f"{query} WHERE subject = ? AND period = ?", (hold.subject, hold.period)
    ).fetchone()
    return int(row[0]) if row else 0


def release(connection: sqlite3.Connection, spending: Spending, gateway: str) -> None:
    """Give back all that a gateway holds, which is gone; what its requests have used counts for itself."""
    query = "SELECT subject, period, tokens FROM held WHERE gateway = ?"
    for subject, period, tokens in connection.execute(query, (gateway,)).fetchall():
        spending.reserve(subject, period, -tokens)
    connection.execute("DELETE FROM held WHERE gateway = ?", (gateway,))
