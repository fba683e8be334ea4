"""Graftwork's own endpoints in vLLM's server, and the set-up of the gateway's state.

vLLM calls `attach_router` before the engine is up and `init_state` once it is. `init_state` raises when a
worker lacks our marker, so the server does not start: vLLM only logs when a plugin fails to import.
"""

import asyncio
import socket
import time
from argparse import Namespace
from pathlib import Path
from threading import Thread
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY, Gauge
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import State
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from engine.base.prompts import prompt_ids
from engine.catalog.catalog import Key, open_catalog
from engine.errors import ConfigError, GraftworkError, ServiceError
from engine.ledger.sender import open_spool
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.usage_log import UsageLog
from engine.serving.gateway.api_errors import send_error
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.call import GatewayState, is_given_to
from engine.serving.gateway.catalog_rows import rows_to_cache
from engine.serving.gateway.forwarding import answer_as_asked
from engine.serving.gateway.grammar_trial import GrammarTrial
from engine.serving.gateway.leaving import end_requests_first
from engine.serving.gateway.membership import Membership
from engine.serving.gateway.meter import TEMPLATE_TOKENS, Meter
from engine.serving.gateway.prewarming import Prewarmer, served_names
from engine.serving.gateway.promised_waits import PromisedWaits
from engine.serving.gateway.rollouts import gate_of_platform, rollouts
from engine.serving.gateway.routing import Router
from engine.serving.gateway.samples import samples
from engine.serving.residency.load_metrics import LoadMetrics
from engine.serving.residency.residency import Residency
from engine.serving.residency.vllm_engine import VllmEngine
from engine.serving.vllm_plugin.plugin import vllm_version
from engine.settings.params import load_params
from engine.state_metrics import StateMetrics
from engine.store.open import open_store
from engine.threads import in_parallel
from engine.work_metrics import WorkMetrics

# Most policies that `/v1/models` lists: a catalog may have a million.
MODELS = 1000
# What a chat template may add for a conversation of another form.
TEMPLATE_RESERVE = 16


class Feedback(BaseModel):
    """Body of `/v1/feedback`: `request_id` is the response's `id`, `reward` is in [0, 1]."""

    model_config = ConfigDict(extra="forbid")
    request_id: str = Field(min_length=1, max_length=200)
    reward: float = Field(ge=0, le=1)


class Prewarm(BaseModel):
    """Body of `/v1/prewarm`: the model that will be requested soon."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(min_length=1, max_length=1024)


class GraftworkEndpoints:
    """vLLM's endpoint plugin."""

    name = "graftwork"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add our routes to vLLM's app."""
        app.get("/graftwork/marker")(marker)
        app.get("/graftwork/ready")(ready)
        app.post("/graftwork/drain")(drain)
        app.get("/graftwork/residency")(residency)
        app.get("/graftwork/loads")(loads)
        app.get("/v1/models")(models)
        app.get("/v1/models/{name:path}")(model)
        app.state.graftwork_gate = gate_of_platform()
        app.post("/graftwork/rollouts")(rollouts)
        app.post("/graftwork/samples")(samples)
        app.post("/v1/feedback", status_code=202)(feedback)
        app.post("/v1/prewarm", status_code=202)(prewarm)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Connect gateway and residency to the running engine.

        Raises `ServiceError` when a worker runs without our plugin.
        """
        settings = engine_client.vllm_config.additional_config["graftwork"]
        params = load_params(settings["params"])
        serving_models: OpenAIServingModels = state.openai_serving_models
        workers = check_marker(await VllmEngine.markers(engine_client))
        engine = await VllmEngine.connect(engine_client, serving_models)
        answer_as_asked(serving_models)
        state.graftwork_marker = {
            "plugin": settings["version"],
            "vllm": vllm_version(),
            "base": settings["base"],
            "base_name": settings["base_name"],
            "text_digest": settings["text_digest"],
            "workers": workers,
        }
        state.graftwork_loads = engine.loads
        catalog = open_catalog(params.paths)
        Thread(target=catalog.read_ahead, name="graftwork-read-ahead", daemon=True).start()
        # A catalog of its own: loads may use every connection of the other one.
        router = Router(
            open_catalog(params.paths),
            settings["base_name"],
            settings["base"],
            cached_rows=rows_to_cache(params.engine.host_adapters),
            configured=params.base.name,
            key_max_age_s=params.gateway.key_max_age_s,
        )
        spool = open_spool(params, "gateway")
        tier = Residency(
            engine,
            catalog,
            open_store(params),
            params.engine,
            on_load=lambda **fields: spool.emit("loads", **fields),
            pinned=lambda: served_names(router.last_released),
            metrics=LoadMetrics(REGISTRY),
            retry_after=PromisedWaits(),
        )
        engine.watch(tier.take_report)
        WorkMetrics(REGISTRY)
        StateMetrics(REGISTRY, params.paths)
        unread = Gauge("graftwork_catalog_unread_seconds", "Since the catalog could be read last.")
        unread.set_function(lambda: router.unread_s)
        shared = None if catalog.is_file else SharedBudgets(params.paths.catalog_url)
        max_model_len = engine_client.vllm_config.model_config.max_model_len
        name = f"{socket.gethostname()}:{params.engine.port}"
        usage, places = UsageLog(params.paths.usage, shared), params.engine.load_queue
        meter = Meter(usage, places, template_tokens(engine_client.get_tokenizer()))
        state.graftwork = GatewayState(
            router,
            tier,
            spool,
            name,
            max_model_len,
            GrammarTrial(Path(engine_client.model_config.model)),
            params.gateway,
            meter,
            engine.used,
        )
        membership = Membership(catalog, name, params.url("engine"), settings["base"], settings["version"])
        warm = params.paths.warm / f"{params.engine.port}.json"
        prewarmer = Prewarmer(tier, router, warm, membership.tell)
        state.graftwork_membership, state.graftwork_prewarmer = membership, prewarmer
        limit_s = params.engine.shutdown_s

        def hand_over() -> None:
            in_parallel(spool.close, usage.hand_over)

        end_requests_first(engine_client, state, limit_s, membership.drain, meter.flush, hand_over)
        # asyncio keeps only weak references to tasks, so the state holds this one.
        state.graftwork_prewarming = asyncio.create_task(_serve_until_stopped(prewarmer, membership))


async def _serve_until_stopped(prewarmer: Prewarmer, membership: Membership) -> None:
    membership.start()
    try:
        await prewarmer.run()
    finally:
        membership.leave()


def template_tokens(tokenizer: Any) -> int:
    """Return how many tokens the base's chat template adds to one message, with a reserve."""
    try:
        return len(prompt_ids(tokenizer, "x")) + TEMPLATE_RESERVE
    except ConfigError:
        return TEMPLATE_TOKENS


