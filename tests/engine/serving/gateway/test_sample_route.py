"""The route for samples before a fake engine: what it refuses, and what it gives up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response
from pydantic import ValidationError
from vllm.lora.request import LoRARequest

from engine.serving.gateway.samples import MAX_SAMPLES, RolloutGate, Samples, samples

ADAPTER = LoRARequest(lora_name="sums@123456789abc", lora_int_id=1, lora_path="graftwork:sums")
ENDLESS, WRONG = 8, 9


class Engine:
    """Notes by which adapter it is asked, and what was ended; some first tokens are endless or wrong."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.ended = 0

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: LoRARequest | None, priority: int
    ) -> AsyncIterator[Any]:
        self.asked.append(lora_request and lora_request.lora_name)
        first = prompt["prompt_token_ids"][0]
        try:
            await asyncio.sleep(600 if first == ENDLESS else 0)
        except asyncio.CancelledError:
            self.ended += 1
            raise
        if first == WRONG:
            raise ValueError("Token id 9 is out of vocabulary.")
        sample = SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="error", routed_experts=None)
        yield SimpleNamespace(outputs=[sample] * params.n)


async def ask(
    engine: Engine,
    model: str,
    *prompts: list[int],
    gone: asyncio.Event | None = None,
    gate: RolloutGate | None = None,
) -> Response | None:
    """Ask, as a client that goes away once `gone` is set."""
    models = SimpleNamespace(
        lora_requests={ADAPTER.lora_name: ADAPTER}, is_base_model=lambda name: name == "tiny"
    )

    async def receive() -> dict[str, str]:
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    parts = {
        "openai_serving_models": models,
        "engine_client": engine,
        "graftwork_gate": gate or RolloutGate(4),
    }
    app = SimpleNamespace(state=SimpleNamespace(**parts))
    body = Samples(model=model, prompts=list(prompts), n=2, max_tokens=4)
    answer = await samples(body, SimpleNamespace(app=app, receive=receive, headers={}))
    # What was cancelled ends in the loop's next round.
    await asyncio.sleep(0)
    return answer


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, at most a minute."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


async def test_an_adapter_that_is_not_there_is_not_the_base() -> None:
    engine = Engine()
    answer = await ask(engine, "sums@000000000000", [40, 41])
    assert answer is not None
    assert (answer.status_code, engine.asked) == (404, [])
    assert b"'sums@000000000000'" in answer.body
    for model in (ADAPTER.lora_name, "tiny"):
        await ask(engine, model, [40, 41])
    assert engine.asked == [ADAPTER.lora_name, None]


async def test_a_refused_prompt_ends_the_others() -> None:
    engine = Engine()
    answer = await asyncio.wait_for(ask(engine, "tiny", [ENDLESS], [WRONG], [ENDLESS]), 60)
    assert answer is not None
    assert (answer.status_code, engine.ended) == (400, 2)
    assert b"out of vocabulary" in answer.body


async def test_a_client_that_goes_away_ends_its_samples() -> None:
    engine, gone = Engine(), asyncio.Event()
    asked = asyncio.create_task(ask(engine, "tiny", [ENDLESS], [ENDLESS], gone=gone))
    await until(lambda: len(engine.asked) == 2)
    gone.set()
    assert await asyncio.wait_for(asked, 20) is None
    await until(lambda: engine.ended == 2)


class WatchedGate(RolloutGate):
    """A gate that says how many wait at it."""

    waiting = 0

    async def enter(self, groups: int, each: int) -> None:
        self.waiting += 1
        try:
            await super().enter(groups, each)
        finally:
            self.waiting -= 1


async def test_requests_wait_until_few_samples_of_those_before_are_left() -> None:
    engine, gate, gone = Engine(), WatchedGate(4), [asyncio.Event() for _ in range(4)]

    def start(number: int, groups: int) -> "asyncio.Task[Response | None]":
        prompts = [[ENDLESS]] * groups
        return asyncio.create_task(ask(engine, "tiny", *prompts, gone=gone[number], gate=gate))

    # Two samples a group: six of the first are more than four, so that the others wait until it is gone.
    tasks = [start(0, 3)]
    await until(lambda: len(engine.asked) == 3)
    tasks += [start(1, 3), start(2, 1), start(3, 4)]
    await until(lambda: gate.waiting == 3)
    # Who goes away while waiting takes no place.
    gone[3].set()
    await until(lambda: gate.waiting == 2)
    assert (len(engine.asked), gate.groups, gate.samples) == (3, 3, 6)
    # Those that wait come in together, also those that would not have come after one another.
    gone[0].set()
    await until(lambda: len(engine.asked) == 7)
    assert (engine.ended, gate.groups, gate.samples) == (3, 4, 8)
    for event in gone:
        event.set()
    await asyncio.gather(*tasks)
    await until(lambda: engine.ended == 7)
    assert (gate.groups, gate.samples) == (0, 0)


async def test_a_group_alone_keeps_nobody_out() -> None:
    gate = RolloutGate(4)
    await gate.enter(1, 64)
    async with asyncio.timeout(20):
        await gate.enter(2, 1)
    third = asyncio.create_task(gate.enter(1, 1))
    await asyncio.sleep(0)
    assert not third.done()
    gate.leave(64)
    await asyncio.wait_for(third, 20)


def test_a_request_has_so_many_samples_and_no_more() -> None:
    each = MAX_SAMPLES // 4
    Samples(model="tiny", prompts=[[1]] * 4, n=each, max_tokens=1)
    for prompts, n in (([[1]] * 5, each), ([[1]] * 4, each + 1)):
        with pytest.raises(ValidationError, match=f"samples.*{MAX_SAMPLES}"):
            Samples(model="tiny", prompts=prompts, n=n, max_tokens=1)
