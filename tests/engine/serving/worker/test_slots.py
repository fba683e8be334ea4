"""Slots of every kind hold what stock vLLM's own `set_lora` leaves there, on every tensor-parallel rank."""

import ctypes
import errno
import os
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from engine.adapters import packed
from engine.base.families import BaseShapes
from engine.errors import AdapterError, MissingBytes
from engine.serving.worker import loader
from engine.serving.worker import slot_copy as fill_module
from engine.serving.worker.host_tier_bytes import HostTierBytes
from engine.serving.worker.slot_copy import SlotCopyPlan
from engine.serving.worker.slots import ExpertSlots, ModuleSlots, SlotBuffers, slots_of
from engine.store.segments import PAGE_ALIGNED_FROM, Store
from tests.helpers import vllm_layers as made

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERTS = 32, 4, 2, 8, 16, 5
MOE = BaseShapes.of(
    {
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": HIDDEN, "head_dim": HEAD,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "moe_intermediate_size": INNER,
        "num_experts": EXPERTS, "intermediate_size": 64,
    }
)  # fmt: skip
LAYER = "model.layers.0"
PATH = f"{LAYER}.mlp.experts"


class CpuExperts:
    """What `slots_of` reads of the CPU's own expert layer."""

    def __init__(self, slots: int, rank: int, tp: tuple[int, int] = (0, 1)):
        inner = INNER // tp[1]
        self.gate_up = ExpertSlots(slots, EXPERTS, 2, rank, HIDDEN, inner, torch.float32, tp)
        self.down = ExpertSlots(slots, EXPERTS, 1, rank, inner, HIDDEN, torch.float32, tp, cut_inputs=True)


def adapter(ranks: dict[str, int], seed: int = 0, shared_a: bool = False) -> dict[str, torch.Tensor]:
    """Factors for the projections of these leaves; no two are alike, but for `shared_a` of gate and up."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in MOE.modules().items():
        rank = ranks.get(name.rpartition(".")[2])
        if rank is None:
            continue
        a = torch.randn(rank, inputs, generator=generator)
        found[f"{name}.lora_A"] = (
            found[f"{name[:-7]}gate_proj.lora_A"] if shared_a and "up_proj" in name else a
        )
        found[f"{name}.lora_B"] = torch.randn(outputs, rank, generator=generator)
    return found


def fill(
    slots: dict[str, ModuleSlots], slot: int, tensors, before: SlotCopyPlan | None = None
) -> SlotCopyPlan:
    whole = packed.pack(tensors, torch.float32, MOE.fused)
    plan = SlotCopyPlan(whole.layout, slots)
    plan.copy_to_slot(slot, plan.sources(whole.payload), before)
    return plan


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers(rank: int, tp: tuple[int, int] = (0, 1), fused: bool = False) -> made.Layers:
    config = made.lora_config(2, rank, torch.float32)
    return {
        f"{LAYER}.self_attn.qkv_proj": made.qkv(HIDDEN, HEADS, KV_HEADS, HEAD, config, tp),
        f"{LAYER}.self_attn.o_proj": made.row(HEADS * HEAD, HIDDEN, config, tp),
        PATH: made.experts(EXPERTS, HIDDEN, INNER, config, tp, fused),
    }


def stock(found: made.Layers, tensors: dict[str, torch.Tensor], rank: int, fused: bool = False) -> None:
    """Put an adapter into slot 0 by vLLM's own manager."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = made.manager(LRUCacheLoRAModelManager, found, made.lora_config(2, rank, torch.float32), fused)
    helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": list(ALL)})
    named = {f"base_model.model.{key}.weight": value for key, value in tensors.items()}
    manager.add_adapter(LoRAModel.from_lora_tensors(1, named, helper, device="cpu"))
    manager.activate_adapter(1)
    assert manager.lora_index_to_id[0] == 1


def contents(layer) -> list[torch.Tensor]:
    """Return slot 0 of a layer's tensors, in vLLM's shapes."""
    if isinstance(layer, CpuExperts):
        sides = [layer.gate_up.a_SEMRI[0, :, i] for i in (0, 1)]
        sides += [layer.gate_up.b_SEMRO[0, :, i].transpose(1, 2) for i in (0, 1)]
        return [*sides, layer.down.a_SEMRI[0, :, 0], layer.down.b_SEMRO[0, :, 0].transpose(1, 2)]
    names = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
    if hasattr(layer, names[0]):
        return [tensor[0] for name in names for tensor in getattr(layer, name)]
    return [tensor[0] for tensor in (*layer.lora_a_stacked, *layer.lora_b_stacked)]


