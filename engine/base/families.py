"""Model families: which modules of a base can carry LoRA, their sizes, and their names in adapter files.

Everything is read from a base's `config.json`. Module names are transformers' (version 5: the experts of a
layer are one parameter with three axes).
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.base.attention import Attention, Size
from engine.base.latent import latent_or_grouped
from engine.errors import BaseModelError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Modules that the engine fuses, with their slices in order; any other projection has one slice.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# Projections whose adapters vLLM silently drops on CUDA, and why; on a CPU our operations apply them.
DROPPED_ON_CUDA = {
    "kv_b_proj": "vLLM's latent attention on CUDA absorbs the base's weights of kv_b_proj when it loads, and "
    "ignores an adapter on it; train without this target"
}
# The name of a module of the routed experts, such as `model.layers.0.mlp.experts.3.up_proj`.
EXPERT = re.compile(r"(?P<parent>.+\.experts)\.(?P<number>0|[1-9]\d{0,5})\.(?P<projection>\w+)")


@dataclass(frozen=True)
class Family:
    """How adapters of these model types differ from those of a dense decoder.

    `experts`: the keys of `config.json` that may hold the number of routed experts (transformers 5 writes
    another key than the models' own files). `inner`: the key of their width. `shared`: the module beside the
    routed experts. `renames`: parts of module paths in adapter files, mapped to ours. `attention` reads that
    of a base from its config.
    """

    name: str
    model_types: tuple[str, ...]
    experts: tuple[str, ...] = ()
    inner: str = "moe_intermediate_size"
    shared: str | None = None
    interleaved: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    attention: Callable[[Mapping[str, Any]], Attention] = Attention


# What the families with DeepSeek's experts share.
DEEPSEEK: dict[str, Any] = {
    "experts": ("n_routed_experts", "num_local_experts"),
    "shared": "shared_experts",
    "attention": latent_or_grouped,
}
FAMILIES = (
    # Attention and one MLP in each layer; each projection is a linear module.
    Family("dense", ("llama", "mistral", "qwen2", "qwen3")),
    # Routed experts only; some layers may be dense (mlp_only_layers, decoder_sparse_step).
    Family("Qwen3-MoE", ("qwen3_moe",), experts=("num_experts", "num_local_experts")),
    # Latent attention, dense first layers, shared experts as one MLP; also Moonlight and Kimi-K2.
    Family("DeepSeek-V3", ("deepseek_v3", "kimi_k2"), **DEEPSEEK),
    # DeepSeek-V3 with attention to the keys that an indexer picks. The indexer carries no LoRA: transformers
    # computes it under no_grad, and its top-k passes no gradient.
    Family("DeepSeek-V3.2", ("deepseek_v32",), **DEEPSEEK),
    # DeepSeek's experts under grouped-query attention (latent attention in lite and dsa).
    Family("GLM-MoE", ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), **DEEPSEEK),
    # The rows of gate and up alternate in the fused parameter, as transformers' GptOssExperts takes gate as
    # [..., ::2] and up as [..., 1::2]; every other family puts up after gate.
    Family(
        "GPT-OSS", ("gpt_oss",), experts=("num_local_experts",), inner="intermediate_size", interleaved=True
    ),
    # Per-expert files name the modules block_sparse_moe and w1, w3, w2. transformers' conversion_mapping:
    # block_sparse_moe is mlp, w1 and w3 are gate_up_proj, w2 down_proj.
    Family(
        "Mixtral",
        ("mixtral",),
        experts=("num_local_experts",),
        inner="intermediate_size",
        renames={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    ),
)
OF_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def attention_of(config: Mapping[str, Any]) -> Attention:
    """Return the attention of the base with this `config.json`; the plain one for an unknown type."""
    family = OF_TYPE.get(config.get("model_type", ""))
    return (family.attention if family else Attention)(config)


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer: their number and the widths of their projections."""

    count: int
    hidden: int
    inner: int

    def size(self, projection: str) -> Size:
        """Return (in, out) of one expert's projection, or of the fused `gate_up_proj`."""
        return {
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "gate_up_proj": (self.hidden, 2 * self.inner),
            "down_proj": (self.inner, self.hidden),
        }[projection]


@dataclass(frozen=True)
class Projections:
    """`count` equal projections under one parent: the experts of a layer, or one module."""

    parent: str
    leaf: str
    size: Size
    count: int = 1


@dataclass(frozen=True)
class BaseShapes:
    """The modules of a base that can carry LoRA: linear ones by path, routed experts by parent path."""

    family: Family
    linear: Mapping[str, Size]
    experts: Mapping[str, Experts]

    @staticmethod
    def of(config: Mapping[str, Any]) -> "BaseShapes":
        """Read a `config.json`; `BaseModelError` for an unsupported family."""
        family = OF_TYPE.get(config.get("model_type", ""))
        if family is None:
            raise BaseModelError(
                f"The base's model type {config.get('model_type')!r} is not supported. "
                f"Set base.name to a base of one of the types {', '.join(sorted(OF_TYPE))}."
            )
        linear: dict[str, Size] = {}
        experts: dict[str, Experts] = {}
        hidden, attention = config["hidden_size"], family.attention(config).projections()
        count = next((config[key] for key in family.experts if config.get(key)), 0)
        for layer in range(config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            linear |= {f"{path}.self_attn.{name}": size for name, size in attention.items()}
            if not count or not _is_sparse(config, layer):
                linear |= _mlp(f"{path}.mlp", hidden, config["intermediate_size"])
                continue
            inner = config[family.inner]
            experts[f"{path}.mlp.experts"] = Experts(count, hidden, inner)
            if family.shared and config.get("n_shared_experts"):
                linear |= _mlp(f"{path}.mlp.{family.shared}", hidden, inner * config["n_shared_experts"])
        return BaseShapes(family, linear, experts)

    @staticmethod
    def read(base: Path) -> "BaseShapes":
        """Read the `config.json` of a base's directory; see `of` for errors."""
        return BaseShapes.of(json.loads((base / "config.json").read_text()))

    @cached_property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Return this base's modules that the engine fuses; latent attention may have an unfused q_proj."""
        leaves = {*self.targets, *PROJECTIONS}
        return {name: parts for name, parts in FUSED.items() if leaves.issuperset(parts)}

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of all projections that can carry LoRA."""
        return tuple(sorted({one.leaf for one in self.projections()}))

    def targets_on(self, cuda: bool) -> tuple[str, ...]:
        """Return the targets whose adapters the engine applies on CUDA, or on a CPU."""
        return tuple(name for name in self.targets if not (cuda and name in DROPPED_ON_CUDA))

    def projections(self, targets: Collection[str] | None = None) -> list[Projections]:
        """Return all projections that can carry LoRA, or those named in `targets`."""
        return [one for one in self._projections if targets is None or one.leaf in targets]

    @cached_property
    def _projections(self) -> tuple[Projections, ...]:
        paths = ((module.rpartition("."), size) for module, size in self.linear.items())
        routed = (
            Projections(path, leaf, experts.size(leaf), experts.count)
            for path, experts in self.experts.items()
            for leaf in PROJECTIONS
        )
        return (*(Projections(parent, leaf, size) for (parent, _, leaf), size in paths), *routed)

    def modules(self) -> dict[str, Size]:
        """Return (in, out) of each canonical module, including every expert's projections."""
        routed = {
            f"{path}.{number}.{projection}": experts.size(projection)
            for path, experts in self.experts.items()
            for number in range(experts.count)
            for projection in PROJECTIONS
        }
        return {**self.linear, **routed}

    def canonical_name(self, module: str) -> str:
        """Return our path of a module that an adapter file may name differently."""
        return ".".join(self.family.renames.get(part, part) for part in module.split("."))


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    first, plain = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    return (
        layer >= first and layer not in plain and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )


def _mlp(path: str, hidden: int, inner: int) -> dict[str, Size]:
    sizes = ((hidden, inner), (hidden, inner), (inner, hidden))
    return {f"{path}.{name}": size for name, size in zip(PROJECTIONS, sizes, strict=True)}
