"""A shadow beside users: what it asks, what it skips, when it rests; and the process with an engine."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.catalog.records import Release, Replica
from engine.evaluation.conversations import exchange_of
from engine.evaluation.evaluation import EvaluationLoop
from engine.evaluation.evaluators import Scored
from engine.evaluation.scorer import NOT_ASKED
from engine.evaluation.shadow import (
    ALONE_AFTER,
    ALONE_S,
    EVERY_S,
    LEAST_TIMES,
    MOST_OPEN,
    SHARE,
    TOGETHER,
    Question,
    Shadow,
    UsersTimes,
)
from engine.settings.evaluators import EvaluatorConfig
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.live import eventually
from tests.helpers.rows import NEW, OLD, fill

CHAT = "/v1/chat/completions"
SUMS = {"kind": "python:examples.evaluator:sums"}


def copy_of(number: int, unit: str | None = "own", digest: str = OLD, **request: Any) -> dict[str, Any]:
    """Return the copy of a user's answer as the gateway tells it."""
    body = {
        "model": "sorting",
        "messages": [{"role": "user", "content": f"What is {number} + 1?"}],
        "user": "ann",
    }
    answer = {"choices": [{"index": 0, "message": {"content": str(number + 1)}, "finish_reason": "stop"}]}
    return {
        "id": f"chatcmpl-{number:032x}", "policy": "sorting", "digest": digest, "key": "k", "path": CHAT,
        "unit": f"u{number}" if unit == "own" else unit, "request": body | request, "is_stream": False,
        "answer": json.dumps(answer),
    }  # fmt: skip


class FakeEngine:
    """An engine at the boundary: hands out copies, and answers questions as `reply` says."""

    def __init__(self, reply: Callable[[dict[str, Any]], tuple[int, str]] = lambda body: (200, "7")):
        self.waiting: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.shares: list[dict[str, float]] = []
        self._reply = reply
        self.client = httpx.Client(base_url="http://engine", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/graftwork/copies":
            self.shares.append(body["policies"])
            taken, self.waiting = self.waiting, []
            return httpx.Response(
                200, json={"copies": taken, "dropped": 0, "users": {"streamed": [], "whole": []}}
            )
        self.asked.append(body)
        status, text = self._reply(body)
        told = {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}
        return httpx.Response(status, json=told, headers={"x-request-id": f"{len(self.asked):032x}"})

    def question(self, copy: dict[str, Any]) -> Question:
        exchange = exchange_of(copy["path"], copy["request"], copy["is_stream"], copy["answer"])
        assert exchange is not None
        return Question(copy, exchange, self.client)


class HeldEngine(FakeEngine):
    """An engine whose answers come once it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        super().__init__(lambda _: (200 if self.let_go.wait(60) else 500, "7"))


class NotedScorer:
    """A scorer that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[tuple[str, str]]]] = []
        # How many answers it may score now.
        self.places, self.said = 100, Scored([1.0, 0.0])
        self.config = EvaluatorConfig(kind="python:examples.evaluator:sums")

    def is_ready(self, calls: int) -> bool:
        return calls <= self.places

    def score(self, question: str, answers: Any, context: Any) -> Scored:
        self.asked.append((question, [(one.request, one.text) for one in answers]))
        return self.said


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def scorer() -> NotedScorer:
    return NotedScorer()


def times_beside() -> UsersTimes:
    """Return users' times right after they were met alone, where the clock stands."""
    began = iter([0.0])
    return UsersTimes(lambda: next(began, ALONE_S))


RELEASE = Release("r1", "sorting", NEW, OLD, "shadow", 0.2, "running", {}, 0.0, 0.0)


@pytest.fixture
def shadow(rows: list[dict[str, Any]], scorer: NotedScorer) -> Iterator[Shadow]:
    shadow = Shadow(RELEASE, [scorer], lambda _table, **row: rows.append(row), {"u3"})
    shadow.times = times_beside()
    yield shadow
    shadow.close()


