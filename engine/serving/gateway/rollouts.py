"""The rollout endpoint: groups of samples for many prompts in one request, token ids in and out.

It calls vLLM's engine as the OpenAI routes do, but omits what a rollout does not need: an HTTP request for
each prompt, top alternatives, each token's text, a message for each token. Each prompt's group has its own
seed, so its samples do not depend on the rest of the batch. One refused prompt, or a client that
disconnects, ends the whole request.
"""

import asyncio
import math
import uuid
from collections.abc import Sequence
from typing import Any, Protocol, Self

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

# Most samples of one request: all of them are in the engine's queue, and then in one response, at once.
MAX_SAMPLES = 1 << 14
# Best on a CPU for policies that train in parallel, by `bench concurrency`: better than 48, and far better
# than no limit. With fewer rows, the requests that start next share too few steps.
FEW_ROWS = 96


class Rollouts(BaseModel):
    """Body of the request: `n` completions of each prompt (token ids); prompt i has seed `seed + i * n`."""

    model_config = ConfigDict(extra="forbid")
    model: str
    prompts: list[list[int]] = Field(min_length=1)
    n: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0)
    seed: int = Field(0, ge=0)
    routed_experts: bool = False
    # Set by the gateway.
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (samples := len(self.prompts) * self.n) > MAX_SAMPLES:
            raise ValueError(f"{samples} samples were requested, but a request may have {MAX_SAMPLES}")
        return self

    def params(self, number: int) -> SamplingParams:
        """Return vLLM's settings for prompt `number`."""
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            # vLLM adds the sample's index in the group to the seed.
            seed=self.seed + number * self.n,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={ROUTED_EXPERTS: int(self.routed_experts), COALESCED: 1},
        )


class GroupRequest(Protocol):
    """A request for `n` samples of each prompt."""

    model: str
    n: int
    cache_salt: str | None

    def params(self, number: int) -> SamplingParams: ...


class RolloutGate:
    """Admits rollout requests in batches: new ones wait until at most `few` running samples are left.

    Where a step's time grows with its rows, parallel requests end together: all policies sample, then all
    train while the engine idles. With the gate, running requests finish first, and their few long samples
    share steps with the next batch. No request starves: all that wait are admitted at once. A group's
    samples count until the whole group has ended; a single group never keeps the gate closed.
    """

    def __init__(self, few: float):
        self.few, self.groups, self.samples, self._open = few, 0, 0, asyncio.Event()
        self._open.set()

    async def enter(self, groups: int, each: int) -> None:
        """Wait for admission, then count `groups` groups of `each` samples as running."""
        await self._open.wait()
        self._count(groups, each)

    def leave(self, each: int) -> None:
        """Stop counting one group of `each` samples: it has ended."""
        self._count(-1, each)

    def _count(self, groups: int, each: int) -> None:
        self.groups += groups
        self.samples += groups * each
        if self.samples <= self.few or self.groups <= 1:
            self._open.set()
        else:
            self._open.clear()


def gate_of_platform() -> RolloutGate:
    """Return this platform's gate: limited on a CPU, open on a GPU, whose steps barely slow with rows."""
    return RolloutGate(FEW_ROWS if current_platform.is_cpu() else math.inf)


@with_cancellation
async def rollouts(body: Rollouts, raw_request: Request) -> Response:
    """Sample every prompt and return the groups in the prompts' order. Responds as `sample_groups`."""
    groups = await sample_groups(raw_request, body, body.prompts)
    if isinstance(groups, Response):
        return groups
    samples = [sample for group in groups for sample in group.outputs]
    tokenizer = raw_request.app.state.engine_client.get_tokenizer()
    texts = tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)
    told = [_told(sample, text) for sample, text in zip(samples, texts, strict=True)]
    groups_of_samples = [told[start : start + body.n] for start in range(0, len(told), body.n)]
    answer = {"groups": groups_of_samples, "usage": usage_of(body.prompts, groups)}
    return Response(orjson.dumps(answer), media_type="application/json")


async def sample_groups(
    request: Request, body: GroupRequest, prompts: Sequence[list[int]]
) -> list[RequestOutput] | Response:
    """Sample each prompt (token ids) behind the gate; return vLLM's outputs in the prompts' order.

    Returns a response instead: 400 for a prompt that the model cannot take, 404 for an adapter that is not in
    the engine, and 500 when the engine aborted a sample. One refused prompt ends the whole request.
    """
    state = request.app.state
    models, gate = state.openai_serving_models, state.graftwork_gate
    lora = models.lora_requests.get(body.model)
    if lora is None and not models.is_base_model(body.model):
        return _refused(404, f"Adapter {body.model!r} is not in the engine. Repeat the request.")
    priority = int(request.headers.get("x-vllm-priority", 0))
    await gate.enter(len(prompts), body.n)
    asked = [
        asyncio.create_task(_group(state.engine_client, body, prompt, number, lora, priority))
        for number, prompt in enumerate(prompts)
    ]
    for task in asked:
        task.add_done_callback(lambda _: gate.leave(body.n))
    try:
        groups = await asyncio.gather(*asked)
    except ValueError as error:
        return _refused(400, str(error))
    finally:
        # When one prompt fails, the other groups are no longer needed.
        for task in asked:
            task.cancel()
    if any(sample.finish_reason == "error" for group in groups for sample in group.outputs):
        return _refused(500, f"The engine aborted a sample of {body.model}; its log has the cause.")
    return groups


async def _group(
    engine: Any, body: GroupRequest, tokens: list[int], number: int, lora: LoRARequest | None, priority: int
) -> RequestOutput:
    prompt = TokensPrompt(prompt_token_ids=tokens)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    name = f"group-{uuid.uuid4().hex}"
    answers = engine.generate(prompt, body.params(number), name, lora_request=lora, priority=priority)
    *_, last = [answer async for answer in answers]
    return last  # type: ignore[no-any-return]


def usage_of(prompts: Sequence[list[int]], groups: Sequence[RequestOutput]) -> dict[str, int]:
    """Return the tokens of all prompts and of all their samples."""
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": sum(len(sample.token_ids) for group in groups for sample in group.outputs),
    }


def _refused(status: int, message: str) -> Response:
    body = {"error": {"message": message, "type": "RolloutError", "code": status}}
    return Response(orjson.dumps(body), status, media_type="application/json")


def _told(sample: CompletionOutput, text: str) -> dict[str, Any]:
    # With logprobs=0 vLLM returns one log-probability for each token: that of the sampled one.
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
