"""The controller's HTTP API: releases, decisions, policies, notices, the page and metrics.

Calls that write need an admin key and go to `ReleaseDecisions` under the loop's lock. Calls that read use the
catalog and the ledger's snapshot.
"""

import json
import math
import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from pydantic import Field

from engine.catalog.catalog import Key, Notice, Policy, Release
from engine.controller.loop import Controller
from engine.controller.mlflow_aliases import AliasMirror
from engine.controller.notifications import DELIVERED
from engine.controller.page import LivePage
from engine.errors import ConfigError, GraftworkError, NotFound, Unauthorized
from engine.ledger.ledger import open_snapshot
from engine.ledger.queries import named_rows
from engine.quality.probe import ProbeResult
from engine.settings.model import Settings
from engine.settings.params import PolicyName

Reason = Annotated[str, Field(min_length=1)]


class PolicyBody(Settings):
    """A policy to create."""

    name: PolicyName
    base: str
    config: dict[str, Any] = Field(default_factory=dict)
    owner: str = "local"


class ReleaseBody(Settings):
    """A release to start; `skip_gates` gives the reason for each skipped gate."""

    policy: str
    digest: str
    settings: dict[str, Any] = Field(default_factory=dict)
    skip_gates: dict[str, str] = Field(default_factory=dict)
    by: str | None = None


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


def build_app(controller: Controller, mirror: AliasMirror) -> FastAPI:
    """Return the app of a running controller."""
    app = FastAPI(title="Graftwork controller", docs_url="/docs", redoc_url=None)
    app.state.controller = controller
    app.add_exception_handler(GraftworkError, _answer_fault)
    app.add_exception_handler(RequestValidationError, _answer_bad_body)
    _add_reading(app, controller, mirror)
    _add_policies_and_releases(app, controller)
    _add_decisions(app, controller)
    _add_notices(app, controller, mirror)
    return app


def _add_reading(app: FastAPI, controller: Controller, mirror: AliasMirror) -> None:
    @app.get("/health")
    def health() -> JSONResponse:
        alarms = [f"{part}: {fault}" for part, fault in controller.faults.items()]
        rejected = len(list(controller.params.paths.spool.glob("rejected/*")))
        if rejected:
            alarms.append(
                f"{rejected} spool files hold lines that no ledger table accepts. They are in spool/rejected."
            )
        stalled = controller.is_stalled()
        status = "stalled" if stalled else "degraded" if alarms else "ok"
        body = {
            "status": status,
            "alarms": alarms,
            "aliases": mirror.fault,
            "frozen": controller.decisions.frozen(),
        }
        return JSONResponse(body, status_code=503 if stalled else 200)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(controller.metrics.registry))

    @app.get("/ledger/{table}")
    def ledger(table: str, policy: str | None = None, limit: int = 1000) -> list[dict[str, Any]]:
        return read_ledger(controller, table, policy, limit)

    live = LivePage(controller)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return live.html()


