"""Graftwork's own endpoints in vLLM's server; `engine/serving/assembly.py` sets up what they answer from."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Annotated, Any, Self

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.catalog.catalog import Key
from engine.errors import GraftworkError, ServiceError
from engine.serving.gateway.answer_copies import AnswerCopies
from engine.serving.gateway.api_errors import send_error
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.call import GatewayState, is_given_to
from engine.serving.gateway.samples import gate_of_platform, samples
from engine.settings.evaluators import EvaluatorName

# Most policies that `/v1/models` lists: a catalog may have a million.
MODELS = 1000


class Feedback(BaseModel):
    """Body of `/v1/feedback`: `request_id` is the response's `id`; `reward` and `value` are in [0, 1]."""

    model_config = ConfigDict(extra="forbid")
    request_id: str = Field(min_length=1, max_length=200)
    reward: float | None = Field(None, ge=0, le=1)
    metric: EvaluatorName | None = None
    value: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        is_metric = self.metric is not None
        if (self.reward is None) != is_metric or (self.value is None) == is_metric:
            raise ValueError("give `reward` alone, or `metric` and `value`")
        return self


class Copies(BaseModel):
    """Body of `/graftwork/copies`: the share of each policy's answers to copy, and how many to return."""

    model_config = ConfigDict(extra="forbid")
    policies: dict[str, Annotated[float, Field(ge=0, le=1)]]
    most: int = Field(ge=0)


class Prewarm(BaseModel):
    """Body of `/v1/prewarm`: the model that will be requested soon."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(min_length=1, max_length=1024)


@dataclass(frozen=True)
class Readiness:
    """Whether users may be sent to this engine: None, or a word for why not; and how to send no more."""

    why_not_ready: Callable[[], str | None]
    drain: Callable[[], object]


def alone() -> Readiness:
    """Return the readiness of an engine that no other one is beside: ready until it is drained."""
    drained = Event()
    return Readiness(lambda: "draining" if drained.is_set() else None, drained.set)


def attach(app: FastAPI) -> None:
    """Add our routes to vLLM's app; they answer from its state, once that is set up."""
    app.get("/graftwork/marker")(marker)
    app.get("/graftwork/ready")(ready)
    app.post("/graftwork/drain")(drain)
    app.post("/graftwork/copies")(copies)
    app.state.graftwork_copies = AnswerCopies()
    app.get("/graftwork/residency")(residency)
    app.get("/graftwork/loads")(loads)
    app.get("/v1/models")(models)
    app.get("/v1/models/{name:path}")(model)
    app.state.graftwork_gate = gate_of_platform()
    app.post("/graftwork/samples")(samples)
    app.post("/v1/feedback", status_code=202)(feedback)
    app.post("/v1/prewarm", status_code=202)(prewarm)
    app.state.graftwork_readiness = alone()


async def marker(request: Request) -> Response:
    """Return versions, base and workers of this engine; 503 while it starts."""
    marker = getattr(request.app.state, "graftwork_marker", None)
    return JSONResponse(marker or {"error": "The engine is starting."}, 200 if marker else 503)


async def ready(request: Request) -> Response:
    """Say whether users may be sent here: 200, or 503 with a word for the reason."""
    why: str | None = "starting"
    state: GatewayState | None = getattr(request.app.state, "graftwork", None)
    if state is not None:
        try:
            why = await state.router.ask(request.app.state.graftwork_readiness.why_not_ready)
        except GraftworkError:
            why = "catalog"
    return JSONResponse({"ready": why is None, "reason": why}, 503 if why else 200)


async def drain(request: Request) -> dict[str, bool]:
    """Take no new users from now on; requests that come are still answered. Before a stop, or an upgrade."""
    request.app.state.graftwork_readiness.drain()
    return {"draining": True}


async def copies(body: Copies, request: Request) -> Response:
    """Return copies of users' answers, and go on to copy some of these policies for the next seconds."""
    kept: AnswerCopies = request.app.state.graftwork_copies
    kept.subscribe(request.app.state.graftwork, body.policies)
    return Response(kept.take(body.most), media_type="application/json")


