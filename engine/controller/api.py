"""The controller's HTTP API: releases, decisions, policies, events and metrics; other routes are handed in.

Calls that write need an admin key and go to `ReleaseDecisions`. Calls that read use the catalog and the
ledger's snapshot.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from engine.catalog.catalog import Policy, Release
from engine.controller.access_control import METRICS, Admin, CredentialRequired, Limit, whole_body
from engine.controller.advance import advance
from engine.controller.alarms import alarms
from engine.controller.recheck import recheck
from engine.controller.release_loop import Controller
from engine.controller.status_metrics import StatusMetrics
from engine.errors import ConfigError, GraftworkError, NotFound, ServiceError
from engine.files import write_whole
from engine.ledger.ledger import open_snapshot
from engine.ledger.queries import named_rows
from engine.ledger.sender import MOST_BYTES, SENT
from engine.quality.probe import ProbeResult
from engine.security.credentials import credential
from engine.security.http import HEALTH
from engine.settings.model import Settings
from engine.settings.params import PolicyName

Reason = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, Path(pattern=r"^[\w.-]{1,200}$")]


class PolicyBody(Settings):
    """A policy to create."""

    name: PolicyName
    base: str
    config: dict[str, Any] = Field(default_factory=dict)
    owner: str = "local"


class ReleaseBody(Settings):
    """A release to start; `skip_gates` gives the reason for each skipped gate.

    `replaces`: another running release of the policy ends as `hold`.
    """

    policy: str
    digest: str
    settings: dict[str, Any] = Field(default_factory=dict)
    skip_gates: dict[str, str] = Field(default_factory=dict)
    by: str | None = None
    replaces: bool = False


class ProbeBody(Settings):
    """The result of a revision's effect probe."""

    policy: str
    digest: str
    result: ProbeResult


class PurgeBody(Settings):
    """A policy to purge from one place."""

    policy: PolicyName
    place: Literal["name", "catalog", "ledger"] = "ledger"
    by: str | None = None


class EraseBody(Settings):
    """A tenant whose requests and ratings are removed from the ledger."""

    tenant: str = Field(min_length=1)
    by: str | None = None


class RecheckBody(Settings):
    """A policy whose champion is judged again by the scores that are there."""

    policy: PolicyName
    by: str | None = None


class NoBody(Settings):
    """A call that needs nothing said."""


class HoldBody(Settings):
    """A decision's reason, and who decides; by default the key's owner."""

    reason: Reason
    by: str | None = None


class RevisionBody(HoldBody):
    """A decision about one revision."""

    policy: str
    digest: str


class RestoreBody(HoldBody):
    """The revision to restore; without a digest, the previous champion."""

    policy: str
    digest: str | None = None


def build_app(
    controller: Controller,
    routers: Sequence[APIRouter] = (),
    aliases: Callable[[], str | None] = lambda: None,
) -> FastAPI:
    """Return the app of a running controller; `aliases` says why MLflow's differ from the routes, or None."""
    app = FastAPI(title="Graftwork controller", docs_url=None, redoc_url=None, openapi_url=None)
    own, events = (credential(controller.params.paths, name) for name in ("controller", "events"))
    app.add_middleware(CredentialRequired, catalog=controller.catalog, own=own, events=events)
    StatusMetrics(controller)
    app.add_exception_handler(GraftworkError, _answer_fault)
    app.add_exception_handler(RequestValidationError, _answer_bad_body)
    _add_reading(app, controller, aliases)
    _add_policies_and_releases(app, controller)
    _add_decisions(app, controller)
    _add_events(app, controller)
    for router in routers:
        app.include_router(router)
    return app


