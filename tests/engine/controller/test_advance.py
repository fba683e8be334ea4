"""`advance` as a table: every state of the row against every kind of evidence."""

import itertools
import math
from dataclasses import replace

import pytest

from engine.catalog.catalog import Release, Route
from engine.controller.advance import Action, Evidence, advance
from engine.controller.offline_scores import KeptScore, LanguageScore, OfflineScore
from engine.quality.canary import CanaryResult, FeedbackCounts
from engine.quality.guards import GuardResult
from engine.quality.regression import Target
from engine.settings.releases import BAKE_WEIGHT, ReleaseConfig
from tests.helpers.canary_results import judged

SETTINGS = ReleaseConfig(weight=0.2, alpha=0.05, margin=0.1, min_units=20, max_s=600, score_margin=0.02)
ACCEPTED = {"accepted": True, "reason": "ok"}
BY = {"by": "me", "reason": "known to be bad"}

PROBES = {
    "none": None,
    "accepted": ACCEPTED,
    "refused": {"accepted": False, "reason": "It is the base."},
    "odd": {},
}
SCORES = {
    "none": None,
    "no items": OfflineScore(0, 0.9, 0.2),
    "better": OfflineScore(100, 0.9, 0.2),
    "a little worse": OfflineScore(100, 0.50, 0.51),
    "worse": OfflineScore(100, 0.2, 0.9),
}
CANARIES = {
    "nothing": CanaryResult(),
    "open": judged(30, 120, (0.9, 0.9), -0.2, 0.2),
    "bad": judged(8, 32, (0.0, 1.0), -1.0, 0.0),
    "good": judged(20, 80, (0.9, 0.9), -0.1, 0.3),
    "good, few": judged(19, 80, (0.9, 0.9), -0.1, 0.3),
    "a little worse, surely": judged(900, 3600, (0.9, 0.95), -0.09, -0.01),
}


def release(**changes: object) -> Release:
    row = Release("r1", "p", "new", "old", "probe", 0.2, "running", SETTINGS.model_dump(), 0.0, 0.0)
    return replace(row, **changes)


def evidence(
    now: float = 100.0, canary: str | None = None, champion: str | None = "old", **more: object
) -> Evidence:
    return Evidence(now=now, route=Route("p", champion=champion, canary=canary, weight=0.2), **more)


def running_canary(**changes: object) -> Release:
    return release(step="canary", canary_started_at=50.0, **changes)


@pytest.mark.parametrize(
    ("probe", "kind"), [("none", "hold"), ("accepted", "next_gate"), ("refused", "hold"), ("odd", "hold")]
)
def test_the_probe_gate(probe: str, kind: str) -> None:
    for skipped in ({}, {"score": BY, "canary": BY}, {"probe": BY}):
        assert advance(release(skip_gates=skipped), evidence(probe=PROBES[probe])).kind == kind


@pytest.mark.parametrize(
    ("score", "kind"),
    [
        ("none", "hold"),
        ("no items", "hold"),
        ("better", "next_gate"),
        ("a little worse", "next_gate"),
        ("worse", "hold"),
    ],
)
def test_the_score_gate(score: str, kind: str) -> None:
    row = release(step="score")
    assert advance(row, evidence(score=SCORES[score])).kind == kind
    skipped = advance(replace(row, skip_gates={"score": BY}), evidence(score=SCORES[score]))
    assert skipped == Action("next_gate", "The score gate was skipped by me: known to be bad")


@pytest.mark.parametrize(
    ("language", "kind"),
    [
        (None, "next_gate"),
        (LanguageScore(0, 0.0, 0.0), "hold"),
        (LanguageScore(50, 18.0, 20.0), "next_gate"),
        (LanguageScore(50, 20.99, 20.0), "next_gate"),
        (LanguageScore(50, 21.01, 20.0), "hold"),
    ],
)
def test_a_revision_that_loses_its_language_is_held_whatever_it_scores(
    language: LanguageScore | None, kind: str
) -> None:
    row, seen = release(step="score"), evidence(score=SCORES["better"], language=language)
    assert advance(row, seen).kind == kind
    assert seen.summary().get("language", {}).get("windows") == (language and language.windows)
    skipped = advance(replace(row, skip_gates={"score": BY}), seen)
    assert skipped == Action("next_gate", "The score gate was skipped by me: known to be bad")
    worse = replace(seen, score=SCORES["worse"])
    assert "score fell" in advance(row, worse).reason


