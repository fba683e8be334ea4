"""How a release's error budget is split, against sums by hand."""

from typing import Any

import pytest

from engine.quality.budget import ErrorBudget
from engine.settings.releases import ReleaseConfig

SUMS = {"kind": "verifier", "decides": "both"}
TASTE = {"kind": "judge:m", "url": "http://judge/v1", "rubric": "Rate it."}
RESOLVED = {"kind": "metric"}
SHOWN = {"kind": "verifier", "decides": "nothing"}


def split(**settings: Any) -> ErrorBudget:
    return ErrorBudget.of(ReleaseConfig.model_validate({"alpha": 0.06, **settings}))


@pytest.mark.parametrize("evaluators", [{}, {"shown": SHOWN}])
def test_without_deciding_evaluators_the_ratings_have_all_of_it(evaluators: dict[str, Any]) -> None:
    assert split(evaluators=evaluators) == ErrorBudget(ratings=0.06)
    assert split(evaluators=evaluators, feedback="none") == ErrorBudget(ratings=0.06)


def test_shadow_evaluators_and_ratings_have_a_third_each() -> None:
    """The shadow's 0.02: half for the evaluator, half for errors, invalid, refused, truncated and length."""
    assert split(evaluators={"sums": SUMS}) == ErrorBudget(
        ratings=pytest.approx(0.02),
        evaluator=pytest.approx(0.02),
        paired=pytest.approx(0.01),
        shadowed=pytest.approx(0.002),
    )


def test_evaluators_share_their_part_and_metrics_have_none_of_the_shadows() -> None:
    found = split(evaluators={"sums": SUMS, "taste": TASTE, "resolved": RESOLVED, "shown": SHOWN})
    assert found.evaluator == pytest.approx(0.02 / 3)
    assert found.paired == pytest.approx(0.02 / 2 / 2)


def test_parts_that_a_release_does_not_have_leave_theirs_to_the_others() -> None:
    halves = ErrorBudget(ratings=0.03, evaluator=0.03)
    assert split(evaluators={"sums": SUMS}, shadow=0) == halves
    assert split(evaluators={"resolved": RESOLVED}) == halves
    without = split(evaluators={"sums": SUMS}, guards=("reward", "ttft"))
    assert (without.paired, without.shadowed) == (pytest.approx(0.02), 0.0)
    alone = split(evaluators={"sums": SUMS}, guards=())
    assert alone == ErrorBudget(evaluator=0.03, paired=0.03)


@pytest.mark.parametrize("evaluators", [{}, {"sums": SUMS}, {"sums": SUMS, "taste": TASTE}, {"r": RESOLVED}])
@pytest.mark.parametrize("shadow", [0, 10])
@pytest.mark.parametrize("guards", [(), ("reward",), ("reward", "errors", "length", "cost")])
def test_all_tests_together_have_alpha(evaluators: dict[str, Any], shadow: int, guards: tuple[str]) -> None:
    found = split(evaluators=evaluators, shadow=shadow, guards=guards)
    paired = len(set(evaluators) - {"r"})
    spent = found.ratings + len(evaluators) * found.evaluator + paired * found.paired
    spent += len({"errors", "length"} & set(guards)) * found.shadowed
    assert spent == pytest.approx(0.06 if guards or evaluators else 0.0)
