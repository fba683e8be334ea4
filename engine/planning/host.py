"""The memory of trainer and engine on a CPU, from the base's `config.json`, before anything is loaded."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from engine.base.sizes import FAMILIES, Shape
from engine.errors import ConfigError
from engine.planning.memory import (
    DTYPE_BYTES,
    GIB,
    gib,
    sequence_bytes,
    step_bytes,
    token_bytes,
    training_bytes,
)
from engine.planning.tiers import memory_bytes
from engine.settings.params import Params
from engine.settings.services import EngineConfig

# What a microbatch of the trainer may keep for its backward pass. A CPU gains nothing from larger products.
ACTIVATION_BYTES = GIB
# Tokens in a block of vLLM's KV cache, the fewest that a CPU takes. Each sample of a group computes what
# follows the last whole block of its prompt: with vLLM's default of 128 often all of it.
CPU_BLOCK = 32
# A small base gets more than its longest batch needs, for prompts that return. The share is of the memory.
LEAST_KV_CACHE, KV_CACHE_SHARE = GIB // 4, 0.125
# Processes and libraries on a base of a megabyte, less than measured, so that nothing is refused that fits.
RUNTIME = {"trainer": GIB // 2, "engine": 3 * GIB // 2}
# From this width on the products are so large that a second thread on shared cores pays.
WIDE = 512
# Linux's memory limit and usage of a container (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the bytes that this process may still allocate, on the machine and in its container."""
    free = int(psutil.virtual_memory().available)
    limit = CGROUP / "memory.max"
    if not limit.is_file() or (allowed := limit.read_text().strip()) == "max":
        return free
    return min(free, int(allowed) - int((CGROUP / "memory.current").read_text()))


def kv_cache_bytes(config: Mapping[str, Any], engine: EngineConfig) -> int:
    """Return the bytes of the KV cache on a CPU: as set, else what the longest batch needs, or a share."""
    if engine.kv_cache_gib is not None:
        return int(engine.kv_cache_gib * GIB)
    share = int(KV_CACHE_SHARE * memory_bytes())
    if config.get("model_type") not in FAMILIES:
        return share
    shape, size = Shape.of(config), DTYPE_BYTES[engine.dtype_on(cuda=False)]
    # Block 0 is vLLM's null block, which no sequence gets.
    blocks = engine.max_num_seqs * -(-engine.max_model_len // CPU_BLOCK) + 1
    return min(share, max(LEAST_KV_CACHE, blocks * sequence_bytes(shape, size, CPU_BLOCK)))


def takes_all_cores(config: Mapping[str, Any], params: Params) -> bool:
    """Say whether engine and trainer each take all cores while the other one does not compute."""
    engine, trainer = params.engine, params.trainer
    is_open = not engine.threads and not trainer.threads and engine.tensor_parallel == 1
    return is_open and config["hidden_size"] >= WIDE


def microbatch_tokens(config: Mapping[str, Any], params: Params) -> int:
    """Return the tokens of a microbatch: as set, else what `ACTIVATION_BYTES` hold of this base."""
    trainer = params.trainer
    if trainer.microbatch_tokens or config.get("model_type") not in FAMILIES:
        return trainer.most_tokens
    shape, checkpointing = Shape.of(config), trainer.checkpoints_on(cuda=False)
    one = token_bytes(shape, DTYPE_BYTES["float32"], params.engine.max_rank, checkpointing)
    return max(64, min(trainer.most_tokens, ACTIVATION_BYTES // one))


def host_parts(config: Mapping[str, Any], params: Params, services: Collection[str]) -> dict[str, int]:
    """Return the bytes of each part of trainer and engine, of those in `services`, by its name for people."""
    shape, engine, wide = Shape.of(config), params.engine, DTYPE_BYTES["float32"]
    size = DTYPE_BYTES[engine.dtype_on(cuda=False)]
    tokens, checkpointing = microbatch_tokens(config, params), params.trainer.checkpoints_on(cuda=False)
    # The engine computes experts from a second copy (engine/serving/worker/moe_cpu.py).
    routed = sum(3 * one.count * one.hidden * one.inner for one in shape.shapes.experts.values())
    parts = {
        "trainer": {
            "the base in the trainer": shape.parameters * wide,
            "activations of one microbatch": training_bytes(
                shape, wide, engine.max_rank, tokens, checkpointing
            ),
            "the trainer's libraries": RUNTIME["trainer"],
        },
        "engine": {
            "the base in the engine": (shape.parameters + routed) * size,
            "KV cache": kv_cache_bytes(config, engine),
            "activations and logits of one step": step_bytes(shape, size, engine),
            "the engine's libraries": RUNTIME["engine"],
        },
    }
    return {what: part for name in parts if name in services for what, part in parts[name].items()}


def refuse_unless_memory(config: Mapping[str, Any], params: Params, services: Collection[str]) -> None:
    """Raise `ConfigError` with the numbers when the free memory is less than these services need."""
    if config.get("model_type") not in FAMILIES:
        return
    parts, free = host_parts(config, params, services), free_bytes()
    if (needed := sum(parts.values())) > free:
        each = ", ".join(f"{what} {gib(part)}" for what, part in parts.items())
        raise ConfigError(
            f"{gib(free)} of memory are free, and {' and '.join(sorted(services))} need {gib(needed)} for "
            f"the base {params.base.name!r}: {each}. "
            "Free memory, lower trainer.microbatch_tokens, engine.max_num_seqs or engine.kv_cache_gib, or "
            "choose a smaller base."
        )
