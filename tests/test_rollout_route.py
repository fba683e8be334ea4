"""The route for rollouts before a fake engine: what it refuses, and what it gives up."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fastapi import Response
from vllm.lora.request import LoRARequest

from engine.serving.rollouts import Rollouts, rollouts

ADAPTER = LoRARequest(lora_name="sums@123456789abc", lora_int_id=1, lora_path="graftwork:sums")


class Engine:
    """Notes what it is asked, and by which adapter; a sample ends when the test says so, if ever."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.aborted = 0

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: LoRARequest | None
    ) -> AsyncIterator[Any]:
        self.asked.append(lora_request and lora_request.lora_name)
        sample = SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="error", routed_experts=None)
        yield SimpleNamespace(outputs=[sample] * params.n)


def state_of(engine: Engine) -> Any:
    models = SimpleNamespace(
        lora_requests={ADAPTER.lora_name: ADAPTER}, is_base_model=lambda name: name == "tiny"
    )
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models, engine_client=engine))
    return SimpleNamespace(app=app)


def ask(engine: Engine, model: str) -> Response:
    body = Rollouts(model=model, prompts=[[40, 41]], n=2, max_tokens=4)
    return asyncio.run(rollouts(body, state_of(engine)))


def test_an_adapter_that_is_not_there_is_not_the_base() -> None:
    engine = Engine()
    answer = ask(engine, "sums@000000000000")
    assert (answer.status_code, engine.asked) == (404, [])
    assert b"holds no adapter 'sums@000000000000'" in answer.body
    for model in (ADAPTER.lora_name, "tiny"):
        ask(engine, model)
    assert engine.asked == [ADAPTER.lora_name, None]
