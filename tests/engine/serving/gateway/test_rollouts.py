"""Rollouts from the real engine: the same samples as its OpenAI route gives, alone or beside others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from engine.base.families import BaseShapes
from engine.errors import ConfigError, NotFound
from engine.training.sample_groups import Sample, Sampling, sample_groups
from tests.helpers.live import RunningEngine
from tests.helpers.parity import RANK, prompts, random_adapter

SAMPLING = Sampling(group_size=4, max_tokens=8, seed=11)


@pytest.fixture(scope="module")
def names(engine: RunningEngine) -> list[str]:
    """Three policies' revisions, and the base."""
    modules = BaseShapes.read(engine.base_path).modules()
    made = [engine.publish(f"rolled-{i}", random_adapter(modules, i), RANK) for i in range(3)]
    return [*made, engine.base_name]


def sampled(engine: RunningEngine, model: str, sampling: Sampling = SAMPLING) -> list[list[Sample]]:
    return sample_groups(engine.url, engine.key, model, prompts(6), sampling)


def test_samples_are_those_of_the_openai_route(engine: RunningEngine, names: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.base_path)
    for model in names:
        groups = sampled(engine, model)
        for number, (prompt, group) in enumerate(zip(prompts(6), groups, strict=True)):
            body = {
                "model": model, "prompt": prompt, "n": 4, "max_tokens": 8, "temperature": 1.0, "logprobs": 0,
                "seed": 11 + 4 * number, "return_token_ids": True,
            }  # fmt: skip
            with engine.client() as client:
                choices = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            for sample, choice in zip(group, choices, strict=True):
                assert list(sample.tokens) == choice["token_ids"]
                assert list(sample.logprobs) == choice["logprobs"]["token_logprobs"]
                # Of random bytes vLLM's text, made token by token, begins with what the prompt left open.
                assert sample.text == tokenizer.decode(sample.tokens, skip_special_tokens=True)
                assert sample.truncated == (choice["finish_reason"] == "length")
    # The adapters are no copies of each other, nor are the groups.
    assert len({str(sampled(engine, model)) for model in names}) == len(names)


def test_a_policy_draws_the_same_alone_and_beside_others(engine: RunningEngine, names: list[str]) -> None:
    alone = [sampled(engine, model) for model in names]
    ready = threading.Barrier(2 * len(names))

    def beside(model: str, seed: int) -> list[list[Sample]]:
        ready.wait(30)
        return sampled(engine, model, replace(SAMPLING, seed=seed))

    with ThreadPoolExecutor(2 * len(names)) as pool:
        others = [pool.submit(beside, model, 100 + i) for i, model in enumerate(names)]
        found = list(pool.map(beside, names, [SAMPLING.seed] * len(names)))
    assert found == alone
    assert [other.result() for other in others] != alone


def test_prompts_that_no_step_holds_are_computed_in_parts(engine: RunningEngine, names: list[str]) -> None:
    """vLLM puts 2,048 tokens into a step; a seeded sample is the same whatever part its prompt fell in."""
    long = [[40 + (7 * i + k) % 200 for k in range(180)] for i in range(8)]
    found = sample_groups(engine.url, engine.key, names[0], long, SAMPLING)
    for number, prompt in enumerate(long):
        seed = SAMPLING.seed + number * SAMPLING.group_size
        alone = sample_groups(engine.url, engine.key, names[0], [prompt], replace(SAMPLING, seed=seed))
        assert found[number] == alone[0]


def test_what_was_cut_off_says_so(engine: RunningEngine, names: list[str]) -> None:
    groups = sampled(engine, names[0], replace(SAMPLING, max_tokens=1))
    ends = {sample.truncated for group in groups for sample in group}
    assert all(len(sample.tokens) == 1 for group in groups for sample in group)
    assert True in ends


def test_faults_are_told_apart(engine: RunningEngine) -> None:
    with pytest.raises(NotFound, match="'nobody@123456789abc'"):
        sampled(engine, "nobody@123456789abc")
    with pytest.raises(ConfigError, match=r"400.*engine\.max_model_len"):
        sample_groups(engine.url, engine.key, engine.base_name, [[40] * 5000], SAMPLING)
    with pytest.raises(ConfigError, match="with 401"):
        sample_groups(engine.url, "gw-wrong", engine.base_name, prompts(1), SAMPLING)
    # Ids outside the vocabulary would read another row's memory.
    with pytest.raises(ConfigError, match=r"400.*engine\.max_model_len"):
        sample_groups(engine.url, engine.key, engine.base_name, [[40, 10**6]], SAMPLING)
