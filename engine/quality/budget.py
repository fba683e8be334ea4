"""How a release's error budget is split: before its start, by its settings alone.

A release that is no worse is ended with probability at most `release.alpha`, over all of its tests and looks.
The budget has up to three parts of equal size: shadow, evaluators and ratings. A part that the release does
not have gets nothing, and the others share it.

- Shadow: half for the evaluators' paired scores, half for faults and length; all of it where there is only
  one of the two. Metrics take no part: nobody reports them of an answer that no user saw.
- Evaluators: those that decide share it equally, metrics too.
- Ratings: the guards of `release.guards`, half for the rewards and half for all others (see `canary`).

Nothing is split for a promotion: it needs every required guard clear, so that no error adds to another's.
"""

from dataclasses import dataclass
from typing import Self

from engine.settings.releases import GuardName, ReleaseConfig

# What of an answer that nobody saw can be a fault: everything but its time and its cost, since it is made at
# background priority, and its rating.
SHADOWED: tuple[GuardName, ...] = ("errors", "invalid", "refused", "truncated", "length")


@dataclass(frozen=True)
class ErrorBudget:
    """Probabilities of a wrong end.

    `ratings` is that of all guards of `release.guards`, `evaluator` that of each deciding evaluator in the
    canary. In the shadow `paired` is each evaluator's and `shadowed` that of each guard of faults and length.
    """

    ratings: float = 0.0
    evaluator: float = 0.0
    paired: float = 0.0
    shadowed: float = 0.0

    @classmethod
    def of(cls, settings: ReleaseConfig) -> Self:
        """Return the split for a release with these settings."""
        deciding, pairing = len(settings.deciding_evaluators), len(settings.shadow_evaluators)
        others = len(set(SHADOWED) & set(settings.guards))
        parts = bool(settings.guards) + bool(deciding) + bool(pairing)
        part = settings.alpha / max(1, parts)
        half = part / 2 if others else part
        return cls(
            ratings=part if settings.guards else 0.0,
            evaluator=part / deciding if deciding else 0.0,
            paired=half / pairing if pairing else 0.0,
            shadowed=half / others if pairing and others else 0.0,
        )
