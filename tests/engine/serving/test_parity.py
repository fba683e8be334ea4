"""The built bases on a live engine: each target alone and all together, in batches of every size."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.live import RunningEngine, start_engine, stop_engine
from tests.helpers.parity import (
    ask,
    check_parity,
    differences,
    kinds_of,
    mixed,
    own_differences,
    publish_all,
    references_of,
)

pytestmark = [pytest.mark.services, pytest.mark.heavy(minutes=6)]
# Log-probabilities in float32 by two implementations: measured 1e-5 at most over these batches.
TOLERANCE = 1e-4
EFFECT = 100 * TOLERANCE


def test_every_target_of_tiny_dense_equals_the_reference(engine: RunningEngine):
    check_parity(engine, kinds_of(engine.base_path), TOLERANCE, effect=EFFECT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla"])
def test_every_target_of_a_recipe_equals_the_reference(name: str, tmp_path_factory: pytest.TempPathFactory):
    """Every slot full. The base has the recipe's shape and is trained for seconds only.

    test_moe_engine.py and test_mla_engine.py ask the same of a smaller base of each family each time.
    """
    from engine.base.toys.build import build
    from engine.base.toys.recipes import RECIPES

    base = tmp_path_factory.mktemp("bases") / name
    base.mkdir()
    build(replace(RECIPES[name], steps=20, problems=2048), 1, base, lambda step, steps, loss: None)
    slots, state = len(kinds_of(base)), tmp_path_factory.mktemp(f"engine-{name}")
    running = start_engine(base, state, slots=slots, max_num_seqs=64)
    try:
        check_parity(running, kinds_of(base), TOLERANCE, effect=EFFECT)
    finally:
        stop_engine(running)


def test_a_row_does_not_depend_on_the_rest_of_its_batch(engine: RunningEngine):
    """To the bit."""
    requests = mixed(publish_all(engine, kinds_of(engine.base_path)[-3:]), 64)
    together = asyncio.run(ask(engine, requests))
    for request, answer in list(zip(requests, together, strict=True))[:8]:
        alone = asyncio.run(ask(engine, [request]))[0]
        assert (alone["ids"], alone["logprobs"]) == (answer["ids"], answer["logprobs"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bfloat16_is_as_near_as_the_reference_in_bfloat16(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
):
    """Every activation has 8 bits: transformers in bfloat16 is as far from itself in float32 as we are."""
    kinds = [{key: value.bfloat16().float() for key, value in kind.items()} for kind in kinds_of(tiny_base)]
    state = tmp_path_factory.mktemp("engine-bfloat16")
    running = start_engine(tiny_base, state, slots=len(kinds), max_num_seqs=64, dtype="bfloat16")
    try:
        names = publish_all(running, kinds, torch.bfloat16)
        requests = mixed(names, 64)
        answers = asyncio.run(ask(running, requests))
    finally:
        stop_engine(running)
    exact = references_of(tiny_base, names, kinds)
    half = references_of(tiny_base, names, kinds, torch.bfloat16)
    ours = differences(requests, answers, exact)
    theirs = own_differences(requests, answers, exact, half)
    print(f"ours: mean {ours.mean():.4f}, max {ours.max():.4f}", theirs.mean(), theirs.max())
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.max() < 2 * theirs.max()
