"""A rank-1 adapter in Kimi-K2's shape (1T parameters): packed, stored, mapped, verified, copied into slots.

The fast tests have its first layers, one of them dense; `-m slow` has all 61, 1.29 GB of adapter.
"""

import json
import resource
from pathlib import Path

import pytest
import torch

from engine.adapters import packed
from engine.adapters.packed import Block, PackedLayout
from engine.base.families import BaseShapes
from engine.base.model_config import read_config
from engine.planning.adapters import Wanted, plan_adapters
from engine.serving.worker.host_tier_bytes import LAYOUT_LIMIT, HostTierBytes, read_layout
from engine.serving.worker.loader import RegisteredAdapter, SlotManager
from engine.settings.services import EngineConfig
from engine.store.segments import Store
from tests.helpers import vllm_layers as made
from tests.helpers.base_layers import adapter, layers_of, slot_values
from tests.helpers.repository import ROOT

KIMI_K2 = read_config(ROOT / "tests/helpers/kimi_k2.json")
DTYPE = torch.bfloat16
# The whole adapter beside one slot of as much, its pages and what Python needs of 138,000 views.
MEMORY_BYTES = 6 << 30


def address_of(store: Store, whole: packed.Packed) -> dict:
    at = store.append(whole.tobytes())
    return {
        "path": str(store.path(at.segment)), "offset": at.offset, "length": at.length,
        "checksum": at.checksum, "layout": whole.layout.to_json(),
    }  # fmt: skip


def load(tmp_path: Path, layers: int, tp: tuple[int, int] = (0, 1)):
    """Bring an adapter on every projection of so many layers into a slot, as an engine does.

    Return its tensors, the layers with their slots, and the packed file's layout.
    """
    config = KIMI_K2 | {"num_hidden_layers": layers}
    shapes = BaseShapes.of(config)
    tensors, _ = adapter(shapes, 1, DTYPE)
    whole = packed.pack(tensors, DTYPE, shapes.fused)
    layout = whole.layout
    store = Store(tmp_path)
    address = address_of(store, whole)
    store.close()
    del whole
    assert len(address["layout"]) < LAYOUT_LIMIT
    found = layers_of(config, 1, 1, DTYPE, tp)
    manager = made.manager(SlotManager, found, made.lora_config(1, 1, DTYPE))
    tier = HostTierBytes(manager.buffers, verifies=tp[0] == 0)
    held = tier.open("k2", address)
    tier.verify(held, address)
    assert held.bytes.mapped is not None
    manager.add_adapter(RegisteredAdapter(1, held))
    manager.activate_adapter(1)
    assert manager.lora_index_to_id == [1]
    wanted = Wanted(1, 1 << 50, tp[1])
    planned = plan_adapters(config, EngineConfig(dtype="bfloat16", max_rank=1), wanted)
    assert (planned.adapter_bytes, planned.load_bytes) == (layout.nbytes, held.plan.bytes)
    assert planned.adapter_blocks == len(layout.blocks)
    return tensors, found, layout


def check_slots(tensors: dict[str, torch.Tensor], layers: made.Layers, shapes: BaseShapes) -> None:
    for module in shapes.modules():
        a, b = slot_values(layers, shapes, module)
        assert torch.equal(a, tensors[f"{module}.lora_A"]), module
        assert torch.equal(b, tensors[f"{module}.lora_B"]), module


def test_its_first_layers_reach_their_slots(tmp_path):
    tensors, layers, layout = load(tmp_path, 3)
    check_slots(tensors, layers, BaseShapes.of(KIMI_K2 | {"num_hidden_layers": 3}))
    # Each run of experts of one rank is one block a side, however many they are.
    assert len([block for block in layout.blocks if block.experts == 384]) == 2 * 2 * 2


def test_one_of_eight_ranks_copies_its_part_alone(tmp_path):
    """Rank 5 of 8: the experts' inner features 1280 to 1535, and heads 40 to 47."""
    tensors, layers, _ = load(tmp_path, 2, (5, 8))
    path = "model.layers.1.mlp.experts"
    gate, down = layers[path].gate_up, layers[path].down
    inner = slice(5 * 256, 6 * 256)
    for number in (0, 383):
        key = f"{path}.{number}.gate_proj.lora_B"
        assert torch.equal(gate.b_SEMRO[0, number, 0, 0], tensors[key][inner, 0])
        key = f"{path}.{number}.down_proj.lora_A"
        assert torch.equal(down.a_SEMRI[0, number, 0, 0], tensors[key][0, inner])
    queries = layers["model.layers.1.self_attn.q_b_proj"].lora_b_stacked[0][0, 0]
    heads = slice(40 * 192, 48 * 192)
    assert torch.equal(queries, tensors["model.layers.1.self_attn.q_b_proj.lora_B"][heads])


@pytest.mark.long
def test_a_layout_with_a_rank_of_its_own_for_every_expert_is_within_the_limit():
    """The largest layout that this base can have: no two neighbours can share a block."""
    layout = worst_layout()
    text = layout.to_json()
    assert LAYOUT_LIMIT / 2 < len(text) < LAYOUT_LIMIT
    assert read_layout(text) == layout


def worst_layout() -> PackedLayout:
    """Return all 61 layers' blocks, experts by turns of rank 1 and 2, gate and up of two ranks as well."""
    shapes = BaseShapes.of(KIMI_K2)
    blocks: list[Block] = []
    offset = 0

    def add(module: str, rank: int, first: int, size: tuple[int, int], expert: int | None) -> None:
        nonlocal offset
        for side, width in zip("AB", size, strict=True):
            if expert is not None:
                shape: tuple[int, ...] = (1, 1, rank, width)
            else:
                shape = (1, rank, width) if side == "A" else (rank, width)
            blocks.append(Block(module, side, first, (size[1],), shape, offset, expert or 0))
            offset += -(-rank * width * DTYPE.itemsize // 64) * 64

    for module, size in shapes.linear.items():
        add(module, 1, 0, size, None)
    for path, experts in shapes.experts.items():
        for number in range(experts.count):
            for i, leaf in enumerate(("gate_proj", "up_proj")):
                add(f"{path}.gate_up_proj", 1 + (number + i) % 2, i, experts.size(leaf), number)
            add(f"{path}.down_proj", 1 + number % 2, 0, experts.size("down_proj"), number)
    return PackedLayout(DTYPE, offset, tuple(blocks))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_adapter_of_a_trillion_parameters_reaches_its_slots(tmp_path):
    tensors, layers, layout = load(tmp_path, KIMI_K2["num_hidden_layers"])
    check_slots(tensors, layers, BaseShapes.of(KIMI_K2))
    assert round(layout.nbytes / 1e9, 2) == 1.29
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"adapter_bytes": layout.nbytes, "layout": len(layout.to_json()), "peak": peak}))
    assert peak < MEMORY_BYTES
