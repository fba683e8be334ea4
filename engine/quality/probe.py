"""Effect probe: the engine must reproduce the log-probabilities that the trainer shipped with a revision.

A probe holds fixed rows of tokens with each token's log-probability under the adapter and under the plain
base. Equality under the adapter shows that all of it is applied. The base's values distinguish a silently
dropped adapter from a wrong one, and a wrong base from both.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine.clients.engine import EngineClient
from engine.errors import AdapterError

VERSION = 1
# Tolerated nats between trainer and engine, by the measure of MEASURES. float32: the worst correct probe
# had a few 1e-6, from another summation order. bfloat16: 0.039 over 63 correct probes of 8 rows, see
# docs/benchmarks/probe.md.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
# In bfloat16 the error under an adapter is at most 2.1 times that under the base, on the same tokens.
BASE_ERRORS, LEAST = 2.5, 0.02
TIMEOUT_S = 120.0
# Larger than any difference of log-probabilities, and finite: JSON has no infinity.
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
    """Probe rows of the revision `digest` in the engine's `dtype`."""

    digest: str
    base_digest: str
    dtype: str
    rows: tuple[ProbeRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the probe as JSON values with its format version."""
        return {"version": VERSION, **asdict(self)}


@dataclass(frozen=True)
class ProbeResult:
    """The verdict on a probe. Errors and effects are in nats, by the measure of the probe's dtype.

    `error`: distance between engine and trainer under the adapter; `base_error`: under the base. `effect`:
    distance between adapter and base in the engine; `claimed`: in the trainer. `max_error`: the largest error
    of one token under the adapter. `module`: the most likely place of a refused revision's fault. `errors`:
    the error of each projection alone, when requested.
    """

    accepted: bool
    reason: str
    error: float
    base_error: float
    effect: float
    claimed: float
    tolerance: float
    max_error: float
    module: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_base(self) -> bool:
        """Say whether the revision was refused only because it equals the base, which is no fault."""
        return not self.accepted and max(self.error, self.base_error, self.claimed) <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def from_json(body: dict[str, Any]) -> Probe:
    """Read a probe; `AdapterError` when it is empty, malformed, or of another format version."""
    if body.get("version") != VERSION or not body.get("rows"):
        raise AdapterError(
            f"The probe has no rows or another format version than {VERSION}. Export the revision again."
        )
    try:
        rows = tuple(
            ProbeRow(*(tuple(row[key]) for key in ("tokens", "adapter", "base"))) for row in body["rows"]
        )
        probe = Probe(body["digest"], body["base_digest"], body["dtype"], rows)
        is_whole = probe.dtype in TOLERANCE and all(map(_is_whole, rows))
    except (KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise AdapterError(
            f"The probe needs a dtype of {', '.join(TOLERANCE)}, rows of two tokens or more, and for each "
            "token but the first a finite log-probability under adapter and base. Export the revision again."
        )
    return probe


def _is_whole(row: ProbeRow) -> bool:
    numbers = (*row.adapter, *row.base)
    return 1 <= len(row.tokens) - 1 == len(row.adapter) == len(row.base) and all(map(math.isfinite, numbers))


def check(engine_url: str, key: str, served: str, base_name: str, probe: Probe) -> ProbeResult:
    """Get the probe's log-probabilities under `served` and the base from the engine, and judge them.

    When the engine refuses to load the adapter, the result is a refusal with the engine's reason. Raises
    `ServiceError` when the engine does not answer.
    """
    rows, tolerance = [row.tokens for row in probe.rows], TOLERANCE[probe.dtype]
    with asking(engine_url, key) as engine:
        base = [engine.logprobs(base_name, tokens) for tokens in rows]
        try:
            adapter = [engine.logprobs(served, tokens) for tokens in rows]
        except AdapterError as fault:
            match = MODULE.search(str(fault))
            unserved = judge(probe, base, base, tolerance)
            module = match[0] if match else UNKNOWN
            return replace(unserved, accepted=False, reason=str(fault), module=module)
    return judge(probe, adapter, base, tolerance)


def asking(engine_url: str, key: str) -> EngineClient:
    """Return an engine client that may request any revision, even an unreleased one."""
    return EngineClient(engine_url, key, "probe", TIMEOUT_S)


def judge(
    probe: Probe, adapter: Sequence[Sequence[float]], base: Sequence[Sequence[float]], tolerance: float
) -> ProbeResult:
    """Compare what the engine answered under adapter and base with what the trainer shipped.

    `tolerance` bounds the base's error. In bfloat16 the other bounds are derived from the base's error.
    """
    shipped_adapter = [row.adapter for row in probe.rows]
    shipped_base = [row.base for row in probe.rows]
    moved = gaps(shipped_adapter, shipped_base)
    differences = gaps(adapter, shipped_adapter), gaps(base, shipped_base), gaps(adapter, base), moved
    error, base_error, effect, claimed = (MEASURES[probe.dtype](each, moved) for each in differences)
    if probe.dtype == "bfloat16":
        tolerance = min(tolerance, max(LEAST, BASE_ERRORS * base_error))
    if base_error > tolerance:
        reason = f"The engine serves a different base: its log-probabilities differ by {base_error:.2g} nats."
    elif error > tolerance and effect <= tolerance:
        reason = f"The engine serves the plain base, although the revision moves it by {claimed:.2g} nats."
    elif error > tolerance:
        reason = f"The engine does not reproduce the revision: it differs by {error:.2g} nats."
    elif claimed <= tolerance:
        reason = f"The revision is the base: it moves log-probabilities by only {claimed:.2g} nats."
    else:
        reason = ""
    says = reason or f"Reproduced within {error:.2g} nats."
    return ProbeResult(not reason, says, error, base_error, effect, claimed, tolerance, max(differences[0]))


def gaps(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> list[float]:
    """Return the absolute difference of each value, row after row; `NO_NUMBER` for NaN and infinity."""
    pairs = [
        (a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)
    ]
    differences = [abs(a - b) for a, b in pairs]
    return [gap if gap < NO_NUMBER else NO_NUMBER for gap in differences]


def largest(differences: Sequence[float], moved: Sequence[float]) -> float:
    """Return the largest gap of one token."""
    return max(differences)


def middle(differences: Sequence[float], moved: Sequence[float]) -> float:
    """Return the median gap over the half of the tokens with the largest `moved`.

    One NaN or infinite gap makes the result `NO_NUMBER`.
    """
    if max(differences) == NO_NUMBER:
        return NO_NUMBER
    most = sorted(range(len(moved)), key=lambda at: -moved[at])[: (len(moved) + 1) // 2]
    return statistics.median(differences[at] for at in most)


MEASURES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "float32": largest,
    "bfloat16": middle,
}