def _add_policies_and_releases(app: FastAPI, controller: Controller) -> None:
    catalog, decisions = controller.catalog, controller.decisions

    @app.get("/policies")
    def policies(after: str = "", limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[dict[str, Any]]:
        return [
            asdict(policy) | {"route": asdict(catalog.routes.get(policy.name))}
            for policy in catalog.policies.page(after, limit)
        ]

    @app.post("/policies")
    def add_policy(body: PolicyBody, _key: Admin) -> dict[str, Any]:
        catalog.policies.add(Policy(body.name, body.base, body.config, body.owner, time.time()))
        return asdict(catalog.policies.get(body.name)) | {"route": asdict(catalog.routes.get(body.name))}

    @app.get("/releases")
    def releases(policy: str | None = None) -> list[dict[str, Any]]:
        return [asdict(release) for release in catalog.releases.all(policy)]

    @app.get("/releases/{release_id}")
    def release(release_id: str) -> dict[str, Any]:
        return _with_evidence(controller, catalog.releases.get(release_id))

    @app.post("/releases")
    def start(body: ReleaseBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            by = body.by or key.owner
            release = decisions.start(body.policy, body.digest, body.settings, body.skip_gates, by)
        return _with_evidence(controller, release)

    @app.post("/releases/{release_id}/approve")
    def approve(release_id: str, body: HoldBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return asdict(decisions.approve(release_id, body.by or key.owner, body.reason))

    @app.post("/releases/{release_id}/hold")
    def hold(release_id: str, body: HoldBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return asdict(decisions.hold(release_id, body.by or key.owner, body.reason))


def _add_decisions(app: FastAPI, controller: Controller) -> None:
    decisions, changes = controller.decisions, controller.applier.changes

    @app.post("/probes")
    def probe(body: ProbeBody, _key: Admin) -> dict[str, Any]:
        """Store the result of a revision's effect probe. A refused revision gets a tombstone."""
        with controller.lock:
            changes.record_probe(body.policy, body.digest, body.result)
        return body.result.to_json()

    @app.post("/promote")
    def promote(body: RevisionBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return asdict(decisions.promote(body.policy, body.digest, body.by or key.owner, body.reason))

    @app.post("/rollback")
    def rollback(body: RevisionBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return asdict(decisions.rollback(body.policy, body.digest, body.by or key.owner, body.reason))

    @app.post("/lift")
    def lift(body: RevisionBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return asdict(decisions.lift(body.policy, body.digest, body.by or key.owner, body.reason))

    @app.post("/restore")
    def restore(body: RestoreBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return asdict(decisions.restore(body.policy, body.digest, body.by or key.owner, body.reason))

    @app.post("/purge")
    def purge(body: PurgeBody, key: Admin) -> dict[str, int]:
        """Remove a policy's name, rows or ledger rows. `graftwork purge` removes it from every place."""
        if body.place == "ledger":
            return controller.purge(body.policy)
        # Without the lock: there may be many rows, and nothing else changes the rows of a marked name.
        return changes.purge(body.policy, body.place, body.by or key.owner)

    @app.post("/freeze")
    def freeze(body: HoldBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            return {"frozen": decisions.freeze(body.by or key.owner, body.reason)}

    @app.post("/thaw")
    def thaw(body: HoldBody, key: Admin) -> dict[str, Any]:
        with controller.lock:
            decisions.thaw(body.by or key.owner, body.reason)
            return {"frozen": decisions.frozen()}


def _add_notices(app: FastAPI, controller: Controller, mirror: AliasMirror) -> None:
    catalog = controller.catalog

    @app.get("/notices")
    def notices(limit: int = 100) -> list[dict[str, Any]]:
        return [asdict(notice) for notice in catalog.notices.page(min(limit, 1000))]

    @app.post("/notices/inbox")
    async def inbox(request: Request) -> dict[str, str]:
        """Store what a Prefect automation delivered; the default target of `prefect.notify_url`."""
        text, link = read_delivery(await request.body())
        id = str(uuid.uuid4())
        now = time.time()
        catalog.notices.add(Notice(id, DELIVERED, "", None, text, link, now, sent_at=now))
        return {"id": id}

    @app.post("/mlflow/webhook")
    def webhook() -> dict[str, bool]:
        """Read MLflow's aliases now. The body is ignored, so the call needs no key."""
        mirror.wake()
        return {"looking": True}


def read_delivery(body: bytes) -> tuple[str, str]:
    """Return (text, link) of a delivered body; one that is not JSON with these keys is all text."""
    try:
        data = json.loads(body)
        return str(data["text"])[:2000], str(data.get("link", ""))[:2000]
    except (ValueError, TypeError, KeyError, AttributeError):
        return body.decode(errors="replace")[:2000], ""


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


def _with_evidence(controller: Controller, release: Release) -> dict[str, Any]:
    latest = controller.latest.get(release.id)
    if release.state == "running" and latest:
        return asdict(release) | {"evidence": latest.summary()}
    return asdict(release)


def _require_admin(request: Request) -> Key:
    controller: Controller = request.app.state.controller
    scheme, _, plaintext = request.headers.get("authorization", "").partition(" ")
    key = controller.catalog.keys.find(plaintext.strip()) if scheme.lower() == "bearer" else None
    if key is None or not key.may("admin"):
        raise Unauthorized("This call needs the header `Authorization: Bearer KEY` with a valid admin key.")
    return key


Admin = Annotated[Key, Depends(_require_admin)]


def _answer_fault(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GraftworkError)
    return JSONResponse({"error": str(error)}, status_code=error.status)


def _answer_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
    return _answer_fault(request, ConfigError(f"The request is not valid. {faults}."))
