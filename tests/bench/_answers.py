"""Whether answers are their adapters' own: compared with the same adapter alone, the base and another one.

An engine that applies no adapter, or always the same one, agrees with itself; so its answers must also differ
from the base's and from another adapter's to the same prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from _traffic import Answer

# Of some answers, more than this must differ from what the base and another adapter say.
MOST = 0.5


@dataclass(frozen=True)
class Check:
    """How far an answer is from its adapter's alone, and from the base's and another adapter's, in nats.

    The last two are infinite where the tokens differ: rounding parts few answers, another model most.
    """

    alone: float
    base: float
    other: float


def off_nats(one: Answer, other: Answer) -> float:
    """Return the largest difference of two greedy answers' log-probabilities, infinite where one is missing.

    Up to the token where they part: there each took its best one, and these differ by rounding only, unless
    the models differ.
    """
    if not (one.is_right and other.is_right and len(one.logprobs) == len(other.logprobs) == len(one.ids)):
        return math.inf
    parted = next((i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b), None)
    count = len(one.ids) if parted is None else parted + 1
    pairs = zip(one.logprobs[:count], other.logprobs[:count], strict=True)
    return max(abs(a - b) for a, b in pairs)


def check_of(cold: Answer, alone: Answer, base: Answer, other: Answer) -> Check:
    """Compare a cold adapter's answer with the same adapter's alone, the base's and another adapter's."""
    unlike = (off_nats(cold, one) if one.ids == cold.ids else math.inf for one in (base, other))
    return Check(off_nats(cold, alone), *unlike)


def figures_of(checks: Sequence[Check], tolerance: float) -> dict[str, float]:
    """Return the shares that are the adapter's own, unlike the base and unlike another one, and distances."""
    count = len(checks) or math.nan
    return {
        "own_share": sum(one.alone <= tolerance for one in checks) / count,
        "unlike_base_share": sum(one.base > tolerance for one in checks) / count,
        "unlike_other_share": sum(one.other > tolerance for one in checks) / count,
        "off_alone_nats": max((one.alone for one in checks), default=math.nan),
        "checked": float(len(checks)),
    }


def faults(name: str, checks: Sequence[Check], tolerance: float, least_own: float) -> list[str]:
    """Return why answers do not count as their adapters' own, a sentence each."""
    if not checks:
        return [f"{name}: no answer was compared."]
    shares, found = figures_of(checks, tolerance), []
    if shares["own_share"] < least_own:
        far = f"only {shares['own_share']:.0%} of answers are within {tolerance:g} nats"
        found.append(f"{name}: {far} of those that their adapters give alone.")
    for key, whose in (("unlike_base_share", "the base's"), ("unlike_other_share", "another adapter's")):
        if shares[key] <= MOST:
            found.append(f"{name}: only {shares[key]:.0%} of answers differ from {whose}.")
    return found