def check_marker(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the workers' markers. Raises `ServiceError` when a worker lacks our loader or operations."""
    for worker in workers:
        if worker["manager"] != "PackedWorkerManager" or not worker["modules"]:
            raise ServiceError(
                f"The engine runs without Graftwork's loader: its worker has {worker}. "
                "See the log above for the plugin's error."
            )
        if "PunicaWrapperCPU" in worker["operations"]:
            raise ServiceError(
                "The engine runs vLLM's own CPU LoRA operations, which give base rows an adapter. "
                "See the log above for the plugin's error."
            )
    return workers


async def marker(request: Request) -> Response:
    """Return versions, base and workers of this engine; 503 while it starts."""
    found = getattr(request.app.state, "graftwork_marker", None)
    return JSONResponse(found or {"error": "The engine is starting."}, 200 if found else 503)


async def ready(request: Request) -> Response:
    """Say whether users may be sent here: 200, or 503 with a word for the reason."""
    why = "starting"
    if (membership := getattr(request.app.state, "graftwork_membership", None)) is not None:
        state: GatewayState = request.app.state.graftwork
        try:
            missing = request.app.state.graftwork_prewarmer.missing
            why = await state.router.ask(membership.why_not_ready, state.router, missing)
        except GraftworkError:
            why = "catalog"
    return JSONResponse({"ready": why is None, "reason": why}, 503 if why else 200)


async def drain(request: Request) -> dict[str, bool]:
    """Take no new users from now on; requests that come are still answered. Before a stop, or an upgrade."""
    request.app.state.graftwork_membership.drain()
    return {"draining": True}


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
    """Record the first reward for an earlier response of the same key.

    404 for what is no such response, 503 when the reward cannot be stored.
    """
    state: GatewayState = request.app.state.graftwork
    key: Key = request.state.graftwork_key
    if not is_given_to(key, body.request_id, state.router.hash_once):
        said = f"No response {body.request_id!r} was given to this key."
        return _Refusal(Refused(404, said, "unknown_request", "request_id"))
    if body.request_id in state.rated:
        return {"status": "accepted"}
    try:
        state.spool.emit("feedback", request_id=body.request_id, reward=body.reward, key=key.id)
    except OSError as error:
        return _Refusal(ServiceError(f"The reward could not be stored: {error}. Send it again later."))
    state.rated.add(body.request_id)
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
        estimate_s = state.residency.prewarm(revision)
    except GraftworkError as error:
        return _Refusal(error)
    return {"model": body.model, "revision": target.name, "estimate_s": round(estimate_s, 3)}


class _Refusal(Response):
    """A `GraftworkError` in the gateway's error format."""

    def __init__(self, error: GraftworkError):
        super().__init__()
        self._error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send_error(send, self._error, scope["path"])
