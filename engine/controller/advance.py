"""Decides a release's next action: a pure function of its row and the evidence.

The gates in order: effect probe, offline score, shadow, approval, canary, promotion. A gate without evidence
fails closed.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.catalog.records import Release, Route
from engine.controller.offline_scores import KeptScore, LanguageScore, OfflineScore
from engine.ledger.evaluations import EvaluatorUse, costs_in_words
from engine.quality.budget import ErrorBudget
from engine.quality.canary import CanaryResult
from engine.quality.sequential import least_pairs
from engine.quality.shadow import ShadowResult
from engine.settings.releases import LOAD_S, ReleaseConfig

Kind = Literal["wait", "next_gate", "ask", "start_canary", "next_step", "promote", "rollback", "hold"]
# Nobody may skip the effect probe.
SKIPPABLE = ("score", "shadow", "canary")
# The share by which a revision's perplexity on general text may be above the base's.
GENERAL_MARGIN = 0.05


@dataclass(frozen=True)
class Evidence:
    """The evidence for a release at the time `now` (epoch seconds), `step_s` seconds into its step.

    `probe` is the effect probe's result, `score` the offline score, `tombstone` the reason of the revision's
    tombstone; each is None when there is none. `language` and `kept` are None for a policy without them.
    `frozen` is whether releases are frozen. A running canary's `step_s` counts from the canary's start, its
    `weight_s` from that of its newest weight, `asked_s` from the request for a step's approval. None of them
    runs in a pause, and the first two not while a step waits for its approval. `units_per_s` is the recent
    traffic before the canary's start, None where too little is known. `without` names the live engines that
    have not loaded the revision, and why, before its first users come.
    """

    now: float
    route: Route
    probe: dict[str, Any] | None = None
    score: OfflineScore | None = None
    canary: CanaryResult = field(default_factory=CanaryResult)
    tombstone: str | None = None
    frozen: bool = False
    step_s: float = 0.0
    language: LanguageScore | None = None
    weight_s: float = 0.0
    asked_s: float = 0.0
    units_per_s: float | None = None
    without: dict[str, str] = field(default_factory=dict)
    shadow: ShadowResult | None = None
    uses: tuple[EvaluatorUse, ...] = ()
    shadow_cost: tuple[int, float, int] = (0, 0.0, 0)
    kept: KeptScore | None = None

    def summary(self) -> dict[str, Any]:
        """Return the evidence that a verdict's row stores."""
        score = asdict(self.score) if self.score else None
        offline = {"language": self.language, "kept": self.kept}
        more = {name: asdict(found) for name, found in offline.items() if found}
        shadow = {"shadow": self.shadow.summary(), "shadow_cost": self.shadow_cost} if self.shadow else {}
        uses = {"evaluators": [use._asdict() for use in self.uses]} if self.uses else {}
        canary = self.canary.summary()
        return {"probe": self.probe, "score": score, **more, **shadow, **uses, "canary": canary}


@dataclass(frozen=True)
class Wait:
    """What a running release waits for: a gate, what it has there and what it needs, for `waited_s` so far.

    In `left_s` of the release's time the wait ends by itself, as `then` says; None: it does not. Neither runs
    while the release is paused.
    """

    gate: str
    has: str
    needs: str
    waited_s: float
    left_s: float | None = None
    then: str = "hold"

    @property
    def ends(self) -> str:
        """When and how the wait ends by itself, or an empty string."""
        return "" if self.left_s is None else f"{self.then} in {max(0.0, self.left_s):.0f} s"

    def row(self) -> dict[str, Any]:
        """Return the line for JSON."""
        return asdict(self) | {"ends": self.ends}


