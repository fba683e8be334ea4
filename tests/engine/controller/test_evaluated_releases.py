"""Releases that evaluators decide: the shadow's gate, a verdict without ratings, and what does not count."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.catalog.catalog import Catalog, Release, migrate
from engine.controller.__main__ import whole_controller
from engine.controller.release_loop import Controller
from engine.ledger.ledger import Spool
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.canary_users import Users
from tests.helpers.rows import NEW, OLD, fill

SUMS = {"kind": "python:examples.evaluator:sums", "decides": "both"}


@pytest.fixture
def params(tmp_path: Path) -> Params:
    return Params(state_dir=tmp_path / "state", release=ReleaseConfig(min_units=10, shadow=100))


@pytest.fixture
def controller(params: Params) -> Iterator[Controller]:
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = whole_controller(params, "test")
    yield controller
    controller.close()


def start(controller: Controller, skip: tuple[str, ...] = (), **settings: Any) -> Release:
    given = {"evaluators": {"sums": SUMS}} | settings
    skipped = dict.fromkeys(("score", *skip), "not here")
    release = controller.decisions.start("sorting", NEW, given, skipped, "me")
    controller.tick()
    return controller.catalog.releases.get(release.id)


class Evaluator:
    """What the evaluators' process spools of a release."""

    def __init__(self, params: Params, release: Release):
        self._release, self.spool = release, Spool(params.paths.spool, "evaluation")
        self.pairs = 0

    def score(
        self, request: str, digest: str | None, score: float | None, version: str = "1", **more: Any
    ) -> None:
        fields = {"id": f"{request}-{digest}-{version}", "release": self._release.id, "policy": "sorting"}
        self.spool.emit(
            "evaluations", **fields, request=request, digest=digest, evaluator="sums", version=version,
            score=score, seconds=0.25, fault=None if score is not None else "timeout", **more,
        )  # fmt: skip

    def pair(self, mine: float | None, theirs: float | None, version: str = "1", **more: Any) -> None:
        """Spool a user's question with both answers and their scores."""
        number, self.pairs = self.pairs, self.pairs + 1
        request, answer = (f"{self._release.id} {arm} {number}" for arm in ("user", "shadow"))
        common: dict[str, Any] = {"policy": "sorting", "key": "k"}
        common |= {
            "status": 200,
            "outcome": "ok",
            "completion_tokens": 4,
            "prompt_tokens": 6,
            "latency_s": 0.5,
        }
        self.spool.emit("observations", id=request, digest=OLD, arm="champion", purpose="user", **common)
        self.spool.emit(
            "observations", id=answer, digest=NEW, arm="pinned", purpose="shadow", **(common | more)
        )
        for id, digest, score in ((request, OLD, theirs), (answer, NEW, mine)):
            self.score(id, digest, score, version)
        self.spool.emit(
            "shadows", id=f"{self._release.id} {number}", release=self._release.id, request=request,
            answer=answer, policy="sorting", digest=NEW, unit=f"u{number}", key="k",
        )  # fmt: skip


def shadowed(controller: Controller, params: Params, pairs: list[tuple[Any, Any]], **more: Any) -> Release:
    release = start(controller)
    evaluator = Evaluator(params, release)
    for mine, theirs in pairs:
        evaluator.pair(mine, theirs, **more)
    evaluator.spool.rotate()
    controller.tick()
    return controller.catalog.releases.get(release.id)


def test_a_release_without_evaluators_has_no_shadow(controller: Controller) -> None:
    assert start(controller, evaluators={}).step == "canary"


def test_an_evaluator_that_decides_nothing_makes_no_shadow(controller: Controller) -> None:
    assert start(controller, evaluators={"sums": SUMS | {"decides": "nothing"}}).step == "canary"
    assert start(controller, evaluators={"resolved": {"kind": "metric"}}).step == "canary"


def test_the_evaluators_process_is_needed_while_a_release_has_evaluators(params: Params) -> None:
    """It is told once of the begin and once of the end, and nothing of releases without evaluators."""
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    told: list[bool] = []
    with closing(whole_controller(params, "test", told.append)) as controller:
        without = start(controller, evaluators={})
        controller.tick()
        controller.decisions.hold(without.id, "not now", "me")
        controller.tick()
        assert told == []
        evaluated = start(controller)
        controller.tick()
        assert told == [True]
        controller.decisions.hold(evaluated.id, "not now", "me")
        controller.tick()
    assert told == [True, False]


def test_harm_in_the_shadow_ends_the_release_before_a_user_meets_it(
    controller: Controller, params: Params
) -> None:
    ended = shadowed(controller, params, [(0.0, 1.0)] * 30)
    assert (ended.state, ended.canary_started_at) == ("rolled_back", None)
    assert controller.catalog.routes.get("sorting").canary is None
    assert "no user saw it" in ended.reason
    assert "sums" in ended.reason
    # Two scores of 0.25 s for each pair, and the engine's half a second.
    assert "30 answers in 15.0 s, with 300 tokens" in ended.reason
    assert ended.evidence["shadow"]["pairs"] == 30
    assert ended.evidence["evaluators"][0]["scores"] == 60


