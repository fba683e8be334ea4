"""Speculative decoding: tokens drafted from a request's own text must change neither answers nor chances."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from live import RunningEngine, start_engine, stop_engine
from parity import Reference, ask, differences, random_adapter

from engine.adapters.families import BaseShapes
from engine.base import BaseInfo
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.serving import plugin
from engine.serving.drafts_cpu import expand
from engine.serving.server import speculative_arguments
from engine.training.rollouts import Sampling, sample_groups

# Log-probabilities in float32 by two implementations: measured 3e-6 over these rollouts.
TOLERANCE = 1e-4
# A text that repeats itself, so that there is something to draft.
PROMPTS = [[40, 41, 42, 43] * 6, [50, 51, 52] * 8, [60, 61] * 12]


def base_of(directory: Path, **config: int) -> BaseInfo:
    (directory / "config.json").write_text(json.dumps(config))
    return BaseInfo("some-base", directory, "0" * 64)


def test_nothing_is_drafted_unless_it_is_asked_for(tmp_path: Path):
    base = base_of(tmp_path)
    assert speculative_arguments(EngineConfig(), base, None) == []
    _, config = speculative_arguments(EngineConfig(speculative=4), base, None)
    assert json.loads(config)["num_speculative_tokens"] == 4


def test_latent_attention_on_a_cpu_refuses_drafts(tmp_path: Path):
    base = base_of(tmp_path, kv_lora_rank=64)
    with pytest.raises(ConfigError, match=r"speculative is 4.*latent attention of some-base.*to 0"):
        speculative_arguments(EngineConfig(speculative=4), base, None)
    assert speculative_arguments(EngineConfig(), base, None) == []


def test_each_drafted_token_gets_its_requests_own_setting():
    ends_B = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperature_B = torch.tensor([0.5, 9.0, 0.0])
    assert expand(temperature_B, ends_B, 5, replace_from=0, replace_to=1).tolist() == [0.5, 0.5, 1, 1, 1]
    assert expand(torch.tensor([3, 9, 7]), ends_B, 5).tolist() == [3, 3, 7, 7, 7]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafts_leave_the_chances_as_they_are(temperature: float):
    """vLLM's own verification with our patch, 5,000 times: frequencies against the softmax."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    current_platform.register_triton_kernel_overrides()
    plugin.verify_drafts_on_cpu()
    count, drafts = 5000, [0, 1, 2]
    logits_V = torch.tensor([2.0, -0.5, -3.0, 0.6, -1.7, -2.0])
    chances_V = (logits_V / temperature).softmax(0)
    ends_B = torch.arange(1, count + 1, dtype=torch.int32) * len(drafts)
    sampling = SimpleNamespace(
        temperature=torch.full((count,), temperature), top_k=None, top_p=None,
        all_greedy=False, all_random=True, generators={},
    )  # fmt: skip
    logits_DV = rejection_sampler.apply_sampling_constraints(
        logits_V.repeat(count * len(drafts), 1), ends_B, sampling
    )
    bonus_B = torch.multinomial(chances_V, count, replacement=True).int()[:, None]
    found = rejection_sampler.rejection_sample(
        torch.tensor(drafts * count, dtype=torch.int32), [len(drafts)] * count, len(drafts), ends_B, None,
        logits_DV, bonus_B, sampling,
    )  # fmt: skip
    for tokens in (found[:, 0], found[found[:, 0] == drafts[0]][:, 1]):
        frequencies_V = torch.bincount(tokens.long(), minlength=6) / len(tokens)
        deviation_V = (chances_V * (1 - chances_V) / len(tokens)).sqrt()
        assert ((frequencies_V - chances_V).abs() < 5 * deviation_V + 1e-3).all()


@pytest.fixture(scope="module")
def drafting(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    running = start_engine(tiny_base, tmp_path_factory.mktemp("drafting"), slots=4, speculative=4)
    yield running
    stop_engine(running)


def counted(engine: RunningEngine, name: str) -> float:
    lines = httpx.get(f"{engine.url}/metrics").text.splitlines()
    name = f"vllm:spec_decode_num_{name}_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def modules_of(base: Path) -> dict[str, tuple[int, int]]:
    return BaseShapes.of(json.loads((base / "config.json").read_text())).modules()


def likeliest(reference: Reference, prompt: list[int], answer: list[int]) -> list[int]:
    """Return the reference's first choice at each place of an answer."""
    with torch.no_grad():
        choices = reference.model(torch.tensor([prompt + answer])).logits[0].argmax(-1)
    return choices[len(prompt) - 1 : -1].tolist()


def test_answers_with_an_adapter_are_those_of_the_reference(drafting: RunningEngine, tiny_base: Path):
    """Greedy tokens are the reference's, and what is sampled has the reference's log-probabilities."""
    tensors = random_adapter(modules_of(tiny_base), 7)
    name = drafting.publish("drafts", tensors, 8)
    references = {name: Reference(tiny_base, tensors), drafting.base_name: Reference(tiny_base, None)}
    requests = [(model, prompt) for model in references for prompt in PROMPTS]
    answers = asyncio.run(ask(drafting, requests, tokens=32))
    assert differences(requests, answers, references).max() < TOLERANCE
    for (model, prompt), answer in zip(requests, answers, strict=True):
        assert answer["ids"] == likeliest(references[model], prompt, answer["ids"])
    assert counted(drafting, "accepted_tokens") > 0
    before = counted(drafting, "accepted_tokens")
    # So cold that even this base repeats itself, or nothing would be drafted.
    sampling = Sampling(8, 32, temperature=0.1, seed=3)
    groups = sample_groups(drafting.url, drafting.key, name, PROMPTS, sampling)
    assert counted(drafting, "accepted_tokens") > before
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for sample in group:
            want = references[name].logprobs(prompt, list(sample.tokens))
            assert (torch.tensor(sample.logprobs) - want).abs().max() < TOLERANCE
    assert sample_groups(drafting.url, drafting.key, name, PROMPTS, sampling) == groups
