"""Runs that keep a slot of their deployment without a process, and runs that were cancelled for want of one.

Prefect counts a run against its deployment's `concurrency_limit` from the moment in which a worker claims it
(PENDING). A worker that is killed before the run's process has begun leaves it so. No heartbeat was sent, so
the automation of tasks/deployments.py misses none; and Prefect's server (3.7.7) keeps the lease that would
expire in its memory alone, so that the slot is taken for good once the server restarts.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from engine.clients.http_client import connect
from engine.clients.prefect import PrefectLogin
from engine.errors import ServiceError
from engine.security.credentials import USER, known_credential
from engine.services import lifecycle
from engine.settings.params import Params
from tasks.outcome import age

TIMEOUT_S = 30.0
# On a busy machine Prefect's server answers 503 for a while, as its database has one writer.
PATIENCE_S = 60.0
# Prefect gives no more at once.
PAGE = 200
# A run's process says that it runs within a minute of its claim, on a busy machine within a few.
UNATTENDED_S = 300
# With a worker alive nothing else tells a slow start from a dead one.
START_S = 3600
CANCELLED_DAYS = 7
DAY_S = 86_400
HOLDING = ("PENDING", "RUNNING", "CANCELLING")
# How Prefect begins the message of a run that it cancels because its deployment's slots are taken.
TAKEN = "Deployment concurrency"


@dataclass(frozen=True)
class StuckRun:
    """A run that was claimed `age_s` seconds ago and will never begin; `why` says how that is known."""

    id: str
    name: str
    deployment: str
    age_s: float
    why: str

    def __str__(self) -> str:
        claimed = f"was claimed {age(self.age_s)} ago and never began"
        return f"run {self.name} of {self.deployment} {claimed}: {self.why}"


@dataclass(frozen=True)
class KeptOutRuns:
    """How many runs of a deployment were lately cancelled for want of a slot; `last_at` in epoch seconds."""

    deployment: str
    runs: int
    last_at: float

    def __str__(self) -> str:
        from engine.report.why import moment

        count = f"{self.runs} run was" if self.runs == 1 else f"{self.runs} runs were"
        return (
            f"{self.deployment}: {count} cancelled in the last {CANCELLED_DAYS} days because another held "
            f"the slot, the last at {moment(self.last_at)}. `graftwork doctor` says whether that one is dead."
        )


def open_prefect(params: Params, timeout_s: float = TIMEOUT_S) -> httpx.Client:
    """Return a logged-in client for Prefect's server."""
    login = PrefectLogin(USER, known_credential(params.paths, "prefect"))
    return connect(params.url("prefect"), timeout_s, login)


def worker_started(params: Params, now: float) -> float | None:
    """Return when this machine's worker started, to the second; None when the supervisor runs none."""
    states = lifecycle.status(params)
    return next((now - it.seconds for it in states if it.name == lifecycle.WORKER and it.pid), None)


def free_stuck(params: Params, now: float, started: float | None) -> list[StuckRun]:
    """Mark the stuck runs as crashed, which gives back their slots; return them.

    Asks again for a minute while Prefect is busy. Raises `ServiceError` when it refuses or does not answer.
    """
    patient = Retrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_delay(PATIENCE_S),
        wait=wait_exponential(0.5, max=8.0),
        reraise=True,
    )
    freed: dict[str, StuckRun] = {}
    try:
        with open_prefect(params) as client:
            patient(_free, client, now, started, freed)
    except httpx.HTTPError as error:
        raise ServiceError(
            f"Prefect at {params.url('prefect')} did not free the slots of dead runs: {error!r}. "
            f"Check {params.paths.logs}/prefect.log, then run `graftwork up` again."
        ) from None
    return list(freed.values())


