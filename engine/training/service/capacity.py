"""The memory that sessions take, and what there is for all of them."""

from pathlib import Path

import psutil

from engine.planning.memory import TRAINED_BYTES
from engine.training.model.adapter import Site

# Of what is free once the base is loaded: the rest is for activations, for what one session at a time needs
# besides (the gradients of calls before, the copy that is being stored), and for the engine beside.
FREE_SHARE = 0.25
# Where Linux says what a container may use and uses (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


def bytes_of(site: Site, rank: int) -> int:
    """Return the memory of a site's factors that train, between operations."""
    return rank * (site.inputs + site.outputs) * max(1, site.experts) * TRAINED_BYTES


def free_bytes() -> int:
    """Return the memory that this process may still take, by the machine and by its container."""
    free = int(psutil.virtual_memory().available)
    limit = CGROUP / "memory.max"
    if not limit.is_file() or (allowed := limit.read_text().strip()) == "max":
        return free
    return min(free, int(allowed) - int((CGROUP / "memory.current").read_text()))
