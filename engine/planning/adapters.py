"""What adapters of a base cost, planned from its `config.json`: bytes, tensor-parallel degree, load time.

It works for any base of a supported family, even one too large for this machine. Each device holds its part
of the base, the slots, the KV cache and its working memory; a machine's page cache holds an adapter's bytes
once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.adapters.adapter_sizes import packed_blocks, slot_bytes, uncut_reason
from engine.base.families import DROPPED_ON_CUDA, BaseShapes
from engine.base.sizes import Shape
from engine.errors import ConfigError
from engine.planning.memory import (
    DTYPE_BYTES,
    WHAT,
    DeviceParts,
    WeightBits,
    base_bytes,
    engine_parts,
    gib,
    print_plan,
)
from engine.planning.tiers import slot_rank
from engine.settings.services import EngineConfig
from engine.store.segments import PAGE_ALIGNED_FROM

DEGREES = (1, 2, 4, 8, 16, 32, 64)
# Bits of a weight by `quantization_config.quant_method`: (routed experts, other projections).
WEIGHT_BITS = {"fp8": (8.0, 8.0), "mxfp4": (4.25, 16.0)}


@dataclass(frozen=True)
class Rates:
    """Bytes per second of each step of a load on one device.

    The defaults were measured with 105.5 MB at rank 1 on two CPU cores (docs/benchmarks/load.md). `load` is
    host tier to slot: 6.9 ms, 1.21 times the memcpy of the same bytes (18.5 GB/s). `read` is the rest of 62
    ms with a dropped page cache. `verify` is the checksum (25 ms) and the search for NaN (7 ms). For a GPU,
    give the rate of its link.
    """

    load: float = 15.3e9
    read: float = 1.9e9
    verify: float = 3.3e9


@dataclass(frozen=True)
class AdapterPlan(DeviceParts):
    """Bytes and seconds of adapters of one rank, with `slots` slots, on devices of `available` bytes.

    `slot_rank`: the slots' rank that holds `rank`. `adapter_bytes`: the packed file. `host_bytes`: one
    adapter's share of its machine's memory. `load_bytes`: what one device copies of it. `engine_*`: the parts
    of one of `tensor_parallel` devices. `load_s`: host tier to slot. `cold_load_s`: local disk to slot.
    """

    model_type: str
    parameters: int
    rank: int
    slot_rank: int
    slots: int
    dtype: str
    adapter_bytes: int
    adapter_share: float
    adapter_tensors: int
    adapter_blocks: int
    host_bytes: int
    host_adapters: int | None
    available: int | None
    tensor_parallel: int
    slot_bytes: int
    load_bytes: int
    engine_base: int
    engine_slots: int
    engine_kv_cache: int
    engine_activations: int
    engine_context: int
    load_s: float
    cold_load_s: float
    dropped_on_cuda: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Say whether the parts fit into one device."""
        return self.available is None or self.needed <= self.available


@dataclass(frozen=True)
class Wanted:
    """A requested plan; `devices` None: the fewest that fit; `weight_bits` None: from the base's config.

    `available`: the bytes of one device; None means unknown, and every plan fits.
    """

    rank: int
    available: int | None
    devices: int | None = None
    weight_bits: float | None = None
    targets: tuple[str, ...] | None = None
    rates: Rates = Rates()


def plan_adapters(config: Mapping[str, Any], engine: EngineConfig, wanted: Wanted) -> AdapterPlan:
    """Return the plan of the fewest devices that hold base, slots and KV cache, or of `wanted.devices`.

    Raises `ConfigError` for a config (of `read_config`) that lacks a size, for a rank or target that no
    engine serves, for a tensor-parallel degree that vLLM does not support for the base, and when nothing
    fits; `BaseModelError` for an unknown family.
    """
    try:
        shapes, shape = BaseShapes.of(config), Shape.of(config)
    except KeyError as error:
        raise ConfigError(
            f"The config lacks {error}, which a {config['model_type']} base needs. "
            "Give the whole config.json."
        ) from None
    _check_targets(shapes, wanted.targets)
    heads = config["num_attention_heads"]

    def on(devices: int) -> AdapterPlan:
        return _plan(config, shape, engine, replace(wanted, devices=devices))

    if wanted.devices is not None:
        if reason := uncut_reason(shapes, heads, shape.key_heads, wanted.devices):
            raise ConfigError(f"vLLM cannot split this base over {wanted.devices} devices: {reason}.")
        plan = on(wanted.devices)
    else:
        cut = [devices for devices in DEGREES if not uncut_reason(shapes, heads, shape.key_heads, devices)]
        plan = next((one for one in map(on, cut) if one.fits), on(cut[-1]))
    _refuse_unless_it_fits(plan)
    return plan