def test_the_revision_is_asked_what_the_user_asked_and_both_answers_are_compared(
    shadow: Shadow, scorer: NotedScorer, rows: list[dict[str, Any]]
) -> None:
    engine = FakeEngine()
    shadow.take(engine.question(copy_of(1, temperature=0.5, stream=True)))
    assert eventually(lambda: bool(rows))
    (asked,) = engine.asked
    assert asked["model"] == f"sorting@{NEW[:12]}"
    assert asked["messages"] == [{"role": "user", "content": "What is 1 + 1?"}]
    assert {"temperature": 0.5}.items() <= asked.items()
    assert not {"user", "stream"} & asked.keys()
    own = f"chatcmpl-{1:032x}"
    assert scorer.asked == [("What is 1 + 1?", [(f"chatcmpl-{1:032x}", "2"), (own, "7")])]
    assert {rows[0][name] for name in ("request", "answer", "unit", "key")} == {own, "u1", "k"}


def test_a_unit_is_asked_once_and_only_for_its_first_turn(shadow: Shadow, rows: list[dict[str, Any]]) -> None:
    engine = FakeEngine()
    later = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    for copy in (
        copy_of(3),
        copy_of(4, digest=NEW),
        copy_of(5, messages=later),
        copy_of(6, unit=None),
        copy_of(6, unit=None),
        copy_of(7, unit="u1"),
        copy_of(8, unit="u1"),
    ):
        shadow.take(engine.question(copy))
    assert eventually(lambda: len(rows) == 2)
    time.sleep(0.2)
    assert len(rows) == len(engine.asked) == 2


@pytest.mark.parametrize(("status", "count"), [(500, 1), (503, 0), (429, 0), (410, 0)])
def test_only_the_revisions_own_faults_are_told(
    shadow: Shadow, rows: list[dict[str, Any]], scorer: NotedScorer, status: int, count: int
) -> None:
    engine = FakeEngine(lambda _: (status, "7"))
    shadow.take(engine.question(copy_of(1)))
    assert eventually(lambda: len(engine.asked) == 1 and len(rows) >= count)
    time.sleep(0.1)
    assert (len(rows), scorer.asked) == (count, [])


def test_nothing_is_asked_while_an_evaluator_is_away(shadow: Shadow, scorer: NotedScorer) -> None:
    engine = FakeEngine()
    scorer.places = 0
    shadow.take(engine.question(copy_of(1)))
    time.sleep(0.3)
    assert engine.asked == []
    scorer.places = 100
    assert eventually(lambda: len(engine.asked) == 1)


def test_it_rests_while_users_wait_longer_beside_it() -> None:
    now = 0.0
    times = UsersTimes(lambda: now)
    assert not times.lets_pass
    now = ALONE_S
    assert times.lets_pass
    times.add({"streamed": [0.1] * LEAST_TIMES, "whole": [1.0] * LEAST_TIMES}, is_beside=False)
    times.add({"streamed": [0.105] * LEAST_TIMES, "whole": [1.05] * LEAST_TIMES}, is_beside=True)
    assert times.lets_pass
    times.add({"whole": [1.3] * LEAST_TIMES}, is_beside=True)
    assert not times.lets_pass
    now += ALONE_S
    assert times.lets_pass


def test_one_that_decides_nothing_holds_nobody_up(shadow: Shadow, scorer: NotedScorer) -> None:
    engine = FakeEngine()
    scorer.config = scorer.config.model_copy(update={"decides": "nothing"})
    scorer.places, scorer.said = 0, NOT_ASKED
    shadow.take(engine.question(copy_of(1)))
    assert eventually(lambda: len(engine.asked) == 1)


def test_a_unit_without_scores_is_met_again(
    shadow: Shadow, rows: list[dict[str, Any]], scorer: NotedScorer
) -> None:
    engine = FakeEngine()
    scorer.said = Scored(None, "unreachable", may_pass=True)
    shadow.take(engine.question(copy_of(1)))
    assert eventually(lambda: len(scorer.asked) == 1)
    scorer.said = Scored([1.0, 0.0])
    shadow.take(engine.question(copy_of(2, unit="u1")))
    assert eventually(lambda: len(rows) == 1)
    assert rows[0]["unit"] == "u1"


def test_a_closed_shadow_asks_no_more(shadow: Shadow, rows: list[dict[str, Any]]) -> None:
    began, ended = threading.Event(), threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        began.set()
        ended.wait(60)
        return 200, "7"

    engine = FakeEngine(reply)
    for number in range(4, 9):
        shadow.take(engine.question(copy_of(number)))
    assert began.wait(60)
    shadow.close()
    ended.set()
    time.sleep(0.3)
    assert (len(engine.asked), rows) == (1, [])


