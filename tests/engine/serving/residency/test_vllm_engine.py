"""The live engine's side of a load: beside its steps, every worker counts, no name outlives its use."""

import asyncio
import socket
import uuid
from functools import partial

import pytest

from engine.errors import AdapterError, DamagedBytes, ServiceError
from engine.serving.residency.vllm_engine import VllmEngine
from engine.serving.worker import load_channel
from engine.serving.worker.load_channel import LoadChannel, SlotReport
from tests.helpers.adapters_cold import settle
from tests.helpers.fake_vllm import FakeClient, models


async def ask_and_leave(engine, worker, name):
    """Wait for a load no longer than it takes to begin; return what ends it in the worker."""
    prepare, under_way = worker.prepare, []

    def begins(name, address, tell):
        worker.asked.append((name, address))
        under_way.append((name, tell))

    worker.prepare = begins
    left = asyncio.create_task(engine.prepare(name, {}))
    await settle(lambda: under_way)
    worker.prepare = prepare
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    return partial(worker.end, *under_way[0])


async def test_a_load_waits_for_no_step():
    """Not even one of an engine that hangs."""
    client, table = FakeClient(step_s=60), models()
    engine = await VllmEngine.connect(client, table)
    async with asyncio.timeout(30):
        await asyncio.gather(*(engine.prepare(f"p@{i}", {"path": str(i)}) for i in range(32)))
    assert client.calls == []
    assert dict(client.workers[0].asked) == {f"p@{i}": {"path": str(i)} for i in range(32)}
    ids = [request.lora_int_id for request in table.lora_requests.values()]
    assert sorted(ids) == list(range(1, 33))
    assert {request.lora_path for request in table.lora_requests.values()} == {
        f"graftwork:0:p@{i}" for i in range(32)
    }
    # vLLM's own resolvers would keep a lock for every name that anybody ever asks for.
    assert (table.lora_resolvers, dict(table.lora_resolver_lock)) == ([], {})


async def test_names_that_leave_at_once_share_a_call():
    client, table = FakeClient(), models()
    engine = await VllmEngine.connect(client, table)
    await asyncio.gather(*(engine.prepare(f"p@{i}", {}) for i in range(32)))
    await asyncio.gather(*(engine.forget(f"p@{i}") for i in range(32)))
    assert [len(ids) for _, ids in client.calls] == [32]
    before = len(client.calls)
    await asyncio.sleep(0.1)
    assert len(client.calls) == before


async def test_every_worker_must_have_it_and_one_refusal_counts():
    client, table = FakeClient(workers=2, prepare_s=0.02), models()
    engine = await VllmEngine.connect(client, table)
    await engine.prepare("p@1", {})
    assert [worker.held for worker in client.workers] == [{"p@1"}, {"p@1"}]
    client.workers[1].refusals = {"p@2": ("damaged", "p@2 cannot be loaded."), "p@3": ("refused", "rank 16.")}
    with pytest.raises(DamagedBytes, match="p@2 cannot"):
        await engine.prepare("p@2", {})
    with pytest.raises(AdapterError, match="rank 16"):
        await engine.prepare("p@3", {})
    assert list(table.lora_requests) == ["p@1"]


async def test_a_name_leaves_when_its_last_request_has_left_the_engine():
    """After an abort the engine may still compute a step with it."""
    client, table = FakeClient(), models()
    engine = await VllmEngine.connect(client, table)
    await engine.prepare("p@1", {})
    client.run("r1", "p@1")
    leaving = asyncio.create_task(engine.forget("p@1"))
    await asyncio.sleep(0.02)
    assert not leaving.done()
    assert "p@1" in table.lora_requests
    del client.output_processor.request_states["r1"]
    await leaving
    assert (table.lora_requests, client.workers[0].held, client.ids_forgotten) == ({}, set(), [1])
    # It comes back under another id: what a step still knew of the first one is not taken for it.
    await engine.prepare("p@1", {})
    assert table.lora_requests["p@1"].lora_int_id == 2


async def test_who_waits_for_a_worker_that_ends_is_told():
    address = f"graftwork-test-{uuid.uuid4().hex}"
    worker = socket.create_server(f"\0{address}", family=socket.AF_UNIX)
    engine = VllmEngine(FakeClient(), models(), [await LoadChannel.connect(address, "")])
    end, _ = worker.accept()
    waiting = asyncio.create_task(engine.prepare("p@1", {}))
    while not await asyncio.to_thread(end.recv, 1000):
        pass
    end.close()
    worker.close()
    for later in (waiting, engine.prepare("p@2", {})):
        with pytest.raises(ServiceError, match="does not answer"):
            await later


