"""Signs of a collapse, in made-up sequences of steps."""

from typing import Any

import pytest

from engine.problems.procedural import Problem
from engine.training.rollout_data import Drawn, Sampler, repeated_share
from engine.training.run_health import signs, warning
from engine.training.sample_groups import Sample

HEALTHY = {"entropy": 2.0, "repeated": 0.05, "truncated": 0.1, "kl": 0.02}


def steps(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Three healthy steps, then one for each of `changes`."""
    return [HEALTHY] * 3 + [HEALTHY | change for change in changes]


def drawn(*groups: list[tuple[tuple[int, ...], str]]) -> Drawn:
    samples = [[Sample(tokens, (-1.0,) * len(tokens), text) for tokens, text in group] for group in groups]
    problems = [Problem("t", f"question {number}", "a") for number in range(len(groups))]
    return Drawn(Sampler(0, None), problems, [[5]] * len(groups), samples, 9, 0.1)


@pytest.mark.parametrize(
    ("metric", "bad", "fine", "words"),
    [
        # The limits: 60% of 2 nats, 5% and 10 points, 10% and 25 points, 1 nat.
        ("entropy", 1.19, 1.21, "entropy fell from 2.00 to 1.19 nats a token"),
        ("repeated", 0.16, 0.14, "the share of repeated 3-grams rose from 5% to 16%"),
        ("truncated", 0.36, 0.34, "the share of answers at the token limit rose from 10% to 36%"),
        ("kl", 1.01, 0.99, "the KL divergence to the base reached 1.01 nats a token"),
    ],
)
def test_each_sign_has_its_limit(metric: str, bad: float, fine: float, words: str) -> None:
    assert signs(steps(*[{metric: bad}] * 3)) == {metric: words}
    assert signs(steps(*[{metric: fine}] * 3)) == {}


def test_one_bad_step_is_no_sign_and_a_base_that_began_so_neither() -> None:
    assert signs(steps({"entropy": 0.7, "repeated": 0.3, "truncated": 0.8}, HEALTHY, HEALTHY)) == {}
    babbling = HEALTHY | {"entropy": 0.2, "repeated": 0.9, "truncated": 1.0}
    assert signs([babbling] * 8) == {}


def test_too_few_steps_and_missing_metrics_show_nothing() -> None:
    assert signs([{"kl": 9.0}] * 3) == {}
    assert signs([{"kl": 9.0}] * 4).keys() == {"kl"}
    # A step in which no group taught has no entropy; a loss without a KL term has no divergence.
    blank = dict.fromkeys(HEALTHY)
    assert signs([blank] * 8) == {}
    assert signs([*steps({"entropy": 0.1}, {"entropy": 0.1}), blank]).keys() == {"entropy"}


@pytest.mark.parametrize(
    ("tokens", "share"),
    [((), 0.0), ((1, 2), 0.0), ((1, 2, 3, 4), 0.0), ((7, 7, 7, 7, 7), 2 / 3), ((1, 2, 3, 1, 2, 3), 1 / 4)],
)
def test_repeated_3_grams(tokens: tuple[int, ...], share: float) -> None:
    assert repeated_share(tokens) == pytest.approx(share)


def test_a_warning_names_only_what_is_new_and_quotes_the_answers_that_repeat_most() -> None:
    calm, loop = ((1, 2, 3, 4), "calm"), ((7,) * 9, "loop loop")
    said = drawn([calm, calm], [calm, loop], [((1, 2, 1, 2, 1, 2), "some"), calm])
    rows = steps({"entropy": 0.5}, {"entropy": 0.5})
    first = warning(rows, said)
    assert first == (
        "The answers may be collapsing: entropy fell from 2.00 to 1.00 nats a token. "
        "'question 1' was answered with 'loop loop'; 'question 2' was answered with 'some'."
    )
    later = [*rows, HEALTHY | {"entropy": 0.5, "kl": 6.0}]
    found = warning(later, said)
    assert found is not None
    assert "KL divergence" in found
    assert "entropy" not in found
    assert warning([*later, HEALTHY | {"entropy": 0.5, "kl": 6.0}], said) is None
