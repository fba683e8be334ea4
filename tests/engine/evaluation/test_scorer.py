"""An evaluator at work on a release: rate, budget, retries, rest, order, and one row for each score."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.catalog.records import Release
from engine.evaluation import scorer as module
from engine.evaluation.evaluators import Scored
from engine.evaluation.scorer import NOT_ASKED, Answered, Scorer
from engine.settings.evaluators import EvaluatorConfig

RELEASE = Release("r1", "sums", "new", "old", "canary", 0.2, "running", {}, 0.0, 0.0)


class FakeEvaluator:
    """An evaluator that says what `reply` makes of the answers."""

    def __init__(self, reply: Callable[[Sequence[str]], Scored]):
        self.reply, self.asked = reply, list[list[str]]()

    def score(self, question: str, answers: Sequence[str], context: dict[str, Any]) -> Scored:
        self.asked.append(list(answers))
        return self.reply(answers)

    def close(self) -> None: ...


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def as_numbers(answers: Sequence[str]) -> Scored:
    return Scored([float(answer) for answer in answers], None, 0.5)


def working(
    reply: Callable[[Sequence[str]], Scored], spent: float = 0.0, **settings: Any
) -> tuple[Scorer, FakeEvaluator, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    evaluator = FakeEvaluator(reply)
    config = EvaluatorConfig(kind="python:examples.evaluator:sums", **settings)

    def emit(_table: str, **row: Any) -> None:
        rows.append(row)

    return Scorer(RELEASE, "sums", config, evaluator, emit, spent), evaluator, rows


def answer(text: str, request: str = "a") -> Answered:
    return Answered(request, "new", text)


def test_each_answer_has_its_own_score_in_whatever_order_it_was_shown(clock: Clock) -> None:
    scorer, evaluator, rows = working(as_numbers, per_minute=60_000)
    for _ in range(20):
        clock.sleep(1)
        assert scorer.score("q", [answer("0.25", "a"), answer("0.75", "b")], {}).scores == [0.25, 0.75]
    assert sorted(map(tuple, evaluator.asked))[0] != sorted(map(tuple, evaluator.asked))[-1]
    assert {(row["request"], row["score"], row["seconds"]) for row in rows} == {
        ("a", 0.25, 0.25),
        ("b", 0.75, 0.25),
    }


def test_a_score_has_one_id_and_a_failure_does_not_take_it(clock: Clock) -> None:
    scorer, _, rows = working(as_numbers, per_minute=60_000)
    failing, _, failed = working(lambda _: Scored(None, "timeout"), per_minute=60_000)
    other, _, newer = working(as_numbers, version="2")
    for one in (scorer, scorer, failing, failing, other):
        clock.sleep(1)
        one.score("q", [answer("1")], {})
    assert rows[0]["id"] == rows[1]["id"] != newer[0]["id"]
    assert len({row["id"] for row in [*rows, *failed]}) == 3
    assert [(row["score"], row["fault"]) for row in failed] == [(None, "timeout")] * 2


def test_no_more_answers_a_minute_than_its_rate(clock: Clock) -> None:
    scorer, evaluator, _ = working(as_numbers, per_minute=30)
    for _ in range(600):
        scorer.score("q", [answer("1")], {})
        clock.sleep(0.1)
    assert 29 <= len(evaluator.asked) <= 31


def test_its_budget_is_the_end_also_after_a_restart(clock: Clock) -> None:
    scorer, evaluator, _ = working(as_numbers, per_minute=60_000, budget=2)
    for _ in range(10):
        clock.sleep(1)
        scorer.score("q", [answer("1")], {})
    assert (len(evaluator.asked), scorer.is_ready()) == (4, False)
    again, _, _ = working(as_numbers, spent=2.0, budget=2)
    assert (again.score("q", [answer("1")], {}), again.is_ready()) == (NOT_ASKED, False)


def test_what_may_pass_is_tried_again_and_every_attempt_costs(clock: Clock) -> None:
    replies = [Scored(None, "status 503", 0.1, may_pass=True), Scored([1.0], None, 0.2, 30)]
    scorer, evaluator, rows = working(lambda _: replies.pop(0))
    assert scorer.score("q", [answer("1")], {}).scores == [1.0]
    assert (len(evaluator.asked), rows[0]["tokens"], round(rows[0]["seconds"], 6)) == (2, 30, 0.3)


def test_one_that_is_away_rests_longer_and_longer_and_comes_back(clock: Clock) -> None:
    is_away = True

    def reply(answers: Sequence[str]) -> Scored:
        return Scored(None, "unreachable", may_pass=True) if is_away else as_numbers(answers)

    scorer, _, rows = working(reply, per_minute=60_000)
    for _ in range(3600):
        scorer.score("q", [answer("1")], {})
        clock.sleep(1)
    # An hour of it: 30 s of rest and three attempts each.
    assert 100 < len(rows) < 200
    is_away = False
    clock.sleep(module.REST_S)
    assert scorer.score("q", [answer("1")], {}).scores == [1.0]


def test_a_fault_of_the_answer_is_not_tried_again(clock: Clock) -> None:
    scorer, evaluator, _ = working(lambda _: Scored(None, "returned text"))
    assert scorer.score("q", [answer("1")], {}).fault == "returned text"
    assert len(evaluator.asked) == 1


def test_an_evaluator_that_raises_has_a_fault_and_goes_on(clock: Clock) -> None:
    def reply(answers: Sequence[str]) -> Scored:
        return as_numbers(answers) if answers == ["1"] else Scored([], None, 1 / 0)

    scorer, _, rows = working(reply, per_minute=60_000)
    assert scorer.score("q", [answer("2")], {}).fault == "raised ZeroDivisionError"
    clock.sleep(1)
    assert scorer.score("q", [answer("1")], {}).scores == [1.0]
    assert [row["fault"] for row in rows] == ["raised ZeroDivisionError", None]


def test_retries_end_with_the_budget(clock: Clock) -> None:
    scorer, evaluator, _ = working(lambda _: Scored(None, "timeout", 9.0, 50, may_pass=True), budget=60)
    assert scorer.score("q", [answer("1")], {}).fault == "timeout"
    assert (len(evaluator.asked), scorer.is_ready()) == (2, False)