@dataclass(frozen=True)
class Action:
    """What to do, and the reason in a sentence; `weight` is the canary's in a next step, or to ask for.

    `waits` is what a release that waits has, needs and waits for.
    """

    kind: Kind
    reason: str = ""
    weight: float = 0.0
    waits: tuple[Wait, ...] = ()


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
    if release.paused and (harm := _shadow_harm(release, evidence) or _guard(release, evidence)):
        return harm
    gates = {
        "probe": _probe,
        "score": _score,
        "shadow": _shadow,
        "approval": _approval,
        "canary": _canary,
    }
    action = gates[release.step](release, evidence)
    if pause := release.paused:
        needs = f"`graftwork decide resume {release.policy}`"
        waited_s = max(0.0, evidence.now - pause["at"])
        wait = Wait("pause", f"paused by {pause['by']}: {pause['reason']}", needs, waited_s)
        return Action("wait", "It is paused.", waits=(wait, *action.waits))
    return action


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
    settings = ReleaseConfig.stored(release.settings)
    if "score" in release.skip_gates:
        return Action("next_gate", _skipped(release, "score"))
    score = evidence.score
    if score is None or score.items == 0:
        return Action("hold", "Revision and baseline have no scored items in common. Score both first.")
    lost = score.refusal(settings.score_margin, decides=settings.feedback == "none")
    if lost is None and evidence.kept:
        lost = evidence.kept.refusal(settings.score_margin)
    return Action("hold", lost) if lost else _language(evidence.language, f"{score.change}.")


def _language(language: LanguageScore | None, so_far: str) -> Action:
    if language is None:
        return Action("next_gate", so_far)
    if language.windows == 0:
        return Action("hold", "Revision and base have no perplexity on general text. Score both first.")
    figures = f"from the base's {language.base:.2f} to {language.revision:.2f}"
    if language.revision > language.base * (1 + GENERAL_MARGIN):
        return Action(
            "hold",
            f"The perplexity on general text rose {figures}; {GENERAL_MARGIN:.0%} more is allowed.",
        )
    return Action("next_gate", f"{so_far} The perplexity on general text went {figures}.")


def _shadow(release: Release, evidence: Evidence) -> Action:
    settings = ReleaseConfig.stored(release.settings)
    if "shadow" in release.skip_gates:
        return Action("next_gate", _skipped(release, "shadow"))
    shadow = evidence.shadow or ShadowResult()
    if harm := _shadow_harm(release, evidence):
        return harm
    sentences = " ".join(guard.sentence() for guard in shadow.required)
    if shadow.is_clear or shadow.units >= settings.shadow:
        return Action("next_gate", f"The shadow did no harm. {sentences} {_uses(evidence)}")
    if evidence.step_s >= settings.max_s:
        return Action(
            "hold",
            f"The shadow met {shadow.units} of {settings.shadow} units within {settings.max_s:g} s. "
            f"{sentences} {_uses(evidence)} Lower `release.shadow`, or raise `release.max_s`.",
        )
    units = f"{shadow.units} of {settings.shadow} units"
    needs, left_s = f"clear, or {settings.shadow} units without harm", settings.max_s - evidence.step_s
    waits = (
        Wait(f"shadow: {guard.guard}", f"{guard.state}, {units}", needs, evidence.step_s, left_s)
        for guard in shadow.required
    )
    return Action("wait", waits=tuple(waits))


def _shadow_harm(release: Release, evidence: Evidence) -> Action | None:
    harm = evidence.shadow.harm if evidence.shadow and release.step == "shadow" else None
    if harm is None:
        return None
    why = f"Its shadow is worse; no user saw it. {harm.sentence()} {_uses(evidence)}"
    return Action("rollback", why)


def _uses(evidence: Evidence) -> str:
    has_any = evidence.uses or any(evidence.shadow_cost)
    return costs_in_words(evidence.uses, evidence.shadow_cost) if has_any else ""


def _approval(release: Release, evidence: Evidence) -> Action:
    wanted_s = ReleaseConfig.stored(release.settings).approval_s
    if not wanted_s:
        return Action("next_gate", release.reason)
    if release.approved:
        return Action("next_gate", f"Approved by {release.approved['by']}: {release.approved['reason']}")
    if evidence.step_s >= wanted_s:
        return Action("hold", f"Nobody approved the release within {wanted_s:g} s.")
    return _wait_for_approval(release, release.weight, evidence.step_s, wanted_s)