@pytest.mark.parametrize("tp", [(0, 1), (0, 2), (1, 2), (0, 4), (2, 4), (3, 4)])
def test_every_rank_holds_what_stock_vllm_gives_it(tp):
    """Four ranks share two key heads, so that two of them hold the same one."""
    tensors = adapter(dict.fromkeys(ALL, 8))
    theirs = layers(8, tp)
    stock(theirs, tensors, 8)
    ours = layers(8, tp)
    on_gpu = slots_of(PATH, ours[PATH])
    on_cpu = CpuExperts(2, 8, tp)
    slots = {name: SlotBuffers(layer) for name, layer in ours.items() if name != PATH}
    whole = packed.pack(tensors, torch.float32, MOE.fused)
    plan = fill(slots | on_gpu, 0, tensors)
    fill(slots | slots_of(PATH, on_cpu), 0, tensors)
    for name, layer in theirs.items():
        for kind in [ours[name], on_cpu] if name == PATH else [ours[name]]:
            for mine, want in zip(contents(kind), contents(layer), strict=True):
                assert want.any()
                assert torch.equal(mine, want), name
    assert plan.bytes == sum(tensor.nbytes for layer in theirs.values() for tensor in contents(layer))
    assert plan.bytes == whole.layout.nbytes or tp[1] > 1
    assert ours[PATH].adapter_enabled.tolist() == theirs[PATH].adapter_enabled.tolist() == [1, 0, 0]


