"""Readings against what is known exactly: expectations of draws, full reads, and how often intervals hold."""

import numpy as np
import pytest

from engine.quality.prediction import OutcomePredictor
from engine.quality.reading import Draw, SuiteReading, TaskReading, draw_probabilities
from engine.quality.regression import RegressionReading, Target
from engine.quality.term_sequence import TermSequence

RUNS, ALPHA = 120, 0.2
# The most misses at ALPHA: four standard deviations over the mean.
MOST_MISSES = round(RUNS * ALPHA + 4 * (RUNS * ALPHA * (1 - ALPHA)) ** 0.5)
Reading = SuiteReading | TaskReading


def history(items: int, seed: int) -> tuple[OutcomePredictor, np.ndarray, np.ndarray]:
    """Return a predictor, the outcomes of a revision like its parent, and the parent's."""
    random = np.random.default_rng(seed)
    difficulty_N = random.normal(0, 1.5, items)
    parent_N, sibling_N, own_N = ((difficulty_N + random.normal(0, 1, items) > 0) * 1.0 for _ in range(3))
    return OutcomePredictor(parent_N, sibling_N[None], ["easy", "hard"] * (items // 2)), own_N, parent_N


def read(reading: Reading, own_N: np.ndarray) -> None:
    while chosen := reading.choose(4):
        reading.add(own_N[chosen])


@pytest.mark.parametrize("known", [0, 1, 3])
@pytest.mark.parametrize("uniform", [0.2, 1.0])
def test_the_term_of_a_draw_expects_the_mean_whatever_is_predicted(known: int, uniform: float) -> None:
    outcomes_N, predicted_N = np.array([1.0, 0.0, 0.4, 1.0, 0.0]), np.array([0.1, 0.9, 0.5, 0.98, 0.02])
    predicted_R, unread_R = predicted_N[known:], outcomes_N[known:]
    probability_R = draw_probabilities(predicted_R, uniform)
    terms = [
        Draw(known + at, at, predicted_R, probability_R).term(outcome, outcomes_N[:known].sum(), 5)
        for at, outcome in enumerate(unread_R)
    ]
    values_R, low_R, high_R, _ = np.array(terms).T
    assert probability_R @ values_R == pytest.approx(outcomes_N.mean())
    assert (low_R <= values_R).all()
    assert (values_R <= high_R).all()
    assert probability_R.min() >= uniform / len(unread_R) - 1e-12


@pytest.mark.long
def test_an_interval_of_the_task_holds_whatever_is_predicted() -> None:
    """Here the opposite of what is true."""
    _, own_N, parent_N = history(40, seed=0)
    random = np.random.default_rng(0)
    misses = 0
    for seed in range(RUNS):
        at_N = random.integers(40, size=60)
        predictor = OutcomePredictor(1 - own_N[at_N], np.empty((0, 60)), ())
        reading = TaskReading(predictor, parent_N[at_N], seed, ALPHA)
        read(reading, own_N[at_N])
        assert 60 * 0.25 < reading.items < 60
        misses += not reading.difference.holds((own_N - parent_N).mean())
    assert misses <= MOST_MISSES


@pytest.mark.parametrize("question", ["all along", "at a width"])
def test_an_interval_of_the_suite_holds_at_any_stopping_time(question: str) -> None:
    misses = 0
    for seed in range(RUNS):
        predictor, own_N, _ = history(40, seed)
        reading, held = SuiteReading(predictor, seed, ALPHA), True
        while chosen := reading.choose(4):
            reading.add(own_N[chosen])
            holds = reading.interval.holds(own_N.mean())
            held = (held and holds) if question == "all along" else holds
            if question == "at a width" and reading.interval.width < 0.3:
                break
        misses += not held
    assert misses <= MOST_MISSES


def test_an_interval_that_peeks_does_not_hold() -> None:
    """The count of misses can tell: draws that pretend to be uniform, and are not, break the promise."""
    misses = 0
    for seed in range(60):
        _, own_N, _ = history(40, seed)
        sequence, worst_first = TermSequence(ALPHA, 0.0, 1.0), np.sort(own_N)
        for outcome in worst_first[:20]:
            sequence.add(outcome, 0.0, 1.0, 0.25)
        misses += not sequence.interval.holds(own_N.mean())
    assert misses > 30


def test_a_full_read_is_exact() -> None:
    predictor, own_N, _ = history(40, seed=1)
    reading = SuiteReading(predictor, seed=1)
    read(reading, own_N)
    assert reading.items == 40
    assert reading.interval == (own_N.mean(),) * 3


def test_the_same_seed_reads_the_same_items_and_another_seed_others() -> None:
    def order(seed: int) -> list[int]:
        predictor, own_N, _ = history(40, seed=2)
        reading, items = SuiteReading(predictor, seed), list[int]()
        for _ in range(5):
            items += (chosen := reading.choose(4))
            reading.add(own_N[chosen])
        return items

    assert order(7) == order(7) != order(8)


def test_a_limit_is_tested_exactly_between_two_candidates() -> None:
    limit, mean = 0.50013, 0.50113
    plain, with_limit = TermSequence(ALPHA, 0.0, 1.0), TermSequence(ALPHA, 0.0, 1.0, [limit])
    for _ in range(50):
        for sequence in (plain, with_limit):
            sequence.add(mean, 0.4995, 0.5025, 1e-7)
    assert plain.interval.low == 0.5
    assert with_limit.interval.low == limit


@pytest.mark.parametrize("outcome", [float("nan"), -0.1, 1.1])
def test_an_outcome_that_is_no_score_is_refused(outcome: float) -> None:
    predictor, _, _ = history(40, seed=4)
    reading = SuiteReading(predictor, seed=4)
    reading.choose(1)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        reading.add([outcome])


def test_predictions_follow_a_revision_that_is_better_than_all_before() -> None:
    nothing_right = np.zeros(40)
    predictor = OutcomePredictor(nothing_right, np.zeros((3, 40)), ())
    assert predictor.predicted().max() < 0.3
    for item in range(20):
        predictor.add(item, 1.0)
    assert predictor.predicted()[20:].min() > 0.7


def test_predictions_without_history_are_even_and_learn_by_segment() -> None:
    predictor = OutcomePredictor(np.full(4, np.nan), np.empty((0, 4)), ["a", "a", "b", "b"])
    assert predictor.predicted().tolist() == [0.5] * 4
    for _ in range(10):
        predictor.add(0, 1.0)
        predictor.add(2, 0.0)
    right, _, wrong, _ = predictor.predicted()
    assert wrong < 0.5 < right


@pytest.mark.parametrize(("target", "margin"), [("suite", 0.05), ("task", 0.15)])
def test_a_reading_ends_as_soon_as_the_answer_is_known(target: Target, margin: float) -> None:
    """Revisions that are much worse, much better, and equal; the last costs the most."""
    items = {}
    for gained in (-1, 1, 0):
        baseline_N = np.tile([0.0, 1.0], 100)
        own_N = np.full(200, float(gained > 0)) if gained else baseline_N
        reading = RegressionReading(target, baseline_N, np.empty((0, 200)), (), 2, margin)
        while chosen := reading.choose(4):
            reading.add(own_N[chosen])
        assert reading.has_fallen is (gained < 0)
        assert reading.difference.holds(gained / 2)
        assert reading.own.holds(own_N.mean())
        items[gained] = reading.items
    assert max(items[-1], items[1]) < items[0] < 200


def test_a_fall_of_the_margin_itself_is_a_fall() -> None:
    baseline_N = np.ones(40)
    own_N = np.r_[np.zeros(2), np.ones(38)]
    reading = RegressionReading("suite", baseline_N, np.empty((0, 40)), (), seed=1, margin=0.05)
    while chosen := reading.choose(4):
        reading.add(own_N[chosen])
    assert reading.has_fallen