@pytest.mark.parametrize(
    ("kept", "kind", "said"),
    [
        (None, "next_gate", ""),
        (KeptScore("mixed", 0), "hold", "--suite mixed"),
        (KeptScore("mixed", 200, 0.30, 0.50, -0.15), "hold", "0.500 to 0.300 on 200 items"),
        # The mean is below the margin, but it is not shown: chance may have done it.
        (KeptScore("mixed", 200, 0.40, 0.50, -0.01), "next_gate", ""),
        (KeptScore("mixed", 200, 0.60, 0.50, 0.15), "next_gate", ""),
    ],
)
def test_a_revision_that_loses_what_its_policy_keeps_is_held(
    kept: KeptScore | None, kind: str, said: str
) -> None:
    seen = evidence(score=SCORES["better"], kept=kept)
    action = advance(release(step="score"), seen)
    assert action.kind == kind
    assert said in action.reason
    assert seen.summary().get("kept", {}).get("items") == (kept and kept.items)


def test_the_margin_of_general_text_is_no_setting_of_the_score() -> None:
    settings = SETTINGS.model_copy(update={"score_margin": 0.5}).model_dump()
    language, scores = LanguageScore(50, 29.0, 20.0), SCORES["better"]
    held = advance(release(step="score", settings=settings), evidence(score=scores, language=language))
    assert (held.kind, "20.00 to 29.00; 5%" in held.reason) == ("hold", True)


@pytest.mark.parametrize(
    ("result", "early", "late"),
    [
        ("nothing", "wait", "hold"),
        ("open", "wait", "hold"),
        ("bad", "rollback", "rollback"),
        ("good", "promote", "promote"),
        ("good, few", "wait", "hold"),
        ("a little worse, surely", "rollback", "rollback"),
    ],
)
def test_the_canary_gate(result: str, early: str, late: str) -> None:
    route = Route("p", champion="old", canary="new", weight=0.2)
    for step_s, kind in ((599.9, early), (600.0, late)):
        seen = Evidence(100.0, route, canary=CANARIES[result], step_s=step_s)
        assert advance(running_canary(), seen).kind == kind


def test_a_canary_is_started_once() -> None:
    assert advance(release(step="canary"), evidence()).kind == "start_canary"
    # Killed between the route and the row, or the other way about.
    assert advance(release(step="canary"), evidence(canary="new")).kind == "start_canary"
    assert advance(running_canary(), evidence(canary=None)).kind == "start_canary"
    assert advance(running_canary(), evidence(canary="new")).kind == "wait"


def test_a_skipped_canary_promotes_with_the_reason() -> None:
    action = advance(release(step="canary", skip_gates={"canary": BY}), evidence())
    assert action == Action("promote", "The canary gate was skipped by me: known to be bad")


def test_a_freeze_stops_promotions_but_not_rollbacks() -> None:
    route = Route("p", champion="old", canary="new", weight=0.2)
    kinds = {}
    for name, result in CANARIES.items():
        kinds[name] = advance(running_canary(), Evidence(100.0, route, canary=result, frozen=True)).kind
    assert {name for name, kind in kinds.items() if kind == "rollback"} == {"bad", "a little worse, surely"}
    assert set(kinds.values()) == {"wait", "rollback"}
    assert advance(release(step="canary", skip_gates={"canary": BY}), evidence(frozen=True)).kind == "wait"


def test_harm_that_any_guard_finds_rolls_back_and_says_which() -> None:
    errors = GuardResult("errors", "harm", 0.1, 0.9, 12, 48, "mixture of binomials at level 0.004")
    good = CANARIES["good"]
    seen = Evidence(
        100.0,
        Route("p", champion="old", canary="new", weight=0.2),
        canary=replace(good, guards=(*good.guards, errors), feedback=FeedbackCounts(60, 45, doubled=3)),
    )
    action = advance(running_canary(), seen)
    assert action.kind == "rollback"
    for said in ("errors", "+0.100 and +0.900", "12 canary and 48", "binomials", "45 of 60", "3 doubled"):
        assert said in action.reason


