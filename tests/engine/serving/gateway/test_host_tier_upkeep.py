"""The host tier follows the catalog: what a release brings is loaded, and what is gone leaves."""

import asyncio

import pytest

from engine.errors import NotFound, ServiceError
from engine.serving.gateway.host_tier_upkeep import HostTierUpkeep, served_names
from engine.threads import WORKS
from tests.helpers.adapters_cold import FakeEngine, name_of, residency, revision, settle, use, using

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


async def test_a_release_brings_its_canary_and_champion():
    engine, router = FakeEngine(0), FakeRouter()
    tier = residency(engine)
    upkeep = HostTierUpkeep(tier, router)
    await upkeep.look()
    assert len(tier.queue) == 0
    router.released = frozenset(("sums", revision(i).digest) for i in (1, 2))
    assert served_names(router.last_released) == {name_of(1), name_of(2)}
    await upkeep.look()
    await settle(lambda: [resident.users for resident in tier.residents.values()] == [0, 0])
    await upkeep.look()
    assert sorted(engine.prepared) == [name_of(1), name_of(2)]
    assert all(resident.users == 0 for resident in tier.residents.values())


async def test_few_wait_at_once_so_that_none_waits_too_long(monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.host_tier_upkeep.AHEAD", 2)
    router, tier = FakeRouter(), residency(FakeEngine(0.01), load_concurrency=3)
    router.released = frozenset(("sums", revision(i).digest) for i in range(12))
    upkeep = HostTierUpkeep(tier, router)
    waiting = []
    async with asyncio.timeout(60):
        while len(tier.residents) < 12:
            await upkeep.look()
            waiting.append(len(tier.queue))
            await asyncio.sleep(0.001)
    assert max(waiting) == 2


async def test_a_release_whose_load_failed_is_loaded_later(monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.host_tier_upkeep.LOOK_S", 0.005)
    monkeypatch.setattr("engine.serving.gateway.host_tier_upkeep.RETRY_S", 0.01)
    router, engine = FakeRouter(), FakeEngine(0)
    tier = residency(engine)
    engine.faults[name_of(1)] = [ServiceError("The store did not answer.")]
    router.released = frozenset({("sums", revision(1).digest)})
    running = asyncio.create_task(HostTierUpkeep(tier, router).run())
    await settle(lambda: name_of(1) in tier.residents)
    running.cancel()
    assert engine.faults[name_of(1)] == []


async def test_what_is_gone_does_not_keep_the_others_from_coming():
    router, tier = FakeRouter(known=2), residency(FakeEngine(0))
    router.released = frozenset({("sums", revision(1).digest), ("sums", "ff" * 32)})
    await HostTierUpkeep(tier, router).look()
    await settle(lambda: set(tier.residents) == {name_of(1)})


async def test_what_was_purged_leaves_once_its_last_request_has():
    engine, router = FakeEngine(0), FakeRouter()
    tier = residency(engine)
    for i in range(3):
        await use(tier, revision(i))
    upkeep = HostTierUpkeep(tier, router)
    async with using(tier, revision(2)):
        for i in (1, 2):
            del router.rows[revision(i).digest]
        await upkeep.look()
        assert len(tier.residents) == 3
        router.changed = {"sums"}
        await upkeep.look()
        assert set(tier.residents) == {name_of(0), name_of(2)}
    await upkeep.look()
    await settle(lambda: engine.held == {name_of(0)})


async def test_what_came_into_quarantine_is_served_no_more():
    """At once where nobody uses it; who asks while others still do is told to come again."""
    router, tier = FakeRouter(), residency(FakeEngine(0))
    for i in range(3):
        await use(tier, revision(i))
    upkeep = HostTierUpkeep(tier, router)
    async with using(tier, revision(2)):
        router.damaged = {("sums", revision(i).digest) for i in (1, 2)}
        router.changed = {"sums"}
        await upkeep.look()
        assert set(tier.residents) == {name_of(0), name_of(2)}
        with pytest.raises(ServiceError, match="lost the bytes"):
            tier.tier.ask(revision(2))
    assert set(tier.residents) == {name_of(0)}


async def test_a_catalog_that_cannot_be_read_is_tried_again(monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.host_tier_upkeep.LOOK_S", 0.005)
    router, tier = FakeRouter(), residency(FakeEngine(0))
    faults = [ServiceError("The catalog cannot be read."), ServiceError("The catalog cannot be read.")]
    plain = router.under_release

    def fails():
        if faults:
            raise faults.pop()
        return plain()

    router.under_release = fails
    router.released = frozenset({("sums", revision(1).digest)})
    running = asyncio.create_task(HostTierUpkeep(tier, router).run())
    await settle(lambda: name_of(1) in tier.residents)
    running.cancel()


async def test_what_could_not_be_looked_at_is_looked_at_again():
    engine, router = FakeEngine(0), FakeRouter()
    tier = residency(engine)
    for i in range(3):
        await use(tier, revision(i))
    upkeep = HostTierUpkeep(tier, router)
    del router.rows[revision(2).digest]
    plain = router.revision

    def fails(policy, digest, may_be_old=True):
        raise ServiceError("The catalog cannot be read.")

    router.revision, router.changed = fails, {"sums"}
    with pytest.raises(ServiceError):
        await upkeep.look()
    router.revision = plain
    await upkeep.look()
    assert set(tier.residents) == {name_of(0), name_of(1)}


async def test_when_anything_may_have_changed_everything_is_looked_at():
    router, tier = FakeRouter(), residency(FakeEngine(0))
    await use(tier, revision(1))
    upkeep = HostTierUpkeep(tier, router)
    del router.rows[revision(1).digest]
    router.take_changed = lambda: None
    await upkeep.look()
    assert tier.residents == {}


async def test_a_loop_that_is_cancelled_is_no_alarm_afterwards(monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.host_tier_upkeep.LOOK_S", 0.001)
    router = FakeRouter()

    def fails():
        raise ServiceError("The catalog cannot be read.")

    router.under_release = fails
    running = asyncio.create_task(HostTierUpkeep(residency(FakeEngine(0)), router).run())
    await settle(lambda: "host-tier" in WORKS and WORKS["host-tier"].failed > 1)
    running.cancel()
    await asyncio.wait([running])
    assert "host-tier" not in WORKS
