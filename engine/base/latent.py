"""Latent attention (MLA), and sparse attention on it (DSA), as DeepSeek's families and GLM's have them."""

from collections.abc import Mapping
from typing import Any

from engine.base.attention import Attention, Size

# Types whose attention is sparse also where a config leaves its sizes to transformers.
SPARSE = ("deepseek_v32", "glm_moe_dsa")


class LatentShapes(Attention):
    """Keys and values of all heads come from one latent of each token, which vLLM caches."""

    # The AMX backend drops adapters on `kv_b_proj`.
    cpu_backend = "CPU_MLA"

    def projections(self) -> dict[str, Size]:
        """Return (in, out) of a layer's projections that can carry LoRA."""
        config, (queries, *_) = self._config, self.widths()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
        narrow = config.get("q_lora_rank")
        query = {"q_a_proj": (hidden, narrow), "q_b_proj": (narrow, queries)} if narrow else {}
        return {
            **(query or {"q_proj": (hidden, queries)}),
            "kv_a_proj_with_mqa": (hidden, latent + rope),
            "kv_b_proj": (latent, heads * (plain + value)),
            "o_proj": (heads * value, hidden),
        }

    def widths(self) -> tuple[int, int, int, int]:
        """Return those of all heads' keys, which the trainer computes; vLLM caches latent and rotary part."""
        config, rope = self._config, self._config["qk_rope_head_dim"]
        width = config["num_attention_heads"] * (config["qk_nope_head_dim"] + rope)
        return width, width, config["kv_lora_rank"] + rope, 0

    def others(self) -> int:
        """Count the norms of the latents."""
        return int(self._config["kv_lora_rank"] + (self._config.get("q_lora_rank") or 0))


class SparseShapes(LatentShapes):
    """An indexer picks the keys; it carries no LoRA."""

    cuda_only = (
        "vLLM implements its sparse attention (an indexer and attention to the keys it picks) only for CUDA"
    )

    def widths(self) -> tuple[int, int, int, int]:
        """Return those of latent attention; vLLM also caches the indexer's key."""
        queries, keys, cached, heads = super().widths()
        return queries, keys, cached + (self._config.get("index_head_dim") or 0), heads

    def others(self) -> int:
        """Count also the indexer: three projections, and a norm with bias."""
        config = self._config
        if not (heads := config.get("index_n_heads")):
            return super().others()
        width, hidden = config["index_head_dim"], config["hidden_size"]
        indexer = config["q_lora_rank"] * heads * width + hidden * (width + heads) + 2 * width
        return int(super().others() + indexer)


def latent_or_grouped(config: Mapping[str, Any]) -> Attention:
    """Return the attention of a base whose family has several kinds."""
    if not config.get("kv_lora_rank"):
        return Attention(config)
    is_sparse = config.get("index_n_heads") or config.get("model_type") in SPARSE
    return SparseShapes(config) if is_sparse else LatentShapes(config)
