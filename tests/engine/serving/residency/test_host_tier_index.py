"""Who stays in the host tier: the popular, whatever passes by; within the budget of bytes and of names."""

import asyncio
import random
from collections import OrderedDict

import pytest

from engine.serving.residency.host_tier_index import WARM_SHARE, HostTierIndex
from tests.helpers.adapters_cold import FakeEngine, name_of, residency, revision, settle, use, using

MIB = 1 << 20


def row(i: int):
    return revision(i, MIB)


async def test_the_least_recently_used_leaves_and_comes_back():
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=3 * MIB)
    for i in (0, 1, 2, 0, 3):
        await use(tier, row(i))
    await asyncio.sleep(0)
    assert set(tier.residents) == {name_of(i) for i in (0, 2, 3)} == engine.held
    await use(tier, row(1))
    assert engine.prepared.count(name_of(1)) == 2


async def test_who_is_in_use_stays():
    tier = residency(FakeEngine(0), host_bytes=MIB)
    async with using(tier, row(1)):
        await use(tier, row(2))
        await use(tier, row(3))
        assert name_of(1) in tier.residents
    assert all(resident.users == 0 for resident in tier.residents.values())
    assert len(tier.residents) == 1


async def test_loads_that_end_together_in_a_tier_for_one_are_all_served():
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=MIB, load_concurrency=4)

    async def check(i: int) -> None:
        async with using(tier, row(i)) as name:
            assert name in engine.held

    await asyncio.gather(*(check(i) for i in range(4)))
    # Each is held for its waiters from the moment in which it is there.
    assert len(engine.prepared) == 4
    await settle(lambda: len(engine.held) == 1)


@pytest.mark.parametrize("at_once", [1, 8])
async def test_a_scan_leaves_the_main_part_alone(at_once):
    """Ten times the capacity, one request each, one after the other and eight at a time."""
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=20 * MIB, load_concurrency=8)
    warm = range(16)
    for _ in range(3):
        for i in warm:
            await use(tier, row(i))
    cold = list(range(100, 300))
    for start in range(0, len(cold), at_once):
        await asyncio.gather(*(use(tier, row(i), 0.001) for i in cold[start : start + at_once]))
    assert {name_of(i) for i in warm} <= set(tier.residents)
    assert all(engine.prepared.count(name_of(i)) == 1 for i in warm)
    assert tier.tier.bytes <= 20 * MIB
    assert tier.evictions == len(engine.prepared) - len(tier.residents)


async def test_who_is_used_twice_is_warm_and_stays():
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=20 * MIB)
    for _ in range(2):
        await use(tier, row(99))
    assert tier.residents[name_of(99)].is_warm
    for i in range(1000, 1100):
        await use(tier, row(i))
    assert engine.prepared.count(name_of(99)) == 1


async def test_a_cycle_that_fits_beside_stale_warm_adapters_gets_in():
    """80 of 100 were used twice and never again; 25 others come in turns, more than the rest holds."""
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=100 * MIB)
    for _ in range(2):
        for i in range(80):
            await use(tier, row(i))
    before = len(engine.prepared)
    for _ in range(20):
        for i in range(100, 125):
            await use(tier, row(i))
    assert len(engine.prepared) - before <= 3 * 25


async def test_the_pinned_leave_room_for_who_is_asked_for():
    engine, pinned = FakeEngine(0), {name_of(i) for i in range(25)}
    tier = residency(engine, host_bytes=100 * MIB, pinned=lambda: pinned)
    for i in range(25):
        tier.load_ahead(row(i))
        await settle(lambda i=i: name_of(i) in tier.residents and not tier.residents[name_of(i)].users)
    for _ in range(2):
        for i in range(100, 175):
            await use(tier, row(i))
    before = len(engine.prepared)
    for _ in range(100):
        for i in range(200, 203):
            await use(tier, row(i))
    assert len(engine.prepared) - before <= 2 * 3
    assert tier.tier.bytes <= 100 * MIB
    assert pinned <= set(tier.residents)


async def test_who_was_popular_once_makes_room():
    tier = residency(FakeEngine(0), host_bytes=20 * MIB)
    for _ in range(30):
        for i in range(20):
            await use(tier, row(i))
    for i in range(100, 118):
        await use(tier, row(i))
        await use(tier, row(i))
    assert sum(name_of(i) in tier.residents for i in range(100, 118)) >= 16


async def test_the_pinned_stay():
    pinned = {name_of(0), name_of(1)}
    tier = residency(FakeEngine(0), host_bytes=2 * MIB, pinned=lambda: pinned)
    for i in range(30):
        await use(tier, row(i))
        await use(tier, row(i))
    assert pinned <= set(tier.residents)
    pinned.clear()
    for i in range(30, 34):
        await use(tier, row(i))
        await use(tier, row(i))
    assert len(tier.residents) <= 2


async def test_names_are_bounded_by_number_however_small():
    engine, events = FakeEngine(0), []
    tier = residency(engine, events, most_adapters=50)
    for i in range(500):
        await use(tier, revision(i, 1))
    await settle(lambda: not tier.tasks)
    assert len(tier.residents) == len(engine.held) == 50
    # Nothing else keeps a name.
    assert (len(tier.queue), tier.states.counts()) == (0, {"host": 50})
    assert [event["tier"] for event in events].count("stored") == 450


def test_any_traffic_keeps_the_books():
    """Against the plain sums, over a long random run with pins."""
    random.seed(3)
    tier = HostTierIndex(40, 12)
    held: list[str] = []
    for _ in range(6000):
        i = min(int(random.expovariate(0.1)), 60)
        name = name_of(i)
        if name not in tier.residents:
            tier.ready(name, revision(i, 1 + i % 7))
        tier.hold(name)
        held.append(name)
        while len(held) > 4 or (held and random.random() < 0.4):
            tier.release(held.pop(random.randrange(len(held))))
            for gone, _ in tier.make_room(lambda: {name_of(0)}):
                assert gone not in held
                assert gone != name_of(0)
        residents = tier.residents
        warm = {name: resident for name, resident in residents.items() if resident.is_warm}
        assert tier.bytes == sum(resident.bytes for resident in residents.values())
        assert sum(resident.users for resident in residents.values()) == len(held)
        if not held:
            assert tier.bytes <= 40
            assert len(residents) <= 12
            assert sum(resident.bytes for resident in warm.values()) <= WARM_SHARE * 40
            assert len(warm) <= WARM_SHARE * 12


def test_zipf_traffic_finds_more_than_in_a_plain_lru():
    """100,000 requests for 10,000 names and 1,000 places: 0.68 of them find theirs in a plain LRU."""
    chance = random.Random(5)
    names = chance.choices(range(10_000), [1 / (i + 1) for i in range(10_000)], k=100_000)
    tier, plain = HostTierIndex(1 << 40, 1000), OrderedDict[int, None]()
    hits = plain_hits = 0
    rows = [revision(i, 1) for i in range(10_000)]
    for i in names:
        name = tier.ask(rows[i])
        hits += name is not None
        if name is None:
            name = name_of(i)
            tier.ready(name, rows[i])
            tier.hold(name)
        tier.release(name)
        tier.make_room(frozenset)
        plain_hits += i in plain
        plain[i] = None
        plain.move_to_end(i)
        if len(plain) > 1000:
            plain.popitem(last=False)
    assert hits / len(names) > 0.7
    assert plain_hits / len(names) < 0.69
