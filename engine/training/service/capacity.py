"""The memory that sessions use, and the memory that is free for them."""

from pathlib import Path

import psutil

from engine.planning.memory import TRAINED_BYTES
from engine.training.model.adapter import Site

# Share of the memory that is free once the base is loaded. The rest is for activations, for one session's
# temporary copies (earlier gradients, the state being stored), and for the engine on the same machine.
FREE_SHARE = 0.25
# Linux's memory limit and usage of a container (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


def bytes_of(site: Site, rank: int) -> int:
    """Return the bytes of a site's trained factors with gradients and Adam moments."""
    return rank * (site.inputs + site.outputs) * max(1, site.experts) * TRAINED_BYTES


def free_bytes() -> int:
    """Return the bytes that this process may still allocate, on the machine and in its container."""
    free = int(psutil.virtual_memory().available)
    limit = CGROUP / "memory.max"
    if not limit.is_file() or (allowed := limit.read_text().strip()) == "max":
        return free
    return min(free, int(allowed) - int((CGROUP / "memory.current").read_text()))
