"""One adapter, one state: the table itself, and residency under any order of events, faults and crashes."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from engine.errors import DamagedBytes, GraftworkError, NotFound, ServiceError
from engine.serving.residency.host_tier_index import TRANSITIONS, AdapterEvent, AdapterState, AdapterStates
from engine.serving.residency.loads import BACKGROUND, INTERACTIVE
from engine.serving.worker.load_channel import SlotReport
from tests.helpers.adapters_cold import FakeCatalog, name_of, refusal, residency, revision

ROOT = Path(__file__).parents[4]
S, E = AdapterState, AdapterEvent
# The events that lead to each state from `stored`.
WAYS: dict[AdapterState, tuple[AdapterEvent, ...]] = {
    S.STORED: (),
    S.QUEUED: (E.ASK,),
    S.LOADING: (E.ASK, E.START),
    S.HOST: (E.ASK, E.START, E.READY),
    S.SLOT: (E.ASK, E.START, E.READY, E.FILL),
    S.LOST: (E.ASK, E.START, E.READY, E.LOSE),
    S.LEAVING: (E.ASK, E.START, E.CANCEL),
    S.RETURNING: (E.ASK, E.START, E.CANCEL, E.ASK),
}


def documented() -> dict[AdapterState, dict[AdapterEvent, AdapterState]]:
    """Read the table of docs/architecture.md: a line for each state, a column for each event."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", text.split("## Where an adapter is")[1].split("\n## ")[0], re.M)
    ]
    events = [AdapterEvent(cell) for cell in rows[0][1:]]
    return {
        AdapterState(row[0]): {
            event: AdapterState(cell) for event, cell in zip(events, row[1:], strict=True) if cell
        }
        for row in rows[2:]
    }


def test_the_table_is_the_documented_one():
    assert documented() == TRANSITIONS
    assert set(TRANSITIONS) == set(AdapterState)


@pytest.mark.parametrize("state", AdapterState)
@pytest.mark.parametrize("event", AdapterEvent)
def test_each_event_leads_where_the_table_says_or_cannot_happen(state, event):
    states = AdapterStates()
    for step in WAYS[state]:
        states.move("p@1", step)
    assert states.state("p@1") is state
    before = dict(states.transitions)
    after = documented()[state].get(event)
    if after is None:
        with pytest.raises(RuntimeError, match=f"p@1 is {state}.*'{event}'"):
            states.move("p@1", event)
        assert (states.state("p@1"), states.transitions) == (state, before)
        return
    assert states.move("p@1", event) is after is states.state("p@1")
    is_counted = after is not state
    assert states.transitions == {**before, **({(state, event, after): 1} if is_counted else {})}
    assert states.in_slots == ({"p@1"} if after is S.SLOT else set())
    # Nothing is kept of what is only stored.
    assert states.counts() == ({} if after is S.STORED else {after: 1})


def test_every_state_leads_back_to_the_store():
    reached = {S.STORED}
    while more := {s for s, ways in TRANSITIONS.items() if reached & set(ways.values())} - reached:
        reached |= more
    assert reached == set(AdapterState)


class SteppedEngine:
    """Prepares and forgets when a test says so; a crashed one answers everything with a fault."""

    def __init__(self):
        self.prepares: dict[str, asyncio.Future] = {}
        self.forgets: dict[str, asyncio.Future] = {}
        self.held: set[str] = set()
        # Asked for while it was still being prepared, or forgotten.
        self.overlapping: list[str] = []
        self.has_crashed = False

    async def prepare(self, name, address):
        await self._wait(self.prepares, name)
        self.held.add(name)

    async def forget(self, name):
        await self._wait(self.forgets, name)
        self.held.discard(name)

    async def _wait(self, calls, name):
        if self.has_crashed:
            raise ServiceError("The engine does not answer.")
        if name in self.prepares or name in self.forgets:
            self.overlapping.append(name)
        calls[name] = asyncio.get_running_loop().create_future()
        try:
            await calls[name]
        finally:
            del calls[name]

    def end(self, calls, name, fault=None):
        if name in calls and not calls[name].done():
            calls[name].set_exception(fault) if fault else calls[name].set_result(None)

    def crash(self):
        self.has_crashed = True
        self.held.clear()
        for calls in (self.prepares, self.forgets):
            for name in calls:
                self.end(calls, name, ServiceError("The engine does not answer."))


