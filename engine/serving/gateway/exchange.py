"""A request in flight: its measurements, and the observation that is spooled of it."""

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Self

from prometheus_client import Counter

from engine.catalog.catalog import Key
from engine.ledger.spool import Spool
from engine.serving.gateway.arms import FALLBACK, Target
from engine.serving.gateway.asgi import CLIENT_LEFT
from engine.serving.gateway.forwarding import ForwardedCall
from engine.serving.gateway.routing import Router

UNOBSERVED = Counter("graftwork_observations_lost", "Requests whose observation could not be spooled.")
FALLBACKS = Counter("graftwork_canary_fallbacks", "Requests that were answered in a canary's place.")
log = logging.getLogger("graftwork.gateway")


@dataclass
class Exchange:
    """A request in flight and its measurements; times in seconds.

    `admitted_at` (epoch seconds) is when the look at the routes began that chose `target`. Until there is an
    answer or an error, `status` is that of a client that left.
    """

    id: str
    key: Key
    target: Target
    unit: str | None
    segment: str | None
    purpose: str
    admitted_at: float
    started: float
    is_stream: bool = False
    status: int = CLIENT_LEFT
    has_left: bool = False
    ttft_s: float | None = None
    usage: dict[str, int] | None = None
    outcome: str | None = None
    # The pieces of the answer so far, and the seconds until the last one.
    pieces: int = 0
    last_s: float = 0.0

    def take(self, piece: bytes) -> None:
        """Time the whole answer, or a piece of its stream; an empty one is none."""
        if not piece:
            return
        self.last_s = time.perf_counter() - self.started
        if self.ttft_s is None:
            self.ttft_s = self.last_s
        self.pieces += 1

    def take_told(self, call: ForwardedCall) -> None:
        """Take what the whole answer told: how it ended, what it used, and an error behind its 200."""
        self.outcome = call.answer.outcome
        self.status = call.answer.status or self.status
        if call.used is not None and any(call.used):
            self.usage = {"prompt_tokens": call.used[0], "completion_tokens": call.used[1]}

    @property
    def is_unanswered(self) -> bool:
        """Whether the client left before the first byte of its answer."""
        return self.has_left and self.ttft_s is None

    def as_attempt(self) -> Self:
        """Return the exchange as an attempt of its canary, whose answer another revision gives.

        Its id is not the answer's, so that a rating of the answer does not count for the canary.
        """
        return replace(self, id=f"{self.id}-canary")

    def again(self, target: Target) -> Self:
        """Return the exchange before any answer, with another target."""
        return replace(
            self,
            target=target,
            status=CLIENT_LEFT,
            usage=None,
            outcome=None,
            ttft_s=None,
            pieces=0,
            last_s=0.0,
        )

    def observation(self, gateway: str) -> dict[str, Any]:
        """Return the row for the ledger's table `observations`; `gateway` is this gateway's name."""
        usage = self.usage or {}
        return {
            "id": self.id,
            "at": self.admitted_at,
            "policy": self.target.policy,
            "digest": self.target.digest,
            "arm": self.target.arm,
            "unit": self.unit,
            "segment": self.segment,
            "key": self.key.id,
            "status": CLIENT_LEFT if self.is_unanswered else self.status,
            "latency_s": time.perf_counter() - self.started,
            "ttft_s": self.ttft_s,
            "token_s": (self.last_s - (self.ttft_s or 0.0)) / (self.pieces - 1) if self.pieces > 1 else None,
            "outcome": self.outcome,
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "pieces": self.pieces if self.is_stream and self.pieces else None,
            "route_version": self.target.route_version,
            "gateway": gateway,
            "purpose": self.purpose,
        }

    def record(self, spool: Spool, gateway: str) -> None:
        """Spool the observation. A full disk is counted and logged, and never changes the answer."""
        if self.target.arm == FALLBACK:
            FALLBACKS.inc()
        try:
            spool.emit("observations", **self.observation(gateway))
        except OSError as error:
            UNOBSERVED.inc()
            log.warning("The observation of %s could not be spooled: %s", self.id, error)


def hash_unit(router: Router, key: Key, target: Target, unit: str) -> str:
    """Return a hash of a tenant's unit (24 hex digits), which only this installation can compute.

    The ledger never stores the unit itself. A release that began under an older version keeps its hashes.
    """
    if target.plain_units:
        return hashlib.sha256(f"{target.policy}\0{unit}".encode()).hexdigest()[:24]
    return router.keyed_hash("unit", key.owner, target.policy or "", unit)
