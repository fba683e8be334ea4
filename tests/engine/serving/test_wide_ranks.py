"""The widest ranks that vLLM takes are served as transformers computes them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.base.families import BaseShapes
from engine.publishing.peft_process import logprobs
from tests.helpers.live import start_engine, stop_engine
from tests.helpers.parity import merge, random_adapter

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(600)]
TOKENS = [7, 8, 9, 10, 55, 91]


@pytest.mark.parametrize("rank", [256, 512])
def test_an_adapter_of_a_wide_rank_is_served_as_it_is(tiny_base, tmp_path, rank):
    running = start_engine(tiny_base, tmp_path / "state", wait_s=600, slots=2, max_rank=rank, dtype="float32")
    try:
        tensors = random_adapter(BaseShapes.read(tiny_base).modules(), 5, rank=rank, size=0.02)
        name = running.publish("wide", tensors, rank)
        body = {
            "model": name,
            "prompt": TOKENS,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 0,
        }
        with running.client() as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(TOKENS)]
    finally:
        stop_engine(running)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32).eval()
    (plain,) = logprobs(model, [TOKENS])
    with torch.no_grad():
        merge(model, tensors)
    (expected,) = logprobs(model, [TOKENS])
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-3)
    assert not torch.allclose(torch.tensor(plain), torch.tensor(expected), atol=0.05)
