"""Loading a packed MoE adapter against a copy of its bytes, and against stock vLLM from files.

    graftwork bench load [--repeats 9] [--ranks 1 8] [--live 1 2] [--long]

At the width of Qwen3-30B-A3B (48 layers, 128 experts, 105.5 MB at rank 1) around vLLM's own LoRA layers:
the base's 60 GB are left out, the slot tensors and all code that fills them are real. `packed_s` is one
call from open to slot ready: bytes in the page cache, checksum verified earlier, slots touched before.
Stock vLLM loads the same adapter from PEFT's fused layout and from one tensor a projection and expert.
`--long` takes rank 8 too, and live engines on many-moe.
"""

import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _load_live
import _record as record
import torch
from _run import Run, options, start
from safetensors.torch import save_file

from engine.adapters import packed
from engine.base.families import BaseShapes
from engine.serving.worker.host_tier import HostTier
from engine.serving.worker.loader import RegisteredAdapter, SlotManager
from engine.store.checksums import checksum_of
from engine.store.segments import Store
from tests.helpers import vllm_layers as made

WIDTH = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
    "intermediate_size": 6144,
}  # fmt: skip
DTYPE = torch.bfloat16
# Of rank 1. Speed-ups over stock vLLM depend on the machine's memory: the floor's own are beside them.
BOUNDS = {"over_floor": record.at_most(1.4), "over_floor_r1_in_r8": record.at_most(2)}
# As MinT did: so many loads one after another.
BURSTS = (4, 8, 16)
STOCK_WAYS = ("fused", "per_expert")
WARM_UPS = 2
# Pairs of a load and a copy: they take hundredths of a second.
PAIRS = 40


def slot_count(rank: int) -> int:
    """Return how many slots to make: a slot of rank 8 takes 844 MB."""
    return 2 if rank == 1 else 1


class CpuExperts:
    """The experts of a layer as the engine keeps them on a CPU."""

    def __init__(self, config, rank: int, tp: tuple[int, int]):
        from engine.serving.worker.slots import ExpertSlots

        count, hidden = config["num_experts"], config["hidden_size"]
        inner = config["moe_intermediate_size"] // tp[1]
        slots = slot_count(rank)
        self.gate_up = ExpertSlots(slots, count, 2, rank, hidden, inner, DTYPE, tp)
        self.down = ExpertSlots(slots, count, 1, rank, inner, hidden, DTYPE, tp, cut_inputs=True)


def layers(config: dict, rank: int, stock: bool, tp: tuple[int, int] = (0, 1)) -> made.Layers:
    """Every LoRA layer of the model by name, with slots that were written once."""
    lora = made.lora_config(slot_count(rank), rank, DTYPE, mixed=True)
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    found = {}
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        found[f"{name}.self_attn.qkv_proj"] = made.qkv(
            hidden, heads, config["num_key_value_heads"], head, lora, tp
        )
        found[f"{name}.self_attn.o_proj"] = made.row(heads * head, hidden, lora, tp)
        found[f"{name}.mlp.experts"] = (
            made.experts(config["num_experts"], hidden, config["moe_intermediate_size"], lora, tp)
            if stock
            else CpuExperts(config, rank, tp)
        )
    return found


