"""The endpoint for samples with any settings: token ids in and out, stops, prompts' log-probabilities.

What `rollouts` samples for the loop, this samples for training scripts of other programs: one prompt, or
several with the same settings. Hundreds of these requests share the gate and the engine's steps.
"""

from typing import Annotated, Any, Self

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from engine.serving.gateway.rollouts import MAX_SAMPLES, sample_groups, usage_of
from engine.serving.vllm_plugin.extra_args import COALESCED

# vLLM's own limit of alternatives for a token, and the gateway's of stop texts.
MOST_ALTERNATIVES = 20
MOST_STOPS = 64
Text = Annotated[str, Field(min_length=1, max_length=4096)]


class Samples(BaseModel):
    """Body of the request: `n` completions of one prompt (token ids), or of each of several.

    `max_tokens` None: what the base's context leaves. `seed` None: another one each time; of several prompts
    number i has `seed + i * n`. `stop` None: the end token ends; texts or token ids: these end too; empty:
    nothing ends but `max_tokens`.
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
            extra_args={} if texts else {COALESCED: 1},
        )


@with_cancellation
async def samples(body: Samples, raw_request: Request) -> Response:
    """Sample each prompt. The answer to `prompts` has a group for each; that to `prompt` is a group.

    Responds as `sample_groups`.
    """
    prompts = body.prompts or [body.prompt or []]
    groups = await sample_groups(raw_request, body, prompts)
    if isinstance(groups, Response):
        return groups
    told = [
        {"samples": [_told(sample) for sample in group.outputs], **_of_prompt(body, group)}
        for group in groups
    ]
    whole: dict[str, Any] = {"groups": told} if body.prompts else told[0]
    answer = {**whole, "usage": usage_of(prompts, groups)}
    return Response(orjson.dumps(answer), media_type="application/json")


def _told(sample: CompletionOutput) -> dict[str, Any]:
    # With logprobs=0 vLLM returns one log-probability for each token: that of the sampled one.
    assert isinstance(sample.logprobs, FlatLogprobs)
    return {
        "tokens": list(sample.token_ids),
        "logprobs": sample.logprobs.logprobs,
        "stop_reason": "length" if sample.finish_reason == "length" else "stop",
    }


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