def _add_reading(app: FastAPI, controller: Controller, aliases: Callable[[], str | None]) -> None:
    @app.get(HEALTH)
    def health() -> JSONResponse:
        stalled = controller.is_stalled()
        return JSONResponse({"status": "stalled" if stalled else "ok"}, status_code=503 if stalled else 200)

    @app.get("/status")
    def status() -> dict[str, Any]:
        faults = [f"{part}: {fault}" for part, fault in alarms(controller).items()]
        return {
            "status": "stalled" if controller.is_stalled() else "degraded" if faults else "ok",
            "alarms": faults,
            "aliases": aliases(),
            "frozen": controller.decisions.frozen(),
            "under_way": controller.files.under_way(),
        }

    @app.get(METRICS)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(controller.metrics.registry))

    @app.get("/ledger/{table}")
    def ledger(table: str, policy: str | None = None, limit: Limit = 1000) -> list[dict[str, Any]]:
        return read_ledger(controller, table, policy, limit)


def _add_policies_and_releases(app: FastAPI, controller: Controller) -> None:
    catalog, decisions = controller.catalog, controller.decisions

    @app.get("/policies")
    def policies(after: str = "", limit: Limit = 100) -> list[dict[str, Any]]:
        return [
            asdict(policy) | {"route": asdict(catalog.routes.get(policy.name))}
            for policy in catalog.policies.page(after, limit)
        ]

    @app.post("/policies")
    def add_policy(body: PolicyBody, _key: Admin) -> dict[str, Any]:
        catalog.policies.add(Policy(body.name, body.base, body.config, body.owner, time.time()))
        return asdict(catalog.policies.get(body.name)) | {"route": asdict(catalog.routes.get(body.name))}

    @app.get("/releases")
    def releases(
        policy: str | None = None, running: bool = False, limit: Limit = 1000
    ) -> list[dict[str, Any]]:
        return [_shown(controller, release) for release in catalog.releases.all(policy, running, limit)]

    @app.get("/releases/{release_id}")
    def release(release_id: str) -> dict[str, Any]:
        return _with_evidence(controller, catalog.releases.get(release_id))

    @app.post("/releases")
    def start(body: ReleaseBody, key: Admin) -> dict[str, Any]:
        by = key.named(body.by)
        release = decisions.start(body.policy, body.digest, body.settings, body.skip_gates, by, body.replaces)
        return _with_evidence(controller, release)

    def add(name: str, decide: Callable[[str, str, str], Release]) -> None:
        @app.post(f"/releases/{{release_id}}/{name}")
        def decided(release_id: str, body: HoldBody, key: Admin) -> dict[str, Any]:
            return _shown(controller, decide(release_id, key.named(body.by), body.reason))

    add("approve", decisions.approve)
    add("pause", decisions.pause)
    add("resume", decisions.resume)
    add("hold", decisions.hold)


