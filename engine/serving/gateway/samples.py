"""The endpoint for samples with any settings: token ids in and out, stops, prompts' log-probabilities.

The loop asks for groups of samples of many prompts in one request, training scripts of other programs mostly
for one prompt's. It calls vLLM's engine as the OpenAI routes do, but omits what nobody asks for: an HTTP
request for each prompt, top alternatives, each token's text, a message for each token. Each prompt's group
has its own seed, so its samples do not depend on the rest of the batch. One refused prompt, or a client that
disconnects, ends the whole request.
"""

import asyncio
import math
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Self

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
# vLLM's own limit of alternatives for a token, and the gateway's of stop texts.
MOST_ALTERNATIVES = 20
MOST_STOPS = 64
Text = Annotated[str, Field(min_length=1, max_length=4096)]


class Samples(BaseModel):
    """Body of the request: `n` completions of one prompt (token ids), or of each of several.

    `max_tokens` None: what the base's context leaves. `seed` None: another one each time; of several prompts
    number i has `seed + i * n`. `stop` None: the end token ends; texts or token ids: these end too; empty:
    nothing ends but `max_tokens`. `texts` and `routed_experts`: return each sample's text, and its experts.
    """

    model_config = ConfigDict(extra="forbid")
    model: str
    prompt: list[int] | None = Field(None, min_length=1)
    prompts: list[Annotated[list[int], Field(min_length=1)]] | None = Field(None, min_length=1)
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: (
        Annotated[list[Text], Field(max_length=MOST_STOPS)]
        | Annotated[list[int], Field(max_length=MOST_STOPS)]
        | None
    ) = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)
    texts: bool = False
    routed_experts: bool = False
    # Set by the gateway.
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give `prompt` or `prompts`")
        if (samples := len(self.prompts or (0,)) * self.n) > MAX_SAMPLES:
            raise ValueError(f"{samples} samples were requested, but a request may have {MAX_SAMPLES}")
        return self

    def params(self, number: int) -> SamplingParams:
        """Return vLLM's settings for prompt `number`.

        A stop text is looked for token by token; else only the end is told.
        """
        texts = [one for one in self.stop or () if isinstance(one, str)]
        asks = self.prompt_logprobs or self.topk_prompt_logprobs
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            # vLLM adds the sample's index in the group to the seed.
            seed=None if self.seed is None else self.seed + number * self.n,
            stop=texts,
            stop_token_ids=[one for one in self.stop or () if isinstance(one, int)],
            ignore_eos=self.stop == [],
            logprobs=0,
            prompt_logprobs=self.topk_prompt_logprobs if asks else None,
            flat_logprobs=True,
            detokenize=bool(texts),
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={ROUTED_EXPERTS: int(self.routed_experts), COALESCED: int(not texts)},
        )


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
async def samples(body: Samples, raw_request: Request) -> Response:
    """Sample each prompt. The answer to `prompts` has a group for each; that to `prompt` is a group.

    Responds as `_sample_groups`.
    """
    prompts = body.prompts or [body.prompt or []]
    groups = await _sample_groups(raw_request, body, prompts)
    if isinstance(groups, Response):
        return groups
    told = [[_told(sample) for sample in group.outputs] for group in groups]
    if body.texts:
        every = [sample for samples in told for sample in samples]
        tokenizer = raw_request.app.state.engine_client.get_tokenizer()
        texts = tokenizer.batch_decode([sample["tokens"] for sample in every], skip_special_tokens=True)
        for sample, text in zip(every, texts, strict=True):
            sample["text"] = text
    answers = [
        {"samples": samples, **_of_prompt(body, group)} for samples, group in zip(told, groups, strict=True)
    ]
    whole: dict[str, Any] = {"groups": answers} if body.prompts else answers[0]
    answer = {**whole, "usage": _usage_of(prompts, groups)}
    return Response(orjson.dumps(answer), media_type="application/json")


async def _sample_groups(
    request: Request, body: Samples, prompts: Sequence[list[int]]
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
    engine: Any, body: Samples, tokens: list[int], number: int, lora: LoRARequest | None, priority: int
) -> RequestOutput:
    prompt = TokensPrompt(prompt_token_ids=tokens)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    name = f"group-{uuid.uuid4().hex}"
    answers = engine.generate(prompt, body.params(number), name, lora_request=lora, priority=priority)
    *_, last = [answer async for answer in answers]
    return last  # type: ignore[no-any-return]


def _usage_of(prompts: Sequence[list[int]], groups: Sequence[RequestOutput]) -> dict[str, int]:
    """Return the tokens of all prompts and of all their samples."""
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": sum(len(sample.token_ids) for group in groups for sample in group.outputs),
    }


def _refused(status: int, message: str) -> Response:
    body = {"error": {"message": message, "type": "SampleError", "code": status}}
    return Response(orjson.dumps(body), status, media_type="application/json")


def _told(sample: CompletionOutput) -> dict[str, Any]:
    # With logprobs=0 vLLM returns one log-probability for each token: that of the sampled one.
    assert isinstance(sample.logprobs, FlatLogprobs)
    told: dict[str, Any] = {
        "tokens": list(sample.token_ids),
        "logprobs": sample.logprobs.logprobs,
        "stop_reason": "length" if sample.finish_reason == "length" else "stop",
    }
    if sample.routed_experts is not None:
        told["routed_experts"] = numpy2base64(sample.routed_experts)
    return told


def _of_prompt(body: Samples, answer: RequestOutput) -> dict[str, Any]:
    """Return the prompt's log-probabilities and their alternatives, None where there are none."""
    logprobs = answer.prompt_logprobs
    own: list[float | None] | None = None
    others: list[list[tuple[int, float]] | None] | None = None
    if isinstance(logprobs, FlatLogprobs):
        # A position's first entry is the prompt's token, then come the most likely ones; the first has none.
        spans = list(zip(logprobs.start_indices, logprobs.end_indices, strict=True))
        own = [logprobs.logprobs[begin] if begin < end else None for begin, end in spans]
        if body.topk_prompt_logprobs:
            pairs = list(zip(logprobs.token_ids, logprobs.logprobs, strict=True))
            others = [pairs[begin + 1 : end] if begin < end else None for begin, end in spans]
    return {"prompt_logprobs": own if body.prompt_logprobs else None, "topk_prompt_logprobs": others}
