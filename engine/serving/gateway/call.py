"""A call: one request from its admission to its end, its id, and the observation that is spooled of it.

An id says to whom it was given: who rates an answer has to be who got it. The first 20 of its 32 hex digits
are random, or those of a trusted proxy's id; the last 12 are a hash of them and of the key, which only this
installation can compute. So nothing is kept by id, and every engine can check one.
"""

import hashlib
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any

from prometheus_client import Counter

from engine.catalog.catalog import Key, Tenant
from engine.errors import Forbidden
from engine.ledger.spool import Spool
from engine.serving.gateway.answers import AnswerReader, Used
from engine.serving.gateway.asgi import App, Header, Receive, Refused, Send
from engine.serving.gateway.constraints import Constraint
from engine.serving.gateway.grammar_trial import GrammarTrial
from engine.serving.gateway.route_table import Endpoint
from engine.serving.gateway.routing import CANARY, FALLBACK, Router, Target
from engine.serving.residency.residency import Residency
from engine.settings.services import GatewayConfig

UNOBSERVED = Counter("graftwork_observations_lost", "Requests whose observation could not be spooled.")
FALLBACKS = Counter("graftwork_canary_fallbacks", "Requests that were answered in a canary's place.")
PROXYS = re.compile(rb"[0-9a-f]{32}")
DIGITS, SEED_DIGITS = 32, 20
MOST_IDS = 1 << 16
# Returns a keyed hash (hex digits) of a purpose and some words.
Hash = Callable[..., str]
log = logging.getLogger("graftwork.gateway")


def new_seed(given: bytes | None) -> str:
    """Return 32 hex digits to make an id of: those of a trusted proxy, else random ones."""
    return given.decode() if given is not None and PROXYS.fullmatch(given) else os.urandom(16).hex()


def id_for(key: Key, seed: str, hashed: Hash) -> str:
    """Return the id of a request by this key."""
    return _id_for(key.id, seed, hashed)


def _id_for(name: str, seed: str, hashed: Hash) -> str:
    begin = seed[:SEED_DIGITS]
    return begin + hashed("request", name, begin)[: DIGITS - SEED_DIGITS]


def is_given_to(key: Key, request_id: str, hashed: Hash) -> bool:
    """Return whether the id of an answer, which may have an API's prefix, was given to this key."""
    digits = request_id[-DIGITS:]
    expected = (_id_for(name, digits, hashed) for name in key.names)
    return len(digits) == DIGITS and any(compare_digest(digits.encode(), one.encode()) for one in expected)


def require(what: str, roles: Sequence[str], key: Key) -> None:
    """Raise `Forbidden` unless the key has one of these roles."""
    if not key.may(*roles):
        needed = " or ".join(map(repr, roles))
        raise Forbidden(
            f"{what} requires a key with the role {needed}; this key's are {', '.join(key.roles)}."
        )


class RecentIds:
    """The ids that were seen last, at most `MOST_IDS`."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def add(self, name: str) -> None:
        """Remember an id, and forget the oldest where there are too many."""
        self._seen[name] = None
        if len(self._seen) > MOST_IDS:
            self._seen.popitem(last=False)


def uncounted(_request_id: str) -> None:
    """Say that what a request has used is not known."""
    return


class Metering:
    """What limits calls and records their usage: `meter.Meter`; this one limits and records nothing."""

    def refuse_spent(self, call: "Call") -> None:
        """Raise `LimitReached` where no request of this minute is left, before anything is read of it."""

    def refused(self, call: "Call") -> None:
        """Count a request that was refused for what it asks."""

    def counted(self, call: "Call", text_bytes: int) -> AbstractContextManager[None]:
        """Count a call that generates nothing, of a text of so many bytes."""
        return nullcontext()

    async def open(self, call: "Call") -> None:
        """Admit a call within all limits, and reserve what it may take; the reservation bounds its answer."""

    def headers(self, call: "Call") -> list[Header]:
        """Return the headers of an answer that say what is left."""
        return []

    def note_beginning(self, call: "Call") -> None:
        """Record that the beginning of a stream was sent: no proxy asks another engine for it any more."""

    def settle(self, call: "Call") -> None:
        """Record what a call used, and which revision answered it."""

    def cold_load(self, call: "Call", name: str) -> AbstractContextManager[None]:
        """Wait for a cold adapter within the tenant's share of the queue."""
        return nullcontext()

    def prewarm(self, key: Key, tenant: Tenant, name: str, is_loading: Callable[[str], bool]) -> None:
        """Count an adapter that is loaded ahead of its requests, within the same share."""


