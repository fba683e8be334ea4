"""What the score gate knows of a revision: its suite, general text, and a suite that the policy keeps."""

from dataclasses import dataclass

from engine.quality.regression import Target
from engine.quality.term_sequence import ROUNDING
from engine.settings.own_functions import LIKELIHOODS


@dataclass(frozen=True)
class OfflineScore:
    """Mean scores of revision and baseline, in [0, 1], on the `items` that both have answered.

    `low` is the lower bound of the paired difference's 95% interval. `verifier` is that of the policy. Where
    only a part of the items was read, `part_of` says what that estimates: the suite's mean, or the task's.
    """

    items: int
    revision: float
    baseline: float
    low: float = -1.0
    verifier: str = ""
    part_of: Target | None = None

    @property
    def change(self) -> str:
        """Return what happened to the score, without a point."""
        return f"{self._name} went from {self._figures}"

    def refusal(self, margin: float, decides: bool) -> str | None:
        """Return why the score gate holds the revision: it fell by more than `margin`, or may have.

        The lower bound counts where the score `decides` alone, and for a part of the items; else the means.
        """
        may = f"{self.change}, and may have fallen by {-self.low:.3f}"
        if self.part_of:
            return None if self.low > -margin + ROUNDING else f"{may}; {margin:g} is too much."
        if decides and self.low < -margin:
            return f"{may}. Without feedback it decides, and {margin:g} is allowed: score more items."
        if self.revision - self.baseline < -margin:
            return f"{self._name} fell from {self._figures}; {margin:g} is allowed."
        return None

    @property
    def _name(self) -> str:
        return LIKELIHOODS.get(self.verifier, "The offline score")

    @property
    def _figures(self) -> str:
        of = f" that were chosen; it is estimated for the {self.part_of}" if self.part_of else ""
        return f"{self.baseline:.3f} to {self.revision:.3f} on {self.items} items{of}"


@dataclass(frozen=True)
class LanguageScore:
    """Perplexities of revision and base on the `windows` of general text that both were scored on.

    Without windows in common both are 0.
    """

    windows: int
    revision: float
    base: float


@dataclass(frozen=True)
class KeptScore:
    """Mean scores of revision and baseline on the kept suite, on the `items` that both have answered.

    `high` is the upper bound of the paired difference's 95% interval.
    """

    suite: str
    items: int
    revision: float = 0.0
    baseline: float = 0.0
    high: float = 1.0

    def refusal(self, margin: float) -> str | None:
        """Return why the score gate holds the revision: it lost more than `margin`, or nobody can know."""
        if self.items == 0:
            return (
                f"Revision and baseline have no scored items of {self.suite} in common, which the policy "
                f"keeps. Score both first, with `graftwork score` and --suite {self.suite}."
            )
        if self.high < -margin:
            return (
                f"The score on {self.suite}, which the policy keeps, fell from {self.baseline:.3f} to "
                f"{self.revision:.3f} on {self.items} items, by {-self.high:.3f} at least; {margin:g} is "
                "allowed."
            )
        return None
