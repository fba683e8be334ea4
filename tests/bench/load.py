"""Loading a packed MoE adapter against a copy of its bytes, and against stock vLLM from files.

    graftwork bench load [--repeats 9] [--ranks 1] [--live 1] [--long]

At the width of Qwen3-30B-A3B (48 layers, 128 experts, 105.5 MB at rank 1) around vLLM's own LoRA layers:
the base's 60 GB are left out, the slot tensors and all code that fills them are real. `packed_s` is one
call from open to slot ready: bytes in the page cache, checksum verified earlier, slots touched before.
Stock vLLM loads the same adapter from PEFT's fused layout and from one tensor a projection and expert.
On a GPU the slots are vLLM's own tensors on the device, and the copy is one from pinned memory to it; nothing
has a bound there.
A pair is the median of 5 loads over that of 5 copies, which alternate; pairs go on until `over_floor` is
decided. `--long` takes rank 8 too, and live engines on many-moe.
"""

import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import _load_live
import _record as record
import torch
from _run import Run, options, start
from safetensors.torch import save_file

from engine.adapters import packed
from engine.base.families import BaseShapes
from engine.serving.worker.host_tier_bytes import HostTierBytes
from engine.serving.worker.loader import RegisteredAdapter, SlotManager
from engine.store.segments import Store, checksum_of
from tests.helpers import vllm_layers as made

WIDTH = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
    "intermediate_size": 6144,
}  # fmt: skip
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of rank 1. Speed-ups over stock vLLM depend on the machine's memory: the floor's own are beside them.
BOUNDS = {
    "over_floor": record.at_most(1.4),
    "over_floor_r1_in_r8": record.at_most(2),
    "over_floor.r8": record.at_most(),
}
if DEVICE.type == "cuda":
    BOUNDS = dict.fromkeys(BOUNDS, record.at_most())
