"""Limits and usage of requests: a bill is opened before a request is forwarded and settled after it.

Rates and requests under way are counted in memory, by each gateway for itself. Budgets of a day and a month
are in the usage log, which all gateways of a machine share, and between machines in their Postgres.
"""

import asyncio
import logging
import math
import sqlite3
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.errors import LimitReached, ServiceError
from engine.metering.usage_log import Ended, Shortage, UsageLog
from engine.metering.usage_rows import DAY, MONTH, Budget, Metered
from engine.serving.gateway.answers import Used
from engine.serving.gateway.asgi import CLIENT_LEFT, Header, Refused
from engine.serving.gateway.fair_share import FairShare
from engine.serving.gateway.request_fields import Size
from engine.serving.gateway.reservation import (
    BYTES_A_TOKEN,
    TEMPLATE_TOKENS,
    TOOL_TOKENS,
    Reservation,
    ceiling_of,
    reserve,
)

# The share of the queue of cold loads that a tenant with policies of its own may take.
LOAD_SHARE = 0.5
# The usage of a request that has ended waits this long for others, to be written in one commit.
SETTLED_S = 0.02
# When a write that failed is tried again, if no request comes before.
AGAIN_S = 1.0
TOKENS = Counter("graftwork_tokens", "Tokens of settled requests.", ["tenant", "kind"])
REFUSED = Counter("graftwork_requests_limited", "Requests refused by a limit.", ["tenant", "limit"])
UNSETTLED = Counter("graftwork_usage_unsettled", "Failed attempts to write the usage of ended requests.")
log = logging.getLogger("graftwork.meter")
# The limits' names: of a minute by what they count, of longer periods by the period.
A_MINUTE = tuple((kind, f"{kind}_per_minute") for kind in ("requests", "tokens"))
A_PERIOD = tuple((period, f"tokens_per_{period}") for period in (DAY, MONTH))


