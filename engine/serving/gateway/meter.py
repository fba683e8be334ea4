"""Limits and usage of calls: a bill is opened before a call is forwarded and settled after it.

Rates and calls under way are counted in memory, by each gateway for itself. Budgets of a day and a month are
in the usage log, which all gateways of a machine share, and between machines in their Postgres.
"""

import math
import sqlite3
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.errors import LimitReached, ServiceError
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import Metered, UsageWriter
from engine.serving.gateway.asgi import Header, Refused
from engine.serving.gateway.call import Call
from engine.serving.gateway.limits import (
    BYTES_A_TOKEN,
    REFUSED,
    TEMPLATE_TOKENS,
    TOOL_TOKENS,
    Account,
    FairShare,
    TokenBucket,
    over,
    reserve,
)

# The share of the queue of cold loads that a tenant with policies of its own may take.
LOAD_SHARE = 0.5
# Accounts that are kept; another is made from the rows of its key.
MOST_ACCOUNTS = 1 << 14
TOKENS = Counter("graftwork_tokens", "Tokens of settled requests.", ["tenant", "kind"])
RATE_HEADERS = tuple(
    tuple(f"x-ratelimit-{word}-{kind}".encode() for word in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
)
left_of = attrgetter("left")


@lru_cache(4096)
def tokens_of(tenant: str, kind: str) -> Counter:
    """Return the counter of these tokens; finding it takes longer than counting."""
    return TOKENS.labels(tenant, kind)


@dataclass(slots=True)
class Bill:
    """What the meter knows of a call: its row in the usage log and the row's number, its tag in the queue."""

    account: Account
    asked: Metered
    number: int
    tag: float


class Meter:
    """Limits and usage of one gateway. Not thread-safe."""

    def __init__(self, usage: UsageLog, load_places: int, template_tokens: int = TEMPLATE_TOKENS):
        self._usage, self._template_tokens = UsageWriter(usage, usage.draw), template_tokens
        self._load_places = load_places
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._accounts: dict[str, Account] = {}
        # Calls under way, by key and tenant.
        self.under_way: Tally[str] = Tally()
        # Of each tenant, the cold adapters that it waits for, and by how many calls.
        self.loading: dict[str, Tally[str]] = {}
        self._prewarming: dict[str, set[str]] = {}
        self._fair = FairShare()
        # Calls under way, all together.
        self._open = 0

    def _account_of(self, call: Call) -> Account:
        """Return the account of the call's rows; rows that have changed make a new one."""
        key, tenant = call.key, call.tenant
        assert key is not None
        found = self._accounts.get(key.id)
        if found is None or found.key is not key or found.tenant is not tenant:
            found = self._accounts[key.id] = Account.of(key, tenant, self._buckets)
            if len(self._accounts) > MOST_ACCOUNTS:
                # The buckets are kept beside it.
                del self._accounts[next(iter(self._accounts))]
        return found

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

    def flush(self) -> None:
        """Record the calls that have ended now. On the event loop."""
        self._usage.flush()

    async def open(self, call: Call) -> None:
        """Admit a call within all limits of its key and tenant, and reserve its tokens.

        Where the call names no number of tokens, its limits may. Raises `LimitReached` with the time to
        retry, `Refused` (400) where the limits never admit it, and `ServiceError` when usage cannot be
        written: no call is served that is not recorded.
        """
        account = self._account_of(call)
        tokens = self._reserve(call, account)
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
            # Of a whole answer no byte is sent before its end; a stream that breaks is not asked again.
            int(call.state.settings.proxy_sets_id and not call.answer.is_stream),
        )
        try:
            number = await self._usage.admit(asked, account.budgets, is_alone=self._open == 1)
        except BaseException as error:
            self._leave(account, tokens)
            if isinstance(error, LimitReached):
                REFUSED.labels(call.tenant.name, "budget").inc()
            if isinstance(error, sqlite3.Error):
                said = f"The usage of this request cannot be recorded: {error}. Try again."
                raise ServiceError(said) from None
            raise
        tag = self._fair.enter(call.tenant.name, tokens, call.tenant.weight)
        call.bill, call.priority = Bill(account, asked, number, tag), int(tag)

    def _reserve(self, call: Call, account: Account) -> int:
        """Return the tokens that a call may take, and bound its answer where only its limits do."""
        body, size = call.body, call.size
        template = self._template_tokens + ("tools" in body) * TOOL_TOKENS
        is_plain = "prompt" in body or "prompts" in body
        prompt = call.body_bytes + (size.prompts if is_plain else template)
        reserved = reserve(size, prompt, call.state.context, account.ceiling)
        if reserved.length is not None:
            body[call.endpoint.length] = reserved.length
        return reserved.tokens

    def _enter(self, account: Account, tokens: int) -> None:
        """Take a call's place and its share of the minute. Raises `LimitReached`, as `open` does."""
        for subject, most in account.concurrency:
            if self.under_way[subject] >= most:
                raise over(account.tenant, "concurrency", f"{most:g} requests under way", subject, 1.0)
        account.take(tokens)
        for subject in account.subjects:
            self.under_way[subject] += 1
        self._open += 1

    def _leave(self, account: Account, unused_tokens: int) -> None:
        """End a call under way, and give back what it reserved of a minute's tokens and did not use."""
        self._open -= 1
        for subject in account.subjects:
            self.under_way[subject] -= 1
            if not self.under_way[subject]:
                del self.under_way[subject]
        for bucket in account.tokens:
            bucket.left = min(bucket.capacity, bucket.left + unused_tokens)

    def headers(self, call: Call) -> list[Header]:
        """Return the headers that say what is left of the tightest limits of a minute."""
        found: list[Header] = []
        account = call.bill.account
        for (limit, remaining, reset), mine in zip(
            RATE_HEADERS, (account.requests, account.tokens), strict=True
        ):
            if mine:
                tight = min(mine, key=left_of) if len(mine) > 1 else mine[0]
                reset_s = (tight.capacity - tight.left) * 60 / tight.capacity if tight.capacity else 60.0
                found += (
                    (limit, b"%.0f" % tight.capacity),
                    (remaining, b"%d" % max(0.0, tight.left)),
                    (reset, b"%.3fs" % reset_s),
                )
        return found

    def settle(self, call: Call) -> None:
        """Record what a call used, and which revision answered it.

        What is not known counts as reserved, and at most the reservation is billed. It is written within
        `SETTLED_S`: one that a kill of the process leaves unwritten counts as reserved.
        """
        bill: Bill = call.bill
        asked, used, digest = bill.asked, call.answer.used, call.target.digest or ""
        if used is not None and sum(used) > asked.reserved:
            prompt = min(used[0], asked.reserved)
            used = prompt, asked.reserved - prompt
        if asked.revision != digest:
            asked = asked._replace(revision=digest)
        self._fair.leave(bill.tag)
        self._leave(bill.account, 0 if used is None else asked.reserved - sum(used))
        self._usage.end(bill.number, asked, call.answer.fault or call.answer.status, used)
        if used is None:
            tokens_of(asked.tenant, "unknown").inc(asked.reserved)
        else:
            tokens_of(asked.tenant, "prompt").inc(used[0])
            tokens_of(asked.tenant, "completion").inc(used[1])

    def prewarm(self, key: Key, tenant: Tenant, name: str, is_loading: Callable[[str], bool]) -> None:
        """Count an adapter that is loaded ahead of its requests. Raises as `cold_load`."""
        before = self._prewarming.get(tenant.name, set())
        self._prewarming[tenant.name] = {one for one in before if is_loading(one)}
        self._refuse_share(key, tenant, name)
        self._prewarming[tenant.name].add(name)

    @contextmanager
    def cold_load(self, call: Call, name: str) -> Iterator[None]:
        """Wait for a cold adapter within the tenant's share of the queue of cold loads.

        Raises `LimitReached` when as many other adapters are loaded for this tenant as its share allows.
        """
        assert call.key is not None
        self._refuse_share(call.key, call.tenant, name)
        mine = self.loading.setdefault(call.tenant.name, Tally())
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
            raise over(tenant, "load_share", limit, f"tenant:{tenant.name}", 1.0)
