"""Sparse attention on one GPU: what vLLM serves of an adapter is what the trainer trained.

    python -m pytest -m gpu -s tests/gpu/test_dsa_parity.py

DeepSeek-V3.2's widths of attention and indexer, which vLLM's kernels are compiled for, with few layers and
experts and random weights. The rows are longer than the keys that a token may see.
"""

from pathlib import Path

import pytest
import torch

from engine.base.families import DROPPED_ON_CUDA, BaseShapes
from engine.training.model.packing import TokenRow
from engine.training.model.replay import decode
from engine.training.sample_groups import Sampling, sample_groups
from tests.helpers.live import start_engine, stop_engine
from tests.helpers.mla_bases import deepseek_v32
from tests.helpers.parity import RANK, prompts, random_adapter
from tests.helpers.resident_bases import resident

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.services,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
WIDTHS = {
    "hidden_size": 1024, "num_attention_heads": 128, "num_key_value_heads": 128, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "q_lora_rank": 512, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    "max_position_embeddings": 4096, "moe_intermediate_size": 256, "intermediate_size": 1024,
}  # fmt: skip
# In bfloat16, with the indexer's keys in float8, single tokens near a tie see other keys.
MEAN_TOLERANCE = 0.05


def test_served_adapters_are_the_trained_ones(tiny_base: Path, tmp_path: Path):
    base = deepseek_v32(tmp_path / "base", tiny_base, **WIDTHS)
    shapes = BaseShapes.read(base)
    leaves = tuple(name for name in shapes.targets if name not in DROPPED_ON_CUDA)
    tensors = random_adapter(shapes.modules(), 5, leaves, size=0.05)
    rounded = {key: value.bfloat16() for key, value in tensors.items()}
    asked = [*prompts(4), torch.randint(5, 300, (2500,)).tolist()]
    engine = start_engine(
        base,
        tmp_path / "engine",
        wait_s=600,
        slots=4,
        max_model_len=4096,
        max_num_seqs=16,
        routed_experts=True,
    )
    try:
        name = engine.publish("dsa", rounded, RANK, torch.bfloat16)
        sampling = Sampling(group_size=2, max_tokens=24, routed_experts=True)
        groups = {m: sample_groups(engine.url, engine.key, m, asked, sampling) for m in (name, base.name)}
    finally:
        stop_engine(engine)
    trainer = resident(base, 1, 8192, device="cuda", dtype=torch.bfloat16)
    adapter = trainer.hold({key: value.float() for key, value in rounded.items()})

    def error(model: str, held) -> float:
        pairs = [(p, s) for p, group in zip(asked, groups[model], strict=True) for s in group]
        rows = [TokenRow((*p, *s.tokens), len(p), decode(s.routed_experts or "")) for p, s in pairs]
        new = torch.tensor([value for row in trainer.score(held, rows) for value in row])
        old = torch.tensor([value for _, sample in pairs for value in sample.logprobs])
        print(f"{model}: mean {(new - old).abs().mean():.4f}, most {(new - old).abs().max():.4f} nats")
        return float((new - old).abs().mean())

    assert error(name, adapter) < MEAN_TOLERANCE
    assert error(base.name, None) < MEAN_TOLERANCE
    # The adapter must matter.
    assert error(name, None) > 2 * MEAN_TOLERANCE
