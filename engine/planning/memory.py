"""One GPU's memory, planned from the base's `config.json` before anything is loaded.

Trainer and engine each hold the whole base and their working memory. `plan` adds up all parts in bytes,
`refuse_unless_it_fits` names the settings that would make it fit, and vLLM's share of the GPU is the engine's
part of the plan.

Legend: L layers, H hidden size, Q query heads times head size, K key heads times head size, I inner size
of the MLP, V vocabulary, E experts, R rank, N tokens at once, B bytes of a number of the base's dtype.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from shutil import get_terminal_size
from typing import Any

from engine.adapters.adapter_sizes import device_size, slot_bytes
from engine.base.sizes import Shape
from engine.errors import ConfigError
from engine.settings.services import EngineConfig, TrainerConfig

GIB = 1 << 30
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# A process's CUDA context, library workspaces and the allocator's rounding: an estimate, until
# tests/gpu/test_one_gpu.py has measured it.
CONTEXT_BYTES = GIB
# Prefill tokens of one engine step on a GPU, and completion tokens whose logits the trainer holds at once.
BATCHED_TOKENS = 2048
HEAD_TOKENS = 512
# Copies of keys and values that attention may hold for each token of a microbatch (shared prompts).
COPIES = 2
# Tokens in a block of vLLM's KV cache on CUDA.
BLOCK = 16
# Bits of a weight: (routed experts, other projections).
WeightBits = tuple[float, float]
# Bytes of a trained number in float32: itself, its gradient, and AdamW's two moments (arXiv 1711.05101,
# algorithm 2).
TRAINED_BYTES = 4 * 4
WHAT = {
    "trainer_base": "base in the trainer",
    "trainer_adapters": "adapters, gradients, Adam moments (float32)",
    "trainer_activations": "activations of one microbatch",
    "trainer_context": "CUDA context of the trainer",
    "engine_base": "base in the engine",
    "engine_kv_cache": "KV cache",
    "engine_slots": "adapter slots",
    "engine_activations": "activations and logits of one step",
    "engine_context": "CUDA context of the engine",
}


@dataclass(frozen=True)
class DeviceParts:
    """Bytes of the parts on one device: the fields of a plan that `WHAT` names."""

    @property
    def parts(self) -> dict[str, int]:
        """Return every part by its field's name, in display order."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name in WHAT}

    @property
    def needed(self) -> int:
        """Return the sum of all parts, in bytes."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Return the name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class MemoryPlan(DeviceParts):
    """Bytes of each part on a GPU with `available` bytes; the trainer's are 0 when it runs on the CPU.

    `sequences` is the number of sequences of `max_model_len` tokens that the KV cache holds.
    """

    available: int
    trainer_base: int
    trainer_adapters: int
    trainer_activations: int
    trainer_context: int
    engine_base: int
    engine_kv_cache: int
    engine_slots: int
    engine_activations: int
    engine_context: int
    parameters: int
    sequences: int

    @property
    def fits(self) -> bool:
        """Say whether the parts fit and the KV cache holds at least one sequence."""
        return self.needed <= self.available and self.sequences >= 1

    @property
    def gpu_memory_utilization(self) -> float:
        """Return vLLM's share of the GPU: what its worker allocates, without its CUDA context.

        `request_memory` in vllm/v1/worker/utils.py compares the share of the whole GPU with the free memory
        once the context exists. Rounded up to 1e-4.
        """
        allocated = self.engine_base + self.engine_kv_cache + self.engine_slots + self.engine_activations
        return -(-allocated * 10_000 // self.available) / 10_000

    @property
    def trainer_share(self) -> float:
        """Return the share of the GPU that the trainer's allocator may use: all that the engine leaves."""
        contexts = self.trainer_context + self.engine_context
        return max(0.0, 1 - self.gpu_memory_utilization - contexts / self.available)


def plan(
    config: Mapping[str, Any], available: int, engine: EngineConfig, trainer: TrainerConfig
) -> MemoryPlan:
    """Return the bytes of every part on a GPU with `available` bytes, for a base's `config.json`.

    Raises `ConfigError` for an unknown family. The plan's `fits` says whether it fits.
    """
    shape, size = Shape.of(config), DTYPE_BYTES[engine.dtype_on(cuda=True)]
    parts, there = engine_parts(shape, engine, engine.max_rank), int(trainer.device != "cpu")
    return MemoryPlan(
        available=available,
        trainer_base=there * parts["engine_base"],
        trainer_adapters=there * adapter_bytes(shape, engine.max_rank, trainer.sessions),
        trainer_activations=there
        * training_bytes(
            shape,
            size,
            engine.max_rank,
            max(trainer.most_tokens, engine.max_model_len),
            trainer.checkpoints_on(cuda=True),
        ),
        trainer_context=there * CONTEXT_BYTES,
        **parts,
        parameters=shape.parameters,
        sequences=parts["engine_kv_cache"] // sequence_bytes(shape, size, engine.max_model_len),
    )


