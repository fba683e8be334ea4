"""A base's sizes, read from its `config.json`: how many numbers it has, and how wide its layers are.

Knows the families of dense and mixture-of-experts decoders that trainer and engine are planned for. Opens
no file and loads no tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

# Families whose parameters are counted here; a test counts each by transformers too.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Shape:
    """What of a base's `config.json` decides its memory. `inner` is for layers without experts."""

    layers: int
    hidden: int
    queries: int
    keys: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    head_norms: bool
    input_biases: bool
    output_bias: bool
    mlp_biases: bool
    experts: int = 0
    expert_inner: int = 0
    active_experts: int = 0
    sparse_layers: int = 0

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Shape":
        """Read a `config.json`; `ConfigError` for a family whose memory is not known here."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                f"The memory of a base of the family {family!r} cannot be planned. "
                f"Choose one of {', '.join(FAMILIES)}, or set base.name to such a base."
            )
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        biased = bool(config.get("attention_bias"))
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            queries=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
            head_dim=head_dim,
            inner=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            head_norms=family.startswith("qwen3"),
            # Qwen2 has biases on q, k and v and no setting for them; Mistral has none.
            input_biases=family == "qwen2" or (biased and family != "mistral"),
            output_bias=biased and family not in ("qwen2", "mistral"),
            mlp_biases=bool(config.get("mlp_bias")) and family == "llama",
            **(_experts(config) if family == "qwen3_moe" else {}),
        )

    @property
    def parameters(self) -> int:
        """Count the base's numbers, as the modules of transformers' `modeling_<family>.py` declare them."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        attention += self.input_biases * (self.queries + 2 * self.keys) + self.output_bias * self.hidden
        norms = 2 * self.hidden + self.head_norms * 2 * self.head_dim
        dense = 3 * self.hidden * self.inner + self.mlp_biases * (2 * self.inner + self.hidden)
        sparse = self.experts * (3 * self.hidden * self.expert_inner + self.hidden)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        mlps = (self.layers - self.sparse_layers) * dense + self.sparse_layers * sparse
        return embeddings + self.hidden + self.layers * (attention + norms) + mlps

    @property
    def lora_width(self) -> int:
        """Sum inputs and outputs of all projections: an adapter of rank R has R times as many numbers."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        dense = 3 * (self.hidden + self.inner)
        sparse = self.experts * 3 * (self.hidden + self.expert_inner)
        mlps = (self.layers - self.sparse_layers) * dense + self.sparse_layers * sparse
        return self.layers * attention + mlps

    @property
    def widest_mlp(self) -> int:
        """Return the inner width that one token passes through in the widest layer."""
        dense = self.inner if self.sparse_layers < self.layers else 0
        return max(dense, self.active_experts * self.expert_inner)


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    every, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    sparse = [layer for layer in layers if layer not in plain and (layer + 1) % every == 0]
    return {
        "experts": config["num_experts"],
        "expert_inner": config["moe_intermediate_size"],
        "active_experts": config["num_experts_per_tok"],
        "sparse_layers": len(sparse),
    }
