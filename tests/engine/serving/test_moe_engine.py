"""A mixture of experts on a live engine: adapters equal PEFT's, base rows the base's, in any batch."""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.base.families import BaseShapes
from tests.helpers.live import RunningEngine, StockServer, start_engine, stop_engine
from tests.helpers.made_adapters import write
from tests.helpers.moe_bases import glm4_moe
from tests.helpers.parity import (
    RANK,
    Reference,
    ask,
    base_rows,
    check_parity,
    differences,
    kinds_of,
    mixed,
    out_of_route,
    own_differences,
    prompts,
    publish_all,
    random_adapter,
    references_of,
)

pytestmark = [pytest.mark.services, pytest.mark.heavy(minutes=4)]
# Log-probabilities in float32 by two implementations: measured 4e-6 at most over these batches.
TOLERANCE = 5e-5
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def start(base: Path, tmp_path_factory: pytest.TempPathFactory, dtype: str, slots: int) -> RunningEngine:
    state = tmp_path_factory.mktemp(f"engine-{dtype}")
    return start_engine(base, state, slots=slots, max_num_seqs=64, dtype=dtype, routed_experts=True)


@pytest.fixture(scope="module")
def engine(moe_engine: RunningEngine) -> RunningEngine:
    return moe_engine


@pytest.fixture(scope="module")
def base(engine: RunningEngine) -> Path:
    return engine.base_path


@pytest.fixture(scope="module")
def kinds(base: Path) -> list[dict]:
    """As many adapters as there are slots."""
    return kinds_of(base)


def test_the_experts_of_every_token_are_told_to_who_asks(engine: RunningEngine, kinds):
    """They are the trainer's own in float32, with cached prompts and without; users get none."""
    name = engine.publish("routes", kinds[-1], RANK)
    assert out_of_route(engine, {engine.base_name: None, name: kinds[-1]}) == [0.0] * 4
    # Of another adapter they are not: the comparison can fail.
    assert out_of_route(engine, {name: kinds[1]})[0] > 0.1
    body = {"model": name, "prompt": prompts(1)[0], "max_tokens": 4}
    with engine.client() as client:
        assert client.post("/v1/completions", json=body).json()["choices"][0]["routed_experts"] is None


def test_every_target_alone_and_all_together_equals_the_reference(engine: RunningEngine, kinds):
    """Batches of 1, 2, 8 and 64, adapters mixed, base rows between them, every slot in use."""
    check_parity(engine, kinds, TOLERANCE)


def test_experts_equal_peft_on_the_files_of_a_revision(engine: RunningEngine, base: Path, tmp_path: Path):
    """The second route: peft opens the per-expert files that a revision holds."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shapes = BaseShapes.read(base)
    tensors = random_adapter(shapes.modules(), 7)
    path = write(tmp_path / "adapter", tensors, "per-expert", shapes)
    reference = Reference(base, None)
    reference.model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    name = engine.publish("peft", tensors, RANK)
    requests = [(name, prompt) for prompt in prompts(8)]
    answers = asyncio.run(ask(engine, requests))
    assert differences(requests, answers, {name: reference}).max() < TOLERANCE


@pytest.fixture(scope="module")
def between(engine: RunningEngine, base: Path) -> list[dict]:
    """The base's answers to 32 prompts, beside adapters in every slot."""
    shapes = BaseShapes.read(base).modules()
    names = [engine.publish("full", random_adapter(shapes, 20 + i, size=1.0), RANK) for i in range(8)]
    return base_rows(engine, names, prompts(32))


def test_base_rows_of_a_full_mixed_batch_are_the_base(engine: RunningEngine, base: Path, between):
    """Bit-identical to base rows alone, and near transformers."""
    requests = [(engine.base_name, prompt) for prompt in prompts(32)]
    alone = asyncio.run(ask(engine, requests))
    assert [(a["ids"], a["logprobs"]) for a in between] == [(a["ids"], a["logprobs"]) for a in alone]
    assert differences(requests, between, {engine.base_name: Reference(base, None)}).max() < TOLERANCE


@pytest.mark.slow
def test_base_rows_equal_an_engine_without_lora(base: Path, between):
    """Stock vLLM, on the same base and prompts; `test_engine.py` asks one about a dense base each time."""
    with StockServer(base, "float32", max_model_len=256) as stock:
        want = asyncio.run(ask(stock, [("stock", prompt) for prompt in prompts(32)]))
    assert [answer["ids"] for answer in between] == [answer["ids"] for answer in want]
    for answer, expected in zip(between, want, strict=True):
        got, stock_logprobs = torch.tensor(answer["logprobs"]), torch.tensor(expected["logprobs"])
        torch.testing.assert_close(got, stock_logprobs, rtol=0, atol=1e-5)


