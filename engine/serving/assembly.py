"""Puts a gateway together in vLLM's server, with every optional part: limits, usage, membership.

vLLM finds `GraftworkEndpoints` by the entry point in `pyproject.toml`. It calls `attach_router` before the
engine is up and `init_state` once it is. `init_state` raises when a worker lacks our marker, so the server
does not start: vLLM only logs when a plugin fails to import.
"""

import asyncio
import gc
import socket
from argparse import Namespace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY, Gauge
from starlette.datastructures import State
from vllm.envs import enable_envs_cache

from engine.base.prompts import prompt_ids
from engine.catalog.catalog import Catalog
from engine.catalog.opening import open_catalog
from engine.errors import ConfigError, ServiceError
from engine.ledger.sender import open_spool
from engine.ledger.spool import Spool
from engine.metering.shared_budgets import SharedBudgets
from engine.metering.usage_log import UsageLog
from engine.planning.tiers import host_tier_adapters
from engine.serving.gateway.call import GatewayState
from engine.serving.gateway.catalog_rows import LEAST_ROWS
from engine.serving.gateway.endpoints import Readiness, attach
from engine.serving.gateway.grammar_trial import GrammarTrial
from engine.serving.gateway.host_tier_upkeep import HostTierUpkeep, served_names
from engine.serving.gateway.membership import Membership
from engine.serving.gateway.meter import TEMPLATE_TOKENS, Meter
from engine.serving.gateway.promised_waits import PromisedWaits
from engine.serving.gateway.routing import Router
from engine.serving.gateway.suggesting import Suggester
from engine.serving.residency.load_metrics import LoadMetrics
from engine.serving.residency.loads import LOAD_PLACES
from engine.serving.residency.residency import Residency
from engine.serving.residency.vllm_engine import VllmEngine
from engine.serving.vllm_plugin.leaving import end_requests_first
from engine.serving.vllm_plugin.plugin import answer_as_asked, vllm_version
from engine.settings.params import Params, load_params
from engine.state_metrics import StateMetrics
from engine.store.open import open_store
from engine.threads import in_parallel
from engine.work_metrics import WorkMetrics

# What a chat template may add for a conversation of another form.
TEMPLATE_RESERVE = 16
# Objects made between two collections, and collections between those of older objects. With Python's own 700
# this process spends 3% of its time under load on them: every piece of an answer makes some.
COLLECT_AFTER = 20_000, 20, 20
# Rows of the catalog to keep for each adapter of the host tier. It needs three (its route, and its revision
# under its digest and under what a client writes of it); the others are for adapters that have left it.
ROWS_PER_ADAPTER = 6


class GraftworkEndpoints:
    """vLLM's endpoint plugin."""

    name = "graftwork"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add our routes to vLLM's app."""
        attach(app)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Connect gateway and residency to the running engine.

        Raises `ServiceError` when a worker runs without our plugin.
        """
        settings = engine_client.vllm_config.additional_config["graftwork"]
        params = load_params(settings["params"])
        workers = check_marker(await VllmEngine.markers(engine_client))
        engine = await VllmEngine.connect(engine_client, state.openai_serving_models)
        answer_as_asked(state.openai_serving_models)
        state.graftwork_marker = marker_of(settings, workers)
        state.graftwork_loads = engine.loads
        catalog, router = open_catalog(params.paths), open_router(params, settings)
        spool, usage = open_spool(params, "gateway"), open_usage(params, catalog)
        Thread(target=catalog.read_ahead, name="graftwork-read-ahead", daemon=True).start()
        tier = open_residency(params, engine, catalog, router, spool)
        count_work(params, router)
        meter = Meter(usage, LOAD_PLACES, template_tokens(engine_client.get_tokenizer()))
        name = f"{socket.gethostname()}:{params.engine.port}"
        membership = Membership(catalog, name, params.url("engine"), settings["base"], settings["version"])
        upkeep = HostTierUpkeep(tier, router, membership.tell)
        why_not_ready = partial(membership.why_not_ready, router, upkeep.missing)
        state.graftwork_readiness = Readiness(why_not_ready, membership.drain)
        state.graftwork = GatewayState(
            router,
            tier,
            spool,
            name,
            engine_client.vllm_config.model_config.max_model_len,
            GrammarTrial(Path(engine_client.model_config.model)),
            params.gateway,
            meter,
            engine.used,
            engine.followed,
        )
        hand_over = partial(in_parallel, spool.close, usage.upkeep.hand_over)
        limit_s, flush = params.engine.shutdown_s, partial(usage.write, gives_back=True)
        end_requests_first(engine_client, state, limit_s, membership.drain, flush, hand_over)
        # asyncio keeps only weak references to tasks, so the state holds this one.
        state.graftwork_upkeep = asyncio.create_task(serve_until_stopped(upkeep, membership))
        gc.set_threshold(*COLLECT_AFTER)
        # vLLM looks up a setting in the environment for each token of an answer, unless it may keep them.
        enable_envs_cache()


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


def marker_of(settings: dict[str, Any], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return versions, base and workers of this engine, which `/graftwork/marker` answers."""
    of_base = {name: settings[name] for name in ("base", "base_name", "text_digest")}
    return {"plugin": settings["version"], "vllm": vllm_version(), **of_base, "workers": workers}


def open_router(params: Params, settings: dict[str, Any]) -> Router:
    """Return the router, on a catalog of its own: loads may use every connection of another one."""
    return Router(
        open_catalog(params.paths),
        settings["base_name"],
        settings["base"],
        cached_rows=rows_to_cache(host_tier_adapters(params.engine)),
        configured=params.base.name,
        key_max_age_s=params.gateway.key_max_age_s,
        suggest=Suggester,
    )


def rows_to_cache(host_adapters: int) -> int:
    """Return how many rows a router caches for a host tier of `host_adapters`."""
    return max(LEAST_ROWS, ROWS_PER_ADAPTER * host_adapters)


def open_residency(
    params: Params, engine: VllmEngine, catalog: Catalog, router: Router, spool: Spool
) -> Residency:
    """Return the residency of this engine, which hears what its worker reports."""
    tier = Residency(
        engine,
        catalog,
        open_store(params),
        params.engine,
        on_load=partial(spool.emit, "loads"),
        pinned=lambda: served_names(router.last_released),
        metrics=LoadMetrics(REGISTRY),
        retry_after=PromisedWaits(),
    )
    engine.watch(tier.take_report)
    return tier


def open_usage(params: Params, catalog: Catalog) -> UsageLog:
    """Return the usage log; of several machines, which share a server's catalog, it shares budgets, too."""
    return UsageLog(params.paths.usage, None if catalog.is_file else SharedBudgets(params.paths.catalog_url))


def count_work(params: Params, router: Router) -> None:
    """Have Prometheus find this process's work, its state on disk, and since when no catalog answers."""
    WorkMetrics(REGISTRY)
    StateMetrics(REGISTRY, params.paths)
    unread = Gauge("graftwork_catalog_unread_seconds", "Since the catalog could be read last.")
    unread.set_function(lambda: router.unread_s)


def template_tokens(tokenizer: Any) -> int:
    """Return how many tokens the base's chat template adds to one message, with a reserve."""
    try:
        return len(prompt_ids(tokenizer, "x")) + TEMPLATE_RESERVE
    except ConfigError:
        return TEMPLATE_TOKENS


async def serve_until_stopped(upkeep: HostTierUpkeep, membership: Membership) -> None:
    """Keep the host tier up, as a member of the engines, until the task is cancelled."""
    membership.start()
    try:
        await upkeep.run()
    finally:
        membership.leave()
