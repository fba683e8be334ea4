"""What others met in production with loading, slots, names and caches, one after the other.

| failure                                     | also tested in                                             |
|---------------------------------------------|------------------------------------------------------------|
| unbounded waits on the adapter update lock  | test_residency.py (a deadline on every wait)               |
| usage count leaked on abort                 | test_slot_reuse.py (clients that hang up)                  |
| reload inside a request hanging             | test_residency.py                                          |
| stale adapter ids in padded rows            | here                                                       |
| base rows mapped to a real slot             | test_engine.py (a full mixed batch), test_grouped.py       |
| KV cache not separated by adapter           | test_engine.py (one prompt under every adapter)            |
| LoRA applied to padding rows, giving NaN    | test_grouped.py (poisoned base rows and slots)             |
| signed URLs in cache keys filling the disk  | test_store_remote.py (the cache)                           |
| LoRA that binds zero modules                | test_packed.py, test_probe_gate.py (served as the base)    |
| an evicted adapter answering 404 for ever   | test_slot_reuse.py (more adapters than room) |
| engine versions never unloaded              | test_host_tier_index.py, test_slot_reuse.py (memory)       |
| a load call reaching one replica of several | test_failed_adapters.py, test_vllm_engine.py (all workers) |
| open files of a removed segment going stale | here                                                       |
"""

import asyncio
import errno
import hashlib
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

from engine.adapters import packed
from engine.errors import AdapterError, ServiceError
from engine.serving.residency.host_tier_index import AdapterState
from engine.serving.residency.vllm_engine import VllmEngine
from engine.serving.worker import host_tier_bytes, loader
from engine.serving.worker import slot_copy as fill
from engine.serving.worker.host_tier_bytes import FORGOTTEN, READY, HostTierBytes
from engine.serving.worker.load_channel import LoadOutcome
from engine.serving.worker.lora_cpu import GroupedPunica
from engine.store.cache import Cache
from engine.store.segments import Location, Store
from kernels.dense import cpu as grouped
from tests.helpers import vllm_layers as made
from tests.helpers.adapters_cold import (
    FakeCatalog,
    FakeEngine,
    name_of,
    residency,
    revision,
    settle,
    use,
    using,
)
from tests.helpers.fake_vllm import FakeClient, models

MIB = 1 << 20
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker be the only rank."""
    monkeypatch.setattr(loader, "is_lost_on_any_rank", lambda lost: lost)


def worker() -> loader.PackedWorkerManager:
    """One worker's manager over one layer and two slots, with a host tier of its own."""
    config = made.lora_config(2, 8, torch.float32)
    manager = loader.PackedWorkerManager.__new__(loader.PackedWorkerManager)
    layer = made.merged(64, [32, 32], config)
    manager._adapter_manager = made.manager(loader.SlotManager, {"model.gate_up_proj": layer}, config)
    manager.host = HostTierBytes(manager.slots.buffers)
    return manager


def in_slots(manager: loader.PackedWorkerManager) -> list[int]:
    """Return the ids of the adapters in slots."""
    return [lora_id for lora_id in manager.slots.lora_index_to_id if lora_id is not None]


class WorkerClient(FakeClient):
    """An engine whose only worker is this manager."""

    def __init__(self, manager: loader.PackedWorkerManager):
        self.extension = loader.LoaderExtension()
        self.extension.model_runner = SimpleNamespace(lora_manager=manager)
        self.output_processor = SimpleNamespace(request_states={})

    async def collective_rpc(self, method, timeout, args):
        return [getattr(self.extension, method)(*args)]


def adapter(number: int) -> packed.Packed:
    tensors = {
        "model.up_proj.lora_A": torch.full((4, 64), 1.0 + number),
        "model.up_proj.lora_B": torch.full((32, 4), 2.0 + number),
    }
    return packed.pack(tensors, torch.float32, FUSED)


def addresses(root, count: int) -> dict[str, dict]:
    store, found = Store(root), {}
    for i in range(count):
        whole = adapter(i)
        at = store.append(whole.tobytes())
        found[f"p@{i}"] = {
            "path": str(store.path(at.segment)), "offset": at.offset, "length": at.length,
            "checksum": at.checksum, "layout": whole.layout.to_json(),
        }  # fmt: skip
    store.close()
    return found


def told(host: HostTierBytes, name: str, address: dict) -> "Future[LoadOutcome]":
    """Ask for an adapter; the future holds what is told of it."""
    future: Future[LoadOutcome] = Future()
    host.prepare(name, address, future.set_result)
    return future


def ready(host: HostTierBytes, name: str, address: dict) -> None:
    assert told(host, name, address).result(10) == READY


def request(number: int) -> LoRARequest:
    return LoRARequest(f"p@{number}", number, f"graftwork:p@{number}")