async def residency(request: Request) -> dict[str, Any]:
    """Return tiers, load queue, counts of states and each resident adapter; sizes in bytes, times in s."""
    state: GatewayState = request.app.state.graftwork
    here, now = state.residency, time.monotonic()
    adapters = {
        name: {
            "tier": "slot" if name in here.states.in_slots else "host",
            "state": here.states.state(name),
            "bytes": resident.bytes,
            "users": resident.users,
            "idle_s": 0.0 if resident.users else now - resident.used_at,
        }
        for name, resident in here.residents.items()
    }
    in_slots = [adapter["bytes"] for adapter in adapters.values() if adapter["tier"] == "slot"]
    limits = {"max_adapters": here.tier.max_adapters, "max_bytes": here.tier.max_bytes}
    return {
        "tiers": {
            "slot": {"adapters": len(in_slots), "bytes": sum(in_slots)},
            "host": {"adapters": len(adapters), "bytes": here.tier.bytes, **limits},
        },
        "queue": here.queue.told(),
        "adapters": adapters,
        "loading": len(here.queue),
        "evictions": here.evictions,
        "states": here.states.counts(),
        "transitions": [
            {"before": before, "event": event, "after": after, "count": count}
            for (before, event, after), count in sorted(here.states.transitions.items())
        ],
    }


async def loads(request: Request) -> list[dict[str, Any]]:
    """Return how much each worker has read and copied into slots."""
    return await request.app.state.graftwork_loads()


async def models(request: Request) -> dict[str, Any]:
    """List the base and the first 1,000 policies that the key may use; revisions are not listed."""
    state: GatewayState = request.app.state.graftwork
    key: Key = request.state.graftwork_key
    known = await state.router.ask(state.router.policies, MODELS, key.policies)
    names = [state.router.base_name, *known]
    return {"object": "list", "data": [_card(name) for name in names]}


async def model(name: str, request: Request) -> Any:
    """Return a model that may be asked for, as OpenAI's client retrieves it: base, policy or revision."""
    state: GatewayState = request.app.state.graftwork
    try:
        await state.router.admit(name, "", key=request.state.graftwork_key)
    except GraftworkError as error:
        return _Refusal(error)
    return _card(name)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "graftwork"}


async def feedback(body: Feedback, request: Request) -> Any:
    """Record the first reward, or the first value of a metric, for an earlier response of the same key.

    404 for what is no such response, 503 when it cannot be stored.
    """
    state: GatewayState = request.app.state.graftwork
    key: Key = request.state.graftwork_key
    if not is_given_to(key, body.request_id, state.router.hash_once):
        said = f"No response {body.request_id!r} was given to this key."
        return _Refusal(Refused(404, said, "unknown_request", "request_id"))
    rated = f"{body.request_id} {body.metric}" if body.metric else body.request_id
    if rated in state.rated:
        return {"status": "accepted"}
    told = {"request_id": body.request_id, "key": key.id}
    try:
        if body.metric is None:
            state.spool.emit("feedback", **told, reward=body.reward)
        else:
            # The ledger takes no second event of this id.
            state.spool.emit("metrics", id=f"{rated} {key.id}", **told, metric=body.metric, value=body.value)
    except OSError as error:
        what = "metric" if body.metric else "reward"
        return _Refusal(ServiceError(f"The {what} could not be stored: {error}. Send it again later."))
    state.rated.add(rated)
    return {"status": "accepted"}


async def prewarm(body: Prewarm, request: Request) -> Any:
    """Load a model's adapter in the background; return the estimated time until it is ready, in seconds."""
    state: GatewayState = request.app.state.graftwork
    try:
        key: Key = request.state.graftwork_key
        target, _ = await state.router.admit(body.model, "", key=key)
        if target.policy is None or target.digest is None:
            return {"model": body.model, "revision": "base", "estimate_s": 0.0}
        revision = await state.router.ask(state.router.revision, target.policy, target.digest)
        tenant = await state.router.ask(state.router.tenant, key.owner)
        state.meter.prewarm(key, tenant, target.name or "", state.residency.is_loading)
        state.residency.load_ahead(revision)
    except GraftworkError as error:
        return _Refusal(error)
    is_here = target.name in state.residency.residents
    estimate_s = 0.0 if is_here else round(state.residency.queue.estimate_s(), 3)
    return {"model": body.model, "revision": target.name, "estimate_s": estimate_s}


class _Refusal(Response):
    """A `GraftworkError` in the gateway's error format."""

    def __init__(self, error: GraftworkError):
        super().__init__()
        self._error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send_error(send, self._error, scope["path"])
