"""Read-only views for `ls`, `why` and `status`, as plain values and as rows of tables.

They read the catalog and the ledger's snapshot, so they work without services.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import httpx

from engine.catalog.catalog import Replica
from engine.catalog.opening import open_catalog
from engine.catalog.records import served_name
from engine.clients.controller import ControllerClient
from engine.controller.route_changes import controller_serves
from engine.errors import ServiceError
from engine.integrations.mlflow_registry import registered
from engine.ledger.ledger import open_ledger
from engine.report.data import PolicyRow, RevisionRow
from engine.report.links import Link
from engine.report.overview import overview
from engine.report.why import Chain, moment, why
from engine.security.credentials import known_credential
from engine.services.lifecycle import State
from engine.settings.params import DIGEST12, Params, known_policies
from tasks.outcome import age, interval_text, wait_row
from tasks.stuck_runs import KeptOutRuns, kept_out_runs, open_prefect

TIMEOUT_S = 3.0


def as_of(params: Params) -> dict[str, Any]:
    """Return whether the controller runs, and when its snapshot was made: epoch seconds or None."""
    snapshot = params.paths.ledger_snapshot
    ledger = snapshot.stat().st_mtime if snapshot.is_file() else None
    with open_catalog(params.paths) as catalog:
        return {"controller": controller_serves(catalog), "ledger": ledger}


def note(fresh: dict[str, Any]) -> str:
    """Return a sentence on the age of the ledger snapshot, empty while a controller updates it."""
    if fresh["ledger"] is None:
        return "There is no ledger snapshot yet: no scores, users or verdicts. `graftwork up` makes one."
    if not fresh["controller"]:
        return f"The controller is not running: as of its last snapshot, {moment(fresh['ledger'])}."
    return ""


def policies(params: Params, limit: int) -> tuple[list[PolicyRow], int]:
    """Return the policies whose routes changed last, by name, and how many there are in all."""
    with open_catalog(params.paths) as catalog, open_ledger(params.paths.ledger_snapshot) as ledger:
        names = sorted(route.policy for route in catalog.routes.latest(limit))
        return list(overview(ledger, catalog, names, limit=1).policies), catalog.policies.count()


def trainable(params: Params) -> list[dict[str, Any]]:
    """Return a row for each policy that the settings have: owner, verifier, suite, and whether scheduled."""
    shown = ("owner", "verifier", "suite", "scheduled")
    return [
        {"policy": name} | {field: getattr(params.policy(name), field) for field in shown}
        for name in known_policies(params)
    ]


def revisions(params: Params, policy: str, limit: int) -> tuple[list[RevisionRow], int]:
    """Return a policy's newest exported revisions, and how many there are; `NotFound` for an unknown one."""
    with open_catalog(params.paths) as catalog, open_ledger(params.paths.ledger_snapshot) as ledger:
        page = overview(ledger, catalog, [policy], limit)
    return list(page.revisions), page.policies[0].revisions


def standing(params: Params) -> dict[str, Any]:
    """Return alarms, a freeze, running releases, three notices, the engines, and runs that found no slot."""
    if not params.paths.has_catalog:
        return {"alarms": [], "frozen": False, "releases": [], "notices": [], "engines": [], "cancelled": []}
    key = known_credential(params.paths, "controller")
    with (
        open_catalog(params.paths) as catalog,
        ControllerClient(params.url("controller"), key, timeout_s=TIMEOUT_S) as controller,
    ):
        waits = controller.waits()
        releases = [
            {"revision": served_name(it.policy, it.revision), "step": it.step, "reason": it.reason}
            | {"waits": waits.get(it.id, [])}
            for it in catalog.releases.all(open_only=True)
        ]
        notices = [{"at": it.at, "name": it.name, "reason": it.reason} for it in catalog.notices.page(3)]
        return {
            "alarms": controller.alarms(),
            "frozen": catalog.switches.is_on("freeze"),
            "releases": releases,
            "notices": notices,
            "engines": [shown_replica(row, time.time()) for row in catalog.replicas.all()],
            "cancelled": [asdict(one) for one in lately_cancelled(params)],
        }


