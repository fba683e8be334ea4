"""The shadow's judge: pairs of answers, each unit once, and what its guards find in them."""

import json
from typing import Any

import numpy as np
import pytest

from engine.quality.guards import ONE_KEY, GuardResult
from engine.quality.rates import log_evidence
from engine.quality.sequential import MeanSequence
from engine.quality.shadow import ShadowAnswer, ShadowJudge, ShadowPair, ShadowResult
from engine.settings.releases import ReleaseConfig

SUMS = {"kind": "verifier", "decides": "both"}
OK = ShadowAnswer(outcome="ok")


def judge(is_against_base: bool = False, **settings: Any) -> ShadowJudge:
    settings = {"evaluators": {"sums": SUMS}, **settings}
    return ShadowJudge(ReleaseConfig.model_validate(settings), is_against_base)


def scored(unit: object, revision: float, baseline: float, key: str = "k", by: str = "sums") -> ShadowPair:
    return ShadowPair(
        key, str(unit), ShadowAnswer(scores={by: revision}), ShadowAnswer(scores={by: baseline})
    )


def named(result: ShadowResult, name: str) -> GuardResult:
    return next(found for found in (*result.guards, *result.observed) if found.guard == name)


def observe(judged: ShadowJudge, count: int, revision: ShadowAnswer, baseline: ShadowAnswer) -> None:
    for number in range(count):
        judged.observe(ShadowPair("k", f"u{number}", revision, baseline))


def test_differences_are_judged_by_the_betting_sequence() -> None:
    """By hand: the shadow has a third of 0.05, its evaluator half of it, and an interval twice that level."""
    judged, direct = judge(), MeanSequence(0.05 / 3, above=0.45, below=0.5)
    chance = np.random.default_rng(1)
    for unit, (new, old) in enumerate(chance.random((300, 2)).tolist()):
        judged.observe(scored(unit, new, old))
        direct.add((new - old + 1) / 2)
        assert judged.is_open == (not direct.is_above and not direct.is_below)
    found = named(judged.result(), "score by sums")
    assert found.lower == pytest.approx(2 * direct.lower - 1)
    assert found.upper == pytest.approx(2 * direct.upper - 1)
    assert found.rule == "betting confidence sequence of pairs at level 0.0167, margin 0.1"


def test_a_worse_revision_is_harm_and_an_equal_one_clear() -> None:
    worse, equal = judge(), judge()
    for unit in range(120):
        worse.observe(scored(unit, 0.2, 0.9))
        equal.observe(scored(unit, 0.9, 0.9))
    harm = worse.result().harm
    assert harm is not None
    assert harm.sentence().startswith("Worse by sums: revision - baseline lies between -")
    assert "after 120 pairs" in harm.sentence()
    assert harm.note == ONE_KEY
    assert not worse.result().is_clear
    assert equal.result().is_clear
    assert equal.result().harm is None


def test_a_unit_counts_once() -> None:
    judged = judge()
    for _ in range(500):
        judged.observe(scored("busy", 0.0, 1.0))
    judged.observe(scored("busy", 0.0, 1.0, key="another key's"))
    assert (judged.result().pairs, judged.result().units) == (2, 2)
    assert named(judged.result(), "score by sums").canary_units == 2


def test_units_are_those_that_every_deciding_evaluator_scored() -> None:
    """With an evaluator that is away, no number of answers leads on to the canary."""
    judged = judge(evaluators={"sums": SUMS, "taste": {"kind": "verifier"}})
    for unit in range(50):
        judged.observe(scored(unit, 1.0, 1.0))
    assert (judged.result().pairs, judged.result().units) == (50, 0)
    judged.observe(ShadowPair("k", "half", ShadowAnswer(scores={"taste": 0.0}), OK))
    assert judged.result().units == 0
    assert not judged.result().is_clear


def test_all_deciding_evaluators_must_be_clear_and_one_finds_harm() -> None:
    judged = judge(evaluators={"sums": SUMS, "taste": {"kind": "verifier"}})
    for unit in range(300):
        new, old = {"sums": 1.0, "taste": 0.0}, {"sums": 1.0, "taste": 1.0}
        judged.observe(ShadowPair("k", str(unit), ShadowAnswer(scores=new), ShadowAnswer(scores=old)))
    assert [found.state for found in judged.result().required] == ["clear", "harm"]
    assert not judged.result().is_clear


def test_only_discordant_pairs_tell_of_faults() -> None:
    """The e-value by hand: of 9 discordant pairs the revision's answer is the bad one, 300 tell nothing."""
    judged = judge(alpha=0.06)
    for number in range(309):
        new = ShadowAnswer(outcome="invalid" if number >= 300 or number < 100 else "ok")
        old = ShadowAnswer(outcome="invalid" if number < 100 else "ok")
        judged.observe(ShadowPair("k", str(number), new, old))
        alone = max(0, number - 299)
        is_harm = log_evidence({0.5: (alone, 0)}) >= -np.log(0.002)
        assert (named(judged.result(), "invalid").state == "harm") == is_harm
    found = named(judged.result(), "invalid")
    assert found.state == "open"
    for number in range(3):
        judged.observe(ShadowPair("k", f"more {number}", ShadowAnswer(outcome="invalid"), OK))
    assert named(judged.result(), "invalid").state == "harm"
    assert "discordant pairs at level 0.002" in named(judged.result(), "invalid").rule