def _add_decisions(app: FastAPI, controller: Controller) -> None:
    decisions, changes = controller.decisions, controller.applier.changes

    @app.post("/probes")
    def probe(body: ProbeBody, _key: Admin) -> dict[str, Any]:
        """Store the result of a revision's effect probe. A refused revision gets a tombstone."""
        with decisions.lock:
            changes.record_probe(body.policy, body.digest, body.result)
        return body.result.to_json()

    def add(name: str, message: type[HoldBody], decide: Callable[..., Any]) -> None:
        def decided(body: Any, key: Admin) -> dict[str, Any]:
            return asdict(decide(body.policy, body.digest, key.named(body.by), body.reason))

        decided.__annotations__["body"] = message
        app.post(name)(decided)

    add("/promote", RevisionBody, decisions.promote)
    add("/rollback", RevisionBody, decisions.rollback)
    add("/lift", RevisionBody, decisions.lift)
    add("/restore", RestoreBody, decisions.restore)

    @app.post("/recheck")
    def look_again(body: RecheckBody, key: Admin) -> dict[str, str]:
        by = key.named(body.by)
        state, reason = controller.on_ledger(lambda ledger: recheck(controller, ledger, body.policy, by))
        return {"state": state, "reason": reason}

    @app.post("/purge")
    def purge(body: PurgeBody, key: Admin) -> dict[str, int]:
        """Remove a policy's name, rows or ledger rows. `graftwork purge` removes it from every place."""
        if body.place == "ledger":
            return controller.files.purge(body.policy)
        # Without the lock: there may be many rows, and nothing else changes the rows of a marked name.
        return changes.purge(body.policy, body.place, key.named(body.by))

    @app.post("/erase")
    def erase(body: EraseBody, key: Admin) -> dict[str, int]:
        """Remove what a tenant's keys asked and rated; `graftwork purge --tenant` takes its policies too."""
        by, catalog = key.named(body.by), controller.catalog
        names = [name for one in catalog.keys.all() if one.owner == body.tenant for name in one.names]
        removed = controller.files.erase(names)
        catalog.note("tenant.erase", body.tenant, {"by": by, "removed": removed})
        return removed

    @app.post("/ledger")
    def publish_ledger(body: NoBody, key: Admin) -> dict[str, bool]:
        """Write the readers' copy of the ledger with all that is spooled; a backup asks for it."""
        controller.files.publish()
        return {"published": True}

    @app.post("/freeze")
    def freeze(body: HoldBody, key: Admin) -> dict[str, Any]:
        return {"frozen": decisions.freeze(key.named(body.by), body.reason)}

    @app.post("/thaw")
    def thaw(body: HoldBody, key: Admin) -> dict[str, Any]:
        return {"frozen": decisions.thaw(key.named(body.by), body.reason)}


def _add_events(app: FastAPI, controller: Controller) -> None:
    spool = controller.params.paths.spool

    @app.post("/events/{name}")
    async def events(name: FileName, request: Request) -> dict[str, int]:
        """Store a spool file of another machine; the answer comes once it is on the disk."""
        lines = await whole_body(request, MOST_BYTES)
        try:
            file = spool / f"{SENT}{name}.jsonl"
            await run_in_threadpool(write_whole, file, lines, durable=True, mode=0o600)
        except OSError as error:
            raise ServiceError(f"The events could not be stored: {error}. They are sent again.") from None
        return {"bytes": len(lines)}


def read_ledger(controller: Controller, table: str, policy: str | None, limit: int) -> list[dict[str, Any]]:
    """Return rows of a ledger table or view from the snapshot, newest first where it has the column `at`.

    Raises `NotFound` for an unknown table.
    """
    with open_snapshot(controller.params.paths.ledger_snapshot) as connection:
        query = "SELECT column_name FROM duckdb_columns() WHERE table_name = ? AND NOT internal"
        columns = [row[0] for row in connection.execute(query, [table]).fetchall()]
        if not columns:
            raise NotFound(f"The ledger has no table or view {table!r}.")
        where = "WHERE policy = $policy" if policy is not None and "policy" in columns else ""
        order = 'ORDER BY "at" DESC' if "at" in columns else ""
        named = {"policy": policy} if where else {}
        rows = connection.execute(f"SELECT * FROM {table} {where} {order} LIMIT {int(limit)}", named)
        return [{name: _plain(value) for name, value in row.items()} for row in named_rows(rows)]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(controller: Controller, release: Release) -> dict[str, Any]:
    """Return a release's row, and what follows from it and the evidence while it runs."""
    latest = controller.latest.get(release.id)
    waits = [wait.row() for wait in advance(release, latest).waits] if latest else []
    return asdict(release) | {"paused": release.paused, "asks": release.asks, "waits": waits}


def _with_evidence(controller: Controller, release: Release) -> dict[str, Any]:
    latest = controller.latest.get(release.id) if release.state == "running" else None
    return _shown(controller, release) | ({"evidence": latest.summary()} if latest else {})


def _answer_fault(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GraftworkError)
    return JSONResponse({"error": str(error)}, status_code=error.status)


def _answer_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
    return _answer_fault(request, ConfigError(f"The request is not valid. {faults}."))