def shown_releases(releases: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the running releases' lines of the table: one for each thing that a release waits for."""
    return [
        {"release": release["revision"]} | wait_row(wait)
        for release in releases
        for wait in release["waits"]
        or [{"gate": release["step"], "has": release["reason"], "needs": "", "waited_s": 0.0, "ends": ""}]
    ]


def lately_cancelled(params: Params) -> list[KeptOutRuns]:
    """Return whose runs were cancelled for want of a slot; none while Prefect does not answer."""
    try:
        with open_prefect(params, TIMEOUT_S) as client:
            return kept_out_runs(client, time.time())
    except httpx.HTTPError:
        return []


def shown_replica(row: Replica, now: float) -> dict[str, Any]:
    """Return an engine for `status`; `beat_s` is the age of its newest heartbeat, by two machines' clocks."""
    shown = {"id": row.id, "url": row.url, "base": row.base[:DIGEST12], "version": row.version}
    return shown | {"draining": row.draining, "beat_s": round(now - row.at, 1)}


def explain(params: Params, subject: str) -> Chain:
    """Return the chain behind an answer or a revision, with its version in MLflow if MLflow answers."""
    chain = why(params, subject)
    if chain.policy is None or chain.digest is None:
        return chain
    policy, digest = chain.policy, chain.digest
    links = [
        _with_version(params, link, policy, digest) if link.name == "run" else link for link in chain.links
    ]
    return replace(chain, links=tuple(links))


def _with_version(params: Params, run: Link, policy: str, digest: str) -> Link:
    url = params.url("mlflow")
    try:
        version = registered(params, policy, digest)
    except ServiceError:
        return replace(run, says=f"{run.says} MLflow does not answer at {url}, so its run is not shown.")
    if version is None:
        return replace(run, says=f"{run.says} It is not registered in MLflow.")
    page = f"{url}/#/models/{policy}/versions/{version}"
    facts = {**run.facts, "mlflow": {"version": version, "url": page}}
    return Link(run.name, True, f"{run.says} Version {version} in MLflow: {page}", facts)


def shown_policy(row: PolicyRow) -> dict[str, str]:
    """Return a policy's line of the table."""
    canary = f"{row.canary[:12]} {row.weight:.0%}" if row.canary else row.running and f"at its {row.running}"
    return {
        "policy": row.name,
        "champion": row.champion[:12] if row.champion else "the base",
        "score": interval_text(row.champion_score, ""),
        "base": f"{row.base_score.mean:.1%}" if row.base_score else "",
        "canary": canary,
        "revisions": str(row.revisions),
    }


def shown_revision(row: RevisionRow, now: float) -> dict[str, str]:
    """Return a revision's line of the table; `now` is in epoch seconds."""
    return {
        "revision": row.digest[:12],
        "role": row.role,
        "step": str(row.step),
        "score": interval_text(row.score, ""),
        "users": f"{row.online:.1%} of {row.units}" if row.online is not None else "",
        "verdict": row.verdict or ("refused" if row.accepted is False else ""),
        "age": age(now - row.created_at),
    }


def shown_service(it: State) -> dict[str, Any]:
    """Return a service's line of the table; `up` is how long it has run."""
    return {"service": it.name, "state": it.state, "address": it.url, "pid": it.pid, "up": age(it.seconds)}


def shown_session(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training session's line of the table."""
    return {
        "session": row["session"],
        "step": row["step"],
        "in": "memory" if row["resident"] else "disk",
        "bytes": f"{row['bytes']:,}",
        "heard": "" if row["heard_s"] is None else f"{age(row['heard_s'])} ago",
        "writer": row["holder"],
        "queued": row["queued"],
    }
