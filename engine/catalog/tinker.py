"""The Tinker API's index: sessions, models, checkpoints, samplers, and results of its calls."""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, delete, func, or_, select, update

from engine.catalog import tables
from engine.catalog.access import Access

# A client asks for a result within minutes; one that was away for longer starts from a checkpoint.
RESULTS_S = 86400.0


@dataclass(frozen=True)
class TinkerSession:
    """A client of the Tinker API, from its start to its end; `finished` is the reason of the end."""

    id: str
    tenant: str
    user_metadata: dict[str, Any]
    created_at: float
    finished: str | None = None


@dataclass(frozen=True)
class TinkerModel:
    """A training client's model: one policy.

    `next_seq` is the number of the call that takes effect next, `gathered` counts the calls whose gradients
    no step has applied. A `corrupted` model has lost such gradients.
    """

    id: str
    session: str
    tenant: str
    policy: str
    rank: int
    targets: list[str]
    user_metadata: dict[str, Any]
    next_seq: int
    gathered: int
    corrupted: bool
    created_at: float
    used_at: float


@dataclass(frozen=True)
class TinkerCheckpoint:
    """A saved state (`kind` weights) or revision (sampler_weights) of a model.

    `stored` is the state's name in the trainer, or the revision's digest.
    """

    model: str
    kind: str
    name: str
    tenant: str
    stored: str
    bytes: int | None
    public: bool
    user_metadata: dict[str, Any]
    created_at: float
    expires_at: float | None

    @property
    def path(self) -> str:
        """The checkpoint's name in the Tinker API."""
        return f"tinker://{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class TinkerSampler:
    """A sampling client: `served` is the base's name or a revision's, as the engine knows it."""

    id: str
    session: str
    tenant: str
    served: str
    path: str | None
    created_at: float


@dataclass(frozen=True)
class TinkerResult:
    """What a call that changed something has answered, for a client that asks again."""

    id: str
    tenant: str
    body: dict[str, Any]
    created_at: float


