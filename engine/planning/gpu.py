"""This machine's GPU and the memory plan of the settings on it.

Trainer and engine ask here before they load anything, and `graftwork up` before it starts either. Only the
first GPU that CUDA shows is used (`CUDA_VISIBLE_DEVICES` chooses another).
"""

from collections.abc import Collection
from importlib.metadata import version
from typing import Any

from engine.base.families import attention_of
from engine.base.resident import base_config
from engine.errors import ConfigError
from engine.planning.host import refuse_unless_memory
from engine.planning.memory import WHAT, MemoryPlan, gib, plan, print_plan, refuse_unless_it_fits
from engine.settings.params import Params


def cuda_bytes() -> int | None:
    """Return the bytes of the GPU's memory, or None where torch has no CUDA or sees no GPU."""
    # The version names a CPU build: importing torch would take seconds.
    if version("torch").endswith("+cpu"):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def trainer_device(params: Params, cuda: bool) -> str:
    """Return `cuda` or `cpu`; `ConfigError` when CUDA is asked for and there is none."""
    wanted = params.trainer.device
    if wanted == "cuda" and not cuda:
        raise ConfigError(
            "trainer.device is cuda, but torch sees no GPU. Install the CUDA build and its driver, "
            "or remove the setting."
        )
    return "cuda" if cuda and wanted != "cpu" else "cpu"


def planned(params: Params) -> MemoryPlan | None:
    """Print and return the memory plan for this machine's GPU; None without a GPU.

    Raises `ConfigError` with the numbers when the plan does not fit.
    """
    available = cuda_bytes()
    if available is None:
        return None
    config, plan = plan_for(params, available)
    say(plan)
    refuse_unless_it_fits(config, plan, params.engine, params.trainer)
    return plan


def refuse_unless_room(params: Params, services: Collection[str]) -> None:
    """Raise `ConfigError` with the numbers when these services do not fit on the GPU, or into main memory."""
    if not planned(params):
        refuse_unless_memory(base_config(params.base, params.paths), params, services)


def refuse_unless_served(params: Params) -> None:
    """Raise `ConfigError` when vLLM cannot serve the base on this machine; checked before any build."""
    reason = attention_of(base_config(params.base, params.paths)).cuda_only
    if reason and cuda_bytes() is None:
        raise ConfigError(
            f"The base {params.base.name!r} cannot be served on a CPU: {reason}. Serve it on a machine with "
            "a GPU. This machine can train it on given data with `graftwork up --only trainer`."
        )


def plan_for(params: Params, available: int) -> tuple[dict[str, Any], MemoryPlan]:
    """Return the base's `config.json` and its plan on a GPU with `available` bytes."""
    config = base_config(params.base, params.paths)
    return config, plan(config, available, params.engine, params.trainer)


def rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Return a plan's table rows (part, size), ending with the sum and vLLM's share."""
    parts = [(WHAT[name], gib(size)) for name, size in plan.parts.items()]
    kept = f"{plan.sequences} sequences"
    return [
        *((what, f"{size}, {kept}" if what == WHAT["engine_kv_cache"] else size) for what, size in parts),
        ("needed", gib(plan.needed)),
        ("the GPU has", gib(plan.available)),
        ("vLLM's gpu_memory_utilization", f"{plan.gpu_memory_utilization:.4f}"),
    ]


def say(plan: MemoryPlan) -> None:
    """Print the plan's table at the start of a service's log."""
    print_plan(f"One GPU, a base of {plan.parameters:,} parameters", rows(plan))