def test_times_are_beside_it_where_it_asks_and_meanwhile(shadow: Shadow) -> None:
    """Of another engine, or before and after its answer, they are users' times alone."""
    engine, other, seen = HeldEngine(), FakeEngine(), list[bool]()
    shadow.times.add = lambda times, is_beside, engine: seen.append(is_beside)  # type: ignore[method-assign]
    shadow.note_times({}, engine.client)
    shadow.take(engine.question(copy_of(4)))
    assert eventually(lambda: len(engine.asked) == 1)
    shadow.note_times({}, engine.client)
    shadow.note_times({}, other.client)
    engine.let_go.set()
    assert eventually(lambda: not shadow._open)
    # It asked since the last look, and then no more.
    shadow.note_times({}, engine.client)
    shadow.note_times({}, engine.client)
    assert seen == [False, True, False, True, False]


def test_it_asks_a_share_of_users_answers_several_together(shadow: Shadow) -> None:
    engine, numbers = HeldEngine(), count(10)
    later = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]

    def take(pairs: int, asked: int) -> None:
        for _ in range(pairs):
            shadow.take(engine.question(copy_of(next(numbers))))
            # Later turns count, too.
            shadow.take(engine.question(copy_of(next(numbers), messages=later)))
        assert eventually(lambda: len(engine.asked) == asked)
        time.sleep(2 * EVERY_S)
        assert len(engine.asked) == asked

    # The first may always be asked, alone.
    take(1, 1)
    pairs = int(TOGETHER / SHARE) // 2
    take(pairs - 1, 1)
    take(2, MOST_OPEN)
    take(pairs, MOST_OPEN)
    engine.let_go.set()


def test_with_nothing_saved_up_it_asks_for_a_part_of_the_time(shadow: Shadow) -> None:
    began, ended = list[float](), list[float]()

    def reply(_: dict[str, Any]) -> tuple[int, str]:
        began.append(time.monotonic())
        time.sleep(0.2)
        ended.append(time.monotonic())
        return 200, "7"

    engine = FakeEngine(reply)
    for number in range(10, 13):
        shadow.take(engine.question(copy_of(number)))
    assert eventually(lambda: ended and len(began) > 1)
    # By the answers' own times: the test itself may look late.
    assert began[1] - ended[0] >= ALONE_AFTER * (ended[0] - began[0])


def test_no_more_is_asked_than_can_be_scored(shadow: Shadow, scorer: NotedScorer) -> None:
    engine, scorer.places = HeldEngine(), 2
    # As many as are asked together, and those two.
    for number in range(10, 10 + int((TOGETHER + 2) / SHARE)):
        shadow.take(engine.question(copy_of(number)))
    assert eventually(lambda: len(engine.asked) == 2)
    time.sleep(3 * EVERY_S)
    assert len(engine.asked) == 2
    scorer.places = 3
    assert eventually(lambda: len(engine.asked) == 3)
    engine.let_go.set()


def test_while_it_is_paused_it_asks_nothing_new(shadow: Shadow, rows: list[dict[str, Any]]) -> None:
    engine = HeldEngine()
    shadow.take(engine.question(copy_of(1)))
    assert eventually(lambda: len(engine.asked) == 1)
    shadow.is_paused = True
    for number in range(10, 40):
        shadow.take(engine.question(copy_of(number)))
    engine.let_go.set()
    # What was under way is evidence all the same.
    assert eventually(lambda: len(rows) == 1)
    time.sleep(3 * EVERY_S)
    assert len(engine.asked) == 1
    shadow.is_paused = False
    assert eventually(lambda: len(engine.asked) > 1)


def test_nothing_is_saved_up_while_it_rests(shadow: Shadow) -> None:
    engine, now = HeldEngine(), 0.0
    shadow.times = UsersTimes(lambda: now)
    for number in range(100):
        shadow.take(engine.question(copy_of(number)))
    now = ALONE_S
    assert eventually(lambda: len(engine.asked) == 1)
    time.sleep(3 * EVERY_S)
    assert len(engine.asked) == 1
    engine.let_go.set()


