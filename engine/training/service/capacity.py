"""The memory that sessions use."""

from engine.planning.memory import TRAINED_BYTES
from engine.training.model.adapter import Site

# Share of the memory that is free once the base is loaded. The rest is for activations, for one session's
# temporary copies (earlier gradients, the state being stored), and for the engine on the same machine.
FREE_SHARE = 0.25


def bytes_of(site: Site, rank: int) -> int:
    """Return the bytes of a site's trained factors with gradients and Adam moments."""
    return rank * (site.inputs + site.outputs) * max(1, site.experts) * TRAINED_BYTES
