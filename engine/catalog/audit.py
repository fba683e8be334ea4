"""The audit log: who changed what in the catalog, with the values before and after, chained by hashes.

Each entry is written in the transaction of its change, and its hash covers the hash before it. Triggers of
the database refuse to change or delete an entry. Someone who can write the database's file can also rewrite
the whole chain, so keep the last hash elsewhere: `graftwork audit --verify --expect ID:HASH`.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from getpass import getuser
from itertools import count
from typing import Any

from sqlalchemy import Connection, select, text

from engine.catalog import tables
from engine.catalog.access import ACTING, Actor, CatalogPart, Values
from engine.catalog.records import AuditEntry
from engine.errors import Conflict

PAGE = 1_000
# What the first entry's hash covers in place of the hash before it.
START = "0" * 64
# These say nothing about the change itself, or would disclose which users see a canary.
LEFT_OUT = ("salt", "updated_at", "version")
# A policy's own texts are kept as hashes: a tenant's data may have to be erased, and an entry cannot be.
TEXTS = ("system", "few_shot")


@cache
def _process() -> Actor:
    """Return the actor of a process that nobody asked: the user of the operating system."""
    return Actor(f"os:{getuser()}")


def record(connection: Connection, action: str, subject: str, before: Values, after: Values) -> None:
    """Append an entry in a write transaction; of two rows only the columns that differ are kept."""
    actor = ACTING.get() or _process()
    if connection.dialect.name == "postgresql":
        # Another writer would chain its entry to the same one. SQLite has one writer.
        connection.execute(text("LOCK TABLE audit IN EXCLUSIVE MODE"))
    table = tables.audit.c
    last = connection.execute(select(table.id, table.hash).order_by(table.id.desc()).limit(1)).first()
    old, new = dict(before or {}), dict(after or {})
    kept = [name for name in {**old, **new} if old.get(name) != new.get(name) and name not in LEFT_OUT]
    entry = AuditEntry(
        id=last.id + 1 if last else 1,
        at=time.time(),
        actor=actor.credential,
        on_behalf_of=actor.on_behalf_of,
        action=action,
        subject=subject,
        before=_json({name: old[name] for name in kept if name in old}),
        after=_json({name: new[name] for name in kept if name in new}),
        hash="",
    )
    values = asdict(entry) | {"hash": chained(last.hash if last else START, entry)}
    connection.execute(tables.audit.insert().values(values))


def chained(previous: str, entry: AuditEntry) -> str:
    """Return the hash of an entry after the one with the hash `previous`."""
    fields = asdict(entry) | {"hash": previous}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _json(values: Mapping[str, Any]) -> str:
    shown = {name: _digest(value) if name in TEXTS and value else value for name, value in values.items()}
    return json.dumps(shown, sort_keys=True, default=str)


def _digest(value: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(value).encode()).hexdigest()}"


class Audit(CatalogPart):
    """The audit log of an open catalog."""

    def page(self, after: int = 0, limit: int = PAGE) -> list[AuditEntry]:
        """Return entries by number; `after` is the last number of the page before."""
        table = tables.audit.c
        query = select(tables.audit).where(table.id > after).order_by(table.id).limit(limit)
        return self._access.all(AuditEntry, query)

    def newest(self, limit: int) -> list[AuditEntry]:
        """Return the newest entries, newest first."""
        query = select(tables.audit).order_by(tables.audit.c.id.desc()).limit(limit)
        return self._access.all(AuditEntry, query)

    def newest_of(self, action: str) -> AuditEntry | None:
        """Return the newest entry of an action; None when there is none."""
        table = tables.audit.c
        query = select(tables.audit).where(table.action == action).order_by(table.id.desc()).limit(1)
        return self._access.one(AuditEntry, query)

    def all_of(self, actions: Sequence[str]) -> list[AuditEntry]:
        """Return every entry of these actions, oldest first; for actions that are rare."""
        table = tables.audit.c
        query = select(tables.audit).where(table.action.in_(actions)).order_by(table.id)
        return self._access.all(AuditEntry, query)

    def verify(self, expected: tuple[int, str] | None = None) -> tuple[int, str]:
        """Check every entry; return the last one's number and hash.

        `expected` is a number with its hash from an earlier check, so that a log which was cut or written
        anew is found. Raises `Conflict` with the first entry that does not fit.
        """
        numbers, previous, last = count(1), START, 0
        while entries := self.page(last):
            for entry in entries:
                if entry.id != next(numbers):
                    raise Conflict(f"The audit log has no entry {last + 1}. It was removed.")
                if entry.hash != chained(previous, entry):
                    raise Conflict(
                        f"Entry {entry.id} of the audit log does not fit its hash. It was changed."
                    )
                if expected and expected[0] == entry.id and expected[1] != entry.hash:
                    raise Conflict(f"Entry {entry.id} of the audit log is another one than was expected.")
                last, previous = entry.id, entry.hash
        if expected and expected[0] > last:
            raise Conflict(f"The audit log ends at entry {last}; entry {expected[0]} was removed.")
        return last, previous
