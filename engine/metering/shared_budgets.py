"""Budgets that machines share through a catalog in Postgres: each machine draws blocks of tokens ahead.

A machine reserves requests within what it has drawn, in its own usage log, so that most requests ask nobody.
Blocks shrink with what is left: near its end a budget is drawn request by request. Tokens that a machine does
not need go back. What is drawn never exceeds the budget, so that nothing that is spent can.
"""

from sqlalchemy import select, update

from engine.catalog import tables
from engine.catalog.access import Access

# A block is this share of what is left of the budget.
SHARE = 16


class SharedBudgets:
    """The drawn tokens of every subject and period, in the catalog at `url`. Thread-safe."""

    def __init__(self, url: str):
        self.access = Access(url)

    def close(self) -> None:
        """Close the connections."""
        self.access.close()

    def draw(self, subject: str, period: str, budget: int, tokens: int) -> int:
        """Draw a block of at least `wanted` tokens; return its size, 0 when the budget has less left.

        Raises `ServiceError` when the database does not answer.
        """
        table = tables.budgets
        mine = (table.c.subject == subject) & (table.c.period == period)
        with self.access.write() as connection:
            drawn = connection.execute(select(table.c.drawn).where(mine)).scalar()
            left = budget - (drawn or 0)
            if tokens > left:
                return 0
            block = max(tokens, left // SHARE)
            if drawn is None:
                connection.execute(table.insert().values(subject=subject, period=period, drawn=block))
            else:
                connection.execute(update(table).where(mine).values(drawn=drawn + block))
        return block

    def give_back(self, subject: str, period: str, tokens: int) -> None:
        """Give back tokens that were drawn and are not needed."""
        table = tables.budgets
        mine = (table.c.subject == subject) & (table.c.period == period)
        with self.access.write() as connection:
            connection.execute(update(table).where(mine).values(drawn=table.c.drawn - tokens))