async def test_no_lock_is_waited_for_without_a_limit():
    """The engine hangs; whoever waits for it is told so, and no lock of a name stays."""
    client, table = FakeClient(step_s=30, prepare_s=30), models()
    tier = residency(await VllmEngine.connect(client, table), timeout_s=0.1)
    results = await asyncio.gather(*(use(tier, revision(i)) for i in range(4)), return_exceptions=True)
    assert all(isinstance(result, ServiceError) and "within 0.1 s" in str(result) for result in results)
    assert dict(table.lora_resolver_lock) == {}


async def test_an_abort_gives_its_use_back():
    """Whether it waits for its adapter or already has it; the adapter can then leave."""
    engine = FakeEngine(0.01)
    tier = residency(engine, host_bytes=MIB)
    for seconds in (0.002, 0.03):
        task = asyncio.create_task(use(tier, revision(1, MIB), 60))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert all(resident.users == 0 for resident in tier.residents.values())
    await use(tier, revision(2, MIB))
    await use(tier, revision(2, MIB))
    await settle(lambda: name_of(1) not in engine.held)


async def test_a_reload_that_hangs_ends_and_holds_up_nobody():
    engine = FakeEngine(0)
    tier = residency(engine, host_bytes=MIB, timeout_s=0.1, load_concurrency=2)
    await use(tier, revision(1, MIB))
    await use(tier, revision(2, MIB))
    await settle(lambda: len(tier.residents) == 1)
    gone = 1 if name_of(2) in tier.residents else 2
    plain = engine.prepare

    async def hangs(name, address):
        await (asyncio.sleep(600) if name == name_of(gone) else plain(name, address))

    engine.prepare = hangs
    stuck = asyncio.create_task(use(tier, revision(gone, MIB)))
    assert await use(tier, revision(7, MIB))
    with pytest.raises(ServiceError, match="not loaded within"):
        await stuck
    engine.prepare = plain
    assert await use(tier, revision(gone, MIB))


def test_rows_of_an_adapter_without_a_slot_are_nobodys(tmp_path):
    """Ids that a step still names after their adapter was lost or forgotten; base rows have id 0."""
    manager = worker()
    ready(manager.host, "p@1", addresses(tmp_path, 2)["p@1"])
    seen = []
    manager.slots.set_adapter_mapping = seen.append
    mapping = made_mapping((1, 0, 2, 1), (1, 2))
    manager.set_active_adapters({request(1), request(2)}, mapping)
    assert (seen[0].index_mapping, seen[0].prompt_mapping) == ((1, 0, 0, 1), (1, 0))
    assert manager.slots.failed == {2: "p@2"}
    # Who forgets it is told: blocks of the prefix cache may hold what the base computed for it.
    assert [manager.forget(f"p@{i}", i) for i in (1, 2)] == [False, True]
    assert manager.slots.failed == {}


def test_padded_and_base_rows_get_no_slot_however_full_they_are():
    operations = GroupedPunica(16, 4, "cpu")
    operations.update_metadata(made_mapping((7, 0, 9, 0, 0), ()), [9, 7], 2, 100)
    assert operations.slots == [1, -1, 0, -1, -1]


def test_padding_stays_what_it_was_among_poisoned_rows_and_slots():
    a, b = torch.full((3, 1, 4, 8), torch.nan), torch.full((3, 4, 6), torch.nan)
    a[1], b[1] = 1.0, 1.0
    x, y = torch.full((5, 8), torch.nan), torch.zeros(5, 6)
    x[2] = 1.0
    plan = grouped.plan([-1, -1, 1, -1, -1])
    assert plan is not None
    grouped.add_lora(y, x, a, b, (6,), plan)
    assert y[2].eq(32).all()
    assert not y[[0, 1, 3, 4]].any()


async def test_the_prefix_cache_tells_adapters_apart_also_after_a_reload():
    """vLLM hashes name and path into a block's key; both are the same after a reload, and no others'."""
    client, table = FakeClient(), models()
    engine = await VllmEngine.connect(client, table)
    await engine.prepare("p@1", {"path": "/store/one.seg"})
    await engine.prepare("p@2", {"path": "/store/one.seg"})
    keys = {name: lora_key(lora) for name, lora in table.lora_requests.items()}
    assert len(set(keys.values())) == 2
    await engine.forget("p@1")
    await engine.prepare("p@1", {"path": "/store/compacted.seg"})
    assert lora_key(table.lora_requests["p@1"]) == keys["p@1"]
    assert lora_key(None) == ()