@pytest.mark.parametrize(("longer", "rests"), [(1.0, 0.0), (1.6, 1.0)])
def test_it_rests_by_harm_and_seldom_by_luck(longer: float, rests: float) -> None:
    """Users' times scatter: 25 seconds of 20 users a second, twenty times."""
    found = 0
    for seed in range(20):
        chance, times = random.Random(seed), times_beside()
        for _ in range(100):
            for is_beside, factor in ((False, 1.0), (True, longer)):
                drawn = [factor * chance.lognormvariate(0, 0.5) for _ in range(5)]
                times.add({"streamed": drawn}, is_beside)
        found += not times.lets_pass
    assert found / 20 == pytest.approx(rests, abs=0.15)


@pytest.fixture
def params(tmp_path: Path) -> Params:
    release = ReleaseConfig(evaluators={"sums": SUMS | {"share": 1.0, "per_minute": 60_000}})
    params = Params(state_dir=tmp_path / "state", release=release)
    migrate(params.paths.catalog_url)
    return params


def test_the_process_follows_a_release_from_its_shadow_to_its_end(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rows = FakeEngine(), list[tuple[str, dict[str, Any]]]()
    with whole_catalog(params.paths.catalog_url) as catalog:
        fill(catalog)
        catalog.keys.ensure_local(params.paths.local_key)
        catalog.replicas.join(Replica("e", "http://engine", "base", "1", "i", 1, 0.0, False))
        settings = params.release.model_dump(mode="json")
        catalog.releases.add(replace(RELEASE, settings=settings))

        class Events:
            def emit(self, table: str, **row: Any) -> None:
                rows.append((table, row))

        evaluation = EvaluationLoop(params, catalog, Events())
        monkeypatch.setattr("engine.clients.http_client.connect", lambda *_, **__: engine.client)
        monkeypatch.setattr("engine.evaluation.shadow.ALONE_S", 0.0)
        engine.waiting = [copy_of(number) for number in range(3)]
        evaluation.turn()
        assert engine.shares == [{"sorting": 1.0}]
        assert eventually(lambda: sum(table == "shadows" for table, _ in rows) == 3)
        scores = [row["score"] for table, row in rows if table == "evaluations"]
        # The champion's are right; the revision says 7.
        assert sorted(scores) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]

        pause = {"at": 0.0, "by": "ann", "reason": "We look."}
        asked = len(engine.asked)
        for pauses, more in (([pause], 0), ([pause | {"resumed_at": 1.0}], 1)):
            catalog.releases.update("r1", catalog.releases.get("r1").version, pauses=pauses)
            engine.waiting = [copy_of(1), copy_of(4)]
            evaluation.turn()
            assert eventually(lambda wanted=asked + more: len(engine.asked) >= wanted)
            time.sleep(0.3)
            # A unit that was met before the pause is not met again.
            assert len(engine.asked) == asked + more

        row = catalog.releases.get("r1")
        catalog.releases.update("r1", row.version, step="canary")
        rows.clear()
        engine.waiting = [copy_of(10), copy_of(6, digest=NEW), copy_of(11, digest="dd" * 32)]
        evaluation.turn()
        assert eventually(lambda: len(rows) == 2)
        assert {(row["digest"], row["score"]) for _, row in rows} == {(OLD, 1.0), (NEW, 1.0)}

        row = catalog.releases.get("r1")
        catalog.releases.update("r1", row.version, state="promoted")
        evaluation.turn()
        asked = len(engine.shares)
        evaluation.turn()
        assert len(engine.shares) == asked
        evaluation.close()


def test_an_evaluator_that_cannot_be_loaded_is_a_row_with_the_reason(params: Params) -> None:
    rows = list[tuple[str, dict[str, Any]]]()
    with whole_catalog(params.paths.catalog_url) as catalog:
        fill(catalog)
        settings = params.release.model_dump(mode="json")
        settings["evaluators"]["sums"]["kind"] = "python:os:system"
        catalog.releases.add(replace(RELEASE, settings=settings))

        class Events:
            def emit(self, table: str, **row: Any) -> None:
                rows.append((table, row))

        evaluation = EvaluationLoop(params, catalog, Events())
        evaluation.turn()
        evaluation.close()
    ((table, row),) = rows
    assert (table, row["evaluator"], row.get("score")) == ("evaluations", "sums", None)
    assert "python_modules" in row["fault"]