def _wait_for_approval(release: Release, weight: float, waited_s: float, wanted_s: float) -> Action:
    needs = f"`graftwork decide approve {release.policy}`, or the form in Prefect"
    wait = Wait(f"approval of {weight:.0%}", "no approval", needs, waited_s, wanted_s - waited_s)
    return Action("wait", waits=(wait,))


def _canary(release: Release, evidence: Evidence) -> Action:
    if not evidence.frozen:
        return _thawed_canary(release, evidence)
    if harm := _guard(release, evidence):
        return harm
    wait = Wait("freeze", "releases are frozen", "`graftwork decide thaw`", evidence.weight_s)
    return Action("wait", "Releases are frozen.", waits=(wait, *_thawed_canary(release, evidence).waits))


def _thawed_canary(release: Release, evidence: Evidence) -> Action:
    settings = ReleaseConfig.stored(release.settings)
    if missing := _missing(evidence):
        return missing
    if "canary" in release.skip_gates:
        return Action("promote", _skipped(release, "canary"))
    if harm := _guard(release, evidence):
        return harm
    if release.asked:
        if evidence.asked_s < settings.approval_s:
            weight = release.asked["weight"]
            return _wait_for_approval(release, weight, evidence.asked_s, settings.approval_s)
        share = f"{release.asked['weight']:.0%}"
        return Action("hold", f"Nobody approved the step to {share} within {settings.approval_s:g} s.")
    if release.canary_started_at is None:
        skipped = _refuse_canary(settings, evidence) or _skip_steps(release, settings, evidence)
        return _approved(release, settings, skipped or _send(release))
    # After a crash right before the route was changed.
    if evidence.route.canary != release.revision or evidence.route.weight != release.weight:
        return _send(release)
    return _approved(release, settings, _next_step(release, settings, evidence))


def _approved(release: Release, settings: ReleaseConfig, action: Action) -> Action:
    """Ask for the approval of a step, in the place of the step, where it needs one that it does not have."""
    needing = [weight for weight in settings.approval_weights if release.weight < weight <= action.weight]
    if not needing or any(one["weight"] >= max(needing) for one in release.approvals):
        return action
    return Action("ask", action.reason, max(needing))


def _missing(evidence: Evidence) -> Action | None:
    """Wait until every engine has loaded the revision; hold where one has not."""
    if not evidence.without:
        return None
    if evidence.step_s < LOAD_S:
        has = f"engines without the revision: {', '.join(sorted(evidence.without))}"
        left_s = LOAD_S - evidence.step_s
        return Action(
            "wait", waits=(Wait("load", has, "every engine has loaded it", evidence.step_s, left_s),)
        )
    named = "; ".join(f"{id}: {why.rstrip('.')}" for id, why in sorted(evidence.without.items()))
    return Action("hold", f"Not every engine loaded the revision within {LOAD_S:g} s. {named}.")


def _send(release: Release) -> Action:
    return Action("start_canary", f"{release.weight:.0%} of the units go to the canary.")


def _refuse_canary(settings: ReleaseConfig, evidence: Evidence) -> Action | None:
    """Return why a canary with these settings could never be promoted, or None."""
    if not settings.promoting_guards:
        return Action("hold", "No guard is configured that could promote the canary; see `release.guards`.")
    if evidence.units_per_s is None:
        return None
    name, level = _promoting_level(settings)
    needed = least_pairs(level, getattr(settings, name))
    reached = evidence.units_per_s * settings.weight * settings.max_s
    if needed <= reached:
        return None
    return Action(
        "hold",
        f"The {name} {getattr(settings, name):g} cannot be met: even if no two users ever differ it takes "
        f"{needed:g} canary units, and {evidence.units_per_s:.2g} units a second give {reached:.0f} within "
        f"{settings.max_s:g} s. Widen `release.{name}`, `release.weight` or `release.max_s`.",
    )


def _promoting_level(settings: ReleaseConfig) -> tuple[str, float]:
    """Return the margin that a promotion must show, by its setting's name, and at which level."""
    budget = ErrorBudget.of(settings)
    if settings.feedback == "none":
        return "rate_margin", settings.alpha
    if "reward" in settings.promoting_guards:
        return "margin", budget.ratings / (1 + len(settings.segments))
    return "margin", 2 * budget.evaluator


