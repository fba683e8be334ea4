"""Latent attention on a live engine: adapters on every module equal PEFT's, base rows the base's."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.base.families import BaseShapes
from tests.helpers.live import RunningEngine, start_engine, stop_engine
from tests.helpers.made_adapters import write
from tests.helpers.mla_bases import deepseek_v3
from tests.helpers.parity import (
    RANK,
    Reference,
    ask,
    base_rows,
    check_parity,
    differences,
    mixed,
    out_of_route,
    own_differences,
    prompts,
    publish_all,
    random_adapter,
    references_of,
)

# Log-probabilities in float32 by two implementations, docs/benchmarks/correctness.md: 6.2e-6 measured.
TOLERANCE = 1e-4
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
pytestmark = pytest.mark.timeout(600)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def batches(kinds: dict[str, dict]) -> tuple[tuple[int, int], ...]:
    """Of 1, 2, 8 and 64 requests; the second has an adapter on all modules and the base."""
    return (1, 3), (2, len(kinds) - 1), (8, 3), (64, 0)


def start(base: Path, tmp_path_factory: pytest.TempPathFactory, dtype: str, slots: int) -> RunningEngine:
    state = tmp_path_factory.mktemp(f"engine-{dtype}")
    return start_engine(
        base, state, wait_s=290, slots=slots, max_num_seqs=64, dtype=dtype, routed_experts=True
    )


def kinds_of(base: Path) -> dict[str, dict]:
    """Adapters on each target alone, on each sort of MLP alone, and on all modules."""
    shapes = BaseShapes.read(base)
    targets = [(name, shapes.modules(), (name,)) for name in shapes.targets]
    linear = {name: size for name, size in shapes.linear.items() if ".mlp." in name}
    shared = {name: size for name, size in linear.items() if ".shared_experts." in name}
    groups = [("dense", {name: linear[name] for name in linear.keys() - shared.keys()}, None)]
    groups += [("shared", shared, None)] if shared else []
    every = ("all", shapes.modules(), None)
    return {
        name: random_adapter(modules, 200 + i, leaves)
        for i, (name, modules, leaves) in enumerate([*targets, *groups, every])
    }


@pytest.fixture(scope="module")
def base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_v3(tmp_path_factory.mktemp("bases") / "mla", tiny_base)


@pytest.fixture(scope="module")
def kinds(base: Path) -> dict[str, dict]:
    return kinds_of(base)


@pytest.fixture(scope="module")
def engine(base: Path, kinds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    running = start(base, tmp_path_factory, "float32", len(kinds))
    yield running
    stop_engine(running)


def test_every_target_alone_and_all_together_equals_the_reference(engine: RunningEngine, kinds):
    """Every slot full."""
    assert set(kinds) == {*ATTENTION, *PROJECTIONS, "dense", "shared", "all"}
    check_parity(engine, list(kinds.values()), TOLERANCE, batches(kinds))


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(
    base: Path, kinds, tmp_path_factory: pytest.TempPathFactory
):
    """transformers in bfloat16 is as far from itself in float32 as we are."""
    rounded = {
        name: {key: value.bfloat16().float() for key, value in kind.items()} for name, kind in kinds.items()
    }
    running = start(base, tmp_path_factory, "bfloat16", len(kinds))
    try:
        names = publish_all(running, list(rounded.values()), torch.bfloat16)
        requests = mixed(names, 64)
        answers = asyncio.run(ask(running, requests))
    finally:
        stop_engine(running)
    exact, half = (
        references_of(base, names, list(rounded.values()), dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    ours, theirs = differences(requests, answers, exact), own_differences(requests, answers, exact, half)
    print(f"ours: mean {ours.mean():.4f}, largest {ours.max():.4f}; transformers: mean {theirs.mean():.4f}")
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.median() < 1.5 * theirs.median()


@pytest.mark.slow
def test_a_base_whose_queries_are_not_compressed(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory):
    """`q_lora_rank` None: `q_proj` and `kv_a_proj_with_mqa` are modules of their own; all layers dense."""
    directory = tmp_path_factory.mktemp("bases") / "wide"
    base = deepseek_v3(directory, tiny_base, q_lora_rank=None, first_k_dense_replace=3)
    kinds = kinds_of(base)
    assert {"q_proj", "kv_a_proj_with_mqa"} < set(kinds)
    running = start(base, tmp_path_factory, "float32", len(kinds))
    try:
        check_parity(running, list(kinds.values()), TOLERANCE, batches(kinds))
    finally:
        stop_engine(running)


@pytest.mark.parametrize("name", ["all", "kv_b_proj", "q_b_proj"])
def test_peft_opens_a_revision_and_agrees(engine: RunningEngine, base: Path, kinds, tmp_path: Path, name):
    """The second route: peft on the per-expert files that a revision holds."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "adapter", kinds[name], "per-expert", BaseShapes.read(base))
    reference = Reference(base, None)
    reference.model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    served = engine.publish("kinds", kinds[name], RANK)
    requests = [(served, prompt) for prompt in prompts(8)]
    answers = asyncio.run(ask(engine, requests))
    assert differences(requests, answers, {served: reference}).max() < TOLERANCE


def test_identical_prompts_get_identical_bits(engine: RunningEngine, kinds):
    """64 times one prompt, for the base and for an adapter: each answer is that of a batch of one."""
    for name in publish_all(engine, [kinds["kv_b_proj"], kinds["q_b_proj"]]):
        for prompt in prompts(3):
            alone = asyncio.run(ask(engine, [(name, prompt)]))[0]
            answers = asyncio.run(ask(engine, [(name, prompt)] * 64))
            found = torch.tensor([answer["logprobs"] for answer in answers])
            spread = (found - torch.tensor(alone["logprobs"])).abs().max()
            assert spread <= (0 if name == engine.base_name else 1e-5)


def test_base_rows_of_a_full_mixed_batch_are_the_base(engine: RunningEngine, kinds):
    """Every slot full and base rows between: bit-identical to base rows alone."""
    names = publish_all(engine, list(kinds.values()))[:-1]
    mine = prompts(32)
    alone = asyncio.run(ask(engine, [(engine.base_name, prompt) for prompt in mine]))
    answers = base_rows(engine, names, mine)
    assert [(a["ids"], a["logprobs"]) for a in answers] == [(a["ids"], a["logprobs"]) for a in alone]


def test_an_adapter_without_effect_is_the_base_to_the_bit(engine: RunningEngine, base: Path):
    zero = random_adapter(BaseShapes.read(base).modules(), 60)
    zero |= {key: torch.zeros_like(value) for key, value in zero.items() if key.endswith("lora_B")}
    name = engine.publish("zero", zero, RANK)
    mine = prompts(16)
    alone = asyncio.run(ask(engine, [(engine.base_name, prompt) for prompt in mine]))
    answers = asyncio.run(ask(engine, [(name, prompt) for prompt in mine]))
    assert [answer["logprobs"] for answer in answers] == [answer["logprobs"] for answer in alone]


def test_the_experts_of_every_token_are_recorded_without_a_cache_of_prefixes(engine: RunningEngine, kinds):
    name = engine.publish("routes", kinds["all"], RANK)
    assert out_of_route(engine, {name: kinds["all"]}) == [0.0, 0.0]