async def test_who_leaves_an_engine_that_fails_is_told(monkeypatch):
    client = FakeClient()
    engine = await VllmEngine.connect(client, models())
    monkeypatch.setattr(client, "workers", None)
    with pytest.raises(ServiceError, match="does not answer"):
        await engine.forget("p@1")


async def test_who_waits_no_longer_does_not_disturb_the_others():
    client, table = FakeClient(), models()
    engine = await VllmEngine.connect(client, table)
    end = await ask_and_leave(engine, client.workers[0], "p@1")
    # What the worker says is read in order: the first load's end before the second one's.
    end()
    await engine.prepare("p@2", {})
    assert list(table.lora_requests) == ["p@2"]


async def test_only_processes_of_the_same_user_are_heard(monkeypatch):
    client = FakeClient()
    monkeypatch.setattr(load_channel.os, "getuid", lambda: 12345)
    engine = await VllmEngine.connect(client, models())
    with pytest.raises(ServiceError, match="does not answer"):
        await engine.prepare("p@1", {})
    assert client.workers[0].asked == []


async def test_who_does_not_know_the_token_is_not_heard():
    client = FakeClient()
    (worker,) = client.workers
    channel = await LoadChannel.connect(worker.listener.address, "guessed")
    with pytest.raises(ServiceError, match="does not answer"):
        await channel.prepare("p@1", {})
    assert worker.asked == []


async def test_a_name_that_a_worker_still_prepares_is_forgotten_after_that():
    """Its client left meanwhile: forgotten first, it would be ready then, for nobody."""
    client, table = FakeClient(), models()
    engine = await VllmEngine.connect(client, table)
    end = await ask_and_leave(engine, client.workers[0], "p@1")
    leaving = asyncio.create_task(engine.forget("p@1"))
    # Turns in which it would be forgotten if nobody waited.
    await asyncio.sleep(0.02)
    assert not leaving.done()
    end()
    await leaving
    assert (client.workers[0].held, len(client.workers[0].asked), len(client.calls)) == (set(), 1, 1)


async def test_any_sentence_reaches_who_asked():
    client = FakeClient()
    engine = await VllmEngine.connect(client, models())
    client.workers[0].refusals = {"p@1": ("refused", "a name with \udcff in it.")}
    with pytest.raises(AdapterError, match="in it"):
        await engine.prepare("p@1", {})


async def test_a_request_that_never_ends_does_not_hold_up_who_forgets():
    client = FakeClient()
    engine = await VllmEngine.connect(client, models())
    for name in ("p@1", "p@2"):
        await engine.prepare(name, {})
    client.run("r1", "p@1")
    stuck = asyncio.create_task(engine.forget("p@1"))
    async with asyncio.timeout(60):
        await engine.forget("p@2")
        await engine.prepare("p@3", {})
    assert not stuck.done()
    stuck.cancel()


async def test_the_slots_are_reported_by_name_and_only_of_names_that_are_here():
    """The newest report is told, whichever went before it was taken; ids that were forgotten are nobody's."""
    client, heard = FakeClient(), []
    engine = await VllmEngine.connect(client, models())
    engine.watch(lambda in_slots, lost, report: heard.append((in_slots, lost, report.activations)))
    for name in ("p@1", "p@2", "p@3"):
        await engine.prepare(name, {})
    listener = client.workers[0].listener
    listener.report(SlotReport((1, 99), (2,), 5, 1))
    await settle(lambda: heard)
    assert heard == [(["p@1"], ["p@2"], 5)]
    await engine.forget("p@1")
    for activations in range(6, 106):
        listener.report(SlotReport((1, 3), (), activations, 1))
    await settle(lambda: heard[-1][2] == 105)
    assert heard[-1][:2] == (["p@3"], [])


async def test_who_hears_a_report_and_fails_does_not_end_the_channel():
    client, heard = FakeClient(), []
    engine = await VllmEngine.connect(client, models())

    def fails(*report):
        heard.append(report)
        raise RuntimeError("It cannot happen here.")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    engine.watch(fails)
    client.workers[0].listener.report(SlotReport((), (), 0, 0))
    await settle(lambda: heard)
    await engine.prepare("p@1", {})