def test_a_copy_is_kept_once_whatever_address_it_came_from(tmp_path):
    """The key is the checksum: no URL, no query, no signature that is another one each time."""
    blob, cache = b"x" * 1000, Cache(tmp_path, 1 << 20)
    checksum = hashlib.sha256(blob).hexdigest()
    paths = {
        cache.add(Location(f"seg?X-Amz-Signature={i}", 64 * i, len(blob), checksum), iter([blob]))
        for i in range(20)
    }
    assert len(paths) == 1
    assert cache.bytes() == len(blob)


def test_an_adapter_of_no_module_is_refused():
    """It would be served as the base, with figures that look plausible."""
    manager = worker()
    layout = packed.PackedLayout(torch.float32, 0, ())
    address = {"path": "/nowhere", "offset": 0, "length": 0, "checksum": "", "layout": layout.to_json()}
    with pytest.raises(AdapterError, match="no blocks"):
        manager.host.open("p@1", address)
    tensors = {"model.v_proj.lora_A": torch.ones(4, 64), "model.v_proj.lora_B": torch.ones(32, 4)}
    elsewhere = packed.pack(tensors, torch.float32, FUSED).layout
    with pytest.raises(AdapterError, match=r"no module model\.v_proj"):
        manager.host.open("p@1", address | {"layout": elsewhere.to_json(), "length": elsewhere.nbytes})


async def test_an_evicted_adapter_comes_back_when_it_is_asked_for():
    client, table = FakeClient(), models()
    tier = residency(await VllmEngine.connect(client, table), host_bytes=MIB)
    for _ in range(3):
        for i in range(4):
            async with using(tier, revision(i, MIB)) as name:
                # What vLLM's server looks a request's model up in.
                assert name in table.lora_requests
    await settle(lambda: len(table.lora_requests) == 1)
    assert tier.evictions >= 8


@pytest.mark.long
async def test_what_has_left_is_nowhere(tmp_path):
    """A thousand revisions through two slots: nothing of a name stays in server or worker."""
    manager, table = worker(), models()
    given = addresses(tmp_path, 8)
    engine = await VllmEngine.connect(WorkerClient(manager), table)
    for turn in range(1000):
        name = f"p@{turn}"
        await engine.prepare(name, given[f"p@{turn % 8}"])
        lora = table.lora_requests[name]
        manager.set_active_adapters({lora}, None)
        assert lora.lora_int_id in manager.slots.lora_index_to_id
        await engine.forget(name)
    assert (table.lora_requests, dict(table.lora_resolver_lock)) == ({}, {})
    assert (manager.slots.list_adapters(), manager.slots.failed) == ({}, {})
    assert (manager.host.adapters, manager.host.loading) == ({}, {})
    assert in_slots(manager) == []
    # Private: what the server keeps of a name that has left costs memory and shows nowhere.
    assert (engine._leaving, engine._names, engine._channels[0]._waiting) == ({}, {}, {})


def test_what_is_forgotten_on_its_way_never_arrives(tmp_path):
    host, address = worker().host, addresses(tmp_path, 1)["p@0"]
    real = host.verify
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(adapter, given):
        begun.set()
        may_go_on.wait(10)
        real(adapter, given)

    host.verify = slow
    first = told(host, "p@0", address)
    assert begun.wait(10)
    host.forget("p@0")
    assert first.result(0) == FORGOTTEN
    may_go_on.set()
    # Private: nothing is told of a load that nobody waits for, so its thread's end is waited for.
    host._pool.shutdown(wait=True)
    assert (host.adapters, host.loading) == ({}, {})


def test_who_asks_again_while_it_is_on_its_way_is_told_with_the_first(tmp_path):
    host, address = worker().host, addresses(tmp_path, 1)["p@0"]
    assert [future.result(10) for future in [told(host, "p@0", address) for _ in range(3)]] == [READY] * 3
    assert host.verified_bytes == address["length"]