BAD = {
    "errors": ShadowAnswer(503),
    "invalid": ShadowAnswer(outcome="invalid"),
    "refused": ShadowAnswer(outcome="refused"),
    "truncated": ShadowAnswer(outcome="truncated"),
    "length": ShadowAnswer(length=300.0),
}


@pytest.mark.parametrize(("name", "bad"), BAD.items())
def test_faults_and_lengths_of_the_revision_alone_are_harm(name: str, bad: ShadowAnswer) -> None:
    good = ShadowAnswer(outcome="ok", length=10.0)
    worse, better, both = judge(), judge(), judge()
    observe(worse, 200, bad, good)
    observe(better, 200, good, bad)
    observe(both, 200, bad, bad)
    assert [found.guard for found in worse.result().guards if found.state == "harm"] == [name]
    assert better.result().harm is None
    assert both.result().harm is None
    assert f"{name}: revision" in named(worse.result(), name).sentence()


def test_against_the_base_lengths_are_reported_only() -> None:
    judged = judge(is_against_base=True)
    observe(judged, 200, ShadowAnswer(length=300.0), ShadowAnswer(length=10.0))
    assert judged.is_open
    assert "reported only" in named(judged.result(), "length").rule


def test_no_key_decides_alone() -> None:
    judged = judge()
    for unit in range(500):
        judged.observe(scored(unit, 0.0, 1.0, key="loud"))
    assert judged.result().harm is not None
    for unit in range(50):
        judged.observe(scored(unit, 1.0, 1.0, key="quiet"))
    found = named(judged.result(), "score by sums")
    assert found.state == "open"
    assert "key loud alone" in found.note


@pytest.mark.parametrize(("name", "bad"), BAD.items())
@pytest.mark.parametrize("second", ["good", "bad"])
def test_faults_that_one_key_alone_meets_do_not_decide(name: str, bad: ShadowAnswer, second: str) -> None:
    judged, good = judge(), ShadowAnswer(outcome="ok", length=10.0)
    for number in range(200):
        judged.observe(ShadowPair("loud", f"l{number}", bad, good))
        judged.observe(ShadowPair("other", f"o{number}", bad if second == "bad" else good, good))
    assert named(judged.result(), name).state == ("harm" if second == "bad" else "open")


def test_what_is_only_observed_decides_nothing() -> None:
    shown = {"kind": "verifier", "decides": "nothing"}
    judged = judge(
        evaluators={"sums": SUMS, "shown": shown, "clicks": {"kind": "metric"}}, guards=("errors",)
    )
    for unit in range(200):
        judged.observe(scored(unit, 0.0, 1.0, by="shown"))
    observe(judged, 200, ShadowAnswer(outcome="invalid"), OK)
    result = judged.result()
    assert [found.guard for found in result.guards] == ["score by sums", "errors"]
    assert [found.guard for found in result.observed if found.state == "harm"] == [
        "score by shown",
        "invalid",
    ]
    assert judged.is_open
    assert result.harm is None
    assert not result.is_clear


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_scores_outside_zero_and_one_are_refused_and_leave_no_trace(wrong: float) -> None:
    judged = judge()
    with pytest.raises(ValueError, match=r"Scores lie in .* by sums"):
        judged.observe(scored("u", wrong, 0.5))
    assert judged.result().pairs == 0
    judged.observe(scored("u", 0.5, 0.5))
    assert judged.result().units == 1


def test_a_row_of_a_result_is_json() -> None:
    row = judge().result().summary()
    assert json.loads(json.dumps(row, allow_nan=False)) == json.loads(json.dumps(row))
    assert [one["upper"] for one in row["guards"] if one["guard"] == "length"] == [None]


@pytest.mark.long
@pytest.mark.parametrize(("mean", "count", "least", "most"), [(0.9, 300, 0, 6), (0.8, 60, 57, 60)])
def test_equal_revisions_seldom_end_and_worse_ones_mostly_do(
    mean: float, count: int, least: int, most: int
) -> None:
    """Scores of 0 or 1 against a baseline of 0.9; the evaluator has a sixth of 5%."""
    chance, ended = np.random.default_rng(7), 0
    for _ in range(count):
        judged = judge()
        pairs = (chance.random((ReleaseConfig().shadow, 2)) < [mean, 0.9]).astype(float).tolist()
        for unit, (new, old) in enumerate(pairs):
            judged.observe(scored(unit, new, old))
            if not judged.is_open:
                break
        ended += judged.result().harm is not None
    assert least <= ended <= most
