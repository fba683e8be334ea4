"""Rollouts: groups of samples for many prompts in one request, token ids in and out.

Talks to vLLM's engine as its OpenAI routes do, without what a rollout has no use for: one request a prompt,
top alternatives, each token's text, a message for each token. A prompt's group has a seed of its own, so that
a request is the same whatever is asked beside it. A prompt that is refused, or a client that goes away, ends
the whole request. Knows nothing of training.
"""

import asyncio
import math
import uuid
from typing import Any, Self

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.serial_utils import numpy2base64

from engine.serving.vllm_plugin.extra_args import COALESCED, ROUTED_EXPERTS

# Samples of one request: all of them are in the engine's queue, and in its answer, at once.
MAX_SAMPLES = 1 << 14
# Where policies that train side by side gain most on a CPU, by `bench concurrency`: more than with 48, and
# far more than without a limit. Beside fewer rows, those that come next share too little.
FEW_ROWS = 96


class Rollouts(BaseModel):
    """What to sample: `n` completions of each prompt; the group of prompt i is seeded by seed + i * n."""

    model_config = ConfigDict(extra="forbid")
    model: str
    prompts: list[list[int]] = Field(min_length=1)
    n: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0)
    seed: int = Field(0, ge=0)
    routed_experts: bool = False

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (samples := len(self.prompts) * self.n) > MAX_SAMPLES:
            raise ValueError(f"{samples} samples are asked for, and a request may have {MAX_SAMPLES}")
        return self


class RolloutGate:
    """Lets requests in together: those that come while others run begin when few of their samples are left.

    Where a step's time grows with its rows, requests that run side by side end side by side: every policy
    samples, then every one learns, and the engine waits. So those that run come first, and their few long
    samples share steps with those that come next. Nobody is passed: all that wait are let in at once. A
    group ends as a whole, so its samples count until its last one; one group alone keeps nobody out.
    """

    def __init__(self, few: float):
        self.few, self.groups, self.samples, self._open = few, 0, 0, asyncio.Event()
        self._open.set()

    async def enter(self, groups: int, each: int) -> None:
        """Wait for one's turn and count so many groups of so many samples."""
        await self._open.wait()
        self._count(groups, each)

    def leave(self, each: int) -> None:
        """Count off a group that has ended."""
        self._count(-1, each)

    def _count(self, groups: int, each: int) -> None:
        self.groups += groups
        self.samples += groups * each
        if self.samples <= self.few or self.groups <= 1:
            self._open.set()
        else:
            self._open.clear()


def gate_of_platform() -> RolloutGate:
    """Return the gate of a CPU; a GPU's step takes as long for a few rows as for many, and holds all."""
    return RolloutGate(FEW_ROWS if current_platform.is_cpu() else math.inf)


@with_cancellation
async def rollouts(body: Rollouts, raw_request: Request) -> Response:
    """Answer each prompt's samples, in the prompts' order.

    A prompt that the model cannot take is a 400, an adapter that the engine does not hold a 404, a sample
    that it gave up a 500.
    """
    state = raw_request.app.state
    models = state.openai_serving_models
    lora = models.lora_requests.get(body.model)
    if lora is None and not models.is_base_model(body.model):
        return _refused(404, f"The engine holds no adapter {body.model!r}. Ask again, or for another one.")
    gate: RolloutGate = state.graftwork_gate
    await gate.enter(len(body.prompts), body.n)
    asked = [
        asyncio.create_task(_group(state.engine_client, body, lora, number))
        for number in range(len(body.prompts))
    ]
    for task in asked:
        task.add_done_callback(lambda _: gate.leave(body.n))
    try:
        groups = await asyncio.gather(*asked)
    except ValueError as error:
        return _refused(400, str(error))
    finally:
        # What is still under way when one is refused would be drawn for nobody.
        for task in asked:
            task.cancel()
    samples = [sample for group in groups for sample in group.outputs]
    if any(sample.finish_reason == "error" for sample in samples):
        return _refused(500, f"The engine gave up a sample of {body.model}; its log says why.")
    tokenizer = state.engine_client.get_tokenizer()
    texts = tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)
    told = [_told(sample, text) for sample, text in zip(samples, texts, strict=True)]
    usage = {
        "prompt_tokens": sum(map(len, body.prompts)),
        "completion_tokens": sum(len(sample.token_ids) for sample in samples),
    }
    found = [told[start : start + body.n] for start in range(0, len(told), body.n)]
    return Response(orjson.dumps({"groups": found, "usage": usage}), media_type="application/json")


async def _group(engine: Any, body: Rollouts, lora: LoRARequest | None, number: int) -> RequestOutput:
    params = SamplingParams(
        n=body.n,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        # vLLM adds a sample's number within the group to the seed.
        seed=body.seed + number * body.n,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={ROUTED_EXPERTS: int(body.routed_experts), COALESCED: 1},
    )
    prompt = TokensPrompt(prompt_token_ids=body.prompts[number])
    answers = engine.generate(prompt, params, f"rollout-{uuid.uuid4().hex}", lora_request=lora)
    *_, last = [answer async for answer in answers]
    return last  # type: ignore[no-any-return]


def _told(sample: CompletionOutput, text: str) -> dict[str, Any]:
    # Without alternatives there is one log-probability a token, the sampled one's.
    assert isinstance(sample.logprobs, FlatLogprobs)
    told: dict[str, Any] = {
        "tokens": list(sample.token_ids),
        "logprobs": sample.logprobs.logprobs,
        "text": text,
        "truncated": sample.finish_reason == "length",
    }
    if sample.routed_experts is not None:
        told["routed_experts"] = numpy2base64(sample.routed_experts)
    return told


def _refused(status: int, message: str) -> Response:
    body = {"error": {"message": message, "type": "RolloutError", "code": status}}
    return Response(orjson.dumps(body), status, media_type="application/json")
