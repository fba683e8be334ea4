"""One GPU in fact: measured memory against the plan, and an adapter served as it was trained.

    python -m pytest -m gpu -s tests/gpu

Random weights in the shapes of Qwen3-0.6B and of two layers of Qwen3-30B-A3B (1.2 and 3.7 GB, written to
the test's directory), bfloat16, both processes. Prints each part as planned and as measured.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.families import BaseShapes
from engine.planning import gpu
from engine.planning.memory import gib
from engine.settings.params import Params
from engine.settings.services import EngineConfig, TrainerConfig
from tests.helpers.live import free_port, start_engine, stop_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.services,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

LENGTH, SEQUENCES, RANK, TOKENS = 2048, 32, 16, 8192
ENGINE = {"max_model_len": LENGTH, "max_num_seqs": SEQUENCES, "slots": 4, "max_rank": RANK}
# Random weights move nothing much; in bfloat16 two implementations differ by this many nats at most.
TOLERANCE = 0.15


SHAPES = {
    "dense": {
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "experts": {
        "num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip


def write_base(directory: Path, shape: str, tokenizer: Path) -> Path:
    """Write random weights of one of the shapes, with a small base's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    classes: tuple[Any, Any] = (Qwen3Config, Qwen3ForCausalLM)
    if shape == "experts":
        classes = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    torch.manual_seed(0)
    with torch.device("cuda"):
        classes[1](classes[0](**COMMON, **SHAPES[shape], dtype=torch.bfloat16)).bfloat16().save_pretrained(
            directory
        )
    torch.cuda.empty_cache()
    for file in [*tokenizer.glob("tokenizer*"), tokenizer / "chat_template.jinja"]:
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module", params=SHAPES)
def base(request: pytest.FixtureRequest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / request.param, request.param, tiny_base)


@pytest.fixture(scope="module")
def params(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Params:
    return Params(
        state_dir=tmp_path_factory.mktemp("state"),
        base={"name": str(base)},
        engine=EngineConfig(port=free_port(), **ENGINE),
        trainer=TrainerConfig(microbatch_tokens=TOKENS, sessions=2),
    )


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def show(what: str, planned: int, measured: int) -> None:
    print(f"{what:<28} planned {gib(planned):>10}  measured {gib(measured):>10}  {measured / planned:.2f}")


def rows(count: int, length: int):
    from engine.training.model.packing import Example, TokenRow

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 300, (count, length), generator=generator).tolist()
    values = (-5.0,) * (length - 1)
    advantages = [(1.0 if number % 2 else -1.0,) * (length - 1) for number in range(count)]
    return [
        Example(TokenRow(tuple(row), 1), values, found) for row, found in zip(tokens, advantages, strict=True)
    ]


def test_memory_and_answers_are_as_planned(params: Params, base: Path) -> None:
    """One test, since each part's memory is measured on top of the one before."""
    from engine.training.service.app import load_base
    from tests.helpers.training_pass import one_pass

    found = gpu.planned(params)
    assert found is not None

    # The first product allocates cuBLAS's workspace (32 MiB on Hopper), which belongs to the context.
    square = torch.ones(64, 64, device="cuda")
    square @ square
    workspace = torch.cuda.memory_allocated()
    resident = load_base(params, base, found)
    assert resident.model.dtype == torch.bfloat16
    assert resident.checkpointing
    loaded = torch.cuda.memory_allocated()
    show("base in the trainer", found.trainer_base, loaded - workspace)
    assert 0.98 < (loaded - workspace) / found.trainer_base < 1.05

    targets = tuple(BaseShapes.read(base).targets)
    adapter = resident.new_adapter(RANK, 2.0 * RANK, targets, torch.Generator().manual_seed(3))
    torch.cuda.reset_peak_memory_stats()
    one_pass(resident, adapter, rows(TOKENS // LENGTH, LENGTH), "dapo", {})
    activations = torch.cuda.max_memory_allocated() - loaded
    show("activations of a microbatch", found.trainer_activations, activations)
    assert activations < found.trainer_activations + found.trainer_adapters
    assert {factor.dtype for factor in adapter.factors.values()} == {torch.float32}
    adapter.step(1e-2, (0.9, 0.95), 1e-8, 0.0, 1.0)
    # 2 sessions are planned, one is held.
    adapters = torch.cuda.memory_allocated() - loaded
    show("adapters of one session", found.trainer_adapters // 2, adapters)
    assert adapters < 1.1 * found.trainer_adapters / 2
    context = used() - torch.cuda.memory_reserved() + workspace
    show("CUDA context of the trainer", found.trainer_context, context)
    assert context < found.trainer_context
    torch.cuda.empty_cache()

    before = used()
    engine = start_engine(base, params.state_dir / "engine", wait_s=600, **ENGINE)
    try:
        taken = used() - before
        parts = {name: size for name, size in found.parts.items() if name.startswith("engine_")}
        show("engine in all", sum(parts.values()), taken)
        assert taken < sum(parts.values())
        served = engine.publish("sums", adapter.canonical(torch.bfloat16), RANK, torch.bfloat16)
        examples = rows(4, 64)
        want = resident.score(adapter, [example.row for example in examples])
        plain = resident.score(None, [example.row for example in examples])
        far = []
        for model, expected in ((served, want), (engine.base_name, plain), (served, want)):
            for example, logprobs in zip(examples, expected, strict=True):
                far.append(distance(ask(engine, model, example.row.tokens), logprobs))
        moved = max(distance(left, right) for left, right in zip(want, plain, strict=True))
        print(f"served and trained differ by {max(far):.4f} nats, the adapter moves {moved:.4f}")
        assert max(far) < TOLERANCE
        # The comparison means something: the adapter moves what it is compared on.
        assert moved > 3 * TOLERANCE
        show("engine after answers", sum(parts.values()), used() - before)
        assert used() - before < sum(parts.values())
    finally:
        stop_engine(engine)


def ask(engine, model: str, tokens: tuple[int, ...]) -> list[float]:
    body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    with engine.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = json.loads(answer.text)["choices"][0]["prompt_logprobs"]
    return [found[i][str(token)]["logprob"] for i, token in enumerate(tokens) if i > 0]


def distance(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
