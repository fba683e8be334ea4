"""Start vLLM's OpenAI server on the resident base with our plugin, gateway and routes inside.

    python -m engine.serving.server --params FILE

The `vllm` console script of the CPU wheel fails (it asks for the metadata of a distribution that is
called otherwise), so the server starts from Python.
"""

import argparse
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base.families import BaseShapes
from engine.errors import ConfigError
from engine.planning.memory import BATCHED_TOKENS
from engine.planning.tiers import cpu_slots
from engine.serving.gateway.uvicorn_accept import accept_bursts
from engine.settings.params import Params, load_params
from engine.settings.reproducible import equal_bits
from engine.settings.services import EngineConfig

if TYPE_CHECKING:
    from engine.base.resident import BaseInfo
    from engine.planning.memory import MemoryPlan

CPU_KV_CACHE_GIB = 0.25
# The shortest and longest n-gram that drafts are looked up by.
LOOKUP = (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", required=True, help="resolved settings (YAML or JSON)")
    path = Path(parser.parse_args().params).absolute()
    params = load_params(path)
    set_environment(params)

    from engine.base.resident import ensure_base
    from engine.catalog.catalog import migrate
    from engine.planning.gpu import planned, refuse_unless_served

    refuse_unless_served(params)
    plan = planned(params)
    base = ensure_base(params.base, params.paths)
    migrate(params.paths.catalog_url)
    serve(server_arguments(params, path, base, plan))


def set_environment(params: Params) -> None:
    """Set what vLLM and its children read from the environment; restart once where it must be earlier."""
    from engine.planning.gpu import cuda_bytes

    os.environ.update(equal_bits(os.environ))
    os.environ.setdefault("VLLM_PLUGINS", "graftwork")
    cores = sorted(os.sched_getaffinity(0))
    threads = params.engine.threads or max(1, len(cores) - 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads that wait must sleep: the trainer shares these cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Slots of many adapters are read here and there: pages of 2 MiB save a sixth of a decode step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # Clients, and balancers with their usual 60 s, must be the ones to close an idle connection: a request
    # that is sent while the server closes it is lost. vLLM's own 5 s is shorter than most clients' patience.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "75")
    # Last, since looking for a GPU may import torch, which reads the above.
    if cuda_bytes() is None:
        # vLLM's sampler compiles a line of its log-probabilities, for seconds, at a request that asks for it.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        # On a GPU cores are no limit.
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(cores, params.engine.tensor_parallel)


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Part sorted cores among the ranks of a machine, which must not share one: `0,1,2|3,4`.

    A rank alone is left to the scheduler. Raises `ConfigError` when there are more ranks than cores.
    """
    if ranks == 1:
        return "nobind"
    if ranks > len(cores):
        raise ConfigError(
            f"engine.tensor_parallel is {ranks}, and this machine lends {len(cores)} cores: each rank needs "
            f"one of its own. Set it to {len(cores)} at most, or lend more cores."
        )
    ends = [len(cores) * i // ranks for i in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[first:end])) for first, end in pairwise(ends))


def server_arguments(
    params: Params, params_path: Path, base: "BaseInfo", plan: "MemoryPlan | None" = None
) -> list[str]:
    """Return vLLM's command line for these settings, on the GPU of `plan` or on the CPU.

    Nothing here lets vLLM run a base's own code: `--trust-remote-code` is never given.
    """
    config = params.engine
    ours = {
        "params": str(params_path),
        "base": base.digest,
        "base_name": base.name,
        "version": version("graftwork"),
    }
    return [
        "--model", str(base.path),
        "--served-model-name", base.name,
        "--host", "127.0.0.1",
        "--port", str(config.port),
        "--dtype", config.dtype_on(cuda=plan is not None),
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs),
        "--tensor-parallel-size", str(config.tensor_parallel),
        *memory_arguments(config, plan),
        "--enforce-eager",
        "--enable-lora",
        "--max-loras", str(slots(config, base, plan)),
        # The host tier's budget is ours, in bytes; vLLM's count of adapters must not be the limit.
        "--max-cpu-loras", str(1 << 20),
        "--max-lora-rank", str(config.max_rank),
        "--lora-target-modules", *lora_targets(base),
        *attention_arguments(base, plan),
        *executor_arguments(config, plan),
        *route_arguments(config, base),
        *speculative_arguments(config, plan),
        "--worker-extension-cls", "engine.serving.worker.loader.LoaderExtension",
        "--middleware", "engine.serving.gateway.gateway.Gateway",
        "--additional-config", json.dumps({"graftwork": ours}),
        "--api-server-count", "1",
        "--generation-config", "vllm",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def slots(config: EngineConfig, base: "BaseInfo", plan: "MemoryPlan | None") -> int:
    """Return how many adapters one batch can hold, on the GPU of `plan` or on the CPU."""
    return config.gpu_slots if plan is not None else cpu_slots(config, BaseShapes.read(base.path))


def lora_targets(base: "BaseInfo") -> tuple[str, ...]:
    """Return what may carry LoRA; routed experts are one module of the engine, which calls it `experts`."""
    shapes = BaseShapes.read(base.path)
    return (*shapes.targets, *(("experts",) if shapes.experts else ()))


def attention_arguments(base: "BaseInfo", plan: "MemoryPlan | None") -> list[str]:
    """Keep latent attention on the CPU's plain backend: the one for AMX drops adapters on `kv_b_proj`."""
    return ["--attention-backend", "CPU_MLA"] if plan is None and _is_latent(base) else []


def _is_latent(base: "BaseInfo") -> bool:
    return bool(json.loads((base.path / "config.json").read_text()).get("kv_lora_rank"))


def executor_arguments(config: EngineConfig, plan: "MemoryPlan | None") -> list[str]:
    """Keep a worker that is alone on a CPU in the engine's process; ranks have processes of their own."""
    alone = plan is None and config.tensor_parallel == 1
    return (
        ["--distributed-executor-backend", "engine.serving.vllm_plugin.executor.InProcessExecutor"]
        if alone
        else []
    )


def route_arguments(config: EngineConfig, base: "BaseInfo") -> list[str]:
    """Record the experts of every token of a mixture of experts, if asked to; a request asks for its own."""
    recorded = config.routed_experts and BaseShapes.read(base.path).experts
    return ["--enable-return-routed-experts"] if recorded else []


def speculative_arguments(config: EngineConfig, plan: "MemoryPlan | None") -> list[str]:
    """Let vLLM draft tokens by looking up the last ones in the request's own text (its `ngram` method).

    Raises `ConfigError` on a CPU. There vLLM 0.32.0 verifies drafts wrongly wherever sampling is not greedy
    (its issue 55005), and under latent attention it ends at the first draft.
    """
    if not config.speculative:
        return []
    if plan is None:
        raise ConfigError(
            f"engine.speculative is {config.speculative}, and on a CPU vLLM draws sampled tokens from "
            "another distribution when it verifies drafts. Set engine.speculative to 0."
        )
    lookup = {"prompt_lookup_min": LOOKUP[0], "prompt_lookup_max": LOOKUP[1]}
    ngram = {"method": "ngram", "num_speculative_tokens": config.speculative, **lookup}
    return ["--speculative-config", json.dumps(ngram)]


def memory_arguments(config: EngineConfig, plan: "MemoryPlan | None") -> list[str]:
    """Return vLLM's memory: its share of the GPU and the KV cache, as planned.

    vLLM refuses to start when its share is not free. The cache is given in bytes: measured instead, it
    would shrink by whatever the trainer takes meanwhile.
    """
    if plan is None:
        size = int((config.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30)
        return ["--kv-cache-memory-bytes", str(size)]
    return [
        "--kv-cache-memory-bytes", str(plan.engine_kv_cache),
        "--gpu-memory-utilization", f"{plan.gpu_memory_utilization:.4f}",
        "--max-num-batched-tokens", str(max(BATCHED_TOKENS, config.max_num_seqs)),
    ]  # fmt: skip


def serve(arguments: list[str]) -> None:
    """Run vLLM's API server in this process until it is stopped."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    accept_bursts()
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