def test_a_better_revision_passes_the_shadow_early_and_an_equal_one_after_its_units(
    controller: Controller, params: Params
) -> None:
    assert shadowed(controller, params, [(1.0, 0.0)] * 40).step == "canary"
    controller.decisions.hold(controller.catalog.releases.all("sorting")[0].id, "me", "next")
    alternating = [(1.0, 0.0), (0.0, 1.0)] * 49
    release = shadowed(controller, params, alternating)
    assert release.step == "shadow"
    evaluator = Evaluator(params, release)
    evaluator.pairs = 98
    for mine, theirs in ((1.0, 0.0), (0.0, 1.0)):
        evaluator.pair(mine, theirs)
    evaluator.spool.rotate()
    # Not on every turn: nobody looks at the shadow again before its second is over.
    assert f"release {release.id}" in controller.due
    controller.due.clear()
    controller.tick()
    assert controller.catalog.releases.get(release.id).step == "canary"


@pytest.mark.parametrize("how", ["no scores", "another version"])
def test_a_shadow_without_scores_is_no_evidence(controller: Controller, params: Params, how: str) -> None:
    version, score = ("2", 1.0) if how == "another version" else ("1", None)
    release = shadowed(controller, params, [(score, score)] * 120, version=version)
    assert release.step == "shadow"
    # A gate without evidence fails closed.
    release = controller.catalog.releases.update(
        release.id, release.version, settings=release.settings | {"max_s": 1e-6}
    )
    controller.due.clear()
    controller.tick()
    ended = controller.catalog.releases.get(release.id)
    assert ended.state == "held"
    assert "0 of 100 units" in ended.reason


def test_failing_answers_of_the_shadow_are_harm(controller: Controller, params: Params) -> None:
    ended = shadowed(controller, params, [(None, 1.0)] * 40, status=500, outcome=None)
    assert (ended.state, ended.canary_started_at) == ("rolled_back", None)
    assert "errors" in ended.reason


def test_skipping_the_shadow_takes_a_reason(controller: Controller) -> None:
    release = start(controller, skip=("shadow",))
    assert (release.step, release.skip_gates["shadow"]["by"]) == ("canary", "me")


def ask(users: Users, evaluator: Evaluator, canary: float, baseline: float, count: int) -> None:
    """Spool users who rate nothing, and the evaluator's score of each answer."""
    version = users.route_version()
    for _ in range(count):
        for digest, arm, score in ((NEW, "canary", canary), *[(OLD, "champion", baseline)] * 4):
            evaluator.score(users.see(digest, arm, version), digest, score)
    users.spool.rotate()
    evaluator.spool.rotate()


@pytest.mark.parametrize(("canary", "state"), [(1.0, "promoted"), (0.0, "rolled_back")])
def test_an_evaluator_alone_promotes_or_rolls_back_without_a_rating(
    controller: Controller, params: Params, canary: float, state: str
) -> None:
    release = start(controller, skip=("shadow",), feedback="evaluators")
    ask(Users(params), Evaluator(params, release), canary, 0.5, 60)
    controller.tick()
    ended = controller.catalog.releases.get(release.id)
    assert ended.state == state, ended.reason
    assert "sums" in ended.reason


def test_an_evaluator_that_may_roll_back_promotes_nothing(controller: Controller, params: Params) -> None:
    release = start(controller, skip=("shadow",), evaluators={"sums": SUMS | {"decides": "rollback"}})
    ask(Users(params), Evaluator(params, release), 1.0, 0.5, 60)
    controller.tick()
    assert controller.catalog.releases.get(release.id).state == "running"


def test_no_score_counts_twice(controller: Controller, params: Params) -> None:
    release = start(controller, skip=("shadow",), feedback="evaluators")
    users, evaluator = Users(params), Evaluator(params, release)
    ask(users, evaluator, 1.0, 1.0, 5)
    controller.tick()
    ask_again = Evaluator(params, release)
    for number in range(25):
        digest = NEW if number % 5 == 0 else OLD
        ask_again.score(f"request-{number}", digest, 0.0)
    ask_again.spool.rotate()
    controller.tick()
    (guard,) = [one for one in controller.latest[release.id].canary.guards if "sums" in one.guard]
    assert (guard.canary_units, guard.baseline_units) == (5, 20)
    assert guard.upper > 0


def test_a_metric_counts_once_by_the_key_that_got_the_answer(controller: Controller, params: Params) -> None:
    resolved = {"kind": "metric-lower", "decides": "both"}
    release = start(controller, evaluators={"resolved": resolved}, feedback="evaluators")
    users, version = Users(params), controller.catalog.routes.get("sorting").version
    for number in range(300):
        digest, arm, value = (NEW, "canary", 0.0) if number % 5 == 0 else (OLD, "champion", 1.0)
        request = users.see(digest, arm, version)
        for key, reported in (("foreign", 1.0), ("k", value), ("k", 1 - value)):
            users.spool.emit(
                "metrics", request_id=request, metric="resolved", value=reported, key=key, at=time.time()
            )
    users.spool.rotate()
    controller.tick()
    ended = controller.catalog.releases.get(release.id)
    assert ended.state == "promoted", ended.reason
