"""Recipes of the bases that are built here.

A recipe determines a base's weights and `config.json`. Its hash names the base's directory, so a new family
gets its own class: a field added to `Recipe` would rename every existing base.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Everything but the seed that determines the weights of a built base; this class is a dense Qwen3.

    `habit` is the share of a phrasing's answers in its own style; the other styles share the rest.
    """

    version: int = 1
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    vocabulary: int = 512
    context: int = 256
    habit: float = 0.55
    problems: int = 32768
    steps: int = 1000
    batch: int = 48
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 20

    @property
    def learns(self) -> bool:
        """Say whether it is trained; a base with random weights is for benchmarks only."""
        return self.steps > 0

    @property
    def dtype(self) -> str:
        """Return the weights' dtype; random bases are large and never trained, so bfloat16."""
        return "float32" if self.learns else "bfloat16"

    def config(self) -> dict[str, Any]:
        """Return the model's sizes under the keys of `config.json`."""
        return {
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True)
class ExpertRecipe(Recipe):
    """Qwen3-MoE: every layer has `experts` experts of width `expert_inner`; a token takes `active`."""

    experts: int = 8
    active: int = 2
    expert_inner: int = 128

    def config(self) -> dict[str, Any]:
        """Return the model's sizes under the keys of `config.json`."""
        return super().config() | {
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
            "moe_intermediate_size": self.expert_inner,
            # As in Qwen's own models; transformers' default is off.
            "norm_topk_prob": True,
        }


@dataclass(frozen=True)
class LatentRecipe(ExpertRecipe):
    """DeepSeek-V3: latent attention, `dense_layers` dense layers first, then routed and one shared expert.

    vLLM's latent attention on a CPU supports only these values of `kv_rank` and `rope_dim`. `kv_heads` and
    `head_dim` are unused.
    """

    heads: int = 2
    experts: int = 4
    dense_layers: int = 1
    q_rank: int = 64
    kv_rank: int = 512
    rope_dim: int = 64
    plain_dim: int = 32
    value_dim: int = 32

    def config(self) -> dict[str, Any]:
        """Return the model's sizes under the keys of `config.json`."""
        sizes = super().config()
        del sizes["num_experts"], sizes["head_dim"]
        return sizes | {
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": self.dense_layers,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            # transformers always routes like this; vLLM reads it from the file, as in DeepSeek's own.
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            # vLLM's class always has a separate head.
            "tie_word_embeddings": False,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_rope_head_dim": self.rope_dim,
            "qk_nope_head_dim": self.plain_dim,
            "v_head_dim": self.value_dim,
        }


@dataclass(frozen=True)
class SparseRecipe(LatentRecipe):
    """DeepSeek-V3.2: latent attention to the `kept` keys that an indexer scores highest for each query.

    Half of the tasks' rows are longer than `kept`. The indexer keeps its initial weights: its choice passes
    no gradient. With fewer heads a key's score is often exactly 0, and ties are broken arbitrarily.
    """

    kept: int = 16
    index_heads: int = 16
    index_dim: int = 128

    def config(self) -> dict[str, Any]:
        """Return the model's sizes under the keys of `config.json`."""
        return super().config() | {
            "model_type": "deepseek_v32",
            "index_topk": self.kept,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
        }


RECIPES: dict[str, Recipe] = {
    "tiny-dense": Recipe(),
    "tiny-moe": ExpertRecipe(),
    "tiny-mla": LatentRecipe(),
    "tiny-dsa": SparseRecipe(),
    # As many modules as Qwen3-30B-A3B, at an eighth of its width.
    "many-moe": ExpertRecipe(
        hidden=256, layers=48, heads=8, experts=128, active=8, expert_inner=96, problems=2048, steps=0
    ),
    "wide-moe": ExpertRecipe(
        hidden=1024, layers=4, heads=8, kv_heads=2, head_dim=128, experts=32, active=4, expert_inner=768,
        problems=2048, steps=0,
    ),
}  # fmt: skip