def test_a_guard_that_is_not_required_need_not_be_clear_but_each_required_one() -> None:
    route, good = Route("p", champion="old", canary="new", weight=0.2), CANARIES["good"]
    for required, kind in ((False, "promote"), (True, "wait")):
        times = GuardResult("ttft", "open", 0.0, math.inf, 0, 0, "ranks", required=required)
        seen = Evidence(100.0, route, canary=replace(good, guards=(*good.guards, times)))
        assert advance(running_canary(), seen).kind == kind


def ramped(weight: float, **changes: object) -> Release:
    """A release that ramps over 1, 5 and 20% and bakes for 60 s, at this weight."""
    settings = SETTINGS.model_dump() | {"ramp": (0.01, 0.05), "bake_s": 60, "step_s": 100}
    return replace(running_canary(weight=weight, settings=settings), **changes)


def at(weight: float, result: CanaryResult, **more: object) -> Evidence:
    route = Route("p", champion="old", canary="new", weight=weight)
    return Evidence(100.0, route, canary=result, **more)


@pytest.mark.parametrize(
    ("weight", "result", "units", "seconds", "kind", "following"),
    [
        (0.01, "open", 19, 10, "wait", 0.0),
        (0.01, "open", 20, 10, "next_step", 0.05),
        (0.01, "open", 0, 100, "next_step", 0.05),
        (0.01, "good", 19, 10, "wait", 0.0),
        (0.05, "good", 20, 10, "next_step", 0.2),
        (0.05, "bad", 0, 10, "rollback", 0.0),
        (0.2, "open", 90, 500, "wait", 0.0),
        (0.2, "good", 20, 10, "next_step", BAKE_WEIGHT),
        (BAKE_WEIGHT, "good", 90, 59, "wait", 0.0),
        (BAKE_WEIGHT, "bad", 90, 59, "rollback", 0.0),
        (BAKE_WEIGHT, "good", 0, 60, "promote", 0.0),
    ],
)
def test_a_ramp_goes_up_by_exposure_or_time_and_bakes_before_the_promotion(
    weight: float, result: str, units: int, seconds: float, kind: str, following: float
) -> None:
    seen = at(weight, replace(CANARIES[result], step_units=units), weight_s=seconds)
    action = advance(ramped(weight), seen)
    assert (action.kind, action.weight) == (kind, following)


def test_a_bake_is_not_held_for_its_time() -> None:
    seen = at(BAKE_WEIGHT, CANARIES["good"], step_s=9e9, weight_s=10.0)
    assert advance(ramped(BAKE_WEIGHT), seen).kind == "wait"


def test_a_route_that_lags_behind_its_row_is_sent_again() -> None:
    assert advance(ramped(0.05), at(0.01, CANARIES["open"])).kind == "start_canary"
    assert advance(ramped(0.05), at(0.01, CANARIES["bad"])).kind == "rollback"


@pytest.mark.parametrize(
    ("units_per_s", "weight"), [(None, 0.01), (30.0, 0.01), (19.0, 0.05), (3.0, 0.2), (1.0, 0.2)]
)
def test_steps_that_traffic_cannot_fill_are_skipped_with_the_reason(
    units_per_s: float | None, weight: float
) -> None:
    row = ramped(0.01, canary_started_at=None)
    action = advance(row, evidence(units_per_s=units_per_s))
    if weight == 0.01:
        assert action.kind == "start_canary"
    else:
        assert (action.kind, action.weight) == ("next_step", weight)
        assert "skipped" in action.reason
        row = replace(row, weight=weight)
        assert advance(row, evidence(units_per_s=units_per_s)).kind == "start_canary"


