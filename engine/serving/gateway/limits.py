"""Limits of a key and its tenant: buckets of a minute, the most that a call may take, the order of tenants.

Where the engine is full, tenants share it by start-time fair queueing (Goyal et al., 1996). Each call gets a
start tag, which vLLM's scheduler takes as its priority (the lowest first). A tenant's tags advance by its
tokens over its weight, so a burst queues behind its own earlier calls and not in front of other tenants. A
tenant that was idle starts at the tag that is in service now: it saves nothing up.
"""

import heapq
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.errors import LimitReached
from engine.metering.usage_rows import DAY, MONTH, Budget
from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.call import Size

# What a chat template adds to a prompt, where it is not known, and what it adds for tools. For each message
# it adds less than the bytes of a message without text; a token has at least one byte of the body.
TEMPLATE_TOKENS = TOOL_TOKENS = 256
# Of text that is only tokenized, which costs less.
BYTES_A_TOKEN = 4
# The limits of longer periods, by the period.
A_PERIOD = tuple((period, f"tokens_per_{period}") for period in (DAY, MONTH))
REFUSED = Counter("graftwork_requests_limited", "Requests refused by a limit.", ["tenant", "limit"])


@dataclass(slots=True)
class TokenBucket:
    """A token bucket of a minute: it holds `capacity` and refills evenly within 60 s."""

    capacity: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        """Add what has come since the last call."""
        self.left = min(self.capacity, self.left + (now - self.at) * self.capacity / 60)
        self.at = now

    def wait_s(self, wanted: float) -> float:
        """Return after how many seconds `wanted` is there; 0 when it is there now."""
        return max(0.0, (wanted - self.left) * 60 / self.capacity) if self.capacity else math.inf


@dataclass(slots=True)
class Account:
    """What limits the calls of a key, by its rows: buckets of a minute, most calls under way, budgets.

    `ceiling` is the tokens of a call that no wait makes these limits admit more than.
    """

    key: Key
    tenant: Tenant
    subjects: tuple[str, str]
    requests: list[TokenBucket]
    tokens: list[TokenBucket]
    concurrency: list[tuple[str, float]]
    budgets: list[Budget]
    ceiling: float

    @staticmethod
    def of(key: Key, tenant: Tenant, buckets: dict[tuple[str, str], TokenBucket]) -> "Account":
        """Return the account of these rows; keys and tenants share the `buckets` of their subjects."""
        subjects = (f"key:{key.id}", f"tenant:{tenant.name}")
        limits = tuple(zip(subjects, (key.limits, tenant.limits), strict=True))
        requests, tokens = (
            [
                _bucket(buckets, (subject, kind), given[f"{kind}_per_minute"])
                for subject, given in limits
                if f"{kind}_per_minute" in given
            ]
            for kind in ("requests", "tokens")
        )
        budgets = [
            Budget(subject, period, given[limit])
            for subject, given in limits
            for period, limit in A_PERIOD
            if limit in given
        ]
        under_way = [(subject, given["concurrency"]) for subject, given in limits if "concurrency" in given]
        ceiling = ceiling_of(key.limits, tenant.limits)
        return Account(key, tenant, subjects, requests, tokens, under_way, budgets, ceiling)

    def refuse_empty(self, kind: str, wanted: int) -> None:
        """Raise `LimitReached` where a bucket of `requests` or `tokens` has too little left."""
        now = time.monotonic()
        for bucket in self.requests if kind == "requests" else self.tokens:
            bucket.refill(now)
            if bucket.left < wanted:
                limit = f"{bucket.capacity:g} {kind} a minute"
                raise over(self.tenant, f"{kind}_per_minute", limit, "", bucket.wait_s(wanted))

    def take(self, tokens: int) -> None:
        """Take a request and its tokens from all buckets, or from none. Raises `LimitReached`."""
        self.refuse_empty("requests", 1)
        self.refuse_empty("tokens", tokens)
        for bucket in self.requests:
            bucket.left -= 1
        for bucket in self.tokens:
            bucket.left -= tokens


def _bucket(
    buckets: dict[tuple[str, str], TokenBucket], name: tuple[str, str], capacity: float
) -> TokenBucket:
    found = buckets.get(name)
    if found is None or found.capacity != capacity:
        found = buckets[name] = TokenBucket(capacity, capacity, time.monotonic())
    return found


def over(tenant: Tenant, limit: str, what: str, subject: str, retry_s: float) -> LimitReached:
    """Return the error for a limit that is reached, and count it."""
    REFUSED.labels(tenant.name, limit).inc()
    of = f" of the {subject.partition(':')[0]}" if subject else ""
    return LimitReached(f"The limit{of}, {what}, is reached. Try again later.", min(retry_s, 60.0))


class FairShare:
    """The tags of one engine. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0.0
        # The tag at which each tenant's last request ends.
        self._ends: dict[str, float] = {}
        self._under_way: list[float] = []
        self._left: list[float] = []

    def enter(self, tenant: str, tokens: int, weight: float) -> float:
        """Return the start tag of a request that may take this many tokens."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + tokens / weight
        heapq.heappush(self._under_way, start)
        return start

    def leave(self, start: float) -> None:
        """End a request; the time of the tags advances to the first one that is still under way."""
        heapq.heappush(self._left, start)
        while self._left and self._under_way and self._left[0] == self._under_way[0]:
            heapq.heappop(self._left)
            self._now = heapq.heappop(self._under_way)
        if self._under_way:
            self._now = max(self._now, self._under_way[0])
        else:
            # Nobody waits: every tenant begins anew.
            self._now = 0.0
            self._ends.clear()


class Reservation(NamedTuple):
    """The tokens that a request can take; `length` caps each completion where the request names no number."""

    tokens: int
    length: int | None


def ceiling_of(*limits: Mapping[str, float]) -> float:
    """Return the tokens of a request that no wait makes these limits admit more than."""
    found = (one for given in limits for name, one in given.items() if name.startswith("tokens_per_"))
    return min(found, default=math.inf)


def reserve(size: Size, prompt_tokens: int, context: int, ceiling: float) -> Reservation:
    """Return what a request reserves: its prompts, of at most so many tokens, and all of its completions.

    Raises `Refused` (400), with the largest length, where the limits never admit it.
    """
    prompt = min(prompt_tokens, context * size.prompts)
    each = context if size.most_tokens is None else min(size.most_tokens, context)
    if prompt + size.samples * each <= ceiling:
        return Reservation(prompt + size.samples * each, None)
    most = int(ceiling - prompt) // size.samples
    if most < 1:
        said = (
            f"A limit of this key or its tenant admits {ceiling:g} tokens, and this prompt may have {prompt} "
            "already. Send a shorter one, in fewer parts."
        )
        raise Refused(400, said, "limit_too_low")
    if size.most_tokens is not None:
        said = (
            f"A limit of this key or its tenant admits {ceiling:g} tokens, and this request may take "
            f"{prompt + size.samples * each}. Ask for at most {most} tokens of each completion."
        )
        raise Refused(400, said, "limit_too_low", "max_tokens")
    return Reservation(prompt + size.samples * most, most)