def deltas(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B @ A of gate and up together, and of down: (E, O, I) each."""
    if hasattr(layer, "gate_up"):
        a_EMRI, b_EMRO = layer.gate_up.a_SEMRI[0], layer.gate_up.b_SEMRO[0]
        gate_up = torch.einsum("emro,emri->emoi", b_EMRO, a_EMRI).flatten(1, 2)
        down = torch.einsum("ero,eri->eoi", layer.down.b_SEMRO[0, :, 0], layer.down.a_SEMRI[0, :, 0])
        return gate_up, down
    pairs = zip(layer.w13_lora_b_stacked, layer.w13_lora_a_stacked, strict=True)
    return torch.cat([b[0] @ a[0] for b, a in pairs], 1), layer.w2_lora_b_stacked[0][
        0
    ] @ layer.w2_lora_a_stacked[0][0]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_fused_experts_compute_what_separate_ones_do(rank):
    """A 3-D engine takes gate and up with factors of their own at half of its rank; so do 2-D and CPU."""
    tensors = adapter({"gate_proj": rank, "up_proj": rank, "down_proj": rank})
    kinds = [CpuExperts(1, 8), made.experts(EXPERTS, HIDDEN, INNER, made.lora_config(1, 8, torch.float32))]
    kinds.append(made.experts(EXPERTS, HIDDEN, INNER, made.lora_config(1, 8, torch.float32), fused=True))
    for layer in kinds:
        fill(slots_of(PATH, layer), 0, tensors)
    for i, part in enumerate(("gate_proj", "up_proj")):
        for expert in range(EXPERTS):
            name = f"{PATH}.{expert}.{part}"
            want = tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
            for layer in kinds:
                torch.testing.assert_close(deltas(layer)[0][expert, i * INNER : (i + 1) * INNER], want)
    for layer in kinds:
        name = f"{PATH}.3.down_proj"
        torch.testing.assert_close(deltas(layer)[1][3], tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"])


def test_fused_experts_equal_stock_vllms_from_one_doubled_factor():
    """vLLM's 3-D layer gets [A_gate; A_up] and the block-diagonal B as a PEFT file would hold them."""
    tensors = adapter({"gate_proj": 4, "up_proj": 4, "down_proj": 8})
    config = made.lora_config(1, 8, torch.float32)
    ours, theirs = (made.experts(EXPERTS, HIDDEN, INNER, config, fused=True) for _ in range(2))
    fill(slots_of(PATH, ours), 0, tensors)

    def of(expert: int, leaf: str, side: str) -> torch.Tensor:
        return tensors[f"{PATH}.{expert}.{leaf}.lora_{side}"]

    each = range(EXPERTS)
    a = torch.stack([torch.cat([of(e, "gate_proj", "A"), of(e, "up_proj", "A")]) for e in each])
    b = torch.stack([torch.block_diag(of(e, "gate_proj", "B"), of(e, "up_proj", "B")) for e in each])
    down = [torch.stack([of(e, "down_proj", side) for e in each]) for side in "AB"]
    theirs.set_lora(0, [a, down[0]], [b, down[1]])
    for mine, want in zip(contents(ours), contents(theirs), strict=True):
        assert torch.equal(mine, want)
    over = packed.pack(adapter({"gate_proj": 5, "up_proj": 5}), torch.float32, MOE.fused)
    with pytest.raises(AdapterError, match=r"rank 5.*10"):
        SlotCopyPlan(over.layout, slots_of(PATH, ours))


def test_nothing_of_the_last_occupant_stays():
    """Occupants of other ranks and targets follow each other; a fresh slot is the second route."""
    every = dict.fromkeys(ALL, 8)
    occupants = [
        every, {"q_proj": 2, "v_proj": 2, "up_proj": 3}, every | {"gate_proj": 1}, {"down_proj": 8},
        dict.fromkeys(ALL, 1), {"k_proj": 4, "gate_proj": 4, "up_proj": 4},
    ]  # fmt: skip
    used = layers(8) | {PATH: CpuExperts(2, 8)}
    slots = {}
    for name, layer in used.items():
        slots |= slots_of(name, layer)
    before = None
    for seed, ranks in enumerate(occupants):
        before = fill(slots, 0, adapter(ranks, seed), before)
        fresh = layers(8) | {PATH: CpuExperts(2, 8)}
        clean = {}
        for name, layer in fresh.items():
            clean |= slots_of(name, layer)
        fill(clean, 0, adapter(ranks, seed))
        for name, layer in used.items():
            for mine, want in zip(contents(layer), contents(fresh[name]), strict=True):
                assert torch.equal(mine, want), (ranks, name)
    before.clear(0)
    assert not any(tensor.any() for layer in used.values() for tensor in contents(layer))


def test_only_the_missing_ranks_are_cleared():
    """What the next occupant writes anyway is not written twice."""
    slots = slots_of(PATH, CpuExperts(1, 8))
    large, small = (
        packed.pack(adapter(dict.fromkeys(ALL[4:], rank)), torch.float32, MOE.fused).layout for rank in (8, 3)
    )
    before, after = SlotCopyPlan(large, slots), SlotCopyPlan(small, slots)
    assert [tuple(stale.shape)[-2] for stale in after.stale(before, 0)] == [5] * 4
    assert not list(before.stale(after, 0))


def open_tier(tmp_path: Path, rank: int = 64, slots: int = 2):
    """A manager, its host tier, and the address of an adapter that is large enough to be mapped."""
    layer = made.merged(4096, [2048, 2048], made.lora_config(slots, rank, torch.float32))
    manager = made.manager(
        loader.SlotManager, {"model.gate_up_proj": layer}, made.lora_config(slots, rank, torch.float32)
    )
    tier = HostTierBytes(manager.buffers)
    tensors = {
        f"model.{part}_proj.lora_{side}": torch.randn(64, 4096) if side == "A" else torch.randn(2048, 64)
        for part in ("gate", "up")
        for side in "AB"
    }
    whole = packed.pack(tensors, torch.float32, MOE.fused)
    assert whole.layout.nbytes > PAGE_ALIGNED_FROM
    store = Store(tmp_path)
    at = store.append(whole.tobytes())
    address = {
        "path": str(store.path(at.segment)), "offset": at.offset, "length": at.length,
        "checksum": at.checksum, "layout": whole.layout.to_json(),
    }  # fmt: skip
    return manager, tier, address, tensors


@pytest.mark.parametrize("rank", [64, 128])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_removed_file_still_serves(tmp_path, rank, mapped):
    """A whole payload is read, at the slot's own rank and below it; a rank's slices of one are mapped."""
    manager, tier, address, tensors = open_tier(tmp_path, rank)
    adapter = tier.open("a", address)
    assert adapter.plan.can_read
    adapter.plan.can_read = not mapped
    tier.verify(adapter, address)
    os.unlink(address["path"])
    manager.add_adapter(loader.RegisteredAdapter(1, adapter))
    manager.activate_adapter(1)
    layer = manager.modules["model.gate_up_proj"]
    assert torch.equal(layer.lora_b_stacked[1][0, 0, :, :64], tensors["model.up_proj.lora_B"])
    assert torch.equal(layer.lora_a_stacked[0][0, 0, :64], tensors["model.gate_proj.lora_A"])
    assert not layer.lora_b_stacked[0][0, 0, :, 64:].any()
    assert not layer.lora_b_stacked[0][1].any()


@pytest.mark.parametrize(("mapped", "reason"), [(False, "4096 of 3145728"), (True, "Bad address")])
def test_a_file_cut_short_takes_no_slot(tmp_path, mapped, reason):
    """Touching the lost pages of a mapping would end this process."""
    manager, tier, address, _ = open_tier(tmp_path)
    adapter = tier.open("a", address)
    adapter.plan.can_read = not mapped
    tier.verify(adapter, address)
    os.truncate(address["path"], address["offset"] + 4096)
    manager.add_adapter(loader.RegisteredAdapter(1, adapter))
    with pytest.raises(OSError, match=reason):
        manager.activate_adapter(1)
    assert manager.lora_index_to_id == [None, None]
    assert not manager.modules["model.gate_up_proj"].lora_b_stacked[0].any()
    with pytest.raises(MissingBytes, match="are not in"):
        tier.open("again", address)


@pytest.mark.parametrize("mapped", [False, True])
def test_several_that_come_at_once_are_read_beside_each_other(tmp_path, monkeypatch, mapped):
    """One whose file was cut short takes no slot, keeps none from the others, and leaves its own clear."""
    manager, tier, address, tensors = open_tier(tmp_path, slots=4)
    scales = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    read, readers, both = fill_module.SlotCopyPlan.read, [], threading.Barrier(2, timeout=20)

    def noted(self, *given):
        readers.append(threading.current_thread())
        # The one that is read alone, and then two of which each waits for the other.
        if len(readers) in (2, 3):
            both.wait()
        return read(self, *given)

    monkeypatch.setattr(fill_module.SlotCopyPlan, "read", noted)
    addresses = {}
    for number, scale in scales.items():
        whole = packed.pack({name: scale * each for name, each in tensors.items()}, torch.float32, MOE.fused)
        with closing(Store(tmp_path)) as store:
            at = store.append(whole.tobytes())
        addresses[number] = address | at._asdict() | {"path": str(store.path(at.segment))}
        adapter = tier.open(str(number), addresses[number])
        adapter.plan.can_read = not mapped
        tier.verify(adapter, addresses[number])
        manager.add_adapter(loader.RegisteredAdapter(number, adapter))
    manager.activate_adapter(1)
    os.truncate(addresses[3]["path"], addresses[3]["offset"] + 4096)
    lost = manager.activate_all([2, 3, 4])
    assert list(lost) == [3]
    assert manager.lora_index_to_id == [1, 2, None, 4]
    layer = manager.modules["model.gate_up_proj"]
    for slot, number in enumerate(manager.lora_index_to_id):
        wanted = scales[number] * tensors["model.up_proj.lora_B"] if number else torch.zeros(2048, 64)
        assert torch.equal(layer.lora_b_stacked[1][slot, 0, :, :64], wanted)
    assert len(set(readers)) == (0 if mapped else 3)
    # The free one is taken, and then the oldest leaves.
    manager.add_adapter(loader.RegisteredAdapter(6, tier.open("6", addresses[1])))
    assert manager.activate_all([5, 6]) == {}
    assert manager.lora_index_to_id == [5, 2, 6, 4]


@pytest.mark.parametrize("rank", [64, 128])
def test_a_read_that_stops_short_goes_on(tmp_path, monkeypatch, rank):
    """The kernel takes 2 GiB at most, and a signal may end a read after any byte or before the first."""
    preadv, counts = fill_module.LIBC.preadv, []

    def stops_short(descriptor, vectors, count, offset):
        if len(counts) % 3 == 2:
            counts.append(0)
            ctypes.set_errno(errno.EINTR)
            return -1
        given = (ctypes.c_uint64 * (2 * count)).from_address(vectors)
        asked = np.array(given).reshape(count, 2)
        counts.append(int(asked[:, 1].sum()))
        # All but one of the vectors, or all but one of the bytes.
        if count > 1 and len(counts) % 2:
            asked = asked[:-1]
        elif asked[-1, 1] > 1:
            asked[-1, 1] -= 1
        return preadv(descriptor, asked.ctypes.data, len(asked), offset)

    monkeypatch.setattr(fill_module, "IOVECS", 7)
    monkeypatch.setattr(fill_module, "READ_BYTES", 100_001)
    monkeypatch.setattr(fill_module, "LIBC", SimpleNamespace(preadv=stops_short))
    manager, tier, address, tensors = open_tier(tmp_path, rank)
    adapter = tier.open("a", address)
    manager.add_adapter(loader.RegisteredAdapter(1, adapter))
    manager.activate_adapter(1)
    assert max(counts) <= 100_001 < address["length"]
    for name, part in (("gate_proj", 0), ("up_proj", 1)):
        layer = manager.modules["model.gate_up_proj"]
        a, b = layer.lora_a_stacked[part][0, 0], layer.lora_b_stacked[part][0, 0]
        assert torch.equal(a[:64], tensors[f"model.{name}.lora_A"])
        assert torch.equal(b[:, :64], tensors[f"model.{name}.lora_B"])
        assert not a[64:].any()
        assert not b[:, 64:].any()


def test_only_the_first_rank_of_a_machine_reads_the_whole(tmp_path):
    manager, _, address, _ = open_tier(tmp_path)
    first, second = HostTierBytes(manager.buffers), HostTierBytes(manager.buffers, verifies=False)
    for tier in (first, second):
        tier.verify(tier.open("a", address), address)
    assert (first.verified_bytes, second.verified_bytes) == (address["length"], 0)
    assert first.validated_bytes == second.validated_bytes == address["length"]
    with pytest.raises(AdapterError, match="damaged"):
        first.verify(first.open("a", address), address | {"checksum": "0" * 64})