@pytest.mark.parametrize(("margin", "needed"), [(0.01, "489"), (0.0, "inf")])
def test_a_margin_that_can_never_be_met_is_refused_with_the_exposure_that_it_needs(
    margin: float, needed: str
) -> None:
    row = release(step="canary", settings=SETTINGS.model_dump() | {"margin": margin})
    action = advance(row, evidence(units_per_s=2.0))
    assert action.kind == "hold"
    assert f"{needed} canary units" in action.reason
    assert "240 within 600 s" in action.reason
    assert advance(row, evidence(units_per_s=None)).kind == "start_canary"
    assert advance(release(step="canary"), evidence(units_per_s=2.0)).kind == "start_canary"


@pytest.mark.parametrize("guards", [(), ("errors", "ttft")])
def test_without_a_guard_that_can_promote_no_user_sees_the_canary(guards: tuple[str, ...]) -> None:
    settings = SETTINGS.model_dump() | {"guards": guards}
    action = advance(release(step="canary", settings=settings), evidence())
    assert action.kind == "hold"
    assert "release.guards" in action.reason


def test_without_feedback_the_offline_scores_lower_bound_decides() -> None:
    row = release(step="score", settings=SETTINGS.model_dump() | {"feedback": "none"})
    for low, kind in ((-0.02, "next_gate"), (-0.021, "hold")):
        score = OfflineScore(100, 0.9, 0.9, low)
        assert advance(row, evidence(score=score)).kind == kind
        assert advance(release(step="score"), evidence(score=score)).kind == "next_gate"


@pytest.mark.parametrize("target", ["suite", "task"])
def test_of_a_part_of_the_items_the_lower_bound_decides_and_the_gate_says_what_it_estimates(
    target: Target,
) -> None:
    row = release(step="score", settings=SETTINGS.model_dump() | {"score_margin": 0.05})
    for low, kind in ((-0.049, "next_gate"), (-0.05, "hold")):
        action = advance(row, evidence(score=OfflineScore(100, 0.9, 0.9, low, part_of=target)))
        assert action.kind == kind
        assert f"estimated for the {target}" in action.reason


def test_the_gate_says_what_was_scored() -> None:
    for verifier, name in (("exact", "offline score"), ("likelihood", "likelihood"), ("preference", "pairs")):
        score = OfflineScore(100, 0.9, 0.8, verifier=verifier)
        assert name in advance(release(step="score"), evidence(score=score)).reason


def test_a_changed_champion_supersedes() -> None:
    for step in ("probe", "score", "canary"):
        action = advance(release(step=step), evidence(champion="other"))
        assert action.kind == "hold"
        assert "uperseded" in action.reason


@pytest.mark.parametrize("verdict", ["promote", "hold"])
def test_a_decision_stands_whatever_is_seen_later(verdict: str) -> None:
    row = release(step="done", reason="why", evidence={"verdict": verdict})
    for champion, result in itertools.product(("old", "new"), CANARIES):
        seen = Evidence(9e9, Route("p", champion=champion), canary=CANARIES[result], step_s=9e9)
        action = advance(row, seen)
        assert action == Action(verdict, "why")


def all_cases() -> list[tuple[Release, Evidence]]:
    rows = [
        release(step=step, state=state, canary_started_at=started, skip_gates=dict.fromkeys(skipped, BY))
        for step in ("probe", "score", "canary")
        for state in ("running", "promoted", "rolled_back", "held")
        for started in (None, 50.0)
        for skipped in ((), ("score",), ("canary",), ("score", "canary"))
    ]
    seen = [
        Evidence(
            0.0, Route("p", champion, None, canary, 0.2), probe, score, result, tombstone, frozen, step_s
        )
        for step_s in (100.0, 9e9)
        for champion in ("old", "other")
        for canary in (None, "new")
        for probe in PROBES.values()
        for score in SCORES.values()
        for result in CANARIES.values()
        for tombstone in (None, "It was bad.")
        for frozen in (False, True)
    ]
    return list(itertools.product(rows, seen))


@pytest.mark.long
def test_what_holds_in_every_case() -> None:
    cases = all_cases()
    assert len(cases) > 100_000
    for row, seen in cases:
        action = advance(row, seen)
        check_case(row, seen, action)


