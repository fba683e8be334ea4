"""What is loaded before anybody asks: what a release brings, and who was popular before a restart."""

import asyncio
import json
import time

import pytest

from engine.errors import NotFound, ServiceError
from engine.serving.gateway.prewarming import Prewarmer, served_names
from tests.helpers.adapters_cold import FakeEngine, name_of, residency, revision, settle, use

MIB = 1 << 20


class FakeRouter:
    """Knows revisions by number; `released` is what must stay resident."""

    def __init__(self, known: int = 1000, size: int = 100):
        self.released: frozenset[tuple[str, str]] = frozenset()
        self.changed: set[str] = set()
        self.damaged: set[tuple[str, str]] = set()
        self.rows = {revision(i).digest: revision(i, size) for i in range(known)}

    def under_release(self):
        return self.released

    @property
    def last_released(self):
        return self.released

    async def ask(self, call, *args):
        return call(*args)

    def take_changed(self):
        changed, self.changed = self.changed, set()
        return changed

    def in_quarantine(self, revisions):
        return {(row.policy, row.digest) for row in revisions} & self.damaged

    def revision(self, policy, digest, may_be_old=True):
        if digest not in self.rows:
            raise NotFound(f"Policy {policy!r} has no revision {digest[:12]!r} in the catalog.")
        return self.rows[digest]


async def test_a_release_brings_its_canary_and_champion(tmp_path):
    engine, router = FakeEngine(0), FakeRouter()
    tier = residency(engine)
    prewarmer = Prewarmer(tier, router, tmp_path / "warm.json")
    await prewarmer.look()
    assert len(tier.queue) == 0
    router.released = frozenset(("sums", revision(i).digest) for i in (1, 2))
    assert served_names(router.last_released) == {name_of(1), name_of(2)}
    await prewarmer.look()
    await settle(lambda: [resident.users for resident in tier.residents.values()] == [0, 0])
    await prewarmer.look()
    assert sorted(engine.prepared) == [name_of(1), name_of(2)]
    assert all(resident.users == 0 for resident in tier.residents.values())


async def test_few_wait_at_once_so_that_none_waits_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.prewarming.AHEAD", 2)
    router, tier = FakeRouter(), residency(FakeEngine(0.01), load_concurrency=3)
    router.released = frozenset(("sums", revision(i).digest) for i in range(12))
    prewarmer = Prewarmer(tier, router, tmp_path / "warm.json")
    waiting = []
    async with asyncio.timeout(60):
        while len(tier.residents) < 12:
            await prewarmer.look()
            waiting.append(len(tier.queue))
            await asyncio.sleep(0.001)
    assert max(waiting) == 2