def _skip_steps(release: Release, settings: ReleaseConfig, evidence: Evidence) -> Action | None:
    """Return the jump over the steps that recent traffic cannot fill in time, or None."""
    if evidence.units_per_s is None:
        return None
    enough = settings.min_units / (settings.step_s * evidence.units_per_s)
    weight = next((one for one in settings.weights if one >= min(enough, settings.weight)), settings.weight)
    if weight <= release.weight:
        return None
    why = f"{evidence.units_per_s:.2g} units a second do not fill them within {settings.step_s:g} s"
    return Action("next_step", f"Steps below {weight:.0%} are skipped: {why}.", weight)


def _guard(release: Release, evidence: Evidence) -> Action | None:
    harm = evidence.canary.harm
    if release.canary_started_at is None or harm is None:
        return None
    said = f"The canary does harm. {harm.sentence()} {evidence.canary.feedback.sentence()} {_uses(evidence)}"
    return Action("rollback", said.rstrip())


def _next_step(release: Release, settings: ReleaseConfig, evidence: Evidence) -> Action:
    """Return the next step of the ramp, the verdict at its end, or `wait`."""
    canary = evidence.canary
    guards = " ".join(guard.sentence() for guard in canary.required)
    sentences = f"{guards} {canary.feedback.sentence()} {_uses(evidence)}".rstrip()
    following = next((weight for weight in settings.weights if weight > release.weight), None)
    wait = Action("wait", waits=tuple(_canary_waits(release, settings, evidence)))
    if release.weight > settings.weight:
        is_baked = evidence.weight_s >= settings.bake_s
        baked = f"The canary did no harm in {settings.bake_s:g} s at {release.weight:.0%}. {sentences}"
        return Action("promote", baked) if is_baked else wait
    if release.weight < settings.weight and following:
        is_full = canary.step_units >= settings.min_units
        if is_full or evidence.weight_s >= settings.step_s:
            why = f"{canary.step_units} units at {release.weight:.0%} within {evidence.weight_s:.0f} s"
            return Action(
                "next_step", f"{following:.0%} of the units go to the canary after {why}.", following
            )
    elif canary.is_clear and canary.canary_units >= settings.min_units:
        if following:
            return Action(
                "next_step", f"The canary is clear; {1 - following:.0%} stay behind. {sentences}", following
            )
        return Action("promote", f"The canary is within its margins or better. {sentences}")
    if evidence.step_s >= settings.max_s:
        return Action("hold", f"No verdict within {settings.max_s:g} s. {sentences}")
    return wait


def _canary_waits(release: Release, settings: ReleaseConfig, evidence: Evidence) -> Iterator[Wait]:
    canary, gate, in_step_s = evidence.canary, f"canary {release.weight:.0%}", evidence.weight_s
    left_s = settings.max_s - evidence.step_s
    if release.weight > settings.weight:
        has, needs = f"no harm in {in_step_s:.0f} s", f"no harm in {settings.bake_s:g} s"
        yield Wait(gate, has, needs, in_step_s, settings.bake_s - in_step_s, "promotion")
    elif release.weight < settings.weight:
        has = f"{canary.step_units} of {settings.min_units} units"
        needs = f"{settings.min_units} units, or {settings.step_s:g} s"
        ends = min((settings.step_s - in_step_s, "next step"), (left_s, "hold"))
        yield Wait(gate, has, needs, in_step_s, *ends)
    else:
        is_full = canary.canary_units >= settings.min_units
        needs = f"clear, and {settings.min_units} units"
        for guard in canary.required:
            if not is_full or guard.state != "clear":
                has = f"{guard.state}, {canary.canary_units} of {settings.min_units} units"
                yield Wait(f"{gate}: {guard.guard}", has, needs, in_step_s, left_s)


def _skipped(release: Release, gate: str) -> str:
    by = release.skip_gates[gate]
    return f"The {gate} gate was skipped by {by['by']}: {by['reason']}"
