"""The Tinker API's index: sessions, models, checkpoints, samplers, and results of its calls."""

import time
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, Table, and_, delete, func, or_, select, update

from engine.catalog import tables
from engine.catalog.access import CatalogPart
from engine.catalog.tinker_records import (
    TinkerCheckpoint,
    TinkerModel,
    TinkerResult,
    TinkerSampler,
    TinkerSession,
)

# A client asks for a result within minutes; one that was away for longer starts from a checkpoint.
RESULTS_S = 86400.0
Row = TypeVar("Row")


TABLES: dict[type[Any], Table] = {
    TinkerSession: tables.tinker_sessions,
    TinkerModel: tables.tinker_models,
    TinkerCheckpoint: tables.tinker_checkpoints,
    TinkerSampler: tables.tinker_samplers,
    TinkerResult: tables.tinker_results,
}


class TinkerIndex(CatalogPart):
    """The catalog's rows of the Tinker API; `catalog.tinker`.

    Every query names the tenant, so that another tenant's row is as absent; so are expired checkpoints.
    """

    def add(self, *rows: Any) -> None:
        """Add rows, unless their names have some; all or nothing."""
        with self._access.write() as connection:
            for row in rows:
                connection.execute(self._access.new(TABLES[type(row)], row))

    def add_session(self, row: TinkerSession) -> None:
        """Add a session; also deletes results that nobody asks for any more."""
        self.add(row)
        old = tables.tinker_results.c.created_at < row.created_at - RESULTS_S
        self._access.change(delete(tables.tinker_results).where(old))

    def find(self, kind: type[Row], tenant: str, id: str) -> Row | None:
        """Return the row with this id; None when the tenant has none."""
        return self._access.one(kind, _mine(kind, tenant, id=id))

    def all_of(self, kind: type[Row], tenant: str, whose: str, id: str) -> list[Row]:
        """Return a tenant's rows whose `session` or `model` has this id, oldest first."""
        query = _mine(kind, tenant, **{whose: id})
        return self._access.all(kind, query.order_by(TABLES[kind].c.created_at))

    def page(self, kind: type[Row], tenant: str, limit: int, offset: int) -> tuple[list[Row], int]:
        """Return a page of a tenant's rows, the newest first, and how many there are."""
        query = _mine(kind, tenant)
        total = self._access.scalar(select(func.count()).select_from(query.subquery()))
        newest = query.order_by(TABLES[kind].c.created_at.desc())
        return self._access.all(kind, newest.limit(limit).offset(offset)), total

    def finish(self, tenant: str, id: str, reason: str) -> None:
        """Record how a session ended; the first reason stays."""
        table = tables.tinker_sessions
        mine = (table.c.id == id) & (table.c.tenant == tenant) & table.c.finished.is_(None)
        self._access.change(update(table).where(mine).values(finished=reason))

    def advance(self, model: TinkerModel, *made: Any) -> None:
        """Store a model after a call, with the call's result and what it made; all or nothing."""
        with self._access.write() as connection:
            for row in (model, *made):
                # A checkpoint takes the place of another one of its name.
                replaces = isinstance(row, TinkerModel | TinkerCheckpoint)
                store = self._access.put if replaces else self._access.new
                connection.execute(store(TABLES[type(row)], row))

    def checkpoint(self, tenant: str, model: str, kind: str, name: str) -> TinkerCheckpoint | None:
        """Return a checkpoint; None when the tenant has no such one."""
        query = _mine(TinkerCheckpoint, tenant, model=model, kind=kind, name=name)
        return self._access.one(TinkerCheckpoint, query)

    def change_checkpoint(self, row: TinkerCheckpoint) -> None:
        """Store whether a checkpoint is public and when it expires, unless it is gone."""
        change = update(tables.tinker_checkpoints).where(_this(row))
        self._access.change(change.values(public=row.public, expires_at=row.expires_at))

    def remove_checkpoint(self, row: TinkerCheckpoint) -> bool:
        """Remove a checkpoint's row; False when it is gone, or was saved again under its name."""
        return self._access.change(delete(tables.tinker_checkpoints).where(_this(row))) > 0

    def expired(self) -> list[TinkerCheckpoint]:
        """Return the checkpoints of all tenants whose time is over."""
        table = tables.tinker_checkpoints
        return self._access.all(TinkerCheckpoint, select(table).where(table.c.expires_at <= time.time()))


def _mine(rows: type[Any], tenant: str, /, **named: str) -> Select[Any]:
    table = TABLES[rows]
    query = select(table).where(*(table.c[name] == it for name, it in {**named, "tenant": tenant}.items()))
    if rows is TinkerCheckpoint:
        query = query.where(or_(table.c.expires_at.is_(None), table.c.expires_at > time.time()))
    return query


def _this(row: TinkerCheckpoint) -> ColumnElement[bool]:
    table = tables.tinker_checkpoints.c
    names = ("model", "kind", "name", "created_at")
    return and_(*(table[name] == getattr(row, name) for name in names))
