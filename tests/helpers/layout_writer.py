"""Write canonical tensors in the layouts of other trainers: the inverse of `layout_tensors`.

Shapes: E experts, R rank, I input features, O output features.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.adapters.layout_tensors import ORDER, Pair, is_block_diagonal
from engine.adapters.layouts import BY_NAME, PER_EXPERT, PLAIN, ExpertLayout
from engine.adapters.revision import PEFT_PREFIX, Tensors, split_key
from engine.base.families import PROJECTIONS, BaseShapes
from engine.errors import AdapterError


def from_canonical(tensors: Tensors, layout: str, base: BaseShapes) -> tuple[Tensors, dict[str, Any]]:
    """Write canonical tensors in a layout; returns the file's tensors and its `adapter_config.json`.

    Raises `AdapterError` when the layout cannot hold them: an expert is missing, or ranks or factors
    differ where it has one for all.
    """
    modules = {split_key(key)[0] for key in tensors}
    routed = sorted(module for module in modules if module not in base.linear)
    pairs = {module: (tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"]) for module in sorted(modules)}
    named = {module: pairs[module] for module in modules if module in base.linear}
    ranks = {module: pair[0].shape[0] for module, pair in named.items()}
    if layout in (PER_EXPERT.name, PLAIN):
        for module in routed:
            name = _file_name(module, base)
            named[name], ranks[name] = pairs[module], pairs[module][0].shape[0]
    else:
        for path, name, pair, rank in _stacks(pairs, routed, BY_NAME[layout], base):
            named[name], ranks[path] = pair, rank
    file = {
        f"{PEFT_PREFIX}{name}.lora_{side}.weight": tensor.contiguous()
        for name, pair in named.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    return file, _config(ranks, layout, base)


def _file_name(module: str, base: BaseShapes) -> str:
    """Return what files of this family call a module of the experts; the inverse of `canonical_name`."""
    back = {ours: theirs for theirs, ours in base.family.renames.items()}
    return ".".join(back.get(part, part) for part in module.split("."))


def _stacks(
    pairs: Mapping[str, Pair], routed: list[str], layout: ExpertLayout, base: BaseShapes
) -> Iterator[tuple[str, str, Pair, int]]:
    """Yield (path of the parameter, name in the file, (A, B) in the layout, rank) for each layer."""
    for parent in sorted({module.rsplit(".", 2)[0] for module in routed}):
        stacks = {
            name: stack for name in PROJECTIONS if (stack := _stack(pairs, parent, name, base)) is not None
        }
        if "gate_up_proj" in layout.names and ("gate_proj" in stacks) != ("up_proj" in stacks):
            raise AdapterError(f"{parent} has LoRA on gate_proj or up_proj alone; {layout.name} fuses them.")
        if "gate_up_proj" in layout.names and "gate_proj" in stacks:
            stacks["gate_up_proj"] = _join(parent, stacks.pop("gate_proj"), stacks.pop("up_proj"), base)
        bare = len(stacks) == 1 and "" in layout.names.values()
        for projection, (A, B) in sorted(stacks.items()):
            if layout.broadcast:
                A, B = _shared(parent, projection, A, B)
            # peft wraps a lone parameter alone: it has the bare name, whichever it is.
            name = parent + ("" if bare else layout.names[projection])
            pair = (_fold(A, layout, "A"), _fold(B, layout, "B"))
            yield f"{parent}.{projection}", name, pair, A.shape[1]


def _stack(pairs: Mapping[str, Pair], parent: str, projection: str, base: BaseShapes) -> Pair | None:
    modules = [f"{parent}.{number}.{projection}" for number in range(base.experts[parent].count)]
    present = [module for module in modules if module in pairs]
    if not present:
        return None
    ranks = {pairs[module][0].shape[0] for module in present}
    if len(present) < len(modules) or len(ranks) > 1:
        raise AdapterError(
            f"{parent} has LoRA of the ranks {sorted(ranks)} on {projection} of {len(present)} of "
            f"{len(modules)} experts; only the per-expert layout can hold that."
        )
    A_ERI, B_EOR = (torch.stack([pairs[module][side] for module in modules]) for side in (0, 1))
    return A_ERI, B_EOR


def _join(parent: str, gate: Pair, up: Pair, base: BaseShapes) -> Pair:
    (gate_A, gate_B), (up_A, up_B) = gate, up
    if gate_A.shape != up_A.shape:
        raise AdapterError(
            f"{parent} has other ranks on gate_proj than on up_proj; no fused layout holds that."
        )
    # What would be read as two blocks is written as two blocks, also where one A would do.
    if not _same(gate_A, up_A) or is_block_diagonal(gate_B, up_B):
        empty = torch.zeros_like(gate_B)
        gate_A = torch.cat([gate_A, up_A], dim=1)
        gate_B, up_B = torch.cat([gate_B, empty], dim=2), torch.cat([empty, up_B], dim=2)
    rows = torch.stack([gate_B, up_B], dim=2 if base.family.interleaved else 1)
    return gate_A, rows.reshape(gate_B.shape[0], -1, gate_B.shape[2])


def _shared(parent: str, projection: str, A: Tensor, B: Tensor) -> Pair:
    outer = B if projection == "down_proj" else A
    if not _same(outer, outer[:1].expand_as(outer)):
        raise AdapterError(f"The experts of {parent} share no factor of {projection}; use another layout.")
    return (A, B[:1]) if projection == "down_proj" else (A[:1], B)


def _same(left: Tensor, right: Tensor) -> bool:
    """Compare bytes: the digest tells 0.0 from -0.0."""
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(one, other)


def _config(ranks: Mapping[str, int], layout: str, base: BaseShapes) -> dict[str, Any]:
    """Describe a file to peft: alpha equals rank in every module, whatever each one's rank is."""
    (usual, _), *_ = Counter(ranks.values()).most_common(1)
    modules, parameters = set(), set()
    for path in ranks:
        leaf = path.rpartition(".")[2]
        if path in base.linear and base.experts and leaf in PROJECTIONS:
            # Among target_modules peft takes gate_proj for the experts' own; a weight it leaves alone.
            parameters.add(".".join(path.split(".")[3:]) + ".weight")
        elif path in base.linear or layout in (PER_EXPERT.name, PLAIN):
            modules.add(leaf)
        else:
            parameters.add(f"mlp.experts.{leaf}")
    special = {_pattern(path, base): rank for path, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": usual,
        "lora_alpha": usual, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules), "target_parameters": sorted(parameters) or None,
        "rank_pattern": special, "alpha_pattern": special,
    }  # fmt: skip


def _pattern(path: str, base: BaseShapes) -> str:
    wrapped = path in base.linear and base.experts and path.rpartition(".")[2] in PROJECTIONS
    return path + ".weight" if wrapped else path


def _fold(tensor: Tensor, layout: ExpertLayout, side: str) -> Tensor:
    axes = layout.axes(side)
    tensor = tensor.permute([ORDER[side].index(name) for name in "".join(axes)])
    for i, axis in enumerate(axes):
        if len(axis) > 1:
            tensor = tensor.flatten(i, i + 1)
    return tensor.contiguous()
