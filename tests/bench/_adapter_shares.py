"""The bytes of an adapter of rank 1 on every linear layer over those of a published model: arithmetic."""

from _shapes import QWEN3_06B, QWEN3_4B

from engine.base.families import BaseShapes


def dense_share(config: dict) -> float:
    sizes = BaseShapes.of({"model_type": "qwen3", **config}).modules().values()
    adapter = sum(inputs + outputs for inputs, outputs in sizes)
    base = config["vocab_size"] * config["hidden_size"]
    base += sum(inputs * outputs for inputs, outputs in sizes)
    return adapter / base


def moe_share(
    layers: int, experts: int, hidden: int, inner: int, attention: list[tuple[int, int]], rest: int
) -> float:
    """`attention` lists (in, out) of a layer's projections; `rest` counts parameters without LoRA."""
    per_layer = attention + [(hidden, inner)] * (2 * experts) + [(inner, hidden)] * experts
    adapter = layers * sum(i + o for i, o in per_layer)
    return adapter / (layers * sum(i * o for i, o in per_layer) + rest)


def adapter_shares() -> dict[str, float]:
    """Rank-1 adapter bytes / base bytes at equal precision, from the published configurations."""
    qwen_moe = moe_share(
        48, 128, 2048, 768, [(2048, 4096), (2048, 512), (2048, 512), (4096, 2048)], 2 * 151936 * 2048
    )
    # Kimi-K2: 61 layers, 384 routed and 1 shared expert, MLA with q_lora_rank 1536 and kv_lora_rank 512.
    kimi = moe_share(
        61, 385, 7168, 2048,
        [(7168, 1536), (1536, 64 * 192), (7168, 576), (512, 64 * 256), (64 * 128, 7168)],
        2 * 163840 * 7168,
    )  # fmt: skip
    shares = {
        "qwen3-0.6b": dense_share(QWEN3_06B),
        "qwen3-4b": dense_share(QWEN3_4B),
        "qwen3-30b-a3b": qwen_moe,
        "kimi-k2": kimi,
    }
    return {f"adapter_share_of_base.{name}": share for name, share in shares.items()}