def pick(i, things):
    """Return one of these things, none of none."""
    return [list(things)[i % len(things)]] if things else []


async def inline(work, *args):
    return work(*args)


class World:
    """A gateway, its engine and those who ask; `step` does one thing to them and checks every invariant."""

    def __init__(self):
        self.start()

    def start(self):
        self.engine, self.catalog = SteppedEngine(), FakeCatalog()
        self.tier = residency(
            self.engine, catalog=self.catalog, load_concurrency=2, load_places=5, most_adapters=2
        )
        # In place of its threads, whose end is no matter of turns.
        self.tier.fetch.in_thread = inline
        self.asking: list[asyncio.Task] = []

    def held(self) -> list[asyncio.Task]:
        return [task for task in self.asking if task.done() and not task.cancelled() and not task.exception()]

    async def step(self, kind, i, extra):
        engine, tier = self.engine, self.tier
        if kind == "ask":
            self.asking.append(asyncio.create_task(tier.hold(revision(i), extra)))
        elif kind == "ahead":
            with suppress(GraftworkError):
                tier.load_ahead(revision(i))
        elif kind == "leave":
            for task in pick(i, self.asking):
                task.cancel()
        elif kind == "release":
            for task in pick(i, self.held()):
                self.asking.remove(task)
                tier.release(task.result())
        elif kind == "prepared":
            for one in pick(i, engine.prepares):
                engine.end(engine.prepares, one, extra)
        elif kind == "forgotten":
            for one in pick(i, engine.forgets):
                engine.end(engine.forgets, one)
        elif kind == "report" and not engine.has_crashed:
            slots, lost = ([name_of(j) for j in some if name_of(j) in engine.held] for some in extra)
            tier.take_report([one for one in slots if one not in lost], lost, SlotReport((), (), 0, 0))
        elif kind == "evict":
            for one in pick(i, tier.residents):
                tier.evict(one)
        elif kind == "quarantine":
            for one in pick(i, tier.residents):
                tier.lose(one)
        elif kind == "doubt":
            tier.doubt(None)
        elif kind == "crash":
            engine.crash()
        elif kind == "restart":
            await self.end_all()
            self.start()
        await self.turn()
        self.check()

    async def turn(self):
        for _ in range(12):
            await asyncio.sleep(0)

    async def end_all(self):
        for task in (*self.asking, *self.tier.tasks):
            task.cancel()
        await asyncio.gather(*self.asking, *self.tier.tasks, return_exceptions=True)

    def check(self):
        states, queue = self.tier.states, self.tier.queue
        assert self.engine.overlapping == []
        found: dict[AdapterState, set[str]] = {state: set() for state in AdapterState}
        for i in range(NAMES):
            found[states.state(name_of(i))].add(name_of(i))
        assert set(self.tier.residents) == found[S.HOST] | found[S.SLOT] | found[S.LOST]
        assert set(queue.running) == found[S.LOADING]
        assert {load.name for load in queue.loads()} == (
            found[S.QUEUED] | found[S.LOADING] | found[S.RETURNING]
        )
        assert set(queue.returning) == found[S.RETURNING]
        assert states.in_slots == found[S.SLOT]
        assert all(self.tier.residents[name].users for name in found[S.LOST])
        assert set(self.engine.prepares) <= found[S.LOADING] | found[S.LEAVING] | found[S.RETURNING]
        # Whoever waits, waits for a load; whoever holds, holds a resident.
        waiting = sum(not task.done() for task in self.asking)
        assert waiting <= sum(load.asked_by for load in queue.loads())
        for task in self.held():
            assert self.tier.residents[task.result()].users

    async def settle(self):
        """Let everything that is under way end well; nobody waits then, and nothing is on its way."""
        for _ in range(100):
            for calls in (self.engine.prepares, self.engine.forgets):
                for name in calls:
                    self.engine.end(calls, name)
            for task in self.held():
                self.asking.remove(task)
                self.tier.release(task.result())
            await self.turn()
            self.check()
        assert all(task.done() for task in self.asking)
        assert not self.tier.tasks
        assert set(self.tier.states.counts()) <= {S.HOST, S.SLOT}
        if not self.engine.has_crashed:
            assert self.engine.held == set(self.tier.residents)
            assert len(self.tier.residents) <= 2