def test_an_adapter_without_effect_is_the_base_to_the_bit(engine: RunningEngine, base: Path):
    """B is zero everywhere, or on the experts alone while attention has an adapter."""
    shapes = BaseShapes.read(base)
    zero = random_adapter(shapes.modules(), 60)
    zero |= {key: torch.zeros_like(value) for key, value in zero.items() if key.endswith("lora_B")}
    attention = random_adapter(shapes.linear, 61)
    silent = attention | {key: value for key, value in zero.items() if ".experts." in key}
    loud = random_adapter(shapes.modules(), 62)
    names = [engine.publish("zero", tensors, RANK) for tensors in (zero, attention, silent, loud)]
    mine = prompts(16)
    alone = asyncio.run(ask(engine, [(engine.base_name, prompt) for prompt in mine]))
    answers = asyncio.run(ask(engine, [(name, prompt) for prompt in mine for name in names]))
    for i in range(0, len(answers), 4):
        assert answers[i]["logprobs"] == alone[i // 4]["logprobs"]
        assert answers[i + 1]["logprobs"] == answers[i + 2]["logprobs"]
    assert answers[3]["logprobs"] != alone[0]["logprobs"]


def test_a_row_hardly_depends_on_the_rest_of_its_batch(engine: RunningEngine, kinds):
    """In float32 as little as the base: its own linear layers sum fewer than four rows in another order."""
    names = publish_all(engine, kinds)
    requests = mixed(names, 64)
    together = asyncio.run(ask(engine, requests))
    for request, answer in list(zip(requests, together, strict=True))[: len(names)]:
        alone = asyncio.run(ask(engine, [request]))[0]
        assert alone["ids"] == answer["ids"]
        got, want = torch.tensor(alone["logprobs"]), torch.tensor(answer["logprobs"])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(
    base: Path, kinds, tmp_path_factory: pytest.TempPathFactory
):
    """bfloat16 moves tokens that are near a tie to other experts, so single answers are far from float32.

    An answer alone is as near as in a batch, and no more is promised: in bfloat16 oneDNN chooses kernels by
    the number of rows (docs/reproduce.md), and how many rows share a step depends on when requests arrive.

    transformers in bfloat16 is as far from itself in float32 as we are. Measured here, mean of 64
    answers' largest differences: ours 0.05 to 0.08, transformers' the same within a tenth.
    """
    rounded = [{key: value.bfloat16().float() for key, value in kind.items()} for kind in kinds]
    running = start(base, tmp_path_factory, "bfloat16", len(kinds))
    try:
        names = publish_all(running, rounded, torch.bfloat16)
        requests = mixed(names, 64)
        together = asyncio.run(ask(running, requests))
        # As many as in the batch: a mean over few answers is that of their ties.
        alone = [asyncio.run(ask(running, [request]))[0] for request in requests]
    finally:
        stop_engine(running)
    exact, half = (references_of(base, names, rounded, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = differences(requests, together, exact)
    theirs = own_differences(requests, together, exact, half)
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.median() < 1.5 * theirs.median()
    ours_alone = differences(requests, alone, exact)
    assert ours_alone.mean() < 1.5 * theirs.mean()
    assert ours_alone.median() < 1.5 * theirs.median()


@pytest.mark.slow
def test_shared_experts_carry_adapters_too(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory):
    """GLM-MoE: the shared expert's linear layers are wrapped, and the wrapped ones are those that run.

    test_mla_engine.py asks the same of DeepSeek's shared experts each time.
    """
    base = glm4_moe(tmp_path_factory.mktemp("bases") / "glm", tiny_base)
    shapes = BaseShapes.read(base)
    shared = {name: size for name, size in shapes.linear.items() if ".shared_experts." in name}
    assert shared
    routed = {name: size for name, size in shapes.modules().items() if ".experts." in name}
    kinds = [random_adapter(those, 80 + i) for i, those in enumerate((shared, routed, shapes.modules()))]
    running = start(base, tmp_path_factory, "float32", len(kinds))
    try:
        check_parity(running, kinds, TOLERANCE, batches=((32, 0),))
    finally:
        stop_engine(running)
