"""Cold loads: shared, bounded, in order, with a deadline on every wait, and ended with their last waiter."""

import asyncio
import heapq
import threading
import time
from dataclasses import replace

import pytest

from engine.errors import AdapterError, Busy, Conflict, DamagedBytes, MissingBytes, NotFound, ServiceError
from engine.serving.gateway.promised_waits import PromisedWaits
from engine.serving.residency.loads import (
    AWAY_S,
    BACKGROUND,
    INTERACTIVE,
    SHARE,
    Load,
    LoadQueue,
)
from engine.serving.residency.residency import Residency
from engine.settings.services import EngineConfig
from tests.helpers.adapters_cold import (
    FakeCatalog,
    FakeEngine,
    FakeStore,
    name_of,
    refusal,
    residency,
    revision,
    settle,
    use,
)


async def test_identical_misses_share_one_load():
    engine, events = FakeEngine(), []
    tier = residency(engine, events)
    names = await asyncio.gather(*(use(tier, revision(1)) for _ in range(20)))
    assert set(names) == {name_of(1)}
    assert engine.prepared == names[:1]
    (event,) = events
    assert (event["tier"], event["bytes"], event["error"], event["waiters"]) == ("host", 100, None, 20)
    assert (event["priority"], event["tier_adapters"], event["tier_bytes"]) == (INTERACTIVE, 1, 100)


async def test_loads_are_bounded_and_a_full_queue_says_when_to_come_again():
    engine = FakeEngine(0.05)
    tier = residency(engine, load_concurrency=2, load_places=5)
    results = await asyncio.gather(*(use(tier, revision(i)) for i in range(8)), return_exceptions=True)
    assert sum(isinstance(result, str) for result in results) == 5
    refused = [result for result in results if isinstance(result, Busy)]
    assert len(refused) == 3
    assert all(1 <= busy.retry_after_s < 10 and "again later" in str(busy) for busy in refused)
    assert engine.peak <= 2
    assert len(tier.queue) == 0


@pytest.mark.parametrize(("size", "at_once"), [(1000, 6), (1 << 20, 16)])
async def test_more_large_adapters_load_at_once_than_small_ones(size, at_once):
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=64 << 20)
    engine.may_end.clear()
    users = [asyncio.create_task(use(tier, revision(i, size))) for i in range(40)]
    # None ends before the last of them has begun.
    await settle(lambda: engine.running == at_once)
    engine.may_end.set()
    await asyncio.gather(*users)
    assert engine.peak == at_once


async def test_small_and_large_adapters_share_the_places():
    """Eight large ones take half of the places, and three small ones the other."""
    tier = residency(FakeEngine(10), host_bytes=64 << 20)
    sizes = [1 << 20] * 8 + [1000] * 10 + [1 << 20] * 10
    users = [asyncio.create_task(use(tier, revision(i, size))) for i, size in enumerate(sizes)]
    await asyncio.sleep(0.02)
    assert len(tier.queue.running) == 11
    for user in users:
        user.cancel()
    await asyncio.gather(*users, return_exceptions=True)
    assert len(tier.queue) == 0


async def test_retry_after_follows_the_queue_and_how_long_loads_took():
    tier = residency(FakeEngine(0.2), load_concurrency=1, load_places=40)
    await use(tier, revision(1))
    few = tier.queue.estimate_s()
    waiting = [asyncio.create_task(use(tier, revision(i))) for i in range(2, 40)]
    await asyncio.sleep(0.01)
    assert tier.queue.estimate_s() > 30 * few
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_one_of_two_revisions_with_one_name_is_never_taken_for_the_other():
    """Their digests begin alike: whoever pins one by its whole digest must not get the other's weights."""
    engine = FakeEngine(0.01)
    tier, one = residency(engine), revision(1)
    twin = replace(one, digest=one.digest[:12] + "f" * 52)
    with_load = await asyncio.gather(use(tier, one), use(tier, twin), return_exceptions=True)
    assert with_load[0] == name_of(1)
    assert isinstance(with_load[1], Conflict)
    with pytest.raises(Conflict, match="two revisions"):
        await use(tier, twin)
    assert await use(tier, one) == name_of(1)
    assert tier.residents[name_of(1)].users == 0


