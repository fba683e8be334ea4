"""Residency: shared loads, a bounded queue, deadlines, and eviction that spares who is in use."""

import asyncio
from dataclasses import replace

import pytest

from engine.adapters.catalog import Revision
from engine.config import EngineConfig
from engine.errors import AdapterError, Busy, ServiceError
from engine.serving.residency import Residency


class FakeEngine:
    """The four calls; a load takes `seconds`, and names in `bad` are refused."""

    def __init__(self, seconds: float = 0.01):
        self.seconds = seconds
        self.prepared: list[str] = []
        self.running = 0
        self.peak = 0
        self.registered: set[str] = set()
        self.bad: set[str] = set()
        self._ready: dict[str, float] = {}

    async def prepare(self, name, address):
        self.prepared.append(name)
        self.running += 1
        self.peak = max(self.peak, self.running)
        self._ready[name] = asyncio.get_running_loop().time() + self.seconds

    async def poll(self, name):
        if name in self.bad:
            self.running -= 1
            return f"{name} cannot be loaded: its bytes are damaged."
        if asyncio.get_running_loop().time() < self._ready[name]:
            return "loading"
        self.running -= 1
        return "ready"

    async def register(self, name):
        self.registered.add(name)

    async def forget(self, name):
        self.registered.discard(name)


class FakeCatalog:
    def revision(self, policy, digest):
        return replace(revision(0), policy=policy, digest=digest)

    def layout(self, digest):
        return "{}"


def revision(i: int, size: int = 100) -> Revision:
    digest = f"{i:064x}"[::-1]
    return Revision(
        "sums", digest, "base", None, 1, 8, size, "layout", "s", 0, size, "cc", "exported", "me", 0.0
    )


def residency(engine, tmp_path, events=None, **settings) -> Residency:
    config = EngineConfig(**settings)
    on_load = (lambda **fields: events.append(fields)) if events is not None else (lambda **fields: None)
    return Residency(engine, FakeCatalog(), tmp_path, config, on_load)


async def use(residency, revision, seconds=0.0):
    async with residency.use(revision) as name:
        await asyncio.sleep(seconds)
        return name


async def test_identical_misses_share_one_load(tmp_path):
    engine, events = FakeEngine(), []
    tier = residency(engine, tmp_path, events)
    names = await asyncio.gather(*(use(tier, revision(1)) for _ in range(20)))
    assert len(set(names)) == 1
    assert engine.prepared == names[:1]
    assert [(event["tier"], event["bytes"], event["error"]) for event in events] == [("host", 100, None)]


async def test_loads_are_bounded_and_the_queue_is_full_at_last(tmp_path):
    engine = FakeEngine(0.05)
    tier = residency(engine, tmp_path, load_concurrency=2, load_queue=5)
    results = await asyncio.gather(*(use(tier, revision(i)) for i in range(8)), return_exceptions=True)
    assert sum(isinstance(result, str) for result in results) == 5
    assert {type(result) for result in results} == {str, Busy}
    assert engine.peak <= 2
    assert tier.loading == 0


async def test_a_waiter_that_leaves_does_not_end_the_load(tmp_path):
    engine = FakeEngine(0.05)
    tier = residency(engine, tmp_path)
    first, second = asyncio.create_task(use(tier, revision(1))), asyncio.create_task(use(tier, revision(1)))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).startswith("sums@")
    assert len(engine.prepared) == 1


async def test_refused_adapters_can_be_asked_for_again(tmp_path):
    engine, events = FakeEngine(), []
    tier = residency(engine, tmp_path, events)
    name = await use(tier, revision(2))
    engine.bad.add(name.replace(revision(2).digest[:12], revision(1).digest[:12]))
    with pytest.raises(AdapterError, match="damaged"):
        await use(tier, revision(1))
    assert "damaged" in events[-1]["error"]
    engine.bad.clear()
    assert await use(tier, revision(1))


async def test_nothing_waits_without_a_limit(tmp_path):
    tier = residency(FakeEngine(10), tmp_path, load_timeout_s=0.05)
    with pytest.raises(ServiceError, match=r"not loaded within 0\.05 s"):
        await use(tier, revision(1))


async def test_the_least_recently_used_leaves_and_comes_back(tmp_path):
    engine = FakeEngine(0)
    size = 1 << 20
    tier = residency(engine, tmp_path, host_bytes=3 * size)
    rows = [revision(i, size) for i in range(5)]
    for row in rows[:3]:
        await use(tier, row)
    await use(tier, rows[0])
    await use(tier, rows[3])
    await asyncio.sleep(0)
    kept = {name.partition("@")[2] for name in tier.residents}
    assert kept == {rows[i].digest[:12] for i in (0, 2, 3)}
    assert engine.registered == set(tier.residents)
    await use(tier, rows[1])
    assert engine.prepared.count(f"sums@{rows[1].digest[:12]}") == 2


async def test_who_is_in_use_stays(tmp_path):
    engine = FakeEngine(0)
    size = 1 << 20
    tier = residency(engine, tmp_path, host_bytes=size)
    busy = asyncio.create_task(use(tier, revision(1, size), 0.1))
    await asyncio.sleep(0.02)
    await use(tier, revision(2, size))
    await use(tier, revision(3, size))
    assert f"sums@{revision(1).digest[:12]}" in tier.residents
    await busy
    assert all(resident.users == 0 for resident in tier.residents.values())


async def test_who_was_pushed_out_before_it_could_begin_is_loaded_again(tmp_path):
    """Loads that end together, in a tier for one: each request runs on an adapter that the engine has."""
    engine, size = FakeEngine(0), 1 << 20
    tier = residency(engine, tmp_path, host_bytes=size, load_concurrency=4)

    async def check(i: int) -> None:
        async with tier.use(revision(i, size)) as name:
            assert name in engine.registered

    await asyncio.gather(*(check(i) for i in range(4)))
    assert len(engine.prepared) > 4
