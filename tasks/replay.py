"""Judges a release's canary again from the ledger, with another level or margin."""

from contextlib import suppress
from dataclasses import dataclass, replace

from engine.catalog.catalog import Catalog, Release
from engine.catalog.opening import open_catalog
from engine.catalog.records import VERDICTS, Route, served_name, split_served_name
from engine.controller.advance import Evidence, advance
from engine.errors import NotFound
from engine.ledger.canaries import CanaryReader
from engine.ledger.ledger import open_snapshot
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig


@dataclass(frozen=True)
class Replayed:
    """A canary's verdict with these settings, `seconds` after its start, beside the recorded one.

    `hold` is also the verdict of one that the ledger's answers do not decide.
    """

    release: str
    revision: str
    alpha: float
    margin: float
    verdict: str
    reason: str
    canary_units: int
    baseline_units: int
    seconds: float
    recorded: str
    recorded_reason: str


def replay(params: Params, subject: str, alpha: float | None, margin: float | None) -> Replayed:
    """Judge the canary of a release again; `subject` is its id, or POLICY[@DIGEST] for the newest one.

    An `alpha` or `margin` of None is the release's own. Raises `NotFound` for an unknown release, one that
    had no canary, and while there is no ledger snapshot.
    """
    with open_catalog(params.paths) as catalog:
        release = _find(catalog, subject)
    if release.canary_started_at is None:
        raise NotFound(f"Release {release.id} had no canary: it ended at its step {release.step!r}.")
    given = {name: value for name, value in (("alpha", alpha), ("margin", margin)) if value is not None}
    settings = ReleaseConfig.stored(release.settings | given)
    reader = CanaryReader(release, settings)
    # Its steps of weight are what they were, so that the verdict is due at any time.
    last = settings.model_copy(update={"ramp": (), "weight": release.weight, "bake_s": 0.0})
    row = replace(release, state="running", step="canary", settings=last.model_dump(mode="json"))
    route = Route(release.policy, release.baseline, None, release.revision, release.weight)
    seconds, verdict, reason = 0.0, "hold", "The ledger has no answers of the canary."
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        for at in reader.replay(ledger, release):
            seconds = max(seconds, at - release.canary_started_at)
            action = advance(row, Evidence(at, route, canary=reader.judge.result(), step_s=seconds))
            verdict, reason = action.kind, action.reason
            if verdict != "wait":
                break
    seen = reader.judge.result()
    if verdict == "wait":
        verdict = "hold"
        reason = "Nothing is decided. " + " ".join(guard.sentence() for guard in seen.required)
    return Replayed(
        release=release.id,
        revision=served_name(release.policy, release.revision),
        alpha=settings.alpha,
        margin=settings.margin,
        verdict=verdict,
        reason=reason,
        canary_units=seen.canary_units,
        baseline_units=seen.baseline_units,
        seconds=seconds,
        recorded=VERDICTS.get(release.state, release.state),
        recorded_reason=release.reason,
    )


def _find(catalog: Catalog, subject: str) -> Release:
    with suppress(NotFound):
        return catalog.releases.get(subject)
    policy, digest = split_served_name(subject)
    releases = [one for one in catalog.releases.all(policy) if one.revision.startswith(digest or "")]
    if not releases:
        raise NotFound(f"There is no release of {subject!r}.")
    return releases[0]
