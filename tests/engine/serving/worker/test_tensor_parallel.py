"""Two tensor-parallel ranks on CPU: answers equal the reference, and each rank reads its slices alone."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine.adapters import packed
from engine.base.families import BaseShapes
from tests.helpers.live import RunningEngine, start_engine, stop_engine
from tests.helpers.moe_bases import qwen3_moe
from tests.helpers.parity import RANK, Reference, ask, prompts

# Of which a rank holds half of the outputs; of the others (o_proj, down_proj) it holds half of the inputs.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# As in test_engine; the sum over two ranks adds an order of its own.
TOLERANCE = 2e-4

# Three processes start; on busy cores that alone takes minutes.
pytestmark = [
    pytest.mark.services,
    pytest.mark.heavy(minutes=2),
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]


@pytest.fixture(scope="module")
def halves(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """A mixture of experts, with one dense layer, cut over two ranks."""
    root = tmp_path_factory.mktemp("halves")
    base = qwen3_moe(root / "moe", tiny_base, moe_intermediate_size=64)
    running = start_engine(base, root / "state", wait_s=400, slots=2, max_num_seqs=8, tensor_parallel=2)
    yield running
    stop_engine(running)


def shapes(base: Path) -> BaseShapes:
    from transformers import AutoConfig

    return BaseShapes.of(AutoConfig.from_pretrained(base).to_dict())


def adapter(base: Path, seed: int) -> dict[str, torch.Tensor]:
    from transformers import AutoConfig

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in (
        BaseShapes.of(AutoConfig.from_pretrained(base).to_dict()).modules().items()
    ):
        tensors[f"{name}.lora_A"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        tensors[f"{name}.lora_B"] = torch.randn(outputs, RANK, generator=generator) * 0.05
    return tensors


def half_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Count what one of two ranks holds of an adapter."""
    total = 0
    for key, tensor in tensors.items():
        module, _, side = key.rpartition(".lora_")
        cut = (side == "B") == (module.rpartition(".")[2] in COLUMNS)
        total += tensor.nbytes // (2 if cut else 1)
    return total


def test_two_ranks_answer_as_the_reference_and_read_their_slices(halves: RunningEngine):
    adapters = [adapter(halves.base_path, seed) for seed in (1, 2)]
    whole = packed.pack(adapters[0], torch.float32, shapes(halves.base_path).fused)
    with halves.client() as client:
        before = client.get("/graftwork/loads").json()
        names = [halves.publish("halves", tensors, RANK) for tensors in adapters]
        requests = [([*names, halves.base_name][i % 3], prompt) for i, prompt in enumerate(prompts(6))]
        answers = asyncio.run(ask(halves, requests))
        after = client.get("/graftwork/loads").json()
    references = [Reference(halves.base_path, kind) for kind in (*adapters, None)]
    for i, (answer, (_, prompt)) in enumerate(zip(answers, requests, strict=True)):
        want = references[i % 3].logprobs(prompt, answer["ids"])
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), want, rtol=0, atol=TOLERANCE)
    without = references[2].logprobs(requests[0][1], answers[0]["ids"])
    assert (torch.tensor(answers[0]["logprobs"]) - without).abs().max() > 0.05
    grown = [{key: b[key] - a[key] for key in a} for a, b in zip(before, after, strict=True)]
    slices = 2 * half_bytes(adapters[0])
    assert [rank["activated_bytes"] for rank in grown] == [slices, slices]
    assert [rank["validated_bytes"] for rank in grown] == [slices, slices]
    assert [rank["verified_bytes"] for rank in grown] == [2 * whole.layout.nbytes, 0]


def test_ranks_share_what_the_server_has_imported(halves: RunningEngine):
    processes = psutil.Process(halves.process.pid).children(recursive=True)
    ranks = [one for one in processes if "VLLM::Worker" in " ".join(one.cmdline())]
    assert len(ranks) == 2
    for memory in (rank.memory_full_info() for rank in ranks):
        assert memory.rss - memory.uss > 200 << 20
