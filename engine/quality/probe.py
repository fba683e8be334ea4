"""Effect probe: the engine must reproduce the log-probabilities that the trainer shipped with a revision.

A probe holds fixed rows of tokens with each token's log-probability under the adapter and under the plain
base. Equality under the adapter shows that all of it is applied; the base's own values tell an adapter that
was silently dropped from one that is wrong, and a wrong base from both. Loads no tensors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from engine.errors import AdapterError, ServiceError

VERSION = 1
# Largest difference of one token's log-probability between trainer and engine. float32: the worst seen is
# a few 1e-6, from sums in another order. bfloat16: the engine rounds every activation to 8 bits.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
TIMEOUT_S = 120.0
# Over every difference of log-probabilities, and finite: JSON has no infinity.
NO_NUMBER = 1e9
MODULE = re.compile(r"model\.layers\.\d+\.[\w.]*?\w(?=\.lora_|[\s,;:]|\.$)")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProbeRow:
    """Token ids, and log-probabilities of all but the first, under the adapter and under the base."""

    tokens: tuple[int, ...]
    adapter: tuple[float, ...]
    base: tuple[float, ...]


@dataclass(frozen=True)
class Probe:
    digest: str
    base_digest: str
    dtype: str
    rows: tuple[ProbeRow, ...]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


@dataclass(frozen=True)
class ProbeResult:
    """What the engine made of a probe. Errors and effect are in nats, the largest over all tokens.

    `error` is the engine's distance from the trainer under the adapter, `base_error` under the base;
    `effect` is how far the engine's adapter moves it from the engine's base, `claimed` the trainer's.
    `module` is where a refused revision's fault most likely is; `errors` are the nats of each projection
    alone, where they were asked for.
    """

    accepted: bool
    reason: str
    error: float
    base_error: float
    effect: float
    claimed: float
    tolerance: float
    module: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_base(self) -> bool:
        """Whether the revision was refused only because it changes nothing: a result, not a fault."""
        return not self.accepted and max(self.error, self.base_error, self.claimed) <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "max_error": self.error}


def from_json(body: dict[str, Any]) -> Probe:
    """Read a probe; `AdapterError` when it is empty or of another format."""
    if body.get("version") != VERSION or not body.get("rows"):
        raise AdapterError(
            f"The probe is not of format version {VERSION} or has no rows. Export the revision again."
        )
    rows = tuple(
        ProbeRow(*(tuple(row[key]) for key in ("tokens", "adapter", "base"))) for row in body["rows"]
    )
    return Probe(body["digest"], body["base_digest"], body["dtype"], rows)


def check(engine_url: str, key: str, served: str, base_name: str, probe: Probe) -> ProbeResult:
    """Ask the engine for the probe's log-probabilities under `served` and under its base, and judge them.

    An adapter that the engine refuses to load is refused with its sentence. Raises `ServiceError` when the
    engine does not answer.
    """
    rows, tolerance = [row.tokens for row in probe.rows], TOLERANCE[probe.dtype]
    with asking(engine_url, key) as client:
        base = [ask(client, base_name, tokens) for tokens in rows]
        try:
            adapter = [ask(client, served, tokens) for tokens in rows]
        except AdapterError as fault:
            found = MODULE.search(str(fault))
            unserved = judge(probe, base, base, tolerance)
            module = found[0] if found else UNKNOWN
            return replace(unserved, accepted=False, reason=str(fault), module=module)
    return judge(probe, adapter, base, tolerance)


def asking(engine_url: str, key: str) -> httpx.Client:
    """Return a client of the engine that may ask for any revision, in order to judge it."""
    headers = {"Authorization": f"Bearer {key}", "x-graftwork-purpose": "probe"}
    return httpx.Client(base_url=engine_url, headers=headers, timeout=TIMEOUT_S)


def ask(client: httpx.Client, model: str, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first under a model.

    Raises `AdapterError` with the engine's sentence when it refuses the adapter.
    """
    body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    try:
        response = client.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        raise ServiceError(
            f"The engine at {client.base_url} did not answer the effect probe: {error!r}."
        ) from None
    if response.status_code == 422:
        raise AdapterError(response.json()["error"]["message"])
    if response.status_code != 200:
        raise ServiceError(f"The engine refused the effect probe of {model!r}: {response.text[:300]}")
    found = response.json()["choices"][0]["prompt_logprobs"]
    return [found[i][str(token)]["logprob"] for i, token in enumerate(tokens) if i > 0]


def judge(
    probe: Probe, adapter: Sequence[Sequence[float]], base: Sequence[Sequence[float]], tolerance: float
) -> ProbeResult:
    """Compare what the engine answered under adapter and base with what the trainer shipped."""
    shipped_adapter = [row.adapter for row in probe.rows]
    shipped_base = [row.base for row in probe.rows]
    error, base_error = distance(adapter, shipped_adapter), distance(base, shipped_base)
    effect, claimed = distance(adapter, base), distance(shipped_adapter, shipped_base)
    if base_error > tolerance:
        reason = f"The engine's base is another one: its log-probabilities differ by {base_error:.2g} nats."
    elif error > tolerance and effect <= tolerance:
        reason = f"The engine serves the plain base, although the revision moves it by {claimed:.2g} nats."
    elif error > tolerance:
        reason = f"The engine does not reproduce the revision: it differs by {error:.2g} nats."
    elif claimed <= tolerance:
        reason = f"The revision is the base: it moves no log-probability by more than {claimed:.2g} nats."
    else:
        reason = ""
    return ProbeResult(
        not reason,
        reason or f"Reproduced within {error:.2g} nats.",
        error,
        base_error,
        effect,
        claimed,
        tolerance,
    )


def distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of one value; `NO_NUMBER` when a value is not a number."""
    pairs = [
        (a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)
    ]
    gaps = [abs(a - b) for a, b in pairs]
    return max(gap if gap < NO_NUMBER else NO_NUMBER for gap in gaps)