def engine_parts(
    shape: Shape, engine: EngineConfig, rank: int, devices: int = 1, bits: WeightBits | None = None
) -> dict[str, int]:
    """Return the engine's fields of a plan, for each of `devices` devices, with slots of rank R."""
    size = DTYPE_BYTES[engine.dtype_on(cuda=True)]
    # On CUDA, vLLM keeps interleaved experts with three axes, where gate and up share an A.
    fused = shape.shapes.family.interleaved
    slot = slot_bytes(shape.shapes, rank, size, devices, shape.key_heads, fused_experts=fused)
    return {
        "engine_base": base_bytes(shape, size, devices, bits),
        # A latent is on every device; keys of grouped attention are split by heads.
        "engine_kv_cache": kv_bytes(shape, size, engine) // max(1, min(devices, shape.key_heads)),
        "engine_slots": engine.gpu_slots * slot,
        "engine_activations": step_bytes(shape, size, engine),
        "engine_context": CONTEXT_BYTES,
    }


def base_bytes(shape: Shape, size: int, devices: int = 1, bits: WeightBits | None = None) -> int:
    """Return one device's bytes of the base: projections and embeddings are split, the rest is replicated."""
    routed, plain = bits or (8.0 * size, 8.0 * size)
    cut = 0.0
    for one in shape.shapes.projections():
        inputs, outputs = device_size(one, devices, shape.key_heads)
        cut += one.count * inputs * outputs * (routed if one.parent in shape.shapes.experts else plain)
    return int(cut / 8) + (shape.embeddings // devices + shape.others) * size


def sequence_bytes(shape: Shape, size: int, length: int) -> int:
    """Return the KV cache bytes of one sequence, in whole blocks: 2 L K B a token, or L K B for a latent.

    Source: `page_size_bytes` of `FullAttentionSpec` and `MLAAttentionSpec` (vllm/v1/kv_cache_interface.py).
    """
    return -(-length // BLOCK) * BLOCK * shape.layers * shape.cached * size


def kv_bytes(shape: Shape, size: int, engine: EngineConfig) -> int:
    """Return the KV cache bytes: `kv_cache_gib`, else `max_num_seqs` whole sequences and a spare block."""
    if engine.kv_cache_gib is not None:
        return int(engine.kv_cache_gib * GIB)
    # Block 0 is vLLM's null block, which no sequence gets.
    spare = sequence_bytes(shape, size, BLOCK)
    return engine.max_num_seqs * sequence_bytes(shape, size, engine.max_model_len) + spare


def adapter_bytes(shape: Shape, rank: int, sessions: int) -> int:
    """Return the bytes of the trainer's adapters, with gradients and Adam moments."""
    return sessions * rank * shape.lora_width * TRAINED_BYTES


def layer_bytes(shape: Shape, size: int, rank: int) -> int:
    """Return the bytes that autograd keeps of one token in one layer with frozen base weights.

    From transformers' decoder layer with LoRA on all seven projections, and measured with saved-tensor hooks
    in tests/engine/planning/test_memory.py: two norms (input in float32, output), q and k in float32 before
    their norms, q in B for attention, k and v in B `COPIES` times, the attention's output and its copy, four
    tensors of the MLP (gate, its activation, up, the product), and the seven products with A. For each routed
    expert of the token (engine/training/model/experts.py): its output, which the router's weight multiplies,
    three products with A, and two indices; and the router's probabilities in float32.
    """
    norms = 2 * (4 + size) * shape.hidden
    attention = (4 + 3 * size) * shape.queries + (4 + 2 * COPIES * size) * shape.keys
    routed = shape.active * (size * (shape.hidden + 3 * rank) + 2 * 8) + 4 * shape.experts
    return norms + attention + 4 * size * shape.widest_mlp + 7 * size * rank + routed


def training_bytes(shape: Shape, size: int, rank: int, tokens: int, checkpointing: bool) -> int:
    """Return the activation bytes of a microbatch: tensors kept for the backward pass, and its own.

    With gradient checkpointing (arXiv 1604.06174) a layer keeps only its input and is recomputed in the
    backward pass; without, all layers are kept. A layer's backward pass needs about as much again as it kept.
    The head keeps a row of each token, and has the logits of `HEAD_TOKENS` at a time. The forward pass holds
    a copy of the factors in B. The active session's earlier gradients are held in float32
    (`adding_gradients` in engine/training/model/update.py).
    """
    factors = rank * shape.lora_width * size
    before = rank * shape.lora_width * 4
    logits = min(tokens, HEAD_TOKENS) * logit_bytes(shape, size)
    if checkpointing:
        factors //= shape.layers
    return tokens * token_bytes(shape, size, rank, checkpointing) + logits + factors + before


def token_bytes(shape: Shape, size: int, rank: int, checkpointing: bool) -> int:
    """Return the bytes of a microbatch that each of its tokens adds."""
    layer = layer_bytes(shape, size, rank)
    kept = shape.layers * (shape.hidden * size if checkpointing else layer)
    head = (4 + 2 * size) * shape.hidden
    return kept + layer + head


def logit_bytes(shape: Shape, size: int) -> int:
    """Return the bytes of one completion token's logits.

    Logits and probabilities in float32, and in a narrower dtype the logits' and the probabilities' copies.
    """
    return shape.vocabulary * (8 if size == 4 else 8 + 2 * size)


def step_bytes(shape: Shape, size: int, engine: EngineConfig) -> int:
    """Return the bytes of the engine's working memory in its largest step.

    CUDA graphs of decode steps are not in it: 0.2 GiB for Qwen3-0.6B on an H200, where the context took 0.8
    of its `CONTEXT_BYTES`.

    A prefill of `BATCHED_TOKENS`: residual, norm, q, k, v, attention, the MLP's three, and vLLM's float32
    buffer of products with A (at most three slices at once). Plus the larger of the sampler, which sorts
    float32 logits of every sequence with int64 indices, and a prompt's log-probabilities, which the effect
    probe requests (`_get_prompt_logprobs_dict` in vllm/v1/worker/gpu_model_runner.py).
    """
    tokens = max(BATCHED_TOKENS, engine.max_num_seqs)
    widths = 4 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 3 * shape.widest_mlp
    forward = tokens * (size * widths + 4 * 3 * engine.max_rank)
    sampler = engine.max_num_seqs * shape.vocabulary * (size + 4 + 4 + 4 + 8)
    prompt = min(tokens, engine.max_model_len) * shape.vocabulary * (size + 4 + 4)
    return forward + max(sampler, prompt)


def refuse_unless_it_fits(
    config: Mapping[str, Any], plan: MemoryPlan, engine: EngineConfig, trainer: TrainerConfig
) -> None:
    """Raise `ConfigError` with the numbers and the settings to change, unless the plan fits."""
    if plan.fits:
        return
    if plan.sequences < 1:
        raise ConfigError(
            f"A KV cache of {gib(plan.engine_kv_cache)} does not hold one sequence of "
            f"{engine.max_model_len} tokens. Raise or remove engine.kv_cache_gib, or lower "
            "engine.max_model_len."
        )
    numbers = (
        f"The GPU has {gib(plan.available)}, and trainer and engine need {gib(plan.needed)}, "
        f"{gib(plan.needed - plan.available)} more. The largest part is the {WHAT[plan.largest]} "
        f"with {gib(plan.parts[plan.largest])}."
    )
    remedies = list(_remedies(config, plan.available, engine, trainer))
    if remedies:
        raise ConfigError(f"{numbers} Any one of these makes it fit: {'; '.join(remedies)}.")
    raise ConfigError(
        f"{numbers} No single setting makes it fit: lower several of engine.max_num_seqs, "
        "engine.max_model_len, engine.slots and trainer.microbatch_tokens, or choose a smaller base."
    )


def _remedies(
    config: Mapping[str, Any], available: int, engine: EngineConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield each single change of a setting that makes the plan fit, with the largest value that does."""

    def fits(section: str, **change: Any) -> bool:
        changed = (engine if section == "engine" else trainer).model_copy(update=change)
        both = (changed, trainer) if section == "engine" else (engine, changed)
        return plan(config, available, *both).fits

    switches: list[tuple[str, str, Any]] = [("engine", "dtype", "bfloat16")]
    if trainer.device != "cpu":
        switches += [("trainer", "gradient_checkpointing", True), ("trainer", "device", "cpu")]
    for section, field, value in switches:
        if fits(section, **{field: value}):
            yield f"{section}.{field}: {str(value).lower()}"
    lowered = (
        ("engine", "max_num_seqs", 1, engine.max_num_seqs),
        ("engine", "max_model_len", BLOCK, engine.max_model_len),
        ("engine", "slots", 2, engine.gpu_slots),
        ("trainer", "microbatch_tokens", 64, trainer.most_tokens),
        ("trainer", "sessions", 1, trainer.sessions),
    )
    for section, field, least, now in lowered:
        values = range(least, now)
        first = bisect_left(values, True, key=lambda value: not fits(section, **{field: value}))
        if first:
            yield f"{section}.{field}: {values[first - 1]}"


def gib(size: int) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.2f} GiB"


def print_plan(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print (part, size) rows as a table."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("part", "size", title=title)
    for row in rows:
        shown.add_row(*row)
    Console(width=min(100, get_terminal_size((100, 24)).columns)).print(shown)
