"""A champion is looked at again: what makes it due, and what becomes of one that has lost."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from engine.catalog.catalog import Catalog, migrate
from engine.clients.controller import ControllerClient
from engine.clients.engine import EngineClient
from engine.controller.__main__ import whole_app, whole_controller
from engine.controller.alarms import alarms
from engine.controller.recheck import ALPHA, due, judge
from engine.controller.release_loop import Controller
from engine.ledger.looks import CommonScores, Made
from engine.problems.procedural import Problem
from engine.problems.verifiers import RULES
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.threads import background
from tasks import recheck as steps
from tasks.score import ItemScore
from tasks.suites import freeze
from tests.helpers.rows import NEW, OLD, fill

DAY_S, ITEMS, BASE = 86_400.0, 60, {"base": "base"}
MADE = Made("1", "engine", "code")


def paired(mine: float, theirs: float, made: Made = MADE, at: float = 0.0, items: int = 100) -> CommonScores:
    right = [[float(item < items * share) for item in range(items)] for share in (mine, theirs)]
    return CommonScores(made, *right, at)


SEEN = [paired(1, 1), paired(1, 1, MADE._replace(suite_version="2"), at=DAY_S)]


@pytest.mark.parametrize(
    ("seen", "made", "now", "why"),
    [
        ([], MADE, 0, "not been scored together"),
        (SEEN, SEEN[1].made, 8 * DAY_S, None),
        (SEEN, SEEN[1].made, 8.1 * DAY_S, "7.1 days ago"),
        (SEEN, Made("2.2", "engine", "code"), 0, "look: suite, verifier, tokenizer or template."),
        (SEEN, Made("2", "other", "newer"), 0, "look: engine's settings, code."),
        ([paired(1, 1, items=99)], MADE, 0, "look: the items."),
    ],
)
def test_what_makes_a_look_due(seen: list[CommonScores], made: Made, now: float, why: str | None) -> None:
    said = due(seen, made, 100, now, after_s=7 * DAY_S)
    assert said is None if why is None else why in str(said)


def test_only_what_is_shown_to_be_below_the_margin_has_lost() -> None:
    assert judge([paired(0.6, 0.9)], 0.05)[0]
    assert not judge([paired(0.9, 0.9)], 0.0)[0]
    # Shown to be worse, and not by more than a release may lose.
    assert not judge([paired(0.6, 0.9)], 0.25)[0]
    # The newest look counts, and not the last that was new.
    assert not judge([paired(0.9, 0.9, at=9.0), paired(0.5, 0.9, MADE._replace(code_version="b"))], 0.05)[0]


def test_later_looks_need_more_and_all_levels_sum_to_alpha() -> None:
    nights = [paired(0.9, 0.9, Made(f"{night}", "", ""), at=night) for night in range(40)]
    late = [*nights, paired(0.6, 0.9, Made("40", "", ""), at=40.0)]
    close = paired(0.76, 0.9, at=41.0)
    assert judge([close], 0.0)[0]
    assert judge(late, 0.05)[0]
    assert not judge([*nights, close], 0.0)[0]
    assert sum(ALPHA / (k * (k + 1)) for k in range(1, 10_000)) == pytest.approx(ALPHA, rel=1e-3)


class Installation:
    """A controller with two revisions, of which NEW is champion, and a suite; `right` answers for the engine.

    `right` tells of a digest (None: the base) how many of the items it solves.
    """

    def __init__(self, params: Params, controller: Controller):
        self.params, self.controller = params, controller
        self.right: dict[str | None, int] = {NEW: 50, OLD: 40, None: 0}
        self.asked: list[str | None] = []

    def write_suite(self, version: int) -> None:
        problems = [Problem("own", f"What is {version} + {n}?", str(version + n)) for n in range(ITEMS)]
        rule = {"verifier": "numeric"}
        freeze("sorting-json", "own", rule, problems, "<{}>".format, version, 8, self.params.suites_dir)

    def answers(
        self, _p: Params, revisions: Any, suite: Any, *_: Any
    ) -> Iterator[Callable[[], tuple[tuple[ItemScore, ...], int]]]:
        for _, digest in revisions:
            self.asked.append(digest)
            right = self.right[digest]
            items = [ItemScore(one.id, float(n < right), "?") for n, one in enumerate(suite.items)]
            yield partial(lambda items: (tuple(items), 0), items)

    def recheck(self) -> dict[str, str]:
        return steps.recheck(self.params, "sorting", "", "nightly")

    @property
    def champion(self) -> str | None:
        return self.controller.catalog.routes.get("sorting").champion


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Installation]]:
    stops: list[Callable[[], object]] = []

    def install(**settings: Any) -> Installation:
        policy = PolicyConfig(task="own.jsonl", suite="sorting-json", verifier="numeric", **settings)
        params = Params(
            state_dir=tmp_path / "state", suites_dir=tmp_path / "suites", policies={"sorting": policy}
        )
        migrate(params.paths.catalog_url)
        with Catalog(params.paths.catalog_url) as catalog:
            fill(catalog)
            route = catalog.routes.get("sorting")
            catalog.routes.update(replace(route, champion=NEW, previous=OLD), route.version)
        controller = whole_controller(params, "test")
        key = controller.catalog.keys.ensure_local(params.paths.local_key)
        client = ControllerClient("http://controller")
        app = whole_app(controller, type("Mirror", (), {"fault": None})())
        client.http = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        one = Installation(params, controller)
        one.write_suite(1)
        monkeypatch.setattr(steps, "controller", lambda _: nullcontext(client))
        monkeypatch.setattr(EngineClient, "marker", lambda _: BASE)
        monkeypatch.setattr("tasks.score.ask_engine", one.answers)
        turning = background(controller.run)
        stops.extend((controller.stop, lambda: turning.result(30), controller.close))
        return one

    yield install
    for stop in stops:
        stop()


def test_a_suite_on_which_the_champion_loses_raises_an_alarm(installed: Callable[..., Installation]) -> None:
    one = installed()
    first = one.recheck()
    assert (first["state"], one.asked) == ("kept", [NEW, OLD])
    assert first["scored"]
    # The readers' copy of the ledger follows.
    one.controller.files.publish()
    assert (one.recheck()["scored"], one.asked) == ("", [NEW, OLD])
    one.write_suite(2)
    one.right[NEW] = 10
    lost = one.recheck()
    assert (lost["state"], one.champion) == ("lost", NEW)
    assert "0.167, and its predecessor 0.667, on 60 items of version 2" in lost["reason"]
    assert lost["scored"] == "Changed since the last look: suite, verifier, tokenizer or template."
    assert alarms(one.controller)["champion of sorting"] == lost["reason"]
    # Once a person has decided, that is no alarm any more.
    one.controller.decisions.restore("sorting", None, "ada", "I have seen it.")
    assert "champion of sorting" not in alarms(one.controller)


def test_with_the_setting_it_is_rolled_back_as_by_a_person_but_not_while_frozen(
    installed: Callable[..., Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = installed(recheck="rollback")
    assert one.recheck()["state"] == "kept"
    # Another version of the verifier's rule is another version of the suite.
    monkeypatch.setitem(RULES, "numeric", RULES["numeric"] + 1)
    one.right[NEW] = 10
    one.controller.decisions.freeze("ada", "A holiday.")
    frozen = one.recheck()
    assert (frozen["state"], one.champion) == ("lost", NEW)
    assert alarms(one.controller)["champion of sorting"] == frozen["reason"]
    one.controller.decisions.thaw("ada", "It is over.")
    found = one.recheck()
    assert (found["state"], one.champion) == ("rolled_back", OLD)
    stone = one.controller.catalog.tombstones.find("sorting", NEW)
    assert stone
    assert (stone.by, stone.reason) == ("nightly", found["reason"])
    newest = one.controller.catalog.notices.newest("graftwork.champion.rolled_back")
    assert newest
    assert newest.reason == found["reason"]
    assert "champion of sorting" not in alarms(one.controller)
    # The next predecessor is the base.
    assert one.recheck()["state"] == "kept"
    assert one.asked[-2:] == [OLD, None]


def test_what_cannot_be_compared_is_said(installed: Callable[..., Installation]) -> None:
    one = installed()
    release = one.controller.decisions.start("sorting", OLD, {"approval_s": 60}, {"score": "none"}, "ada")
    assert "release of aaaaaaaaaaaa is running" in one.recheck()["reason"]
    one.controller.decisions.hold(release.id, "ada", "It is over.")
    routes = one.controller.catalog.routes
    kept = routes.get("sorting")
    routes.update(replace(kept, previous="ee" * 32), kept.version)
    assert "predecessor eeeeeeeeeeee is no longer in the catalog" in one.recheck()["reason"]
    routes.update(kept, kept.version + 1)
    assert one.asked == []
    one.controller.decisions.rollback("sorting", OLD, "ada", "It is bad.")
    assert (one.recheck()["state"], one.asked) == ("kept", [NEW, None])
    one.controller.decisions.rollback("sorting", NEW, "ada", "It is bad.")
    assert one.recheck() == {
        "state": "skipped", "reason": "It has no champion: the base answers.", "scored": "",
    }  # fmt: skip
