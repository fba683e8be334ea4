"""Samples of one prompt from the real engine: stops, seeds, and log-probabilities that are the trainer's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.base.families import BaseShapes
from engine.clients.engine import EngineClient
from engine.errors import ConfigError, NotFound
from engine.training.model.lora import ResidentBase
from engine.training.sample_groups import Sampling, sample_groups
from tests.helpers.live import RunningEngine
from tests.helpers.parity import RANK, prompts, random_adapter

PROMPT = prompts(1)[0]


@pytest.fixture(scope="module")
def tensors(engine: RunningEngine) -> dict[str, torch.Tensor]:
    return random_adapter(BaseShapes.read(engine.base_path).modules(), 41)


@pytest.fixture(scope="module")
def name(engine: RunningEngine, tensors: dict[str, torch.Tensor]) -> str:
    return engine.publish("sampled", tensors, RANK)


def ask(engine: RunningEngine, model: str, **body) -> dict:
    with EngineClient(engine.url, engine.key, "rollout", timeout_s=120) as client:
        return client.samples({"model": model, "prompt": PROMPT, "max_tokens": 8, "seed": 5} | body)


def test_samples_are_those_of_a_rollout(engine: RunningEngine, name: str) -> None:
    for model in (name, engine.base_name):
        found = ask(engine, model, n=3)
        drawn = sample_groups(engine.url, engine.key, model, [PROMPT], Sampling(3, 8, seed=5))[0]
        assert [one["tokens"] for one in found["samples"]] == [list(one.tokens) for one in drawn]
        assert [one["logprobs"] for one in found["samples"]] == [list(one.logprobs) for one in drawn]
        count = sum(len(one.tokens) for one in drawn)
        assert found["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": count}
        assert found["prompt_logprobs"] is found["topk_prompt_logprobs"] is None
    assert ask(engine, name, seed=None)["samples"][0]["tokens"]
    top = [ask(engine, name, seed=seed, top_k=1)["samples"][0]["tokens"] for seed in (1, 2)]
    assert top[0] == top[1] == ask(engine, name, top_p=1e-6)["samples"][0]["tokens"]


def test_a_sample_ends_with_what_stops_it(engine: RunningEngine, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.base_path)
    whole = ask(engine, name, stop=[], max_tokens=24)["samples"][0]
    assert (len(whole["tokens"]), whole["stop_reason"]) == (24, "length")
    for number in (3, 9):
        token = whole["tokens"][number]
        end = whole["tokens"].index(token) + 1
        cut = ask(engine, name, stop=[token], max_tokens=24)["samples"][0]
        assert cut["tokens"] == whole["tokens"][:end]
        assert cut["logprobs"] == whole["logprobs"][:end]
        assert cut["stop_reason"] == "stop"
        text = next(one for one in map(tokenizer.decode, whole["tokens"][number:]) if one.isascii())
        by_text = ask(engine, name, stop=[text], max_tokens=24)["samples"][0]
        assert text in tokenizer.decode(by_text["tokens"])
        assert text not in tokenizer.decode(by_text["tokens"][:-1])
        assert by_text["tokens"] == whole["tokens"][: len(by_text["tokens"])]
    # Without max_tokens it ends at a stop, or where the context does.
    assert (
        ask(engine, name, stop=[whole["tokens"][3]], max_tokens=None)["samples"][0]["stop_reason"] == "stop"
    )


def test_a_prompt_s_logprobs_are_the_trainer_s(
    engine: RunningEngine, name: str, tensors: dict[str, torch.Tensor]
) -> None:
    from engine.training.model.packing import TokenRow

    base = ResidentBase(engine.base_path, threads=1, microbatch_tokens=256)
    for model, adapter in ((name, base.hold(tensors)), (engine.base_name, None)):
        found = ask(engine, model, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=4)
        first, *told = found["prompt_logprobs"]
        assert (first, found["topk_prompt_logprobs"][0]) == (None, None)
        want = base.score(adapter, [TokenRow(tuple(PROMPT), 1)])[0]
        assert told == pytest.approx(want, abs=1e-3)
        for own, token, best in zip(told, PROMPT[1:], found["topk_prompt_logprobs"][1:], strict=True):
            values = [value for _, value in best]
            assert len({token for token, _ in best}) == 4
            assert values == sorted(values, reverse=True)
            assert dict(best).get(token, own) == own <= values[0]
        whole = (*PROMPT, *found["samples"][0]["tokens"])
        trained = base.score(adapter, [TokenRow(whole, len(PROMPT))])[0]
        assert found["samples"][0]["logprobs"] == pytest.approx(trained, abs=1e-3)
        alone = ask(engine, model, max_tokens=1, topk_prompt_logprobs=4)
        assert alone["prompt_logprobs"] is None
        assert alone["topk_prompt_logprobs"] == found["topk_prompt_logprobs"]


def test_single_requests_at_once_draw_what_each_draws_alone(engine: RunningEngine, name: str) -> None:
    alone = [ask(engine, name, seed=seed)["samples"] for seed in range(8)]
    with ThreadPoolExecutor(40) as threads:
        found = list(threads.map(lambda number: ask(engine, name, seed=number % 8)["samples"], range(40)))
    for number, samples in enumerate(found):
        assert samples[0]["tokens"] == alone[number % 8][0]["tokens"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1 << 30]}, "out of vocabulary"),
        ({"stop": ["a", 5]}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs"),
        ({"cache_salt": "theirs"}, "'cache_salt'"),
    ],
)
def test_what_cannot_be_sampled_is_named(engine: RunningEngine, name: str, body: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=f"samples.*{says}"):
        ask(engine, name, **body)


def test_an_unknown_model_is_not_the_base(engine: RunningEngine) -> None:
    with pytest.raises(NotFound):
        ask(engine, "nobody")