def stuck_runs(client: httpx.Client, now: float, started: float | None) -> list[StuckRun]:
    """Return the pool's runs that were claimed and will never begin, the oldest first.

    `started` is when the pool's worker started, if that is known: what was claimed before is dead. Raises
    `httpx.HTTPError`.
    """
    known = _deployments(client)
    runs = _runs(client, list(known), {"state": {"type": {"any_": HOLDING}}}, "EXPECTED_START_TIME_ASC")
    claimed = {run["id"]: _epoch(run["state"]["timestamp"]) for run in runs if run["state_type"] == "PENDING"}
    if not claimed:
        return []
    alive = _has_worker(client)
    dead = {id: why for id, at in claimed.items() if (why := _why_dead(at, now, started, alive=alive))}
    busy = {run["deployment_id"] for run in runs if run["id"] not in dead}
    return [
        StuckRun(id, run["name"], deployment["name"], now - claimed[id], dead[id])
        for run in runs
        if (id := run["id"]) in dead
        and (deployment := known[run["deployment_id"]])
        # Where a living run has the slot, the lease of the dead one has expired, and its end would take the
        # slot from the living one.
        and not (deployment["global_concurrency_limit"] and run["deployment_id"] in busy)
    ]


def kept_out_runs(client: httpx.Client, now: float) -> list[KeptOutRuns]:
    """Return the pool's deployments with runs that were lately cancelled for want of a slot.

    Counts among the newest 200 cancelled runs. Raises `httpx.HTTPError`.
    """
    known = {id: one for id, one in _deployments(client).items() if one["global_concurrency_limit"]}
    after = datetime.fromtimestamp(now - CANCELLED_DAYS * DAY_S, UTC).isoformat()
    wanted = {"state": {"type": {"any_": ["CANCELLED"]}}, "end_time": {"after_": after}}
    times: dict[str, list[float]] = {}
    for run in _runs(client, list(known), wanted, "END_TIME_DESC"):
        # Others were cancelled by a person.
        if (run["state"]["message"] or "").startswith(TAKEN):
            name = known[run["deployment_id"]]["name"]
            times.setdefault(name, []).append(_epoch(run["state"]["timestamp"]))
    return [KeptOutRuns(name, len(at), max(at)) for name, at in sorted(times.items())]


def _free(client: httpx.Client, now: float, started: float | None, freed: dict[str, StuckRun]) -> None:
    """End the stuck runs and add them to `freed` by their ids, also those before a failure."""
    for run in stuck_runs(client, now, started):
        if _crash(client, run):
            freed[run.id] = run


def _may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error
    return isinstance(error, httpx.TransportError)


def _why_dead(since: float, now: float, started: float | None, *, alive: bool) -> str:
    """Return why a run that was claimed at `since` is dead; empty while it may still begin."""
    if started is not None and since < started:
        return "the worker that claimed it has ended"
    if not alive and now - since > UNATTENDED_S:
        return "no worker is alive"
    return "no process takes so long to start" if now - since > START_S else ""


def _deployments(client: httpx.Client) -> dict[str, dict[str, Any]]:
    """Return the pool's deployments by id."""
    body = {"work_pools": {"name": {"any_": [lifecycle.WORK_POOL]}}, "limit": PAGE}
    return {one["id"]: one for one in _ask(client, "/api/deployments/filter", body)}


def _runs(
    client: httpx.Client, deployments: list[str], wanted: dict[str, Any], sort: str
) -> list[dict[str, Any]]:
    """Return runs of these deployments; without deployments there are none to ask for."""
    if not deployments:
        return []
    wanted = {"deployment_id": {"any_": deployments}, **wanted}
    body = {"flow_runs": wanted, "limit": PAGE, "sort": sort}
    return list(_ask(client, "/api/flow_runs/filter", body))


def _has_worker(client: httpx.Client) -> bool:
    """Return whether Prefect has lately heard a worker of the pool."""
    workers = _ask(client, f"/api/work_pools/{lifecycle.WORK_POOL}/workers/filter", {"limit": PAGE})
    return any(one["status"] == "ONLINE" for one in workers)


def _crash(client: httpx.Client, run: StuckRun) -> bool:
    """End a run; False when Prefect says that it has gone on or ended meanwhile."""
    # Without force: Prefect's rules for an end give the slot back.
    state = {
        "type": "CRASHED",
        "name": "Crashed",
        "message": f"The {run}. The slot that it held is free again.",
    }
    answer = _ask(client, f"/api/flow_runs/{run.id}/set_state", {"state": state, "force": False})
    return bool(answer["status"] == "ACCEPT")


def _ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body).raise_for_status()
    try:
        return answer.json()
    except ValueError:
        # Another program may listen at Prefect's address.
        raise httpx.DecodingError("It is no JSON.", request=answer.request) from None


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