RATE_HEADERS = {
    kind: tuple(f"x-ratelimit-{word}-{kind}".encode() for word in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
}


@dataclass
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


left_of = attrgetter("left")


@lru_cache(4096)
def tokens_of(tenant: str, kind: str) -> Counter:
    """Return the counter of these tokens; finding it takes longer than counting."""
    return TOKENS.labels(tenant, kind)


@dataclass(slots=True)
class Asking:
    """A request that waits to be recorded; `number` becomes its number, or why it is refused."""

    asked: Metered
    budgets: Sequence[Budget]
    number: asyncio.Future[int]


@dataclass(slots=True)
class Bill:
    """A metered request; `tag` is its place in the fair queue."""

    number: int
    asked: Metered
    buckets: list[tuple[str, TokenBucket]]
    subjects: tuple[str, str]
    tag: float

    @property
    def priority(self) -> int:
        """vLLM's priority: the lowest is computed first."""
        return int(self.tag)

    def headers(self) -> list[Header]:
        """Return the headers that say what is left of the tightest limits of a minute."""
        found: list[Header] = []
        for kind, names in RATE_HEADERS.items():
            if mine := [one for name, one in self.buckets if name == kind]:
                tight = min(mine, key=left_of) if len(mine) > 1 else mine[0]
                reset_s = (tight.capacity - tight.left) * 60 / tight.capacity if tight.capacity else 60.0
                found += (
                    (names[0], b"%.0f" % tight.capacity),
                    (names[1], b"%d" % max(0.0, tight.left)),
                    (names[2], b"%.3fs" % reset_s),
                )
        return found


class Meter:
    """Limits and usage of one gateway. Not thread-safe."""

    def __init__(
        self, usage: UsageLog, max_model_len: int, load_places: int, template_tokens: int = TEMPLATE_TOKENS
    ):
        self._usage, self._template_tokens = usage, template_tokens
        self.context, self._load_places = max_model_len, load_places
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        # Requests under way, by key and tenant.
        self.under_way: Tally[str] = Tally()
        # Of each tenant, the cold adapters that it waits for, and by how many requests.
        self.loading: dict[str, Tally[str]] = {}
        self._prewarming: dict[str, set[str]] = {}
        self._fair = FairShare()
        # Requests under way, all together.
        self._open = 0
        # What is to be written: who asks in this turn of the event loop, and what has ended since.
        self._asking: list[Asking] = []
        self._ended: list[Ended] = []
        self._timer: asyncio.TimerHandle | None = None

    def reserve(
        self, key: Key, tenant: Tenant, body: dict[str, Any], body_bytes: int, size: Size
    ) -> Reservation:
        """Return what a request reserves. Raises `Refused` (400) where its limits never admit it."""
        template = self._template_tokens + ("tools" in body) * TOOL_TOKENS
        is_plain = "prompt" in body or "prompts" in body
        prompt = body_bytes + (size.prompts if is_plain else template)
        return reserve(size, prompt, self.context, ceiling_of(key.limits, tenant.limits))

    @contextmanager
    def call(self, key: Key, tenant: Tenant, body_bytes: int = 0) -> Iterator[None]:
        """Count a call that generates nothing; one that tokenizes text takes tokens of the minute for it.

        Raises `LimitReached` as `open` does, and `Refused` (400) for a text that the limits never admit.
        """
        tokens = body_bytes // BYTES_A_TOKEN
        minutes = [given.get("tokens_per_minute", math.inf) for given in (key.limits, tenant.limits)]
        if tokens > min(minutes):
            said = (
                f"A limit of this key or its tenant admits {min(minutes) * BYTES_A_TOKEN:g} bytes a minute."
            )
            raise Refused(400, said, "limit_too_low")
        subjects, buckets = self._enter(key, tenant, tokens)
        try:
            yield
        finally:
            self._leave(subjects, buckets, 0)

    def refuse_spent(self, key: Key, tenant: Tenant) -> None:
        """Raise `LimitReached` where no request of this minute is left, before anything is read of it."""
        for bucket in self._requests_of(key, tenant):
            if bucket.left < 1:
                limit = f"{bucket.capacity:g} requests a minute"
                raise self._over(tenant, "requests_per_minute", limit, "", bucket.wait_s(1))

    def refused(self, key: Key, tenant: Tenant) -> None:
        """Count a request that was refused for what it asks: it costs the gateway as much as many others."""
        for bucket in self._requests_of(key, tenant):
            bucket.left = max(bucket.left - 1, -bucket.capacity)

    def _requests_of(self, key: Key, tenant: Tenant) -> list[TokenBucket]:
        now, name = time.monotonic(), "requests_per_minute"
        limits = ((f"key:{key.id}", key.limits), (f"tenant:{tenant.name}", tenant.limits))
        return [
            self._bucket(subject, "requests", given[name], now) for subject, given in limits if name in given
        ]

    async def open(self, key: Key, tenant: Tenant, asked: Metered) -> Bill:
        """Admit a request within all limits of its key and tenant, and reserve its tokens.

        Raises `LimitReached` with the time to retry, and `ServiceError` when usage cannot be written: no
        request is served that is not recorded.
        """
        subjects, buckets = self._enter(key, tenant, asked.reserved)
        budgets = [
            Budget(subject, period, given[limit])
            for subject, given in zip(subjects, (key.limits, tenant.limits), strict=True)
            for period, limit in A_PERIOD
            if limit in given
        ]
        try:
            number = await self._admit(asked, budgets)
        except BaseException as error:
            self._leave(subjects, buckets, asked.reserved)
            if isinstance(error, LimitReached):
                REFUSED.labels(tenant.name, "budget").inc()
            if isinstance(error, sqlite3.Error):
                said = f"The usage of this request cannot be recorded: {error}. Try again."
                raise ServiceError(said) from None
            raise
        tag = self._fair.enter(tenant.name, asked.reserved, tenant.weight)
        return Bill(number, asked, buckets, subjects, tag)

    def _enter(
        self, key: Key, tenant: Tenant, tokens: int
    ) -> tuple[tuple[str, str], list[tuple[str, TokenBucket]]]:
        """Take a request's place and its share of the minute. Raises `LimitReached`, as `open` does."""
        now = time.monotonic()
        subjects = (f"key:{key.id}", f"tenant:{tenant.name}")
        limits = ((subjects[0], key.limits), (subjects[1], tenant.limits))
        buckets = [
            (kind, self._bucket(subject, kind, given[limit], now))
            for subject, given in limits
            for kind, limit in A_MINUTE
            if limit in given
        ]
        for subject, given in limits:
            most = given.get("concurrency")
            if most is not None and self.under_way[subject] >= most:
                raise self._over(tenant, "concurrency", f"{most:g} requests under way", subject, 1.0)
        for kind, bucket in buckets:
            wanted = 1 if kind == "requests" else tokens
            if bucket.left < wanted:
                limit = f"{bucket.capacity:g} {kind} a minute"
                raise self._over(tenant, f"{kind}_per_minute", limit, "", bucket.wait_s(wanted))
        for kind, bucket in buckets:
            bucket.left -= 1 if kind == "requests" else tokens
        self.under_way.update(subjects)
        self._open += 1
        return subjects, buckets

    async def _admit(self, asked: Metered, budgets: Sequence[Budget]) -> int:
        """Record the request; draw from shared budgets what this machine lacks of them."""
        while True:
            try:
                return await self._written(asked, budgets)
            except Shortage as short:
                if not await asyncio.to_thread(self._usage.draw, short):
                    raise short.refusal from None

    async def _written(self, asked: Metered, budgets: Sequence[Budget]) -> int:
        """Record the request; return its number.

        Where others are under way, those of this turn of the event loop are recorded together.
        """
        if self._open == 1:
            (answer,) = self._record([(asked, budgets)])
            if isinstance(answer, Exception):
                raise answer
            return answer
        loop = asyncio.get_running_loop()
        asking = Asking(asked, budgets, loop.create_future())
        if not self._asking:
            loop.call_soon(self._write)
        self._asking.append(asking)
        try:
            return await asking.number
        except asyncio.CancelledError:
            if asking.number.done() and not asking.number.cancelled() and not asking.number.exception():
                self._end(asking.number.result(), asked, CLIENT_LEFT, (0, 0))
            raise

    def _end(self, number: int, asked: Metered, status: int, used: Used | None) -> None:
        """Record a request that has ended: at once where it is the last, else with the next that comes."""
        self._ended.append((number, asked, status, used))
        if not self._open:
            self._record(())
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLED_S, self._write_ended)

    def _write_ended(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Record the requests that have ended now. On the event loop."""
        if self._ended:
            self._record(())

    def _write(self) -> None:
        # A client may have left since.
        asking = [one for one in self._asking if not one.number.cancelled()]
        self._asking.clear()
        answers = self._record([(one.asked, one.budgets) for one in asking])
        for one, answer in zip(asking, answers, strict=True):
            if isinstance(answer, Exception):
                one.number.set_exception(answer)
            else:
                one.number.set_result(answer)

    def _record(self, asking: Sequence[tuple[Metered, Sequence[Budget]]]) -> Sequence[int | Exception]:
        """Record what has ended and what is asked for; return each one's number, or why it is refused."""
        try:
            answers = self._usage.record(self._ended, asking)
        except sqlite3.Error as error:
            if self._ended:
                UNSETTLED.inc()
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._write_ended)
                log.warning("The usage of %d requests could not be written: %s", len(self._ended), error)
            return [error] * len(asking)
        self._ended.clear()
        return answers

    def _leave(
        self, subjects: Sequence[str], buckets: Sequence[tuple[str, TokenBucket]], unused_tokens: int
    ) -> None:
        """End a request under way, and give back what it reserved of a minute's tokens and did not use."""
        self._open -= 1
        for subject in subjects:
            self.under_way[subject] -= 1
            if not self.under_way[subject]:
                del self.under_way[subject]
        for kind, bucket in buckets:
            if kind == "tokens":
                bucket.left = min(bucket.capacity, bucket.left + unused_tokens)

    def settle(self, bill: Bill, status: int, digest: str | None, used: Used | None) -> None:
        """Record what a request used, and which revision answered it (None: the base).

        `used` is (prompt, completion) tokens; None: not known, so that its reservation counts. While others
        are under way it is written with the next one, within `SETTLED_S`. At most the reservation is billed.
        """
        asked = bill.asked
        if used is not None and sum(used) > asked.reserved:
            prompt = min(used[0], asked.reserved)
            used = prompt, asked.reserved - prompt
        if asked.revision != (digest or ""):
            asked = asked._replace(revision=digest or "")
        self._fair.leave(bill.tag)
        self._leave(bill.subjects, bill.buckets, 0 if used is None else asked.reserved - sum(used))
        self._end(bill.number, asked, status, used)
        for kind, tokens in zip(("prompt", "completion"), used or (), strict=False):
            tokens_of(asked.tenant, kind).inc(tokens)
        if used is None:
            tokens_of(asked.tenant, "unknown").inc(asked.reserved)

    def prewarm(self, key: Key, tenant: Tenant, name: str, is_loading: Callable[[str], bool]) -> None:
        """Count an adapter that is loaded ahead of its requests. Raises as `cold_load`."""
        before = self._prewarming.get(tenant.name, set())
        self._prewarming[tenant.name] = {one for one in before if is_loading(one)}
        self._refuse_share(key, tenant, name)
        self._prewarming[tenant.name].add(name)

    @contextmanager
    def cold_load(self, key: Key, tenant: Tenant, name: str) -> Iterator[None]:
        """Wait for a cold adapter within the tenant's share of the queue of cold loads.

        Raises `LimitReached` when as many other adapters are loaded for this tenant as its share allows.
        """
        self._refuse_share(key, tenant, name)
        mine = self.loading.setdefault(tenant.name, Tally())
        mine[name] += 1
        try:
            yield
        finally:
            mine[name] -= 1
            if not mine[name]:
                del mine[name]

    def _refuse_share(self, key: Key, tenant: Tenant, name: str) -> None:
        share = tenant.limits.get("load_share", LOAD_SHARE if key.policies else 1.0)
        share = min(share, key.limits.get("load_share", 1.0))
        mine = {*self.loading.get(tenant.name, ()), *self._prewarming.get(tenant.name, ())}
        if name not in mine and len(mine) >= max(1, math.floor(share * self._load_places)):
            limit = f"{share:.0%} of the queue of cold loads"
            raise self._over(tenant, "load_share", limit, f"tenant:{tenant.name}", 1.0)

    def _bucket(self, subject: str, kind: str, capacity: float, now: float) -> TokenBucket:
        found = self._buckets.get((subject, kind))
        if found is None or found.capacity != capacity:
            found = self._buckets[subject, kind] = TokenBucket(capacity, capacity, now)
        found.refill(now)
        return found

    def _over(self, tenant: Tenant, limit: str, what: str, subject: str, retry_s: float) -> LimitReached:
        REFUSED.labels(tenant.name, limit).inc()
        of = f" of the {subject.partition(':')[0]}" if subject else ""
        return LimitReached(f"The limit{of}, {what}, is reached. Try again later.", min(retry_s, 60.0))
