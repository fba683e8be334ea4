"""A base's attention, from its `config.json`: its projections, what it caches, and how vLLM serves it."""

from collections.abc import Mapping
from typing import Any

Size = tuple[int, int]


class Attention:
    """Grouped-query attention, the plain kind, of one base.

    `cpu_backend`: vLLM's backend on a CPU, with blocks of its own; None: vLLM's choice. `cuda_only`: why vLLM
    serves it only on CUDA.
    """

    cpu_backend: str | None = None
    cuda_only: str | None = None

    def __init__(self, config: Mapping[str, Any]):
        self._config = config

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        config = self._config
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def projections(self) -> dict[str, Size]:
        """Return (in, out) of a layer's projections that can carry LoRA."""
        hidden, (queries, keys, *_) = self._config["hidden_size"], self.widths()
        return {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (queries, hidden),
        }

    def widths(self) -> tuple[int, int, int, int]:
        """Return `queries`, `keys`, `cached` and `key_heads` of `sizes.Shape`."""
        heads = self._config["num_attention_heads"]
        key_heads = self._config.get("num_key_value_heads") or heads
        keys = key_heads * self.head_dim
        return heads * self.head_dim, keys, 2 * keys, key_heads

    def others(self) -> int:
        """Count a layer's parameters of this kind of attention beside its projections."""
        return 0
