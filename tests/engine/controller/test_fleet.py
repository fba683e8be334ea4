"""A release waits until every live engine has its revision; engines that have not are named."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.catalog.catalog import Catalog, Release, Replica, migrate
from engine.catalog.fleet import SILENT_S, Fleet
from engine.controller import advance
from engine.controller.evidence import EvidenceReader
from engine.controller.release_loop import Controller
from engine.settings.params import Params
from tests.helpers.rows import NEW, fill

PAIR = ("sorting", NEW)


class World:
    """A controller with a clock of the test, and engines that beat when told to."""

    def __init__(self, root: Path):
        self.now = 100.0
        params = Params(state_dir=root)
        migrate(params.paths.catalog_url)
        self.catalog = Catalog(params.paths.catalog_url)
        fill(self.catalog)
        self.controller = Controller(params, "test")

        def now() -> float:
            return self.now

        fleet = Fleet(self.catalog, now)
        self.controller.reader = EvidenceReader(self.catalog, now, fleet.without)
        self.engines: dict[str, Replica] = {}

    def join(self, id: str, base: str = "base") -> None:
        self.engines[id] = Replica(id, "http://x", base, "1", uuid.uuid4().hex, 0, 0.0, draining=False)
        self.catalog.replicas.join(self.engines[id])

    def tick(self, seconds: float, **loads: dict[tuple[str, str], str | None]) -> None:
        self.now += seconds
        for id, loaded in loads.items():
            assert self.catalog.replicas.beat(self.engines[id], loaded)
        self.controller.tick()

    def start(self, **settings: Any) -> Release:
        skipped = {"score": "none here"}
        return self.controller.decisions.start("sorting", NEW, settings, skipped, "me")

    def canary(self) -> str | None:
        return self.catalog.routes.get("sorting").canary


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "state")
    yield world
    world.controller.close()
    world.catalog.close()


def test_the_canary_starts_when_every_engine_has_it(world: World) -> None:
    world.join("one")
    world.join("two")
    world.join("other", base="another")
    world.start()
    world.tick(1, one={PAIR: None}, two={})
    world.tick(1, one={PAIR: None}, two={})
    assert world.canary() is None
    world.tick(1, one={PAIR: None}, two={PAIR: None})
    assert world.canary() == NEW


def test_an_engine_that_cannot_load_it_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advance, "LOAD_S", 30)
    world.join("one")
    world.join("two")
    release = world.start()
    for _ in range(29):
        world.tick(1, one={PAIR: None}, two={PAIR: "Its file is torn."})
        assert world.canary() is None
    for _ in range(3):
        world.tick(1, one={PAIR: None}, two={PAIR: "Its file is torn."})
    ended = world.catalog.releases.get(release.id)
    assert ended.state == "held"
    assert "two: Its file is torn." in ended.reason
    assert "one:" not in ended.reason


def test_a_promotion_without_a_canary_waits_too(world: World) -> None:
    world.join("one")
    skipped = {"score": "none here", "canary": "urgent"}
    world.controller.decisions.start("sorting", NEW, {}, skipped, "me")
    world.tick(1, one={})
    assert world.catalog.routes.get("sorting").champion != NEW
    world.tick(1, one={PAIR: None})
    assert world.catalog.routes.get("sorting").champion == NEW


def test_nobody_waits_for_a_dead_or_draining_engine(world: World) -> None:
    world.join("dead")
    world.join("one")
    world.start()
    world.tick(1, one={PAIR: None})
    assert world.canary() is None
    world.tick(SILENT_S, one={PAIR: None})
    assert world.canary() is None
    world.tick(1, one={PAIR: None})
    assert world.canary() == NEW


def test_a_draining_engine_is_not_waited_for(world: World) -> None:
    world.join("leaving")
    world.engines["leaving"] = replace(world.engines["leaving"], draining=True)
    world.start()
    world.tick(1, leaving={})
    assert world.canary() == NEW


def test_a_rollback_waits_for_nobody(world: World) -> None:
    world.join("one")
    world.start()
    world.tick(1, one={PAIR: None})
    assert world.canary() == NEW
    # Its heartbeat goes on, and it says that it has lost the revision.
    world.catalog.tombstones.add("sorting", NEW, "bad", "ada")
    world.tick(1, one={})
    assert world.canary() is None


def test_the_engines_own_clocks_do_not_matter(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    catalog, now = Catalog(url), [0.0]
    fleet = Fleet(catalog, lambda: now[0])
    one = Replica("one", "http://x", "base", "1", "a", 0, 0.0, draining=False)
    catalog.replicas.join(one)
    assert [row.id for row in fleet.live()] == ["one"]
    now[0] = SILENT_S + 1
    assert fleet.live() == []
    assert catalog.replicas.beat(one, {})
    assert [row.id for row in fleet.live()] == ["one"]
    # A new start counts from when it is first seen.
    now[0] += SILENT_S + 1
    catalog.replicas.join(replace(one, incarnation="b"))
    assert [row.id for row in fleet.live()] == ["one"]
    catalog.close()
