"""A base's sizes from its `config.json`: number of parameters and widths of its layers.

Beside the projections, which engine/base/families.py lists, it counts norms, biases and routers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.base.attention import Attention
from engine.base.families import PROJECTIONS, BaseShapes, Experts, attention_of
from engine.errors import ConfigError

INPUTS = ("q_proj", "k_proj", "v_proj")
# Supported families, with the projections that have a bias when `attention_bias` is set. A test compares each
# count with transformers.
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (*INPUTS, "o_proj"),
    "mistral": (),
    "qwen2": INPUTS,
    "qwen3": (*INPUTS, "o_proj"),
    "qwen3_moe": (*INPUTS, "o_proj"),
    "mixtral": (),
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
    "kimi_k2": ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v32": ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
    "glm4_moe": INPUTS,
    "gpt_oss": (*INPUTS, "o_proj"),
}
# Families with those biases even when the config does not set `attention_bias`.
BIASED = ("qwen2", "gpt_oss")


@dataclass(frozen=True)
class Shape:
    """The sizes of a base that determine its memory.

    `queries`, `keys`: widths of all heads of a token. `cached`: numbers that the KV cache keeps of a token in
    a layer, of `key_heads` heads, or with 0 as a latent. `widest_mlp`: the inner width that a token passes in
    the widest layer. `experts`, `active`: routed experts of such a layer, and of a token (0 without).
    `lora_width`: sum of inputs and outputs of all projections; an adapter of rank R has R times as many
    numbers. `parameters` counts projections, `embeddings` with the head, and `others`.
    """

    shapes: BaseShapes
    layers: int
    hidden: int
    queries: int
    keys: int
    cached: int
    key_heads: int
    vocabulary: int
    widest_mlp: int
    experts: int
    active: int
    parameters: int
    embeddings: int
    others: int
    lora_width: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Shape":
        """Read a `config.json`; `ConfigError` for a family whose memory cannot be planned."""
        if config.get("model_type") not in FAMILIES:
            raise ConfigError(
                f"The memory of a base of the family {config.get('model_type')!r} cannot be planned. "
                f"Set base.name to a base of one of {', '.join(FAMILIES)}."
            )
        shapes = BaseShapes.of(config)
        projections = shapes.projections()
        weights = sum(one.count * one.size[0] * one.size[1] for one in projections)
        attention = attention_of(config)
        queries, keys, cached, key_heads = attention.widths()
        tables = 1 if config.get("tie_word_embeddings") else 2
        embeddings = tables * config["vocab_size"] * config["hidden_size"]
        others = _biases(config, shapes) + _norms(config, attention)
        others += sum(_router(config, experts) for experts in shapes.experts.values())
        return Shape(
            shapes=shapes,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            queries=queries,
            keys=keys,
            cached=cached,
            key_heads=key_heads,
            vocabulary=config["vocab_size"],
            widest_mlp=_widest(config, shapes),
            experts=max((experts.count for experts in shapes.experts.values()), default=0),
            active=config["num_experts_per_tok"] if shapes.experts else 0,
            parameters=weights + embeddings + others,
            embeddings=embeddings,
            others=others,
            lora_width=sum(one.count * sum(one.size) for one in projections),
        )


def _widest(config: Mapping[str, Any], shapes: BaseShapes) -> int:
    shared = config.get("n_shared_experts") or 0
    routed = [(config["num_experts_per_tok"] + shared) * experts.inner for experts in shapes.experts.values()]
    dense = [size[1] for module, size in shapes.linear.items() if module.endswith(".mlp.gate_proj")]
    return max(routed + dense)


def _biases(config: Mapping[str, Any], shapes: BaseShapes) -> int:
    family = config["model_type"]
    biased = FAMILIES[family] if config.get("attention_bias", family in BIASED) else ()
    if family == "llama" and config.get("mlp_bias"):
        biased = (*biased, *PROJECTIONS)
    return sum(size[1] for name, size in shapes.linear.items() if name.rpartition(".")[2] in biased)


def _norms(config: Mapping[str, Any], attention: Attention) -> int:
    """Count the norms, the final one included, and what else of a layer is no projection."""
    family, hidden = config["model_type"], config["hidden_size"]
    layer = 2 * hidden + attention.others()
    if family.startswith("qwen3") or (family == "glm4_moe" and config.get("use_qk_norm")):
        layer += 2 * attention.head_dim
    if family == "gpt_oss":
        # The attention's sinks.
        layer += config["num_attention_heads"]
    return int(config["num_hidden_layers"] * layer + hidden)


def _router(config: Mapping[str, Any], experts: Experts) -> int:
    """Count a layer's router and, for GPT-OSS, the biases of router and experts."""
    biases = 1 + 2 * experts.inner + experts.hidden if config["model_type"] == "gpt_oss" else 0
    return experts.count * (experts.hidden + biases)
