"""Evaluators in a canary: what they may end, what a promotion needs, and what is only observed."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.quality.canary import CanaryAnswer, CanaryJudge
from engine.quality.guards import GuardResult, RewardGuard
from engine.settings.releases import GUARDS, ReleaseConfig

SUMS = {"kind": "verifier", "decides": "both"}
WEIGHTS = {0: 0.2}


def judge(is_against_base: bool = False, **settings: Any) -> CanaryJudge:
    return CanaryJudge(ReleaseConfig.model_validate(settings), WEIGHTS, is_against_base)


def users(count: int) -> Iterator[tuple[str, bool]]:
    return ((f"u{number}", number % 5 == 0) for number in range(count))


def score(judged: CanaryJudge, name: str, canary: float, baseline: float, count: int = 1000) -> None:
    for unit, is_canary in users(count):
        judged.evaluate(name, 0, "k", unit, is_canary, canary if is_canary else baseline)


def named(found: tuple[GuardResult, ...], name: str) -> GuardResult:
    return next(guard for guard in found if guard.guard == name)


def test_without_evaluators_every_level_is_what_it_was() -> None:
    """The levels of the releases whose error rates are published."""
    judged = judge()
    rules = {found.guard: found.rule for found in judged.result().guards}
    assert rules["reward"] == "betting confidence sequence at level 0.05, margin 0.1"
    assert rules["errors"] == "mixture of binomials at level 0.00313, margin 0.05"
    assert list(rules) == list(GUARDS)
    assert {guard.share for guard in judged.others.values()} == {0.05 / 2 / 8}
    silent = judge(feedback="none")
    assert {guard.share for guard in silent.others.values()} == {0.05 / 8}
    assert [found.guard for found in silent.result().guards] == list(GUARDS[1:])


def test_the_rewards_and_the_others_keep_to_the_ratings_part() -> None:
    """0.06 is a third each for shadow, evaluators and ratings; an interval's level is twice its harm's."""
    rules = {
        found.guard: found.rule for found in judge(alpha=0.06, evaluators={"sums": SUMS}).result().guards
    }
    assert "level 0.04," in rules["score by sums"]
    assert "level 0.02," in rules["reward"]
    assert "level 0.00125," in rules["errors"]


def test_an_evaluators_guard_is_the_rewards_under_another_name() -> None:
    judged = judge(evaluators={"sums": SUMS}, shadow=0)
    direct = RewardGuard(WEIGHTS, 0.05, 0.1)
    for number, (unit, is_canary) in enumerate(users(600)):
        value = float(number % 7 > 0)
        judged.evaluate("sums", 0, "k", unit, is_canary, value)
        direct.add(0, "k", unit, is_canary, value)
    found, wanted = named(judged.result().guards, "score by sums"), direct.judge()
    assert (found.state, found.lower, found.upper) == (wanted.state, wanted.lower, wanted.upper)
    assert (found.evaluator, found.required) == ("sums", True)


def test_a_unit_has_the_mean_of_its_scores() -> None:
    judged = judge(evaluators={"sums": SUMS})
    for value in (1.0, 0.0, 0.5):
        judged.evaluate("sums", 0, "k", "u", True, value)
    assert judged.evaluators["sums"].mean(True) == 0.5


@pytest.mark.parametrize("decides", ["nothing", "rollback", "both"])
def test_what_an_evaluator_may_decide(decides: str) -> None:
    evaluators = {"sums": {"kind": "verifier", "decides": decides}}
    bad, good = judge(evaluators=evaluators), judge(evaluators=evaluators, feedback="evaluators")
    score(bad, "sums", 0.0, 1.0)
    score(good, "sums", 1.0, 1.0)
    harm = bad.result().harm
    assert (harm is not None) == (decides != "nothing")
    assert good.result().is_clear == (decides == "both")
    assert bool(good.result().observed) == (decides == "nothing")


def test_a_verdict_names_the_evaluator() -> None:
    judged = judge(evaluators={"sums": SUMS})
    score(judged, "sums", 0.0, 1.0)
    harm = judged.result().harm
    assert harm is not None
    assert harm.sentence().startswith("Worse by sums: canary - baseline lies between -1.000 and -")
    assert harm.guard == "score by sums"


def test_a_promotion_needs_every_named_guard_and_not_whichever_is_clear_first() -> None:
    evaluators = {"sums": SUMS, "schema": SUMS, "taste": {"kind": "verifier"}}
    judged = judge(evaluators=evaluators)
    assert [found.guard for found in judged.result().required] == [
        "reward", "score by sums", "score by schema",
    ]  # fmt: skip
    score(judged, "sums", 1.0, 1.0)
    score(judged, "schema", 1.0, 1.0)
    assert not judged.result().is_clear
    assert judged.result().canary_units == 0
    for unit, is_canary in users(2000):
        judged.rate(0, "k", unit, is_canary, 1.0)
    assert judged.result().is_clear


def test_with_evaluators_rewards_need_not_be_clear_and_may_still_roll_back() -> None:
    judged = judge(evaluators={"sums": SUMS}, feedback="evaluators")
    score(judged, "sums", 1.0, 1.0)
    result = judged.result()
    assert [found.guard for found in result.required] == ["score by sums"]
    assert result.is_clear
    assert (result.canary_units, result.baseline_units, result.step_units) == (200, 800, 200)
    for unit, is_canary in users(200):
        judged.rate(0, "k", unit, is_canary, float(not is_canary))
    harm = judged.result().harm
    assert harm is not None
    assert harm.guard == "reward"


def test_without_feedback_evaluators_are_needed_beside_all_other_guards() -> None:
    judged = judge(evaluators={"sums": SUMS}, feedback="none", guards=("errors",))
    for unit, is_canary in users(1500):
        judged.observe(CanaryAnswer(0, "k", unit, is_canary))
    assert not judged.result().is_clear
    score(judged, "sums", 1.0, 1.0)
    assert judged.result().is_clear
    assert judged.result().canary_units == 200


def test_a_metric_may_be_better_when_it_is_lower() -> None:
    evaluators = {"clicks": {"kind": "metric"}, "retries": {"kind": "metric-lower"}}
    judged = judge(evaluators=evaluators)
    score(judged, "clicks", 1.0, 0.0)
    score(judged, "retries", 1.0, 0.0)
    assert [found.state for found in judged.result().guards[1:3]] == ["clear", "harm"]
    harm = judged.result().harm
    assert harm is not None
    assert harm.evaluator == "retries"


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_scores_outside_zero_and_one_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"Scores lie in .* by sums"):
        judge(evaluators={"sums": SUMS}).evaluate("sums", 0, "k", "u", True, value)


def test_no_key_decides_alone_by_an_evaluator() -> None:
    judged = judge(evaluators={"sums": SUMS})
    for unit, is_canary in users(500):
        judged.evaluate("sums", 0, "loud", unit, is_canary, float(not is_canary))
    assert judged.result().harm is not None
    for unit, is_canary in users(50):
        judged.evaluate("sums", 0, "quiet", unit, is_canary, 1.0)
    found = named(judged.result().guards, "score by sums")
    assert found.state == "open"
    assert "key loud alone" in found.note


def test_guards_that_are_not_chosen_are_observed_and_decide_nothing() -> None:
    judged = judge(guards=("reward", "errors"))
    for unit, is_canary in users(400):
        outcome, length = ("invalid", 90.0) if is_canary else ("ok", 10.0)
        judged.observe(CanaryAnswer(0, "k", unit, is_canary, outcome=outcome, length=length))
    result = judged.result()
    assert [found.guard for found in result.guards] == ["reward", "errors"]
    assert [(found.guard, found.state) for found in result.observed] == [
        ("invalid", "harm"), ("refused", "open"), ("truncated", "open"), ("length", "harm"),
    ]  # fmt: skip
    assert result.harm is None
    assert judged.is_open
    assert {guard.share for guard in judged.others.values()} == {0.025}


def test_without_feedback_ratings_that_come_are_observed() -> None:
    judged = judge(feedback="none")
    judged.rate(0, "k", "u", True, 1.0)
    assert [found.guard for found in judged.result().observed] == ["reward"]


def test_a_row_has_what_was_observed_without_infinite_bounds() -> None:
    judged = judge(guards=("reward",))
    judged.observe(CanaryAnswer(0, "k", "u", True, ttft_s=1.0))
    row = judged.result().summary()
    assert [(one["guard"], one["upper"]) for one in row["observed"]] == [("errors", 1.0), ("ttft", None)]
