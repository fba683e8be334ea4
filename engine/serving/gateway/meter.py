"""Limits and usage of calls: a bill is opened before a call is forwarded and settled after it.

Rates and calls under way are counted in memory, by each gateway for itself. Budgets of a day and a month are
in the usage log, which all gateways of a machine share, and between machines in their Postgres.

Where the engine is full, tenants share it by start-time fair queueing (Goyal et al., 1996). Each call gets a
start tag, which vLLM's scheduler takes as its priority (the lowest first). A tenant's tags advance by its
tokens over its weight, so a burst queues behind its own earlier calls and not in front of other tenants. A
tenant that was idle starts at the tag that is in service now: it saves nothing up.
"""

import heapq
import math
import sqlite3
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.errors import LimitReached, ServiceError
from engine.metering.usage_log import UsageEntry, UsageLog
from engine.metering.usage_rows import DAY, MONTH, Budget, Metered
from engine.serving.gateway.asgi import Header, Refused
from engine.serving.gateway.call import Call, Metering

# What a chat template adds to a prompt, where it is not known, and what it adds for tools. For each message
# it adds less than the bytes of a message without text; a token has at least one byte of the body.
TEMPLATE_TOKENS = TOOL_TOKENS = 256
# Of text that is only tokenized, which costs less.
BYTES_A_TOKEN = 4
# The limits of longer periods, by the period.
A_PERIOD = tuple((period, f"tokens_per_{period}") for period in (DAY, MONTH))
# Accounts that are kept; another is made from the rows of its key.
MOST_ACCOUNTS = 1 << 14
# The share of the queue of cold loads that a tenant with policies of its own may take.
LOAD_SHARE = 0.5
# Beyond the priority of every other call, of which the lowest is computed first.
BEHIND_ALL = 1 << 52
REFUSED = Counter("graftwork_requests_limited", "Requests refused by a limit.", ["tenant", "limit"])
TOKENS = Counter("graftwork_tokens", "Tokens of settled requests.", ["tenant", "kind"])
RATE_HEADERS = tuple(
    tuple(f"x-ratelimit-{word}-{kind}".encode() for word in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
)
left_of = attrgetter("left")


def over(tenant: Tenant, limit: str, what: str, subject: str, retry_s: float) -> LimitReached:
    """Return the error for a limit that is reached, and count it."""
    REFUSED.labels(tenant.name, limit).inc()
    of = f" of the {subject.partition(':')[0]}" if subject else ""
    return LimitReached(f"The limit{of}, {what}, is reached. Try again later.", min(retry_s, 60.0))


@lru_cache(4096)
def tokens_of(tenant: str, kind: str) -> Counter:
    """Return the counter of these tokens; finding it takes longer than counting."""
    return TOKENS.labels(tenant, kind)


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
    bucket = buckets.get(name)
    if bucket is None or bucket.capacity != capacity:
        bucket = buckets[name] = TokenBucket(capacity, capacity, time.monotonic())
    return bucket


class LoadShare:
    """How many cold adapters each tenant waits for, of the `places` that the queue has. Not thread-safe."""

    def __init__(self, places: int):
        self._places = places
        # Of each tenant, the adapters that it waits for, and by how many calls; and those loaded ahead.
        self.waited: dict[str, Tally[str]] = {}
        self._ahead: dict[str, set[str]] = {}

    def prewarm(self, key: Key, tenant: Tenant, name: str, is_loading: Callable[[str], bool]) -> None:
        """Count an adapter that is loaded ahead of its requests. Raises as `wait`."""
        before = self._ahead.get(tenant.name, set())
        self._ahead[tenant.name] = {one for one in before if is_loading(one)}
        self._refuse(key, tenant, name)
        self._ahead[tenant.name].add(name)

    @contextmanager
    def wait(self, key: Key, tenant: Tenant, name: str) -> Iterator[None]:
        """Wait for a cold adapter.

        Raises `LimitReached` when as many other adapters are loaded for this tenant as its share allows.
        """
        self._refuse(key, tenant, name)
        mine = self.waited.setdefault(tenant.name, Tally())
        mine[name] += 1
        try:
            yield
        finally:
            mine[name] -= 1
            if not mine[name]:
                del mine[name]

    def _refuse(self, key: Key, tenant: Tenant, name: str) -> None:
        share = tenant.limits.get("load_share", LOAD_SHARE if key.policies else 1.0)
        share = min(share, key.limits.get("load_share", 1.0))
        mine = {*self.waited.get(tenant.name, ()), *self._ahead.get(tenant.name, ())}
        if name not in mine and len(mine) >= max(1, math.floor(share * self._places)):
            limit = f"{share:.0%} of the queue of cold loads"
            raise over(tenant, "load_share", limit, f"tenant:{tenant.name}", 1.0)


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


@dataclass(slots=True)
class Bill:
    """What the meter knows of a call: its entry in the usage log, and its tag (a shadow's: None)."""

    account: Account
    entry: UsageEntry
    tag: float | None


class Meter(Metering):
    """Limits and usage of one gateway. Not thread-safe."""

    def __init__(self, usage: UsageLog, load_places: int, template_tokens: int = TEMPLATE_TOKENS):
        self._usage, self._template_tokens = usage, template_tokens
        # Of the queue of cold loads.
        self.loads = LoadShare(load_places)
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._accounts: dict[str, Account] = {}
        # Calls under way, by key and tenant.
        self.under_way: Tally[str] = Tally()
        self._fair = FairShare()

    def _account_of(self, call: Call) -> Account:
        """Return the account of the call's rows; rows that have changed make a new one."""
        key, tenant = call.key, call.tenant
        assert key is not None
        account = self._accounts.get(key.id)
        if account is None or account.key is not key or account.tenant is not tenant:
            account = self._accounts[key.id] = Account.of(key, tenant, self._buckets)
            if len(self._accounts) > MOST_ACCOUNTS:
                # The buckets are kept beside it.
                del self._accounts[next(iter(self._accounts))]
        return account

    def refuse_spent(self, call: Call) -> None:
        """Raise `LimitReached` where no request of this minute is left, before anything is read of it."""
        self._account_of(call).refuse_empty("requests", 1)

    def refused(self, call: Call) -> None:
        """Count a request that was refused for what it asks: it costs the gateway as much as many others."""
        for bucket in self._account_of(call).requests:
            bucket.left = max(bucket.left - 1, -bucket.capacity)

    @contextmanager
    def counted(self, call: Call, text_bytes: int) -> Iterator[None]:
        """Count a call that generates nothing; one that tokenizes text takes tokens of the minute for it.

        Raises `LimitReached` as `open` does, and `Refused` (400) for a text that the limits never admit.
        """
        account, tokens = self._account_of(call), text_bytes // BYTES_A_TOKEN
        most = min((bucket.capacity for bucket in account.tokens), default=math.inf)
        if tokens > most:
            said = f"A limit of this key or its tenant admits {most * BYTES_A_TOKEN:g} bytes a minute."
            raise Refused(400, said, "limit_too_low")
        self._enter(account, tokens)
        try:
            yield
        finally:
            self._leave(account, 0)

    async def open(self, call: Call) -> None:
        """Admit a call within all limits of its key and tenant, and reserve its tokens.

        Where the call names no number of tokens, its limits may. Raises `LimitReached` with the time to
        retry, `Refused` (400) where the limits never admit it, and `ServiceError` when usage cannot be
        written: no call is served that is not recorded.
        """
        account = self._account_of(call)
        template = self._template_tokens + ("tools" in call.body) * TOOL_TOKENS
        tokens = call.reserve(template, account.ceiling)
        self._enter(account, tokens)
        asked = Metered(
            call.answer_id,
            call.tenant.name,
            account.key.id,
            call.target.policy or "",
            call.target.digest or "",
            call.purpose,
            call.admitted_at,
            tokens,
            # A whole answer until its end, a stream until `note_beginning`.
            int(call.state.settings.proxy_sets_id),
        )
        try:
            entry = await self._usage.admit_or_draw(asked, account.budgets)
        except BaseException as error:
            self._leave(account, tokens)
            if isinstance(error, LimitReached):
                REFUSED.labels(call.tenant.name, "budget").inc()
            if isinstance(error, sqlite3.Error | OSError):
                said = f"The usage of this request cannot be recorded: {error}. Try again."
                raise ServiceError(said) from None
            raise
        # Nobody waits for a shadow's answer, so it has no place among the tenants: all others come before it.
        entered = call.purpose != "shadow"
        tag = self._fair.enter(call.tenant.name, tokens, call.tenant.weight) if entered else None
        call.bill, call.priority = Bill(account, entry, tag), BEHIND_ALL if tag is None else int(tag)

    def _enter(self, account: Account, tokens: int) -> None:
        """Take a call's place and its share of the minute. Raises `LimitReached`, as `open` does."""
        for subject, most in account.concurrency:
            if self.under_way[subject] >= most:
                raise over(account.tenant, "concurrency", f"{most:g} requests under way", subject, 1.0)
        account.take(tokens)
        for subject in account.subjects:
            self.under_way[subject] += 1

    def _leave(self, account: Account, unused_tokens: int) -> None:
        """End a call under way, and give back what it reserved of a minute's tokens and did not use."""
        for subject in account.subjects:
            self.under_way[subject] -= 1
            if not self.under_way[subject]:
                del self.under_way[subject]
        for bucket in account.tokens:
            bucket.left = min(bucket.capacity, bucket.left + unused_tokens)

    def headers(self, call: Call) -> list[Header]:
        """Return the headers that say what is left of the tightest limits of a minute."""
        headers: list[Header] = []
        account = call.bill.account
        for (limit, remaining, reset), mine in zip(
            RATE_HEADERS, (account.requests, account.tokens), strict=True
        ):
            if mine:
                tight = min(mine, key=left_of) if len(mine) > 1 else mine[0]
                reset_s = (tight.capacity - tight.left) * 60 / tight.capacity if tight.capacity else 60.0
                headers += (
                    (limit, b"%.0f" % tight.capacity),
                    (remaining, b"%d" % max(0.0, tight.left)),
                    (reset, b"%.3fs" % reset_s),
                )
        return headers

    def note_beginning(self, call: Call) -> None:
        """Record that the beginning of a stream was sent: no proxy asks another engine for it any more."""
        if call.bill is not None and call.bill.entry.request.repeated:
            self._usage.note_beginning(call.bill.entry)

    def settle(self, call: Call) -> None:
        """Record what a call used, and which revision answered it.

        What is not known counts as reserved, and at most the reservation is billed.
        """
        bill: Bill = call.bill
        asked, used = bill.entry.request, call.answer.used
        if used is not None:
            prompt = min(max(used[0], 0), asked.reserved)
            used = prompt, min(max(used[1], 0), asked.reserved - prompt)
        if bill.tag is not None:
            self._fair.leave(bill.tag)
        self._leave(bill.account, 0 if used is None else asked.reserved - sum(used))
        status = call.answer.fault or call.answer.status
        self._usage.settle(bill.entry, status, used, call.target.digest or "")
        if used is None:
            tokens_of(asked.tenant, "unknown").inc(asked.reserved)
        else:
            tokens_of(asked.tenant, "prompt").inc(used[0])
            tokens_of(asked.tenant, "completion").inc(used[1])

    def cold_load(self, call: Call, name: str) -> AbstractContextManager[None]:
        """Wait for a cold adapter within the tenant's share of the queue. Raises as `LoadShare.wait`."""
        assert call.key is not None
        return self.loads.wait(call.key, call.tenant, name)

    def prewarm(self, key: Key, tenant: Tenant, name: str, is_loading: Callable[[str], bool]) -> None:
        """Count an adapter that is loaded ahead of its requests, within the same share."""
        self.loads.prewarm(key, tenant, name, is_loading)


def ceiling_of(*limits: Mapping[str, float]) -> float:
    """Return the tokens of a request that no wait makes these limits admit more than."""
    ceilings = (one for given in limits for name, one in given.items() if name.startswith("tokens_per_"))
    return min(ceilings, default=math.inf)