def _refuse_unless_it_fits(plan: AdapterPlan) -> None:
    if plan.available is None or plan.fits:
        return
    raise ConfigError(
        f"Each of {plan.tensor_parallel} devices has {gib(plan.available)} and needs {gib(plan.needed)}, "
        f"most of it for the {WHAT[plan.largest]} ({gib(plan.parts[plan.largest])}). Lower --slots or "
        "--rank, or use more devices or devices with more memory."
    )


def _plan(config: Mapping[str, Any], shape: Shape, engine: EngineConfig, wanted: Wanted) -> AdapterPlan:
    shapes, dtype = shape.shapes, engine.dtype_on(cuda=True)
    itemsize, devices, bits = DTYPE_BYTES[dtype], wanted.devices or 1, wanted.weight_bits
    held = slot_rank(wanted.rank, shapes.family.interleaved)
    blocks = packed_blocks(shapes, wanted.rank, itemsize, wanted.targets)
    loaded = slot_bytes(shapes, wanted.rank, itemsize, devices, shape.key_heads, wanted.targets)
    weights = _weight_bits(config) if bits is None else (bits, bits)
    parts = engine_parts(shape, engine, held, devices, weights)
    whole = sum(blocks)
    # Large adapters are once in the page cache; small ones are copied by each process.
    host = whole if whole >= PAGE_ALIGNED_FROM else whole * devices
    targets = wanted.targets or shapes.targets
    return AdapterPlan(
        model_type=config["model_type"],
        parameters=shape.parameters,
        rank=wanted.rank,
        slot_rank=held,
        slots=engine.gpu_slots,
        dtype=dtype,
        adapter_bytes=whole,
        adapter_share=whole / base_bytes(shape, itemsize, bits=weights),
        adapter_tensors=2 * sum(one.count for one in shapes.projections(wanted.targets)),
        adapter_blocks=len(blocks),
        host_bytes=host,
        host_adapters=engine.host_bytes // host if engine.host_bytes else None,
        available=wanted.available,
        tensor_parallel=devices,
        slot_bytes=parts["engine_slots"] // engine.gpu_slots,
        load_bytes=loaded,
        **parts,
        load_s=loaded / wanted.rates.load,
        cold_load_s=whole / wanted.rates.read + whole / wanted.rates.verify + loaded / wanted.rates.load,
        dropped_on_cuda=tuple(sorted(set(targets) & DROPPED_ON_CUDA.keys())),
    )


def _weight_bits(config: Mapping[str, Any]) -> WeightBits | None:
    stated = config.get("quantization_config")
    if not stated:
        return None
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if method not in WEIGHT_BITS:
        raise ConfigError(
            f"The bits of a weight under the quantization {method!r} are unknown. Give --weight-bits."
        )
    return WEIGHT_BITS[str(method)]


def _check_targets(shapes: BaseShapes, targets: Collection[str] | None) -> None:
    unknown = sorted(set(targets or ()) - set(shapes.targets))
    if unknown:
        raise ConfigError(f"The base has no projection {unknown[0]!r}; it has {', '.join(shapes.targets)}.")


def rows(plan: AdapterPlan) -> list[tuple[str, str]]:
    """Return a plan's table rows (part, size)."""
    dropped = ", ".join(plan.dropped_on_cuda)
    return [
        ("an adapter, packed", f"{size(plan.adapter_bytes)}, {plan.adapter_share:.4%} of the base"),
        ("its tensors, and blocks of the file", f"{plan.adapter_tensors:,}, {plan.adapter_blocks:,}"),
        ("host memory for each adapter", size(plan.host_bytes)),
        *(
            [("adapters in engine.host_bytes", f"{plan.host_adapters:,}")]
            if plan.host_adapters is not None
            else []
        ),
        ("tensor-parallel degree", str(plan.tensor_parallel)),
        ("a slot, on each device", f"{size(plan.slot_bytes)} for rank {plan.slot_rank}"),
        *((WHAT[name], gib(part)) for name, part in plan.parts.items()),
        ("each device needs", gib(plan.needed)),
        *([("each device has", gib(plan.available))] if plan.available is not None else []),
        ("load, host to slot", seconds(plan.load_s)),
        ("cold load, local disk to slot", seconds(plan.cold_load_s)),
        *([("not applied by vLLM on CUDA", dropped)] if dropped else []),
    ]


def say(plan: AdapterPlan) -> None:
    """Print the plan's table."""
    print_plan(
        f"Adapters of rank {plan.rank} in {plan.dtype} on a {plan.model_type} base of "
        f"{plan.parameters:,} parameters, {plan.slots} slots",
        rows(plan),
    )


def size(nbytes: int) -> str:
    """Format bytes; MB are 10^6."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.1f} kB"


def seconds(value: float) -> str:
    """Format seconds, in ms below one second."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
