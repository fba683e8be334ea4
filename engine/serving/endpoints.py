"""Graftwork's own routes in vLLM's server, and what joins the gateway to the live engine.

vLLM calls `attach_router` before the engine is up and `init_state` once it is. The engine must show
our marker there, or the server refuses to start: vLLM only logs when a plugin fails to import.
"""

import asyncio
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import State
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from engine.adapters.catalog import Catalog
from engine.config import load_params, served_name
from engine.errors import AdapterError, GraftworkError, ServiceError
from engine.quality.spool import Spool
from engine.serving.gateway import GatewayState, send_error
from engine.serving.plugin import vllm_version
from engine.serving.residency import Residency
from engine.serving.rollouts import gate_of_platform, rollouts
from engine.serving.routing import Router

RPC_TIMEOUT_S = 60.0


class Feedback(BaseModel):
    """What a user thought of an answer; `request_id` is the response's `id`."""

    model_config = ConfigDict(extra="forbid")
    request_id: str = Field(min_length=1, max_length=200)
    reward: float = Field(ge=0, le=1)


class Prewarm(BaseModel):
    """Which model will soon be asked for."""

    model_config = ConfigDict(extra="forbid")
    model: str


class CatalogResolver(LoRAResolver):
    """Tell vLLM of adapters that the host tier already holds; it never loads one by itself."""

    def __init__(self) -> None:
        self.expected: set[str] = set()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if lora_name not in self.expected:
            return None
        # vLLM sets the id. The path is constant for each name: the prefix cache is keyed by both.
        return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=f"graftwork:{lora_name}")


class VllmEngine:
    """The four calls of `residency.Engine` on vLLM's client."""

    def __init__(self, client: Any, models: OpenAIServingModels, resolver: CatalogResolver):
        self._client = client
        self._models = models
        self._resolver = resolver

    async def marker(self) -> list[dict[str, Any]]:
        return await self._call("graftwork_marker")

    async def loads(self) -> list[dict[str, Any]]:
        """Return what each worker has read and copied."""
        return await self._call("graftwork_loads")

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        await self._call("graftwork_prepare", name, address)

    async def poll(self, name: str) -> str:
        """Return the slowest worker's state; a refusal by any of them counts for all."""
        states = await self._call("graftwork_poll", name)
        return next((state for state in states if state != "ready"), "ready")

    async def register(self, name: str) -> None:
        self._resolver.expected.add(name)
        result = await self._models.resolve_lora(name)
        if not isinstance(result, LoRARequest):
            self._resolver.expected.discard(name)
            raise AdapterError(f"The engine refused {name}: {result.error.message}")

    async def forget(self, name: str) -> None:
        """Drop every trace of a name, in the server too, which would keep it for ever."""
        self._resolver.expected.discard(name)
        request = self._models.lora_requests.pop(name, None)
        self._models.lora_resolver_lock.pop(name, None)
        if request is not None:
            await self._client.remove_lora(request.lora_int_id)
        await self._call("graftwork_forget", name)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._client.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)


class GraftworkEndpoints:
    """vLLM's endpoint plugin."""

    name = "graftwork"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.get("/graftwork/marker")(marker)
        app.get("/graftwork/residency")(residency)
        app.get("/graftwork/loads")(loads)
        app.get("/v1/models")(models)
        app.state.graftwork_gate = gate_of_platform()
        app.post("/graftwork/rollouts")(rollouts)
        app.post("/v1/feedback", status_code=202)(feedback)
        app.post("/v1/prewarm", status_code=202)(prewarm)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        settings = engine_client.vllm_config.additional_config["graftwork"]
        params = load_params(settings["params"])
        serving_models: OpenAIServingModels = state.openai_serving_models
        resolver = CatalogResolver()
        LoRAResolverRegistry.register_resolver("graftwork", resolver)
        serving_models.lora_resolvers = [resolver]
        engine = VllmEngine(engine_client, serving_models, resolver)
        state.graftwork_marker = {
            "plugin": settings["version"],
            "vllm": vllm_version(),
            "base": settings["base"],
            "base_name": settings["base_name"],
            "workers": check_marker(await engine.marker()),
        }
        state.graftwork_loads = engine.loads
        catalog = Catalog(params.paths.catalog_url)
        router = Router(catalog, settings["base_name"], settings["base"])
        spool = Spool(params.paths.spool, "gateway")
        state.graftwork = GatewayState(
            router=router,
            residency=Residency(
                engine,
                catalog,
                Path(params.paths.store),
                params.engine,
                on_load=lambda **fields: spool.emit("loads", **fields),
                pinned=lambda: served(router),
            ),
            spool=spool,
            name=f"127.0.0.1:{params.engine.port}",
        )


