"""The split of a policy's units between champion and canary.

It hashes policy, unit and salt: any number of gateways agree without coordination.
"""

import hashlib
from dataclasses import dataclass

from engine.catalog.catalog import Route
from engine.settings.params import served_name

CANARY, FALLBACK = "canary", "fallback"


@dataclass(frozen=True)
class Target:
    """The revision that answers: `digest` None means the base.

    `arm` is `champion`, `canary`, `base`, `pinned`, or `fallback`: champion or base in the place of a canary,
    which counts for neither arm of its release. `plain_units`: the ledger has this policy's units under
    hashes of an older version.
    """

    policy: str | None
    digest: str | None
    arm: str
    route_version: int | None = None
    plain_units: bool = False

    @property
    def name(self) -> str | None:
        """The served name, or None for the base."""
        return served_name(self.policy, self.digest) if self.policy and self.digest else None


def in_canary(route: Route, unit: str) -> bool:
    """Return whether the canary answers this unit: its hash falls into the share `route.weight`."""
    if route.canary is None:
        return False
    word = hashlib.sha256(f"{route.policy}\0{unit}\0{route.salt}".encode()).digest()[:8]
    return int.from_bytes(word, "big") < route.weight * 2**64
