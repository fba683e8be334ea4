"""Policies: named lines of training, each with one base and one owner. A new one gets an empty route."""

import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import islice

from sqlalchemy import Connection, func, select, update

from engine.catalog import tables
from engine.catalog.access import Access
from engine.catalog.changes import tell
from engine.catalog.keys import refuse_outside
from engine.catalog.purges import refuse_purged_names
from engine.catalog.records import Policy, Route
from engine.catalog.unknown_names import UnknownNames
from engine.errors import Conflict

# Policies of one transaction.
POLICIES = 1_000


class Policies:
    """The catalog's policies; `catalog.policies`."""

    def __init__(self, access: Access, names: UnknownNames):
        self._access = access
        self._names = names

    def add(self, policy: Policy, again: bool = False) -> None:
        """Add a policy with an empty route, or update the config of one that we own.

        Raises `Conflict` when the name has another owner or another base, when it is outside of its owner's
        policies or within another tenant's, or when it was purged and `again` is not set.
        """
        self.add_many([policy], again)

    def add_many(self, policies: Iterable[Policy], again: bool = False) -> None:
        """Add policies as `add` does, 1,000 a transaction; a refusal keeps the transactions before it."""
        rest = iter(policies)
        while some := list(islice(rest, POLICIES)):
            with self._access.write() as connection:
                self._add(connection, some, again)

    def _add(self, connection: Connection, policies: Sequence[Policy], again: bool) -> None:
        table = tables.policies
        rows = connection.execute(select(table).where(table.c.name.in_([one.name for one in policies])))
        stored = {row.name: Policy(**row._mapping) for row in rows}
        new: dict[str, Policy] = {}
        for policy in policies:
            before = stored.get(policy.name) or new.get(policy.name, policy)
            fault = taken(policy.name, (before.owner, before.base), (policy.owner, policy.base))
            if fault:
                raise Conflict(fault)
            if policy.name in stored:
                if before.config != policy.config:
                    self._access.record(
                        connection, "policy.change", policy.name, before.config, policy.config
                    )
                mine = table.c.name == policy.name
                connection.execute(update(table).where(mine).values(config=policy.config))
            else:
                new[policy.name] = policy
        if not new:
            return
        refuse_outside(connection, new.values())
        if not again:
            refuse_purged_names(connection, list(new))
        now = time.time()
        routes = [Route(name, salt=secrets.token_hex(8), updated_at=now) for name in new]
        connection.execute(table.insert(), list(map(vars, new.values())))
        connection.execute(tables.routes.insert(), list(map(vars, routes)))
        tell(connection, *new)
        # One entry a transaction: a million policies may be added at once.
        first, *others = new.values()
        about = {"base": first.base, "owner": first.owner, "others": [one.name for one in others]}
        self._access.record(connection, "policy.add", first.name, None, first.config | about)

    def get(self, name: str) -> Policy:
        """Return a policy; `NotFound` when there is none."""
        policy = self._access.one(Policy, select(tables.policies).where(tables.policies.c.name == name))
        if policy is None:
            raise self._names.unknown(name)
        return policy

    def page(self, after: str = "", limit: int = 1000) -> list[Policy]:
        """Return a page of policies by name; `after` is the last name of the page before."""
        table = tables.policies.c
        query = select(tables.policies).where(table.name > after).order_by(table.name).limit(limit)
        return self._access.all(Policy, query)

    def owners(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return (owner, base) of those of these policies that exist."""
        table = tables.policies.c
        query = select(table.name, table.owner, table.base)
        with self._access.read() as connection:
            rows = tables.rows_among(connection, query, table.name, names)
        return {name: (owner, base) for name, owner, base in rows}

    def count(self) -> int:
        """Return how many policies there are."""
        return int(self._access.scalar(select(func.count()).select_from(tables.policies)))


def taken(name: str, holder: tuple[str, str], claimant: tuple[str, str]) -> str | None:
    """Return why a policy of one (owner, base) cannot be used as one of another; None when it can."""
    if holder[0] != claimant[0]:
        return f"Policy {name!r} belongs to {holder[0]!r}; choose another name."
    if holder[1] != claimant[1]:
        return (
            f"Policy {name!r} is trained on base {holder[1][:12]}, not on base {claimant[1][:12]}; choose "
            "another name or another state_dir."
        )
    return None