class TinkerIndex:
    """The catalog's rows of the Tinker API; `catalog.tinker`.

    Every query names the tenant, so that another tenant's row is as absent.
    """

    def __init__(self, access: Access):
        self._access = access

    def add_session(self, row: TinkerSession) -> None:
        """Add a session; also deletes results that nobody asks for any more."""
        old = tables.tinker_results.c.created_at < row.created_at - RESULTS_S
        with self._access.write() as connection:
            connection.execute(self._access.new(tables.tinker_sessions, row))
            connection.execute(delete(tables.tinker_results).where(old))

    def session(self, tenant: str, id: str) -> TinkerSession | None:
        """Return a session; None when the tenant has none with this id."""
        return self._access.one(TinkerSession, _one(tables.tinker_sessions, tenant, id))

    def finish(self, tenant: str, id: str, reason: str) -> None:
        """Record how a session ended; the first reason stays."""
        table = tables.tinker_sessions
        mine = (table.c.id == id) & (table.c.tenant == tenant) & table.c.finished.is_(None)
        with self._access.write() as connection:
            connection.execute(update(table).where(mine).values(finished=reason))

    def add_model(self, row: TinkerModel, result: TinkerResult) -> None:
        """Add a model with the answer of the call that made it; both or neither, once."""
        with self._access.write() as connection:
            connection.execute(self._access.new(tables.tinker_models, row))
            connection.execute(self._access.new(tables.tinker_results, result))

    def model(self, tenant: str, id: str) -> TinkerModel | None:
        """Return a model; None when the tenant has none with this id."""
        return self._access.one(TinkerModel, _one(tables.tinker_models, tenant, id))

    def models(self, tenant: str, limit: int, offset: int) -> tuple[list[TinkerModel], int]:
        """Return a page of a tenant's models, the newest first, and how many there are."""
        return self._page(TinkerModel, tables.tinker_models, tenant, limit, offset)

    def models_of(self, tenant: str, session: str) -> list[TinkerModel]:
        """Return a session's models, oldest first."""
        table = tables.tinker_models
        query = _mine(table, tenant).where(table.c.session == session).order_by(table.c.created_at)
        return self._access.all(TinkerModel, query)

    def advance(
        self,
        model: TinkerModel,
        result: TinkerResult | None = None,
        checkpoint: TinkerCheckpoint | None = None,
        sampler: TinkerSampler | None = None,
    ) -> None:
        """Store a model after a call, with the call's result and what it made; all or nothing."""
        with self._access.write() as connection:
            connection.execute(self._access.put(tables.tinker_models, model))
            if checkpoint:
                connection.execute(self._access.put(tables.tinker_checkpoints, checkpoint))
            if sampler:
                connection.execute(self._access.new(tables.tinker_samplers, sampler))
            if result:
                connection.execute(self._access.new(tables.tinker_results, result))

    def result(self, tenant: str, id: str) -> TinkerResult | None:
        """Return a call's result; None when there is none, or another tenant made the call."""
        return self._access.one(TinkerResult, _one(tables.tinker_results, tenant, id))

    def checkpoint(self, tenant: str, model: str, kind: str, name: str) -> TinkerCheckpoint | None:
        """Return a checkpoint that has not expired; None when the tenant has no such one."""
        query = _alive(_mine(tables.tinker_checkpoints, tenant)).where(_named(model, kind, name))
        return self._access.one(TinkerCheckpoint, query)

    def checkpoints(self, tenant: str, limit: int, offset: int) -> tuple[list[TinkerCheckpoint], int]:
        """Return a page of a tenant's checkpoints, the newest first, and how many there are."""
        return self._page(TinkerCheckpoint, tables.tinker_checkpoints, tenant, limit, offset)

    def checkpoints_of(self, tenant: str, model: str) -> list[TinkerCheckpoint]:
        """Return a model's checkpoints, oldest first."""
        table = tables.tinker_checkpoints
        query = _alive(_mine(table, tenant)).where(table.c.model == model).order_by(table.c.created_at)
        return self._access.all(TinkerCheckpoint, query)

    def add_checkpoint(self, row: TinkerCheckpoint) -> None:
        """Add a checkpoint's row, unless its name has one."""
        with self._access.write() as connection:
            connection.execute(self._access.new(tables.tinker_checkpoints, row))

    def change_checkpoint(self, row: TinkerCheckpoint) -> None:
        """Store whether a checkpoint is public and when it expires, unless it is gone."""
        change = update(tables.tinker_checkpoints).where(_this(row))
        with self._access.write() as connection:
            connection.execute(change.values(public=row.public, expires_at=row.expires_at))

    def remove_checkpoint(self, row: TinkerCheckpoint) -> bool:
        """Remove a checkpoint's row; False when it is gone, or was saved again under its name."""
        with self._access.write() as connection:
            return bool(connection.execute(delete(tables.tinker_checkpoints).where(_this(row))).rowcount)

    def expired(self) -> list[TinkerCheckpoint]:
        """Return the checkpoints of all tenants whose time is over."""
        table = tables.tinker_checkpoints
        return self._access.all(TinkerCheckpoint, select(table).where(table.c.expires_at <= time.time()))

    def add_sampler(self, row: TinkerSampler) -> None:
        """Add a sampling client, once."""
        with self._access.write() as connection:
            connection.execute(self._access.new(tables.tinker_samplers, row))

    def sampler(self, tenant: str, id: str) -> TinkerSampler | None:
        """Return a sampling client; None when the tenant has none with this id."""
        return self._access.one(TinkerSampler, _one(tables.tinker_samplers, tenant, id))

    def samplers_of(self, tenant: str, session: str) -> list[TinkerSampler]:
        """Return a session's sampling clients, oldest first."""
        table = tables.tinker_samplers
        query = _mine(table, tenant).where(table.c.session == session).order_by(table.c.created_at)
        return self._access.all(TinkerSampler, query)

    def _page(self, kind: Any, table: Table, tenant: str, limit: int, offset: int) -> tuple[list[Any], int]:
        query = _mine(table, tenant)
        if table is tables.tinker_checkpoints:
            query = _alive(query)
        with self._access.read() as connection:
            total = connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()
        page = query.order_by(table.c.created_at.desc()).limit(limit).offset(offset)
        return self._access.all(kind, page), total


def _mine(table: Table, tenant: str) -> Select[Any]:
    return select(table).where(table.c.tenant == tenant)


def _one(table: Table, tenant: str, id: str) -> Select[Any]:
    return _mine(table, tenant).where(table.c.id == id)


def _alive(query: Select[Any]) -> Select[Any]:
    expires = tables.tinker_checkpoints.c.expires_at
    return query.where(or_(expires.is_(None), expires > time.time()))


def _this(row: TinkerCheckpoint) -> ColumnElement[bool]:
    at = tables.tinker_checkpoints.c.created_at == row.created_at
    return _named(row.model, row.kind, row.name) & at


def _named(model: str, kind: str, name: str) -> ColumnElement[bool]:
    table = tables.tinker_checkpoints.c
    return (table.model == model) & (table.kind == kind) & (table.name == name)