@pytest.mark.long
def test_a_segment_that_one_thread_lets_go_is_open_to_the_next(tmp_path):
    """Who takes it up while another drops it gets an open one, or opens it anew: never one that closes."""
    address = addresses(tmp_path, 1)["p@0"]
    segments, end = host_tier_bytes.OpenSegments(), time.monotonic() + 3

    def take_and_drop() -> None:
        while time.monotonic() < end:
            held = segments.at(address)
            assert len(os.pread(held.file.fd, 16, 0)) == 16
            del held

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(take_and_drop) for _ in range(4)]:
                future.result()
    finally:
        sys.setswitchinterval(usual)
    assert not [
        path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if path == address["path"]
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
async def test_a_fault_of_the_machine_is_not_the_adapters(tmp_path, monkeypatch, number):
    """Who asks hears that the service failed and may ask again; nothing goes into quarantine."""
    manager, given = worker(), addresses(tmp_path, 1)["p@0"]
    engine = await VllmEngine.connect(WorkerClient(manager), models())

    def fails(path, flags):
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as broken:
        broken.setattr(host_tier_bytes.os, "open", fails)
        with pytest.raises(ServiceError, match=os.strerror(number)):
            await engine.prepare("p@0", given)
    await engine.prepare("p@0", given)


async def test_bytes_that_another_host_moved_are_loaded_anew(tmp_path, monkeypatch):
    """On NFS a segment that is open here ends with its name: what a step then lacks, the next load finds."""
    manager, table, whole = worker(), models(), adapter(1)
    # Another lies beside it, or it would be copied.
    before, after = (Store(tmp_path).append_many([whole.tobytes()] * 2)[0] for _ in range(2))
    row = replace(revision(1), segment=before.segment, length=before.length, checksum=before.checksum)
    catalog = FakeCatalog()
    catalog.layouts.get = lambda digest: whole.layout.to_json()
    catalog.revisions.get = lambda policy, digest: replace(row, segment=after.segment)
    engine = await VllmEngine.connect(WorkerClient(manager), table)
    tier = residency(engine, catalog=catalog, store=Store(tmp_path))
    engine.watch(tier.take_report)
    users = [await tier.hold(row) for _ in range(2)]
    first = table.lora_requests[users[0]]
    Store(tmp_path).remove(before.segment)

    def stale(descriptor, vectors, offset):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as away:
        away.setattr(fill, "preadv", stale)
        manager.set_active_adapters({first}, None)
    assert (in_slots(manager), list(manager.slots.failed)) == ([], [first.lora_int_id])
    # Who comes now would fail too, and so keep it here; both who are on it have failed.
    await settle(lambda: tier.states.state(name_of(1)) is AdapterState.LOST)
    with pytest.raises(ServiceError, match="Try again"):
        await tier.hold(row)
    for name in users:
        tier.release(name)
    again = table.lora_requests[await tier.hold(row)]
    manager.set_active_adapters({again}, None)
    # What did not reach the slot is not counted.
    await settle(lambda: tier.metrics.registry.get_sample_value("graftwork_slot_fills_total") == 1)
    assert (in_slots(manager), manager.slots.failed) == ([again.lora_int_id], {})
    await settle(lambda: tier.states.in_slots == {name_of(1)})
    # Blocks of the prefix cache that were computed without the bytes are not found again.
    assert lora_key(again) != lora_key(first)


@pytest.mark.parametrize("copied", [True, False])
def test_many_small_adapters_hold_few_files(tmp_path, copied):
    """Copies of what lies behind a URL are files of their own; a segment is open once for all in it."""
    manager, count = worker(), 50
    given = addresses(tmp_path, count)
    if copied:
        for name, address in given.items():
            whole = Path(address["path"]).read_bytes()
            copy = tmp_path / name
            copy.write_bytes(whole[address["offset"] : address["offset"] + address["length"]])
            address |= {"path": str(copy), "offset": 0}
    ready(manager.host, "p@0", given["p@0"])
    before = len(os.listdir("/proc/self/fd"))
    for name, address in given.items():
        ready(manager.host, name, address)
    assert len(os.listdir("/proc/self/fd")) <= before
    for i in (7, 8):
        manager.set_active_adapters({request(i)}, None)
    (layer,) = manager.slots.modules.values()
    for slot, i in enumerate((7, 8)):
        assert layer.lora_b_stacked[1][slot, 0, :, :4].eq(2.0 + i).all()
        assert not layer.lora_b_stacked[1][slot, 0, :, 4:].any()


async def test_a_segment_that_goes_stale_while_it_is_read_is_looked_for_again(tmp_path, monkeypatch):
    host, address = worker().host, addresses(tmp_path, 1)["p@0"]

    def stale(*given):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(host_tier_bytes.os, "preadv", stale)
    assert told(host, "p@0", address).result(10)[0] == "missing"


async def test_each_replica_loads_for_itself():
    """No call makes an adapter known to a server: its row does, to every one that reads the catalog."""
    catalog, engines = FakeCatalog(), [FakeEngine(0), FakeEngine(0)]
    first, second = (residency(engine, catalog=catalog) for engine in engines)
    first.load_ahead(revision(1))
    await settle(lambda: engines[0].held)
    assert await use(second, revision(1)) == name_of(1)
    assert engines[1].held == {name_of(1)}
    # Nor does a replica that refuses it speak for the others.
    engines[0].faults[name_of(2)] = [AdapterError("It cannot be loaded.")]
    with pytest.raises(AdapterError):
        await use(first, revision(2))
    assert await use(second, revision(2))


def made_mapping(tokens, prompts) -> LoRAMapping:
    return LoRAMapping(index_mapping=tokens, prompt_mapping=prompts, is_prefill=True)


def lora_key(lora: LoRARequest | None) -> tuple:
    return tuple(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))