# As MinT did: so many loads one after another.
BURSTS = (4, 8, 16)
PARTS = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
STOCK_WAYS = ("fused", "per_expert")
WARM_UPS = 2
# Loads and copies of a pair, and how many pairs are enough whatever they say, by whether the form is long.
EACH = 5
MOST_PAIRS = {False: 60, True: 1000}


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
    with DEVICE:
        for i in range(config["num_hidden_layers"]):
            name = f"model.layers.{i}"
            found[f"{name}.self_attn.qkv_proj"] = made.qkv(
                hidden, heads, config["num_key_value_heads"], head, lora, tp
            )
            found[f"{name}.self_attn.o_proj"] = made.row(heads * head, hidden, lora, tp)
            found[f"{name}.mlp.experts"] = (
                made.experts(config["num_experts"], hidden, config["moe_intermediate_size"], lora, tp)
                if stock or DEVICE.type == "cuda"
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
        self.host = HostTierBytes(self.slots.buffers, verifies=tp[0] == 0)
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
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class Floor:
    """One memcpy of so many bytes into touched memory, or on a GPU one copy from pinned memory."""

    def __init__(self, length: int):
        self._from = torch.ones(length, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
        self._to = torch.ones(length, dtype=torch.uint8, device=DEVICE)

    def __call__(self) -> None:
        self._to.copy_(self._from, non_blocking=True)


def in_turns(
    ours: Ours, floor: Floor, addresses: Sequence[dict], count: int, number: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of so many loads and copies, in turn, so that both see the same machine."""
    found: dict[str, list[float]] = {"load": [], "floor": []}
    for i in range(count):
        for side in record.in_turn(found, number + i):
            if side == "floor":
                found[side].append(seconds(floor))
            else:
                found[side].append(seconds(partial(ours.load, addresses[i % len(addresses)])))
                ours.unload()
    return found


def over_floor(
    ours: Ours, floor: Floor, addresses: Sequence[dict], tail: str, number: int
) -> dict[str, float]:
    """Return the figures of a pair: the median seconds of its loads, of its copies, and their ratio."""
    found = in_turns(ours, floor, addresses, EACH, number)
    load, copy = (record.median(found[side]) for side in ("load", "floor"))
    return {f"over_floor{tail}": load / copy, f"packed_s{tail}": load, f"floor_s{tail}": copy}


def burst(ours: Ours, floor: Floor, addresses: Sequence[dict], number: int) -> float:
    """Return the mean seconds of the loads of one of `BURSTS`."""
    return statistics.mean(in_turns(ours, floor, addresses, BURSTS[number])["load"])


def same_slots(ours: Ours, stock: made.StockWorker, ours_at: int, stock_at: int) -> bool:
    """Compare every tensor of a slot with what stock vLLM's `set_lora` left in its own."""
    for name, layer in stock._adapter_manager.modules.items():
        mine = ours.slots.modules[name]
        if name.endswith("experts") and DEVICE.type == "cuda":
            both = [getattr(one, f"{part}_stacked") for part in PARTS for one in (mine, layer)]
            pairs = [
                (left[ours_at], right[stock_at])
                for of_mine, of_layer in zip(both[::2], both[1::2], strict=True)
                for left, right in zip(of_mine, of_layer, strict=True)
            ]
        elif name.endswith("experts"):
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


@dataclass(frozen=True)
class BesideStock:
    """Our load, a copy, and vLLM's own load from each directory, in turn."""

    ours: Ours
    address: dict
    floor: Floor
    stock: made.StockWorker
    directories: Mapping[str, Path]
    # Of stock's adapters; the check has those from 1.
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def take(self, repeat: int) -> dict[str, float]:
        """Return each way's seconds over those of our load, and over those of the copy."""
        found = {way: self._load(way) for way in record.in_turn(("ours", "floor", *self.directories), repeat)}
        return {
            **{f"speedup_vs_{way}": found[way] / found["ours"] for way in self.directories},
            **{f"floor_speedup_vs_{way}": found[way] / found["floor"] for way in self.directories},
            **{f"stock_{way}_s": found[way] for way in self.directories},
        }

    def _load(self, way: str) -> float:
        gc.collect()
        if way == "floor":
            return seconds(self.floor)
        if way == "ours":
            took = seconds(lambda: self.ours.load(self.address))
            self.ours.unload()
            return took
        number = next(self.numbers)
        took = seconds(lambda: self.stock.load(number, self.directories[way], way == "fused"))
        self.stock.remove_adapter(number)
        return took


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


def cold(ours: Ours, address: dict, _: int) -> float:
    """Load with the file's pages dropped from the page cache."""
    gc.collect()
    descriptor = os.open(address["path"], os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    took = seconds(lambda: ours.load(address))
    ours.unload()
    return took


def narrow(run: Run, figures: record.Figures, config: dict, root: Path) -> None:
    """Add the figures of rank 1 in slots of rank 8."""
    with closing(Store(root / "store-narrow")) as store:
        ours = Ours(config, 8)
        addresses = [put(store, tensors(config, 1, seed), config) for seed in range(2)]
        floor = Floor(addresses[0]["length"])
        in_turns(ours, floor, addresses, WARM_UPS)
        take = partial(over_floor, ours, floor, addresses, "_r1_in_r8")
        found = run.pairs("rank 1 in slots of rank 8, pair", take, BOUNDS, most=MOST_PAIRS[run.is_long])
    figures.add_pairs({name: values for name, values in found.items() if name != "floor_s_r1_in_r8"})


def compare(run: Run, figures: record.Figures, config: dict, rank: int, root: Path, repeats: int) -> bool:
    """Add the figures of our route and stock vLLM's two on the same adapter in slots of its own rank.

    Returns whether all fill a slot with the same tensors.
    """
    what, tail = f"rank {rank}", "" if rank == 1 else f".r{rank}"
    adapter = tensors(config, rank, 0)
    store = Store(root / f"store-{rank}")
    address = put(store, adapter, config)
    directories = {way: root / f"{way}-{rank}" for way in STOCK_WAYS}
    write_peft(directories["fused"], fuse(config, adapter), rank)
    write_peft(directories["per_expert"], adapter, rank)
    del adapter
    ours, floor = Ours(config, rank), Floor(address["length"])
    lora = made.lora_config(slot_count(rank), rank, DTYPE, mixed=True)
    stock = made.StockWorker(layers(config, rank, True), lora)
    correct = same_as_stock(ours, address, stock, directories)
    turns = BesideStock(ours, address, floor, stock, directories)
    turns.take(0)
    in_turns(ours, floor, [address], WARM_UPS)
    take = partial(over_floor, ours, floor, [address], "")
    most = MOST_PAIRS[run.is_long]
    figures.add_pairs(run.pairs(f"{what}, pair", take, BOUNDS, suffix=tail, most=most), tail)
    bursts = run.repeats(f"{what}, burst", partial(burst, ours, floor, [address]), most=len(BURSTS))
    figures.values |= {f"packed_s.n{n}{tail}": mean for n, mean in zip(BURSTS, bursts, strict=False)}
    most = max(3, repeats // 2)
    times = run.repeats(f"{what}, cold load", partial(cold, ours, address), most=most)
    figures.add({"cold_packed_s": times}, tail)
    for one in run.parts(lambda: checks(ours, address)):
        figures.add(one, tail)
    found = run.repeats(f"{what}, load beside stock vLLM", turns.take, most=repeats)
    figures.add({name: [one[name] for one in found] for name in (found[0] if found else ())}, tail)
    store.close()
    return correct


def checks(ours: Ours, address: dict) -> dict[str, list[float]]:
    """Time the checksum alone, and all that `prepare` does on its thread: that and the search for NaN."""
    opened = ours.host.open("adapter", address)
    payload = opened.bytes.look().numpy()
    return {
        "verify_s": [seconds(lambda: checksum_of(memoryview(payload))) for _ in range(3)],
        "prepare_s": [seconds(lambda: ours.host.verify(opened, address)) for _ in range(3)],
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="loads of stock vLLM, and of a live engine")
    parser.add_argument("--ranks", type=int, nargs="+", help="1, and 8 with --long")
    parser.add_argument(
        "--live", type=int, nargs="*",
        help="tensor-parallel sizes of the live engines on many-moe; none without --long",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="of our copies, the floor's and stock vLLM's")
    arguments = parser.parse_args()
    run = Run("load" if DEVICE.type == "cpu" else "load-gpu", arguments.long)
    torch.set_num_threads(arguments.threads)
    ranks = arguments.ranks or ([1, 8] if run.is_long else [1])
    live = (_load_live.rank_counts() if run.is_long else []) if arguments.live is None else arguments.live
    figures, correct = record.Figures(), True
    with tempfile.TemporaryDirectory(prefix="graftwork-load-") as folder, run.preparing():
        root, repeats = Path(folder), arguments.repeats
        for rank in ranks:
            correct &= compare(run, figures, WIDTH, rank, root, repeats)
            gc.collect()
            if run.is_interrupted:
                break
        else:
            narrow(run, figures, WIDTH, root)
        for found, right in run.parts(*(partial(_load_live.live, root, repeats, count) for count in live)):
            figures.add(found)
            correct &= right
    record.report(run, figures, BOUNDS, correct, arguments.out)


if __name__ == "__main__":
    start(main)