def test_those_who_are_refused_come_back_one_after_another_and_keep_the_queue_full(monkeypatch):
    """4,000 at once for 1,000 places: all are loaded in the time that loads take, few refused twice."""
    now, took_s, at_once = 0.0, 0.02, 6
    monkeypatch.setattr("engine.serving.residency.loads.time.monotonic", lambda: now)
    queue = LoadQueue(1000, at_once, PromisedWaits())
    comes = [(0.0, i) for i in range(4000)]
    ends: list[tuple[float, int, Load]] = []
    asked = 0
    while comes or ends:
        now = min(line[0][0] for line in (comes, ends) if line)
        if ends and ends[0][0] == now:
            queue.end(heapq.heappop(ends)[2])
        else:
            _, i = heapq.heappop(comes)
            asked += 1
            try:
                queue.add(Load(name_of(i), revision(i), INTERACTIVE))
            except Busy as busy:
                heapq.heappush(comes, (now + max(1, round(busy.retry_after_s)), i))
        while (load := queue.next()) is not None:
            # The first loads are held up by the burst itself.
            heapq.heappush(ends, (now + (took_s if now > 1 else 50 * took_s), id(load), load))
    assert now < 1.2 * 4000 * took_s / at_once
    assert asked < 2 * 4000


def test_refusals_of_the_background_keep_no_person_away():
    queue = LoadQueue(10, 1, PromisedWaits())
    for i in range(10):
        queue.add(Load(name_of(i), revision(i), INTERACTIVE))
    away = {BACKGROUND: 0.0, INTERACTIVE: 0.0}
    for priority, count in ((BACKGROUND, 10_000), (INTERACTIVE, 1)):
        for i in range(count):
            with pytest.raises(Busy) as refused:
                queue.add(Load(name_of(100 + i), revision(100 + i), priority))
            away[priority] = refused.value.retry_after_s
    assert away[INTERACTIVE] == 1
    # However many came before.
    assert 1 < away[BACKGROUND] <= AWAY_S


def test_without_promises_whoever_is_refused_comes_back_when_the_next_place_is_free():
    queue = LoadQueue(1, 1)
    queue.add(Load(name_of(0), revision(0), INTERACTIVE))
    for i in range(1, 100):
        with pytest.raises(Busy) as refused:
            queue.add(Load(name_of(i), revision(i), INTERACTIVE))
        assert refused.value.retry_after_s == 1


async def test_people_come_before_the_background_which_goes_on_all_the_same():
    engine = FakeEngine(0)
    tier = residency(engine, load_concurrency=1, load_places=100)
    engine.may_end.clear()
    first = asyncio.create_task(use(tier, revision(0)))
    await settle(lambda: engine.running)
    scores = [asyncio.create_task(use(tier, revision(i), priority=BACKGROUND)) for i in range(1, 6)]
    people = [asyncio.create_task(use(tier, revision(i))) for i in range(10, 40)]
    # All are in line before the first load ends.
    await settle(lambda: len(tier.queue) == 1 + len(scores) + len(people))
    engine.may_end.set()
    await asyncio.gather(first, *scores, *people)
    background = {name_of(i) for i in range(1, 6)}
    turns = [i for i, name in enumerate(engine.prepared) if name in background]
    # One after every `SHARE` of the people's, and no earlier.
    assert turns == [(SHARE + 1) * (i + 1) for i in range(5)]


async def test_the_background_leaves_places_to_people():
    engine = FakeEngine(600)
    tier = residency(engine, load_concurrency=2, load_places=10)
    for i in range(6):
        tier.load_ahead(revision(i))
    with pytest.raises(Busy):
        tier.load_ahead(revision(6))
    assert len(tier.queue.running) == 1
    await settle(lambda: engine.running)
    engine.seconds = 0
    # Before the one that is under way ends.
    async with asyncio.timeout(60):
        await use(tier, revision(20))


async def test_a_person_who_asks_for_what_is_loaded_ahead_waits_like_a_person():
    engine = FakeEngine(0)
    tier = residency(engine, load_concurrency=1, load_places=40)
    engine.may_end.clear()
    for i in range(8):
        tier.load_ahead(revision(i))
    await settle(lambda: engine.running)
    person = asyncio.create_task(use(tier, revision(7)))
    await settle(lambda: name_of(7) in tier.queue.waiting[INTERACTIVE])
    engine.may_end.set()
    await person
    assert engine.prepared[:2] == [name_of(0), name_of(7)]


async def test_a_waiter_that_leaves_does_not_end_the_load():
    engine = FakeEngine(0.05)
    tier = residency(engine)
    first, second = asyncio.create_task(use(tier, revision(1))), asyncio.create_task(use(tier, revision(1)))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).startswith("sums@")
    assert len(engine.prepared) == 1


