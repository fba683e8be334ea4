"""Decides a release's next action: a pure function of its row and the evidence.

The gates in order: effect probe, offline score, approval, canary, promotion. A gate without evidence fails
closed.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.catalog.records import Release, Route
from engine.settings.params import ReleaseConfig

Kind = Literal["wait", "next_gate", "start_canary", "promote", "rollback", "hold"]
# Nobody may skip the effect probe.
SKIPPABLE = ("score", "canary")


@dataclass(frozen=True)
class OfflineScore:
    """Mean scores of revision and baseline, in [0, 1], on the `items` that both have answered."""

    items: int
    revision: float
    baseline: float


@dataclass(frozen=True)
class LanguageScore:
    """Perplexities of revision and base on the `windows` of general text that both were scored on.

    Without windows in common both are 0.
    """

    windows: int
    revision: float
    base: float


@dataclass(frozen=True)
class CanaryResult:
    """Rated units and mean rewards of both arms, and the confidence bounds of their difference."""

    canary_units: int = 0
    baseline_units: int = 0
    canary_reward: float | None = None
    baseline_reward: float | None = None
    pairs: int = 0
    lower: float = -1.0
    upper: float = 1.0


@dataclass(frozen=True)
class Evidence:
    """The evidence for a release at the time `now` (epoch seconds), `step_s` seconds into its step.

    `probe` is the effect probe's result, `score` the offline score, `tombstone` the reason of the revision's
    tombstone; each is None when there is none. `language` is None for a policy without the suite `general`.
    `frozen` is whether releases are frozen. A running canary's `step_s` counts from the canary's start.
    """

    now: float
    route: Route
    probe: dict[str, Any] | None = None
    score: OfflineScore | None = None
    canary: CanaryResult = CanaryResult()
    tombstone: str | None = None
    frozen: bool = False
    step_s: float = 0.0
    language: LanguageScore | None = None

    def summary(self) -> dict[str, Any]:
        """Return the evidence that a verdict's row stores."""
        score = asdict(self.score) if self.score else None
        language = {"language": asdict(self.language)} if self.language else {}
        return {"probe": self.probe, "score": score, **language, "canary": asdict(self.canary)}


@dataclass(frozen=True)
class Action:
    """What to do, and the reason in a sentence."""

    kind: Kind
    reason: str = ""


def advance(release: Release, evidence: Evidence) -> Action:
    """Return the next action of a release. Pure: the same row and evidence give the same action.

    A running release at step `done` was decided before a crash: its row holds the verdict. A rollback needs
    no such note, since its tombstone is written first.
    """
    if release.state != "running":
        return Action("wait")
    if evidence.tombstone is not None:
        return Action("rollback", evidence.tombstone)
    if release.step == "done":
        # Decided before a crash: the decision stands.
        return Action(release.evidence["verdict"], release.reason)
    if evidence.route.champion != release.baseline:
        return Action("hold", "Superseded: the champion changed while the release was running.")
    gates = {"probe": _probe, "score": _score, "approval": _approval, "canary": _canary}
    return gates[release.step](release, evidence)


def _probe(release: Release, evidence: Evidence) -> Action:
    if evidence.probe is None:
        return Action(
            "hold", "The effect probe has not run for this revision. Verify it, then release again."
        )
    if not evidence.probe.get("accepted", False):
        why = evidence.probe.get("reason") or "no reason was recorded."
        return Action("hold", f"The effect probe refused the revision: {why}")
    return Action("next_gate", "The effect probe accepted the revision.")


def _score(release: Release, evidence: Evidence) -> Action:
    settings = ReleaseConfig.model_validate(release.settings)
    if "score" in release.skip_gates:
        return Action("next_gate", _skipped(release, "score"))
    score = evidence.score
    if score is None or score.items == 0:
        return Action("hold", "Revision and baseline have no scored items in common. Score both first.")
    change = score.revision - score.baseline
    figures = f"{score.baseline:.3f} to {score.revision:.3f} on {score.items} items"
    if change < -settings.score_margin:
        return Action("hold", f"The offline score fell from {figures}; {settings.score_margin:g} is allowed.")
    return _language(evidence.language, settings, f"The offline score went from {figures}.")


def _language(language: LanguageScore | None, settings: ReleaseConfig, so_far: str) -> Action:
    if language is None:
        return Action("next_gate", so_far)
    if language.windows == 0:
        return Action("hold", "Revision and base have no perplexity on general text. Score both first.")
    figures = f"from the base's {language.base:.2f} to {language.revision:.2f}"
    if language.revision > language.base * (1 + settings.general_margin):
        return Action(
            "hold",
            f"The perplexity on general text rose {figures}; {settings.general_margin:.0%} more is allowed.",
        )
    return Action("next_gate", f"{so_far} The perplexity on general text went {figures}.")


def _approval(release: Release, evidence: Evidence) -> Action:
    wanted_s = ReleaseConfig.model_validate(release.settings).approval_s
    if not wanted_s:
        return Action("next_gate", release.reason)
    if release.approved:
        return Action("next_gate", f"Approved by {release.approved['by']}: {release.approved['reason']}")
    if evidence.step_s >= wanted_s:
        return Action("hold", f"Nobody approved the release within {wanted_s:g} s.")
    return Action("wait")


def _canary(release: Release, evidence: Evidence) -> Action:
    settings = ReleaseConfig.model_validate(release.settings)
    if evidence.frozen:
        return _guard(release, evidence, settings) or Action("wait", "Releases are frozen.")
    if "canary" in release.skip_gates:
        return Action("promote", _skipped(release, "canary"))
    if release.canary_started_at is None or evidence.route.canary != release.revision:
        return Action("start_canary", f"{settings.weight:.0%} of the units go to the canary.")
    return _guard(release, evidence, settings) or _reach_verdict(release, evidence, settings)


def _guard(release: Release, evidence: Evidence, settings: ReleaseConfig) -> Action | None:
    canary = evidence.canary
    if release.canary_started_at is None or canary.upper > 0:
        return None
    return Action(
        "rollback",
        f"The canary's reward is below the baseline's: {_figures(canary)} at level {settings.alpha:g}.",
    )


def _reach_verdict(release: Release, evidence: Evidence, settings: ReleaseConfig) -> Action:
    canary = evidence.canary
    if canary.lower >= -settings.margin and canary.canary_units >= settings.min_units:
        return Action(
            "promote",
            f"The canary's reward is within {settings.margin:g} of the baseline's or above it: "
            f"{_figures(canary)} at level {settings.alpha:g}.",
        )
    if evidence.step_s >= settings.max_seconds:
        return Action("hold", f"No verdict within {settings.max_seconds:g} s: {_figures(canary)}.")
    return Action("wait")


def _figures(canary: CanaryResult) -> str:
    return (
        f"the difference lies between {canary.lower:+.3f} and {canary.upper:+.3f} after "
        f"{canary.canary_units} canary and {canary.baseline_units} baseline units"
    )


def _skipped(release: Release, gate: str) -> str:
    by = release.skip_gates[gate]
    return f"The {gate} gate was skipped by {by['by']}: {by['reason']}"
