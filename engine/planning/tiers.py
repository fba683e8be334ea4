"""How many adapters an engine holds where the settings leave it open: in its slots, and in the host tier.

On a CPU both follow from the machine's memory. On a GPU slots are a part of its plan (planning/memory.py).
"""

from pathlib import Path
from typing import get_args

import psutil

from engine.adapters.adapter_sizes import slot_bytes
from engine.base.families import BaseShapes
from engine.errors import ConfigError
from engine.planning.memory import DTYPE_BYTES
from engine.settings.services import MOST_SLOTS, EngineConfig

# Of the memory. The kernel may take pages of the host tier back: adapters of a MiB or more are mapped files.
SLOT_SHARE, HOST_SHARE = 0.25, 0.5
# Adapters of the host tier, or more where `host_bytes` holds more small ones.
HOST_ADAPTERS, SMALL_ADAPTER = 4096, 1 << 16
# So many for each sequence: an adapter whose requests come and go finds its slot again.
SLOTS_A_SEQUENCE = 4
# What Linux lets a container use (cgroup v2).
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Return the bytes of this machine's memory, or of its container's."""
    total = int(psutil.virtual_memory().total)
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    return total if limit == "max" else min(total, int(limit))


def cpu_slots(engine: EngineConfig, shapes: BaseShapes) -> int:
    """Return the slots of an engine on a CPU: as set, or what a share of the memory holds, two at least."""
    if engine.slots is not None:
        return engine.slots
    each = slot_bytes(shapes, engine.max_rank, DTYPE_BYTES[engine.dtype_on(cuda=False)])
    wanted = min(SLOTS_A_SEQUENCE * engine.max_num_seqs, MOST_SLOTS)
    return max(2, min(wanted, int(SLOT_SHARE * memory_bytes()) // each))


def host_tier_bytes(engine: EngineConfig) -> int:
    """Return the budget of the host tier: as set, or a share of the memory."""
    return engine.host_bytes or int(HOST_SHARE * memory_bytes())


def host_tier_adapters(engine: EngineConfig) -> int:
    """Return the most adapters of the host tier, whose rows the gateway keeps too."""
    return max(HOST_ADAPTERS, (engine.host_bytes or 0) // SMALL_ADAPTER)


def slot_rank(rank: int, fused_experts: bool = False) -> int:
    """Return the smallest slot rank that holds this rank; `ConfigError` when none does.

    Fused experts hold gate and up as one factor of twice the rank (`slots.FusedGateUp`).
    """
    served = get_args(EngineConfig.model_fields["max_rank"].annotation)
    needed = 2 * rank if fused_experts else rank
    if not 0 < needed <= max(served):
        twice = f", which needs {needed} in its fused experts" if fused_experts else ""
        raise ConfigError(
            f"No engine serves rank {rank}{twice}; the largest is {max(served)}. Lower the rank."
        )
    return int(min(one for one in served if one >= needed))
