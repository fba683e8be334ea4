"""Tokens of budgets that a gateway holds, so that a request reserves its tokens without a commit.

A gateway draws a share of what is left of a budget, in one commit with its note of what it holds, and admits
requests within that. Shares shrink with what is left: near its end a budget is drawn request by request. What
is held counts as reserved for every other gateway, so that a budget is never exceeded; what a gateway has not
used for `IDLE_S` goes back.
"""

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import LimitReached
from engine.metering.usage_rows import MONTH, Budget, Metered, Spending, begin, periods, remaining_s

# What is drawn at once, of what is left.
SHARE = 16
IDLE_S = 60.0
HOLD = """
    INSERT INTO held VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens
"""
OF_HOLD = "WHERE gateway = ? AND subject = ? AND period = ?"


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