async def test_a_load_ends_with_its_last_waiter():
    engine, events = FakeEngine(30), []
    tier = residency(engine, events, load_concurrency=1)
    waiters = [asyncio.create_task(use(tier, revision(1))) for _ in range(2)]
    queued = asyncio.create_task(use(tier, revision(2)))
    await settle(lambda: engine.running)
    assert (set(tier.queue.running), set(tier.queue.waiting[INTERACTIVE])) == ({name_of(1)}, {name_of(2)})
    # The one in the queue first, or it would begin in the moment in which the other ends.
    for task in (queued, *waiters):
        task.cancel()
    await asyncio.gather(*waiters, queued, return_exceptions=True)
    await settle(lambda: engine.forgotten)
    assert (engine.running, len(tier.queue), tier.residents) == (0, 0, {})
    # The one that was still in the queue has never reached the engine.
    assert engine.prepared == engine.forgotten == [name_of(1)]
    assert [event["error"] for event in events] == ["Every client that waited for it has left."] * 2
    engine.seconds = 0
    assert await use(tier, revision(1))


async def test_whoever_asks_while_a_load_is_called_off_gets_a_new_one():
    engine = FakeEngine(600)
    tier = residency(engine)
    first = asyncio.create_task(use(tier, revision(1)))
    await settle(lambda: engine.running)
    engine.seconds = 0
    first.cancel()
    await asyncio.sleep(0)
    assert await use(tier, revision(1)) == name_of(1)
    assert engine.held == {name_of(1)}
    assert len(engine.prepared) == 2


