"""vLLM's own LoRA layers, without weights, for any base that `BaseShapes` knows: slots of true width."""

from collections.abc import Mapping
from typing import Any

import torch

from engine.adapters.adapter_sizes import ROW, WHOLE
from engine.base.families import PROJECTIONS, BaseShapes
from engine.serving.worker.slots import ExpertSlots
from tests.helpers import vllm_layers as made


class CpuExperts:
    """The experts of a layer as the engine keeps them on a CPU."""

    def __init__(self, experts: Any, slots: int, rank: int, dtype: torch.dtype, tp: tuple[int, int]):
        count, hidden, inner = experts.count, experts.hidden, experts.inner // tp[1]
        self.gate_up = ExpertSlots(slots, count, 2, rank, hidden, inner, dtype, tp)
        self.down = ExpertSlots(slots, count, 1, rank, inner, hidden, dtype, tp, cut_inputs=True)


def layers_of(
    config: Mapping[str, Any], slots: int, rank: int, dtype: torch.dtype, tp: tuple[int, int] = (0, 1)
) -> made.Layers:
    """Return every LoRA layer of the base by its engine name, the experts as on a CPU."""
    shapes, lora = BaseShapes.of(config), made.lora_config(slots, rank, dtype)
    parents: dict[str, dict[str, tuple[int, int]]] = {}
    for module, size in shapes.linear.items():
        parent, _, leaf = module.rpartition(".")
        parents.setdefault(parent, {})[leaf] = size
    found: made.Layers = {
        path: CpuExperts(experts, slots, rank, dtype, tp) for path, experts in shapes.experts.items()
    }
    for parent, sizes in parents.items():
        for name, parts in shapes.fused.items():
            if sizes.keys() >= set(parts):
                widths = [sizes.pop(part) for part in parts]
                found[f"{parent}.{name}"] = _fused(config, name, widths, lora, tp)
        for leaf, (inputs, outputs) in sizes.items():
            if leaf in WHOLE:
                found[f"{parent}.{leaf}"] = made.replicated(inputs, outputs, lora)
            else:
                kind = made.row if leaf in ROW else made.column
                found[f"{parent}.{leaf}"] = kind(inputs, outputs, lora, tp)
    return found


def _fused(
    config: Mapping[str, Any], name: str, sizes: list[tuple[int, int]], lora: Any, tp: tuple[int, int]
) -> Any:
    inputs, outputs = sizes[0][0], [size[1] for size in sizes]
    if name == "qkv_proj":
        heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
        return made.qkv(inputs, heads, keys, outputs[0] // heads, lora, tp)
    # vLLM keeps the narrow projections of latent attention whole on every rank (disable_tp).
    return made.merged(inputs, outputs, lora, (0, 1) if name == "fused_qkv_a_proj" else tp)


def adapter(
    shapes: BaseShapes, rank: int, dtype: torch.dtype, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return an adapter on every projection, as views on one flat tensor of random values, and that."""
    sizes = shapes.modules()
    values = torch.empty(rank * sum(sum(size) for size in sizes.values()), dtype=dtype)
    values.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    tensors, start = {}, 0
    for module, (inputs, outputs) in sizes.items():
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            count = shape[0] * shape[1]
            tensors[f"{module}.lora_{side}"] = values[start : start + count].view(shape)
            start += count
    return tensors, values


def slot_values(layers: made.Layers, shapes: BaseShapes, module: str, slot: int = 0) -> tuple[Any, Any]:
    """Return A (R, I) and B (O, R) of a canonical module as the layers' slots hold them."""
    parent, _, leaf = module.rpartition(".")
    path, _, number = parent.rpartition(".")
    if path in shapes.experts:
        part = layers[path].down if leaf == "down_proj" else layers[path].gate_up
        slice_ = 0 if leaf == "down_proj" else PROJECTIONS.index(leaf)
        return part.a_SEMRI[slot, int(number), slice_], part.b_SEMRO[slot, int(number), slice_].T
    for name, parts in shapes.fused.items():
        if leaf in parts and f"{parent}.{name}" in layers:
            layer, slice_ = layers[f"{parent}.{name}"], parts.index(leaf)
            break
    else:
        layer, slice_ = layers[module], 0
    return layer.lora_a_stacked[slice_][slot, 0], layer.lora_b_stacked[slice_][slot, 0]
