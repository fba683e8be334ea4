"""`advance` as a table: every state of the row against every kind of evidence."""

import itertools
from dataclasses import replace

import pytest

from engine.catalog.catalog import Release, Route
from engine.controller.advance import (
    Action,
    CanaryResult,
    Evidence,
    LanguageScore,
    OfflineScore,
    advance,
)
from engine.settings.params import ReleaseConfig

SETTINGS = ReleaseConfig(weight=0.2, alpha=0.05, margin=0.1, min_units=20, max_seconds=600, score_margin=0.02)
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
    "open": CanaryResult(30, 120, 0.9, 0.9, 30, -0.2, 0.2),
    "bad": CanaryResult(8, 32, 0.0, 1.0, 8, -1.0, 0.0),
    "good": CanaryResult(20, 80, 0.9, 0.9, 20, -0.1, 0.3),
    "good, few": CanaryResult(19, 80, 0.9, 0.9, 19, -0.1, 0.3),
    "a little worse, surely": CanaryResult(900, 3600, 0.9, 0.95, 900, -0.09, -0.01),
}


def release(**changes: object) -> Release:
    row = Release("r1", "p", "new", "old", "probe", 0.2, "running", SETTINGS.model_dump(), 0.0, 0.0)
    return replace(row, **changes)


def evidence(
    now: float = 100.0, canary: str | None = None, champion: str | None = "old", **more: object
) -> Evidence:
    return Evidence(now=now, route=Route("p", champion=champion, canary=canary), **more)


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
    assert "The offline score fell" in advance(row, worse).reason


def test_the_margin_of_general_text_is_a_setting() -> None:
    settings = SETTINGS.model_copy(update={"general_margin": 0.5}).model_dump()
    row, language = release(step="score", settings=settings), LanguageScore(50, 29.0, 20.0)
    assert advance(row, evidence(score=SCORES["better"], language=language)).kind == "next_gate"
    assert "rose from the base's 20.00 to 29.00; 5% more is allowed" in (
        advance(release(step="score"), evidence(score=SCORES["better"], language=language)).reason
    )


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
    route = Route("p", champion="old", canary="new")
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
    route = Route("p", champion="old", canary="new")
    kinds = {}
    for name, result in CANARIES.items():
        kinds[name] = advance(running_canary(), Evidence(100.0, route, canary=result, frozen=True)).kind
    assert {name for name, kind in kinds.items() if kind == "rollback"} == {"bad", "a little worse, surely"}
    assert set(kinds.values()) == {"wait", "rollback"}
    assert advance(release(step="canary", skip_gates={"canary": BY}), evidence(frozen=True)).kind == "wait"


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
        Evidence(0.0, Route("p", champion, None, canary), probe, score, result, tombstone, frozen, step_s)
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