async def test_a_release_whose_load_failed_is_loaded_later(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.prewarming.LOOK_S", 0.005)
    monkeypatch.setattr("engine.serving.gateway.prewarming.NOTE_S", 0.01)
    router, engine = FakeRouter(), FakeEngine(0)
    tier = residency(engine)
    engine.faults[name_of(1)] = [ServiceError("The store did not answer.")]
    router.released = frozenset({("sums", revision(1).digest)})
    running = asyncio.create_task(Prewarmer(tier, router, tmp_path / "warm.json").run())
    await settle(lambda: name_of(1) in tier.residents)
    running.cancel()
    assert engine.faults[name_of(1)] == []


async def test_what_is_gone_does_not_keep_the_others_from_coming(tmp_path):
    router, tier = FakeRouter(known=2), residency(FakeEngine(0))
    router.released = frozenset({("sums", revision(1).digest), ("sums", "ff" * 32)})
    await Prewarmer(tier, router, tmp_path / "warm.json").look()
    await settle(lambda: set(tier.residents) == {name_of(1)})


async def test_a_restart_brings_back_the_popular_of_the_last_hour(tmp_path):
    before, router = residency(FakeEngine(0), host_bytes=20 * MIB), FakeRouter(size=MIB)
    for i in range(20):
        for _ in range(1 + i):
            await use(before, revision(i, MIB))
    prewarmer = Prewarmer(before, router, tmp_path / "warm" / "8460.json")
    now = time.time()
    rows = prewarmer.rows(now)
    assert {row["digest"] for row in rows} <= {revision(i).digest for i in range(20)}
    prewarmer.write(rows)

    engine = FakeEngine(0)
    after = residency(engine, host_bytes=20 * MIB, load_places=6)
    again = Prewarmer(after, router, tmp_path / "warm" / "8460.json")
    running = asyncio.create_task(again.run())
    await settle(lambda: len(after.residents) == 10)
    running.cancel()
    # As many as half of the tier holds, the most used first, though the queue takes three at a time.
    assert set(after.residents) == {name_of(i) for i in range(10, 20)}
    assert engine.prepared[0] == name_of(19)
    # Whoever was warm is known as that: names that nobody asked for before do not push them out.
    assert all(after.tier.popularity.of(name_of(i)) >= 3 for i in range(10, 20))
    assert again.popular(now + 4000) == []
    # A clock that was put back makes no difference.
    assert len(again.popular(now - 86400)) == 10


async def test_what_was_purged_leaves_once_its_last_request_has(tmp_path):
    engine, router = FakeEngine(0), FakeRouter()
    tier = residency(engine)
    for i in range(3):
        await use(tier, revision(i))
    prewarmer = Prewarmer(tier, router, tmp_path / "warm.json")
    busy = asyncio.create_task(use(tier, revision(2), 0.05))
    await asyncio.sleep(0)
    for i in (1, 2):
        del router.rows[revision(i).digest]
    await prewarmer.look()
    assert len(tier.residents) == 3
    router.changed = {"sums"}
    await prewarmer.look()
    assert set(tier.residents) == {name_of(0), name_of(2)}
    await busy
    await prewarmer.look()
    await settle(lambda: engine.held == {name_of(0)})


async def test_what_came_into_quarantine_is_served_no_more(tmp_path):
    """At once where nobody uses it; who asks while others still do is told to come again."""
    router, tier = FakeRouter(), residency(FakeEngine(0))
    for i in range(3):
        await use(tier, revision(i))
    prewarmer = Prewarmer(tier, router, tmp_path / "warm.json")
    busy = asyncio.create_task(use(tier, revision(2), 0.05))
    await asyncio.sleep(0)
    router.damaged = {("sums", revision(i).digest) for i in (1, 2)}
    router.changed = {"sums"}
    await prewarmer.look()
    assert set(tier.residents) == {name_of(0), name_of(2)}
    with pytest.raises(ServiceError, match="lost the bytes"):
        tier.tier.ask(revision(2))
    await busy
    assert set(tier.residents) == {name_of(0)}


async def test_a_file_that_is_no_list_of_names_prewarms_nothing(tmp_path):
    prewarmer = Prewarmer(residency(FakeEngine(0)), FakeRouter(), tmp_path / "warm.json")
    used = {"policy": "sums", "digest": "ab" * 32, "bytes": 1, "hits": 1, "used_at": None}
    for text in ("", "{", "[1]", json.dumps([{"policy": "sums"}]), '{"a": 1}', json.dumps([used]), "1"):
        (tmp_path / "warm.json").write_text(text)
        assert prewarmer.popular(time.time()) == []


async def test_a_catalog_that_cannot_be_read_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.prewarming.LOOK_S", 0.005)
    router, tier = FakeRouter(), residency(FakeEngine(0))
    faults = [ServiceError("The catalog cannot be read."), ServiceError("The catalog cannot be read.")]
    plain = router.under_release

    def fails():
        if faults:
            raise faults.pop()
        return plain()

    router.under_release = fails
    router.released = frozenset({("sums", revision(1).digest)})
    running = asyncio.create_task(Prewarmer(tier, router, tmp_path / "warm.json").run())
    await settle(lambda: name_of(1) in tier.residents)
    running.cancel()


async def test_what_could_not_be_looked_at_is_looked_at_again(tmp_path):
    engine, router = FakeEngine(0), FakeRouter()
    tier = residency(engine)
    for i in range(3):
        await use(tier, revision(i))
    prewarmer = Prewarmer(tier, router, tmp_path / "warm.json")
    del router.rows[revision(2).digest]
    plain = router.revision

    def fails(policy, digest, may_be_old=True):
        raise ServiceError("The catalog cannot be read.")

    router.revision, router.changed = fails, {"sums"}
    with pytest.raises(ServiceError):
        await prewarmer.look()
    router.revision = plain
    await prewarmer.look()
    assert set(tier.residents) == {name_of(0), name_of(1)}


async def test_when_anything_may_have_changed_everything_is_looked_at(tmp_path):
    router, tier = FakeRouter(), residency(FakeEngine(0))
    await use(tier, revision(1))
    prewarmer = Prewarmer(tier, router, tmp_path / "warm.json")
    del router.rows[revision(1).digest]
    router.take_changed = lambda: None
    await prewarmer.look()
    assert tier.residents == {}


async def test_popularity_does_not_feed_on_itself(tmp_path):
    """Who is prewarmed at each start and asked for by nobody is forgotten an hour after the last use."""
    router, now = FakeRouter(), time.time()
    before = residency(FakeEngine(0))
    await use(before, revision(1))
    first = Prewarmer(before, router, tmp_path / "warm.json")
    rows = first.rows(now)
    for _ in range(2):
        first.write(rows)
        tier = residency(FakeEngine(0))
        again = Prewarmer(tier, router, tmp_path / "warm.json")
        running = asyncio.create_task(again.run())
        await settle(lambda tier=tier: name_of(1) in tier.residents and not tier.residents[name_of(1)].users)
        running.cancel()
        assert again.rows(now) == rows
        assert again.rows(now + 3700) == []
        assert tier.metrics.registry.get_sample_value("graftwork_warm_requests_total") == 0
