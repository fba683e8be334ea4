"""Sizes of an adapter, counted from a base's shapes alone: packed bytes, and bytes of a slot on one device.

No tensor is built: `packed.pack` and the engine's slot tensors are the second route, which tests compare.
Modules are cut over devices as vLLM's tensor parallelism does.

Legend: R rank, I inputs and O outputs of a projection, E experts, T devices that a layer is cut over.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, groupby

from engine.base.attention import Size
from engine.base.families import BaseShapes, Projections
from engine.files import aligned

# Projections cut along their inputs, and those that every device holds whole; all others are cut along
# outputs.
ROW = ("o_proj", "down_proj")
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
KEYS = ("k_proj", "v_proj")


def packed_blocks(shapes: BaseShapes, rank: int, itemsize: int, targets: Collection[str] | None) -> list[int]:
    """Return the bytes of each block that `pack` writes for an adapter of one rank, padding included."""
    sizes: dict[tuple[str, int], dict[str, Size]] = {}
    for one in shapes.projections(targets):
        sizes.setdefault((one.parent, one.count), {})[one.leaf] = one.size
    blocks = []
    for (_, count), leaves in sizes.items():
        for run in _runs(leaves, shapes.fused):
            inputs = len(run) * leaves[run[0]][0]
            outputs = sum(leaves[leaf][1] for leaf in run)
            blocks += [aligned(count * rank * width * itemsize) for width in (inputs, outputs)]
    return blocks


def slot_bytes(
    shapes: BaseShapes,
    rank: int,
    itemsize: int,
    devices: int = 1,
    key_heads: int = 0,
    targets: Collection[str] | None = None,
    fused_experts: bool = False,
) -> int:
    """Return the bytes of a slot of this rank on each of T devices: R (I + O) elements of the device's parts.

    With `fused_experts` gate and up of an expert have one A of this rank, and one B of both outputs.
    """
    widths = []
    for one in shapes.projections(targets):
        inputs, outputs = device_size(one, devices, key_heads)
        shares_a = fused_experts and one.parent in shapes.experts and one.leaf == "up_proj"
        widths.append(one.count * (outputs if shares_a else inputs + outputs))
    return rank * itemsize * sum(widths)


def device_size(one: Projections, devices: int, key_heads: int) -> Size:
    """Return (in, out) of the part that one of T devices holds.

    As vLLM cuts them: keys of grouped attention are copied when there are more devices than heads of them
    (`QKVParallelLinear`); the narrow projections of latent attention are on every device.
    """
    inputs, outputs = one.size
    if one.leaf in WHOLE:
        return inputs, outputs
    if one.leaf in ROW:
        return inputs // devices, outputs
    copies = max(1, min(devices, key_heads))
    return inputs, outputs // (copies if one.leaf in KEYS else devices)


def uncut_reason(shapes: BaseShapes, heads: int, key_heads: int, devices: int) -> str | None:
    """Say why vLLM cannot cut this base over so many devices, or None; `key_heads` is 0 for latent keys."""
    if heads % devices:
        return f"{heads} attention heads do not divide by {devices}"
    if key_heads and key_heads % devices and devices % key_heads:
        return f"{key_heads} key heads neither divide by {devices} nor divide it"
    for one in shapes.projections():
        width = one.size[0] if one.leaf in ROW else one.size[1]
        if one.leaf not in (*WHOLE, *KEYS) and width % devices:
            return f"the {width} features of {one.parent}.{one.leaf} do not divide by {devices}"
    return None


def _runs(leaves: Collection[str], fused: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the projections that share two blocks: adjacent slices of a fused module, or a single one."""
    yield from ((leaf,) for leaf in leaves if leaf not in chain.from_iterable(fused.values()))
    for parts in fused.values():
        for there, run in groupby(parts, key=lambda part: part in leaves):
            if there:
                yield tuple(run)
