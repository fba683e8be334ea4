"""The live engine's side of a load: one call for all, every worker counts, no name outlives its use."""

import asyncio

import pytest
from fake_vllm import FakeClient, models

from engine.errors import AdapterError, DamagedBytes, ServiceError
from engine.serving import vllm_engine
from engine.serving.vllm_engine import VllmEngine


async def test_loads_share_their_calls_into_the_engine():
    client, table = FakeClient(turns=3), models()
    engine = VllmEngine(client, table)
    await asyncio.gather(*(engine.prepare(f"p@{i}", {"path": str(i)}) for i in range(32)))
    assert len(client.calls) == 3
    assert set(client.calls[0][1]) == set(table.lora_requests)
    assert all(call[1] == {} for call in client.calls[1:])
    ids = [request.lora_int_id for request in table.lora_requests.values()]
    assert sorted(ids) == list(range(1, 33))
    assert {request.lora_path for request in table.lora_requests.values()} == {
        f"graftwork:p@{i}" for i in range(32)
    }
    # vLLM's own resolvers would keep a lock for every name that anybody ever asks for.
    assert (table.lora_resolvers, dict(table.lora_resolver_lock)) == ([], {})


async def test_nothing_is_asked_while_nothing_loads():
    client = FakeClient()
    engine = VllmEngine(client, models())
    await engine.prepare("p@1", {})
    before = len(client.calls)
    await asyncio.sleep(0.1)
    assert len(client.calls) == before


async def test_every_worker_must_have_it_and_one_refusal_counts():
    client, table = FakeClient(workers=2), models()
    engine = VllmEngine(client, table)
    await engine.prepare("p@1", {})
    assert len(client.calls) == 2
    client.refusals = {"p@2": ("damaged", "p@2 cannot be loaded."), "p@3": ("refused", "rank 16.")}
    with pytest.raises(DamagedBytes, match="p@2 cannot"):
        await engine.prepare("p@2", {})
    with pytest.raises(AdapterError, match="rank 16"):
        await engine.prepare("p@3", {})
    assert list(table.lora_requests) == ["p@1"]


async def test_a_name_leaves_when_its_last_request_has_left_the_engine():
    """After an abort the engine may still compute a step with it."""
    client, table = FakeClient(), models()
    engine = VllmEngine(client, table)
    await engine.prepare("p@1", {})
    client.run("r1", "p@1")
    leaving = asyncio.create_task(engine.forget("p@1"))
    await asyncio.sleep(0.02)
    assert not leaving.done()
    assert "p@1" in table.lora_requests
    del client.output_processor.request_states["r1"]
    await leaving
    assert (table.lora_requests, client.states, client.ids_forgotten) == ({}, [{}], [1])
    # It comes back under another id: what a step still knew of the first one is not taken for it.
    await engine.prepare("p@1", {})
    assert table.lora_requests["p@1"].lora_int_id == 2


async def test_a_name_that_is_wanted_before_it_has_left_stays():
    client, table = FakeClient(), models()
    engine = VllmEngine(client, table)
    await engine.prepare("p@1", {})
    client.run("r1", "p@1")
    leaving = asyncio.create_task(engine.forget("p@1"))
    await asyncio.sleep(0.01)
    await engine.prepare("p@1", {})
    await leaving
    del client.output_processor.request_states["r1"]
    await asyncio.sleep(0.02)
    assert table.lora_requests["p@1"].lora_int_id == 1
    assert client.ids_forgotten == []


async def test_who_waits_for_an_engine_that_fails_is_told(monkeypatch):
    client = FakeClient()
    engine = VllmEngine(client, models())
    monkeypatch.setattr(client, "states", None)
    with pytest.raises(ServiceError, match="does not answer"):
        await engine.prepare("p@1", {})
    with pytest.raises(ServiceError, match="does not answer"):
        await engine.forget("p@1")


async def test_a_request_that_never_ends_does_not_hold_up_who_forgets(monkeypatch):
    monkeypatch.setattr(vllm_engine, "ABORT_S", 0.05)
    client = FakeClient()
    engine = VllmEngine(client, models())
    await engine.prepare("p@1", {})
    client.run("r1", "p@1")
    with pytest.raises(TimeoutError):
        await engine.forget("p@1")
    await engine.prepare("p@2", {})
