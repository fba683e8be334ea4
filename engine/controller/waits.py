"""What a running release waits for, as a table: a pure function of its row and the evidence."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from engine.catalog.records import Release
from engine.controller.advance import Evidence
from engine.quality.shadow import ShadowResult
from engine.settings.releases import LOAD_S, ReleaseConfig


@dataclass(frozen=True)
class Wait:
    """A line of the table: a gate, what the release has there and what it needs, for `waited_s` so far.

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


def waits_of(release: Release, evidence: Evidence) -> list[Wait]:
    """Return what a release waits for now; an ended one waits for nothing."""
    if release.state != "running":
        return []
    settings = ReleaseConfig.stored(release.settings)
    gate = WAITS.get(release.step)
    waits = gate(release, settings, evidence) if gate else []
    if evidence.frozen and release.step == "canary":
        waits = [Wait("freeze", "releases are frozen", "`graftwork decide thaw`", evidence.weight_s), *waits]
    if pause := release.paused:
        has, needs = (
            f"paused by {pause['by']}: {pause['reason']}",
            f"`graftwork decide resume {release.policy}`",
        )
        waits = [Wait("pause", has, needs, max(0.0, evidence.now - pause["at"])), *waits]
    return waits


def _approval(release: Release, settings: ReleaseConfig, evidence: Evidence) -> list[Wait]:
    if release.asks is None:
        return []
    waited_s = evidence.asked_s if release.asked else evidence.step_s
    needs = f"`graftwork decide approve {release.policy}`, or the form in Prefect"
    left_s = settings.approval_s - waited_s
    return [Wait(f"approval of {release.asks:.0%}", "no approval", needs, waited_s, left_s)]


def _canary(release: Release, settings: ReleaseConfig, evidence: Evidence) -> list[Wait]:
    if release.asks is not None:
        return _approval(release, settings, evidence)
    if evidence.without:
        has = f"engines without the revision: {', '.join(sorted(evidence.without))}"
        return [Wait("load", has, "every engine has loaded it", evidence.step_s, LOAD_S - evidence.step_s)]
    if release.canary_started_at is None:
        return []
    gate, canary, in_step_s = f"canary {release.weight:.0%}", evidence.canary, evidence.weight_s
    if release.weight > settings.weight:
        has, needs = f"no harm in {in_step_s:.0f} s", f"no harm in {settings.bake_s:g} s"
        return [Wait(gate, has, needs, in_step_s, settings.bake_s - in_step_s, "promotion")]
    left_s = settings.max_s - evidence.step_s
    if release.weight < settings.weight:
        has = f"{canary.step_units} of {settings.min_units} units"
        needs = f"{settings.min_units} units, or {settings.step_s:g} s"
        ends = min((settings.step_s - in_step_s, "next step"), (left_s, "hold"))
        return [Wait(gate, has, needs, in_step_s, *ends)]
    units, few = (
        f"{canary.canary_units} of {settings.min_units} units",
        canary.canary_units < settings.min_units,
    )
    needs = f"clear, and {settings.min_units} units"
    return [
        Wait(f"{gate}: {guard.guard}", f"{guard.state}, {units}", needs, in_step_s, left_s)
        for guard in canary.required
        if few or guard.state != "clear"
    ]


def _shadow(release: Release, settings: ReleaseConfig, evidence: Evidence) -> list[Wait]:
    shadow = evidence.shadow or ShadowResult()
    units = f"{shadow.units} of {settings.shadow} units"
    needs, left_s = f"clear, or {settings.shadow} units without harm", settings.max_s - evidence.step_s
    return [
        Wait(f"shadow: {guard.guard}", f"{guard.state}, {units}", needs, evidence.step_s, left_s)
        for guard in shadow.required
    ]


# By a release's step. The other gates let it through or end it at once.
Gate = Callable[[Release, ReleaseConfig, Evidence], list[Wait]]
WAITS: dict[str, Gate] = {"shadow": _shadow, "approval": _approval, "canary": _canary}
