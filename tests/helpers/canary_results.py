"""Results of a canary for tests of what follows from them."""

from engine.quality.canary import CanaryResult
from engine.quality.guards import GuardResult


def judged(
    canary_units: int, baseline_units: int, means: tuple[float, float], lower: float, upper: float
) -> CanaryResult:
    """Return what the reward's guard says about these bounds, with a margin of 0.1."""
    state = "harm" if upper <= 0 else "clear" if lower >= -0.1 else "open"
    guard = GuardResult("reward", state, lower, upper, canary_units, baseline_units, "a rule", required=True)
    return CanaryResult(canary_units, baseline_units, *means, canary_units, lower, upper, guards=(guard,))