def tensors(config: dict, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """An adapter on every projection; A of gate and up are one, as PEFT's fused layout has it."""
    torch.manual_seed(seed)
    found = {}
    for name, (inputs, outputs) in BaseShapes.of(config).modules().items():
        shared = found.get(f"{name.replace('up_proj', 'gate_proj')}.lora_A")
        found[f"{name}.lora_A"] = torch.randn(rank, inputs).to(DTYPE) if shared is None else shared
        found[f"{name}.lora_B"] = torch.randn(outputs, rank).to(DTYPE)
    return found


def fuse(config: dict, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return PEFT's fused layout: of all experts of a layer one A (E*R, I) and one B (O, R*E), rank-major."""
    found = {key: value for key, value in adapter.items() if ".experts." not in key}
    for i in range(config["num_hidden_layers"]):
        path = f"model.layers.{i}.mlp.experts"

        def stack(leaf: str, side: str, path: str = path) -> torch.Tensor:
            return torch.stack(
                [adapter[f"{path}.{e}.{leaf}.lora_{side}"] for e in range(config["num_experts"])]
            )

        gate_up_EOR = torch.cat([stack("gate_proj", "B"), stack("up_proj", "B")], dim=1)
        for name, a_ERI, b_EOR in (
            (f"{path}.base_layer", stack("gate_proj", "A"), gate_up_EOR),
            (path, stack("down_proj", "A"), stack("down_proj", "B")),
        ):
            found[f"{name}.lora_A"] = a_ERI.flatten(0, 1).contiguous()
            found[f"{name}.lora_B"] = b_EOR.permute(1, 2, 0).flatten(1).contiguous()
    return found


def write_peft(directory: Path, found: dict[str, torch.Tensor], rank: int) -> None:
    directory.mkdir(parents=True)
    # PEFT's fused layout shares nothing between tensors, and safetensors refuses it.
    named = {f"base_model.model.{key}.weight": value.clone() for key, value in found.items()}
    save_file(named, directory / "adapter_model.safetensors")
    targets = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in found})
    config = {"r": rank, "lora_alpha": rank, "target_modules": targets, "peft_type": "LORA", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


class Ours:
    """Our manager and host tier over slots of one rank; `load` is one call from open to slot ready."""

    def __init__(self, config: dict, rank: int, tp: tuple[int, int] = (0, 1)):
        lora = made.lora_config(slot_count(rank), rank, DTYPE)
        self.slots: SlotManager = made.manager(SlotManager, layers(config, rank, False, tp), lora)
        self.host = HostTier(self.slots.buffers, verifies=tp[0] == 0)
        self._number = 0

    def load(self, address: dict) -> None:
        self._number += 1
        adapter = self.host.open("adapter", address)
        self.slots.add_adapter(RegisteredAdapter(self._number, adapter))
        self.slots.activate_adapter(self._number)

    def unload(self) -> None:
        self.slots.remove_adapter(self._number)


def put(store: Store, adapter: dict[str, torch.Tensor], config: dict) -> dict:
    whole = packed.pack(adapter, DTYPE, BaseShapes.of(config).fused)
    at = store.append(whole.tobytes())
    return {
        "path": str(store.path(at.segment)), "offset": at.offset, "length": at.length,
        "checksum": at.checksum, "layout": whole.layout.to_json(),
    }  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Floor:
    """One memcpy of so many bytes into touched memory."""

    def __init__(self, length: int):
        self._from, self._to = (torch.ones(length, dtype=torch.uint8) for _ in range(2))

    def __call__(self) -> None:
        self._to.copy_(self._from)


def against_floor(ours: Ours, addresses: list[dict], repeats: int) -> tuple[list[float], list[float]]:
    """Return load and floor seconds, in turn, so that both see the same machine."""
    floor = Floor(addresses[0]["length"])
    loads, floors = [], []
    for i in range(repeats + WARM_UPS):
        for side in record.in_turn((floors, loads), i):
            if side is floors:
                floors.append(seconds(floor))
            else:
                loads.append(seconds(lambda i=i: ours.load(addresses[i % len(addresses)])))
                ours.unload()
    return loads[WARM_UPS:], floors[WARM_UPS:]


def same_slots(ours: Ours, stock: made.StockWorker, ours_at: int, stock_at: int) -> bool:
    """Compare every tensor of a slot with what stock vLLM's `set_lora` left in its own."""
    for name, layer in stock._adapter_manager.modules.items():
        mine = ours.slots.modules[name]
        if name.endswith("experts"):
            pairs = [
                (mine.gate_up.a_SEMRI[ours_at, :, i], layer.w13_lora_a_stacked[i][stock_at]) for i in (0, 1)
            ]
            pairs += [
                (mine.gate_up.b_SEMRO[ours_at, :, i].transpose(1, 2), layer.w13_lora_b_stacked[i][stock_at])
                for i in (0, 1)
            ]
            pairs += [
                (mine.down.a_SEMRI[ours_at, :, 0], layer.w2_lora_a_stacked[0][stock_at]),
                (mine.down.b_SEMRO[ours_at, :, 0].transpose(1, 2), layer.w2_lora_b_stacked[0][stock_at]),
            ]
        else:
            both = zip(
                (*mine.lora_a_stacked, *mine.lora_b_stacked),
                (*layer.lora_a_stacked, *layer.lora_b_stacked),
                strict=True,
            )
            pairs = [(left[ours_at], right[stock_at]) for left, right in both]
        if not all(torch.equal(left, right) and left.any() for left, right in pairs):
            return False
    return True


def against_stock(
    ours: Ours, address: dict, stock: made.StockWorker, directories: dict[str, Path], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of our loads, and of vLLM's own from each directory, in turn."""
    numbers = itertools.count(1)
    found: dict[str, list[float]] = {way: [] for way in ("ours", *directories)}

    def load(way: str) -> float:
        gc.collect()
        if way == "ours":
            took = seconds(lambda: ours.load(address))
            ours.unload()
            return took
        number = next(numbers)
        took = seconds(lambda: stock.load(number, directories[way], way == "fused"))
        stock.remove_adapter(number)
        return took

    for repeat in range(repeats + WARM_UPS):
        for way in record.in_turn(found, repeat):
            found[way].append(load(way))
    return {way: times[WARM_UPS:] for way, times in found.items()}


def same_as_stock(ours: Ours, address: dict, stock: made.StockWorker, directories: dict[str, Path]) -> bool:
    """Say whether our load and vLLM's own from each directory fill a slot with the same tensors."""
    ours.load(address)
    at, same = ours.slots.lora_index_to_id.index(ours._number), True
    for number, (way, directory) in enumerate(directories.items(), 1):
        stock.load(number, directory, way == "fused")
        same &= same_slots(ours, stock, at, stock._adapter_manager.lora_index_to_id.index(number))
        stock.remove_adapter(number)
    ours.unload()
    return same


def cold(ours: Ours, address: dict, repeats: int) -> list[float]:
    """Load with the file's pages dropped from the page cache."""
    times = []
    for _ in range(repeats):
        gc.collect()
        descriptor = os.open(address["path"], os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        times.append(seconds(lambda: ours.load(address)))
        ours.unload()
    return times


def measure(config: dict, rank: int, slot_rank: int, root: Path, repeats: int) -> dict[str, list[float]]:
    """Measure our route at a rank in slots of a rank; `floor` and `load` are pairs."""
    store = Store(root / f"store-{rank}-{slot_rank}")
    ours = Ours(config, slot_rank)
    addresses = [put(store, tensors(config, rank, seed), config) for seed in range(2)]
    loads, floors = against_floor(ours, addresses, max(PAIRS, repeats))
    found = {"load": loads, "floor": floors}
    for burst in BURSTS:
        times, _ = against_floor(ours, addresses, burst)
        found[f"burst_{burst}"] = [statistics.mean(times)]
    store.close()
    return found


def compare(config: dict, rank: int, root: Path, repeats: int) -> tuple[dict[str, list[float]], bool]:
    """Measure our route and stock vLLM's two on the same adapter in slots of its own rank."""
    adapter = tensors(config, rank, 0)
    store = Store(root / f"store-{rank}")
    address = put(store, adapter, config)
    directories = {way: root / f"{way}-{rank}" for way in STOCK_WAYS}
    write_peft(directories["fused"], fuse(config, adapter), rank)
    write_peft(directories["per_expert"], adapter, rank)
    del adapter
    ours = Ours(config, rank)
    loads, floors = against_floor(ours, [address], max(PAIRS, repeats))
    found = {"load": loads, "floor": floors, "cold": cold(ours, address, max(3, repeats // 2))}
    found |= checks(ours, address)
    for burst in BURSTS:
        found[f"burst_{burst}"] = [statistics.mean(against_floor(ours, [address], burst)[0])]
    lora = made.lora_config(slot_count(rank), rank, DTYPE, mixed=True)
    stock = made.StockWorker(layers(config, rank, True), lora)
    found |= against_stock(ours, address, stock, directories, repeats)
    correct = same_as_stock(ours, address, stock, directories)
    store.close()
    return found, correct


def checks(ours: Ours, address: dict) -> dict[str, list[float]]:
    """Time the checksum alone, and all that `prepare` does on its thread: that and the search for NaN."""
    opened = ours.host.open("adapter", address)
    payload = opened.bytes.look().numpy()
    return {
        "verify": [seconds(lambda: checksum_of(memoryview(payload))) for _ in range(3)],
        "prepare": [seconds(lambda: ours.host.verify(opened, address)) for _ in range(3)],
    }


def ratio(above: list[float], below: list[float]) -> list[float]:
    """Pair the repeats; where the counts differ, each against the median."""
    if len(above) == len(below):
        return [a / b for a, b in zip(above, below, strict=True)]
    return [a / record.median(below) for a in above]


def true_width(config: dict, ranks: list[int], root: Path, repeats: int):
    """Return values, each a list of repeats, and whether all slots were filled right."""
    values: dict[str, list[float]] = {}
    correct = True
    for rank in ranks:
        found, same = compare(config, rank, root, repeats)
        gc.collect()
        correct &= same
        tail = "" if rank == 1 else f".r{rank}"
        values |= {
            f"over_floor{tail}": ratio(found["load"], found["floor"]),
            f"packed_s{tail}": found["load"],
            f"floor_s{tail}": found["floor"],
            **{f"speedup_vs_{way}{tail}": ratio(found[way], found["ours"]) for way in STOCK_WAYS},
            **{f"floor_speedup_vs_{way}{tail}": ratio(found[way], found["floor"]) for way in STOCK_WAYS},
            f"stock_fused_s{tail}": found["fused"],
            f"stock_per_expert_s{tail}": found["per_expert"],
            f"cold_packed_s{tail}": found["cold"],
            f"verify_s{tail}": found["verify"],
            f"prepare_s{tail}": found["prepare"],
        }
        values |= {f"packed_s.n{burst}{tail}": found[f"burst_{burst}"] for burst in BURSTS}
    found = measure(config, 1, 8, root, repeats)
    values["over_floor_r1_in_r8"] = ratio(found["load"], found["floor"])
    values["packed_s_r1_in_r8"] = found["load"]
    return values, correct


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument(
        "--live", type=int, nargs="*",
        help="tensor-parallel sizes of the live engines on many-moe",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="of our copies, the floor's and stock vLLM's")
    arguments = parser.parse_args()
    run = Run("load", arguments.long)
    torch.set_num_threads(arguments.threads)
    ranks = arguments.ranks or ([1, 8] if run.is_long else [1])
    live = (_load_live.rank_counts() if run.is_long else []) if arguments.live is None else arguments.live
    with tempfile.TemporaryDirectory(prefix="graftwork-load-") as root:
        values, correct = true_width(WIDTH, ranks, Path(root), arguments.repeats)
        for count in live:
            found, right = _load_live.live(Path(root), arguments.repeats, count)
            values |= found
            correct &= right
    figures = record.Figures()
    figures.add(values)
    figures.add_pairs({name: values[name] for name in BOUNDS})
    record.report(run, figures, BOUNDS, correct, arguments.out)


if __name__ == "__main__":
    start(main)