async def test_who_leaves_in_the_moment_of_its_load_holds_nothing():
    engine = FakeEngine(0.01)
    tier = residency(engine)
    for delay in range(40):
        task = asyncio.create_task(use(tier, revision(delay)))
        await asyncio.sleep(0.0095 + delay * 5e-5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert all(resident.users == 0 for resident in tier.residents.values())


async def test_refused_adapters_can_be_asked_for_again():
    engine, events = FakeEngine(), []
    tier = residency(engine, events)
    engine.faults[name_of(1)] = [refusal()]
    with pytest.raises(AdapterError, match="rank 16"):
        await use(tier, revision(1))
    assert "rank 16" in events[-1]["error"]
    assert await use(tier, revision(1))
    assert engine.forgotten == [name_of(1)]


async def test_nothing_waits_without_a_limit():
    tier = residency(FakeEngine(10), timeout_s=0.05, load_concurrency=1)
    results = await asyncio.gather(*(use(tier, revision(i)) for i in range(3)), return_exceptions=True)
    assert all(isinstance(result, ServiceError) for result in results)
    assert all("within 0.05 s" in str(result) for result in results)
    assert len(tier.queue) == 0


async def test_an_engine_that_fails_is_said_to_whoever_waits():
    engine = FakeEngine()
    engine.faults[name_of(1)] = [RuntimeError("EngineDeadError")]
    with pytest.raises(ServiceError, match="EngineDeadError"):
        await use(residency(engine), revision(1))


async def test_what_comes_into_quarantine_while_it_is_loaded_is_refused():
    """`store verify` found the bytes damaged after this load had asked: residents are gone over only once."""
    catalog = FakeCatalog()
    tier = residency(FakeEngine(0.02), catalog=catalog)
    users = [asyncio.create_task(use(tier, revision(i))) for i in (1, 2)]
    await asyncio.sleep(0.005)
    catalog.quarantine.add("sums", revision(1).digest, "Its bytes are damaged.")
    tier.doubt({"sums"})
    refused, name = await asyncio.gather(*users, return_exceptions=True)
    assert isinstance(refused, AdapterError)
    assert "in quarantine" in str(refused)
    assert (name, set(tier.residents)) == (name_of(2), {name_of(2)})


async def test_damaged_bytes_are_put_in_quarantine_and_others_are_not():
    engine, catalog = FakeEngine(), FakeCatalog()
    tier = residency(engine, catalog=catalog)
    engine.faults[name_of(1)] = [DamagedBytes("its bytes are damaged.")]
    with pytest.raises(DamagedBytes):
        await use(tier, revision(1))
    assert catalog.damaged == {revision(1).digest: "its bytes are damaged."}
    with pytest.raises(AdapterError, match=r"quarantine.*damaged"):
        await use(tier, revision(1))
    assert engine.prepared == [name_of(1)]
    assert await use(tier, revision(2))
    # Its bytes came again: whoever asks is served.
    catalog.damaged.clear()
    assert await use(tier, revision(1))


async def test_a_damaged_copy_is_fetched_once_more():
    engine, catalog, store = FakeEngine(), FakeCatalog(), FakeStore(copies=True)
    tier = residency(engine, catalog=catalog, store=store)
    engine.faults[name_of(1)] = [DamagedBytes("its bytes are damaged.")]
    assert await use(tier, revision(1))
    assert (store.dropped, catalog.damaged) == (["s"], {})
    engine.faults[name_of(2)] = [DamagedBytes("its bytes are damaged.") for _ in range(2)]
    with pytest.raises(DamagedBytes):
        await use(tier, revision(2))
    assert list(catalog.damaged) == [revision(2).digest]


async def test_bytes_that_were_moved_meanwhile_are_found():
    engine, catalog = FakeEngine(), FakeCatalog()
    tier = residency(engine, catalog=catalog)
    catalog.moved[revision(1).digest] = ["new.seg"]
    engine.faults[name_of(1)] = [MissingBytes("its segment is missing.")]
    assert await use(tier, replace(revision(1), segment="old.seg"))
    assert [address["path"] for address in engine.addresses] == ["/store/old.seg", "/store/new.seg"]
    # Gone where the row still names them: refused, but bytes that are not there are no damage.
    engine.faults[name_of(2)] = [MissingBytes("its segment is missing.")]
    with pytest.raises(MissingBytes):
        await use(tier, revision(2))
    assert catalog.damaged == {}


async def test_a_full_disk_under_the_log_holds_nobody_up():
    """The next load starts, and what was evicted leaves the engine, though neither can be noted."""

    def full(**fields):
        raise OSError(28, "No space left on device")

    engine = FakeEngine(0)
    config = EngineConfig(load_concurrency=1)
    tier = Residency(engine, FakeCatalog(), FakeStore(), config, full, most_adapters=2)
    await asyncio.gather(*(use(tier, revision(i)) for i in range(6)))
    assert len(tier.queue) == 0
    await settle(lambda: engine.held == set(tier.residents) and len(engine.held) <= 2)
    assert tier.metrics.registry.get_sample_value("graftwork_loads_untold_total") >= 6


async def test_evictions_wait_while_nobody_knows_who_must_stay():
    def unreadable():
        if faults:
            raise ServiceError("The catalog cannot be read.")
        return frozenset()

    faults, engine = [True], FakeEngine(0)
    tier = residency(engine, pinned=unreadable, load_concurrency=1, most_adapters=2)
    await asyncio.gather(*(use(tier, revision(i)) for i in range(6)))
    assert (len(tier.queue), len(tier.residents)) == (0, 6)
    faults.clear()
    await use(tier, revision(6))
    await settle(lambda: engine.held == set(tier.residents) and len(engine.held) <= 2)


async def test_a_load_whose_row_was_purged_meanwhile_is_not_taken_in():
    engine, catalog = FakeEngine(0), FakeCatalog()
    tier = residency(engine, catalog=catalog)
    engine.may_end.clear()
    both = [asyncio.create_task(use(tier, revision(i))) for i in (1, 2)]
    await settle(lambda: engine.running == 2)
    read = catalog.revisions.get

    def purged(policy, digest):
        if digest == revision(1).digest:
            raise NotFound("There is no such revision.")
        return read(policy, digest)

    catalog.revisions.get = purged
    tier.doubt({"others"})
    assert not any(load.in_doubt for load in tier.queue.running.values())
    tier.doubt({"sums"})
    engine.may_end.set()
    gone, there = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(gone, NotFound)
    assert set(tier.residents) == {there} == {name_of(2)}
    await settle(lambda: engine.held == {name_of(2)})


async def test_a_few_threads_fetch_for_many_loads():
    """Each may hold one of the catalog's connections, of which there are fifteen."""
    running, peak, lock = set(), [], threading.Lock()

    class Slow(FakeStore):
        def fetch(self, location):
            me = threading.get_ident()
            with lock:
                running.add(me)
                peak.append(len(running))
            time.sleep(0.01)
            with lock:
                running.discard(me)
            return super().fetch(location)

    tier = residency(FakeEngine(0), store=Slow(copies=True), load_concurrency=64)
    await asyncio.gather(*(use(tier, revision(i)) for i in range(64)))
    assert 1 < max(peak) <= 8


async def test_what_is_brought_unasked_is_no_use():
    tier = residency(FakeEngine(0))
    tier.load_ahead(revision(1))
    await settle(lambda: name_of(1) in tier.residents and tier.residents[name_of(1)].users == 0)
    resident = tier.residents[name_of(1)]

    def hits():
        return tier.metrics.registry.get_sample_value("graftwork_warm_requests_total")

    then = resident.used_at
    tier.load_ahead(revision(1))
    assert len(tier.queue) == 0
    assert (resident.is_used, resident.used_at, resident.users, hits()) == (False, then, 0, 0)
    await use(tier, revision(1))
    assert (resident.is_used, resident.is_warm, hits()) == (True, False, 1)