NAMES = 3
numbers = st.integers(0, NAMES - 1)
some = st.lists(numbers, max_size=NAMES)
faults = st.sampled_from([None, None, None, refusal(), DamagedBytes("damaged."), RuntimeError("dead")])
steps = st.one_of(
    st.tuples(st.just("ask"), numbers, st.sampled_from([INTERACTIVE, BACKGROUND])),
    st.tuples(st.just("prepared"), numbers, faults),
    st.tuples(st.just("report"), st.just(0), st.tuples(some, some)),
    st.tuples(
        st.sampled_from(["ahead", "leave", "release", "forgotten", "evict", "quarantine"]),
        numbers,
        st.none(),
    ),
    st.tuples(st.just("ask"), numbers, st.just(INTERACTIVE)),
    st.tuples(st.sampled_from(["leave", "forgotten"]), numbers, st.none()),
    st.tuples(st.sampled_from(["doubt", "doubt", "doubt", "crash", "restart"]), st.just(0), st.none()),
)


@pytest.mark.long
@given(st.lists(steps, min_size=20, max_size=60))
def test_in_any_order_of_events_nobody_waits_for_nothing_and_every_view_agrees(order):
    """Loads, evictions, lost bytes, clients that leave, reports that are lost, crashes of either process."""

    async def run():
        world = World()
        for step in order:
            await world.step(*step)
        await world.settle()
        await world.end_all()

    asyncio.run(run())


def ways(states: AdapterStates) -> list[str]:
    return [f"{before} {event} {after}" for before, event, after in states.transitions]


async def test_who_asks_for_what_is_leaving_has_it_loaded_anew_after_that():
    world = World()
    await world.step("ask", 0, INTERACTIVE)
    await world.step("leave", 0, None)
    world.engine.end(world.engine.prepares, name_of(0))
    await world.turn()
    assert world.tier.states.state(name_of(0)) is S.LEAVING
    await world.step("ask", 0, INTERACTIVE)
    assert world.tier.states.state(name_of(0)) is S.RETURNING
    assert world.tier.queue.told()["loads"][name_of(0)]["state"] == "queued"
    assert world.engine.prepares == {}
    await world.step("forgotten", 0, None)
    assert list(world.engine.prepares) == [name_of(0)]
    await world.settle()
    assert ways(world.tier.states) == [
        "stored ask queued",
        "queued start loading",
        "loading cancel leaving",
        "leaving ask returning",
        "returning forget queued",
        "loading ready host",
    ]
    shown = generate_latest(world.tier.metrics.registry).decode()
    assert 'graftwork_adapter_transitions_total{after="leaving",before="loading",event="cancel"} 1.0' in shown
    assert 'graftwork_adapters{state="host"} 1.0' in shown


async def test_an_adapter_that_the_engine_never_lets_go_keeps_its_asker_no_longer_than_a_load_may_take():
    engine = SteppedEngine()
    tier = residency(engine, timeout_s=0.05, most_adapters=1)
    first = asyncio.create_task(tier.hold(revision(0)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0.01)
    with pytest.raises(ServiceError, match="not loaded within"):
        await tier.hold(revision(0))
    assert tier.states.state(name_of(0)) is S.LEAVING
    # Others are loaded meanwhile.
    other = asyncio.create_task(tier.hold(revision(1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.end(engine.prepares, name_of(1))
    assert await other == name_of(1)


async def test_a_load_whose_row_is_gone_leaves_the_engine_again():
    world = World()
    world.catalog.revisions.get = lambda policy, digest: (_ for _ in ()).throw(NotFound("It is gone."))
    await world.step("ask", 0, INTERACTIVE)
    world.tier.doubt(None)
    await world.step("prepared", 0, None)
    assert world.tier.states.state(name_of(0)) is S.LEAVING
    await world.settle()
    assert world.engine.held == set()