@dataclass
class GatewayState:
    """What the stages need of the server; set once the engine is up.

    `context` is the base's, in tokens. `counted` returns the tokens that the engine has spent on a request so
    far, by its id; within `followed` it counts the request's samples that have ended, too. `rated` are
    responses whose reward is known, and those with the name of a known metric. `copied` forwards a call and
    may copy its answer, while somebody asks for copies.
    """

    router: Router
    residency: Residency
    spool: Spool
    name: str
    context: int
    grammars: GrammarTrial
    settings: GatewayConfig = field(default_factory=GatewayConfig)
    meter: Metering = field(default_factory=Metering)
    counted: Callable[[str], Used | None] = uncounted
    followed: Callable[[str], AbstractContextManager[object]] = nullcontext
    rated: RecentIds = field(default_factory=RecentIds)
    copied: Callable[["Call", App], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """How much a request asks for: prompts, completions of all prompts, and tokens of each completion.

    `most_tokens` is None where the request leaves it to the base's context.
    """

    prompts: int
    samples: int
    most_tokens: int | None


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way through the gateway; each stage fills in what the next ones read.

    `id` has 32 hex digits, which the answer's id has behind the prefix of its API. `parent` is the call of a
    canary that failed, in whose place this one answers; `name` is the adapter that vLLM computes with, None
    for the base.
    """

    state: GatewayState
    scope: Any
    receive: Receive
    send: Send
    endpoint: Endpoint
    id: str
    # Admitted: who asks, as of a look then (`time.perf_counter`), and the headers that the gateway reads.
    key: Key | None = None
    tenant: Tenant = field(init=False)
    looked_at: float = field(init=False)
    headers: dict[str, str] = field(init=False)
    # Read, at that time (`time.perf_counter`): for what, on whose behalf, and the body as it goes on.
    started: float = field(init=False)
    purpose: str = field(init=False)
    segment: str | None = field(init=False)
    unit: str | None = field(init=False)
    model: str = field(init=False)
    body: dict[str, Any] = field(init=False)
    raw: bytes = field(init=False, default=b"")
    body_bytes: int = field(init=False)
    size: Size = field(init=False)
    constraints: list[Constraint] = field(init=False)
    wants_usage: bool = True
    answer: AnswerReader = field(init=False)
    # Routed: who answers, as of a look at the routes that began then (epoch seconds).
    target: Target = field(init=False)
    admitted_at: float = field(init=False)
    # Metered: what the meter knows of it; vLLM's priority, of which the lowest is computed first.
    bill: Any = None
    priority: int = 0
    # Held and forwarded.
    name: str | None = None
    has_failed: bool = False
    is_observed: bool = False
    parent: "Call | None" = None

    @property
    def answer_id(self) -> str:
        """The id by which its client knows the answer."""
        return self.endpoint.id_prefix + self.id

    @property
    def is_canary(self) -> bool:
        """Whether a canary answers."""
        return self.target.arm == CANARY

    def in_its_place(self) -> "Call":
        """Return the call of whoever answers in place of this canary, which has failed."""
        other = copy(self)
        other.parent, other.answer = self, self.answer.again()
        other.name, other.has_failed, other.is_observed = None, False, False
        return other

    def reserve(self, template_tokens: int, ceiling: float) -> int:
        """Return the tokens that it may take: its prompts, with their template, and all of its completions.

        Where only its limits, `ceiling`, bound its answer, the body says so from now on. Raises `Refused`
        (400), with the largest length, where they never admit it.
        """
        body, size, context = self.body, self.size, self.state.context
        is_plain = "prompt" in body or "prompts" in body
        most_prompt = self.body_bytes + (size.prompts if is_plain else template_tokens)
        prompt = min(most_prompt, context * size.prompts)
        each = context if size.most_tokens is None else min(size.most_tokens, context)
        if prompt + size.samples * each <= ceiling:
            return prompt + size.samples * each
        most = int(ceiling - prompt) // size.samples
        if most < 1:
            said = (
                f"A limit of this key or its tenant admits {ceiling:g} tokens, and this prompt may have "
                f"{prompt} already. Send a shorter one, in fewer parts."
            )
            raise Refused(400, said, "limit_too_low")
        if size.most_tokens is not None:
            said = (
                f"A limit of this key or its tenant admits {ceiling:g} tokens, and this request may take "
                f"{prompt + size.samples * each}. Ask for at most {most} tokens of each completion."
            )
            raise Refused(400, said, "limit_too_low", "max_tokens")
        body[self.endpoint.length] = most
        return prompt + size.samples * most

    def observation(self) -> dict[str, Any]:
        """Return the row for the ledger's table `observations`."""
        answer, target, key = self.answer, self.target, self.key
        assert key is not None
        prompt, completion = answer.used if answer.used and any(answer.used) else (None, None)
        first_s = answer.first_at and answer.first_at - self.started
        between_s = answer.last_at - answer.first_at if answer.first_at else 0.0
        return {
            # Not the answer's where another gives it, so that a rating of it does not count for the canary.
            "id": f"{self.answer_id}-canary" if self.has_failed else self.answer_id,
            "at": self.admitted_at,
            "policy": target.policy,
            "digest": target.digest,
            "arm": target.arm,
            "unit": hash_unit(self, self.unit) if self.unit else None,
            "segment": self.segment,
            "key": key.id,
            "status": answer.final_status,
            "latency_s": time.perf_counter() - self.started,
            "ttft_s": first_s,
            "token_s": between_s / (answer.pieces - 1) if answer.pieces > 1 else None,
            "outcome": answer.outcome,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "pieces": answer.pieces if answer.is_stream and answer.pieces else None,
            "route_version": target.route_version,
            "gateway": self.state.name,
            "purpose": self.purpose,
        }


def observe(call: Call) -> None:
    """Spool the observation, once. A full disk is counted and logged, and never changes the answer."""
    if call.is_observed:
        return
    call.is_observed = True
    if call.target.arm == FALLBACK:
        FALLBACKS.inc()
    try:
        call.state.spool.emit("observations", **call.observation())
    except OSError as error:
        UNOBSERVED.inc()
        log.warning("The observation of %s could not be spooled: %s", call.id, error)


def hash_unit(call: Call, unit: str) -> str:
    """Return a hash of a tenant's unit (24 hex digits), which only this installation can compute.

    The ledger never stores the unit itself. A release that began under an older version keeps its hashes.
    """
    assert call.key is not None
    if call.target.plain_units:
        return hashlib.sha256(f"{call.target.policy}\0{unit}".encode()).hexdigest()[:24]
    return call.state.router.keyed_hash("unit", call.key.owner, call.target.policy or "", unit)
