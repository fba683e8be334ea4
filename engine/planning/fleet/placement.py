"""Which engine a request goes to: HAProxy's consistent hash with bounded load, or any one by chance."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# HAProxy's `hash-balance-factor` in tasks/haproxy.py, in percent, and its points of a server on the ring.
BALANCE, POINTS = 150, 160


class Ring:
    """A consistent hash with bounded load: HAProxy's `hash-type consistent` and `hash-balance-factor`.

    `first` says where each policy goes while all engines are idle.
    """

    def __init__(self, policies: int, engines: int):
        places = mixed(np.arange(engines * POINTS, dtype=np.uint64) + np.uint64(1 << 40))
        order = np.argsort(places)
        self.owners = (order // POINTS).tolist()
        starts = np.searchsorted(places[order], mixed(np.arange(policies, dtype=np.uint64)))
        self._starts = starts % len(order)
        self.first: NDArray[np.int64] | None = (order // POINTS)[self._starts]

    def choose(self, policy: int, load: Sequence[int], is_up: Sequence[bool]) -> int:
        """Return the first engine on the ring that is up and not over its share of the load."""
        slots = -(-(sum(load) + 1) * BALANCE // 100)
        most, place = -(-slots // max(1, sum(is_up))), int(self._starts[policy])
        owners, count = self.owners, len(self.owners)
        for step in range(count):
            engine: int = owners[(place + step) % count]
            if is_up[engine] and load[engine] < most:
                return engine
        raise AssertionError("Some engine is below the mean.")


class Anywhere:
    """Any engine that is up, each with the same chance."""

    first: NDArray[np.int64] | None = None

    def __init__(self, chance: np.random.Generator):
        self._chance = chance

    def choose(self, policy: int, load: Sequence[int], is_up: Sequence[bool]) -> int:
        """Return an engine at random."""
        while True:
            engine = int(self._chance.random() * len(load))
            if is_up[engine]:
                return engine


Placement = Ring | Anywhere


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the values' hashes: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