def check_case(row: Release, seen: Evidence, action: Action) -> None:
    if row.state != "running":
        assert action.kind == "wait"
    elif seen.tombstone:
        assert action == Action("rollback", "It was bad.")
    if action.kind not in ("wait",):
        assert action.reason.strip(), "every action says why"
    if action.kind in ("promote", "start_canary"):
        assert row.step == "canary"
        assert not seen.frozen
        assert seen.route.champion == row.baseline
    if action.kind == "promote" and "canary" not in row.skip_gates:
        assert seen.canary.canary_units >= 20
        assert seen.canary.lower >= -0.1
        assert seen.canary.upper > 0
        assert seen.route.canary == row.revision
    if action.kind == "next_gate" and row.step == "probe":
        assert seen.probe == ACCEPTED
    if action.kind == "next_gate" and row.step == "score":
        assert "score" in row.skip_gates or (seen.score and seen.score.items > 0)
    if action.kind == "rollback" and not seen.tombstone:
        assert row.canary_started_at is not None
        assert seen.canary.upper <= 0


PAUSED = {"pauses": [{"by": "ann", "reason": "Lunch.", "at": 60.0}]}


def test_a_paused_release_does_nothing_but_roll_back() -> None:
    for step in ("probe", "score", "approval", "canary"):
        assert advance(release(step=step, **PAUSED), evidence(probe=ACCEPTED, step_s=9e9)).kind == "wait"
    for name, result in CANARIES.items():
        kind = "rollback" if result.harm else "wait"
        late = at(0.2, result, step_s=9e9, weight_s=9e9)
        assert advance(running_canary(**PAUSED), late).kind == kind, name
    assert advance(release(**PAUSED), evidence(tombstone="It was bad.")).kind == "rollback"
    over = {
        "pauses": [PAUSED["pauses"][0] | {"resumed_by": "ann", "resumed_for": "Back.", "resumed_at": 70.0}]
    }
    assert advance(running_canary(**over), at(0.2, CANARIES["good"])).kind == "promote"


def approving(weight: float, *approvals: dict[str, object], **changes: object) -> Release:
    """A release of `ramped` whose steps to 5 and 20% need an approval within 60 s."""
    row = ramped(weight, approvals=list(approvals), **changes)
    return replace(row, settings=row.settings | {"approval_s": 60, "approval_weights": (0.05, 0.2)})


def test_a_step_asks_for_its_approval_and_no_approval_takes_it() -> None:
    full, few = at(0.01, replace(CANARIES["open"], step_units=20)), at(0.01, CANARIES["open"])
    asked, given = (
        {"weight": 0.05, "asked_at": 90.0},
        {"weight": 0.05, "asked_at": 90.0, "by": "ann", "at": 95.0},
    )
    assert (advance(approving(0.01), full).kind, advance(approving(0.01), full).weight) == ("ask", 0.05)
    assert advance(approving(0.01), few).kind == "wait"
    waiting = approving(0.01, asked)
    for asked_s, kind in ((59.9, "wait"), (60.0, "hold")):
        assert advance(waiting, replace(full, asked_s=asked_s, step_s=9e9, weight_s=9e9)).kind == kind
    assert advance(waiting, at(0.01, CANARIES["bad"])).kind == "rollback"
    # Evidence takes the step, not the approval.
    assert advance(approving(0.01, given), few).kind == "wait"
    assert advance(approving(0.01, given), full) == advance(ramped(0.01), full)
    # Each step has its own, and one for a larger step covers those before it.
    assert advance(approving(0.05, given), at(0.05, full.canary)).kind == "ask"
    assert advance(approving(0.01, given | {"weight": 0.2}), full).kind == "next_step"
    assert advance(approving(0.2, given), at(0.2, CANARIES["good"])).weight == BAKE_WEIGHT


def test_a_jump_over_steps_asks_for_the_largest_before_any_user_comes() -> None:
    row = approving(0.01, canary_started_at=None)
    action = advance(row, evidence(units_per_s=3.0))
    assert (action.kind, action.weight) == ("ask", 0.2)
    assert advance(row, evidence(units_per_s=30.0)).kind == "start_canary"