def check_marker(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the workers' proof that our parts run; `ServiceError` when one lacks them."""
    for worker in workers:
        if worker["manager"] != "PackedWorkerManager" or not worker["modules"]:
            raise ServiceError(f"The engine runs without Graftwork's loader: {worker}. See its log above.")
        if "PunicaWrapperCPU" in worker["operations"]:
            raise ServiceError(
                "The engine runs vLLM's own CPU LoRA operations, which are wrong for base rows."
            )
    return workers


def served(router: Router) -> frozenset[str]:
    """Return the served names that must stay resident: canaries and the champions beside them."""
    routes = router.refresh().routes.values()
    return frozenset(
        served_name(route.policy, digest)
        for route in routes
        if route.canary
        for digest in (route.canary, route.champion)
        if digest
    )


async def marker(request: Request) -> Response:
    found = getattr(request.app.state, "graftwork_marker", None)
    return JSONResponse(found or {"error": "The engine is starting."}, 200 if found else 503)


async def residency(request: Request) -> dict[str, Any]:
    state: GatewayState = request.app.state.graftwork
    adapters = {
        name: {"tier": "host", "bytes": resident.bytes, "users": resident.users}
        for name, resident in state.residency.residents.items()
    }
    return {"adapters": adapters, "loading": state.residency.loading, "evictions": state.residency.evictions}


async def loads(request: Request) -> list[dict[str, Any]]:
    return await request.app.state.graftwork_loads()


async def models(request: Request) -> dict[str, Any]:
    """List the base and the policies, in the form of OpenAI's API; revisions are not models."""
    state: GatewayState = request.app.state.graftwork
    names = [state.router.base_name, *sorted(state.router.refresh().routes)]
    created = int(time.time())
    data = [{"id": name, "object": "model", "created": created, "owned_by": "graftwork"} for name in names]
    return {"object": "list", "data": data}


async def feedback(body: Feedback, request: Request) -> dict[str, str]:
    state: GatewayState = request.app.state.graftwork
    key = request.state.graftwork_key
    state.spool.emit("feedback", request_id=body.request_id, reward=body.reward, key=key.hash)
    return {"status": "accepted"}


async def prewarm(body: Prewarm, request: Request) -> Any:
    """Bring a model's adapter into the host tier in the background."""
    state: GatewayState = request.app.state.graftwork
    try:
        target = state.router.resolve(body.model, "")
        if target.policy is None or target.digest is None:
            return {"model": body.model, "revision": "base"}
        revision = state.router.revision(target.policy, target.digest)
    except GraftworkError as error:
        return _Refusal(error)

    async def load() -> None:
        async with state.residency.use(revision):
            pass

    task = asyncio.create_task(load())
    _background.add(task)
    task.add_done_callback(_background.discard)
    return {"model": body.model, "revision": target.name}


# asyncio keeps only weak references to tasks.
_background: set[asyncio.Task[None]] = set()


class _Refusal(Response):
    """A GraftworkError as the gateway answers it."""

    def __init__(self, error: GraftworkError):
        super().__init__()
        self._error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send_error(send, self._error)
