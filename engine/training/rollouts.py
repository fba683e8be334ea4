"""Rollouts: groups of samples from the engine, with the log-probabilities that they were drawn at.

One request a problem with `n` samples, prompts as token ids, a bounded number under way. A full or
absent engine is waited for: a restart takes it some 40 s, and the step goes on when it is back.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from engine.errors import Busy, NotFound, ServiceError

AWAY = {429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Sample:
    """One completion: its token ids with the end token, each one's log-probability, and its text.

    `routed_experts` are those of prompt and completion as the engine encodes them, if they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    routed_experts: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How to sample. `seed` plus a problem's number seeds its group, so that a step can be repeated."""

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    concurrency: int = 64
    timeout_s: float = 120.0
    patience_s: float = 180.0
    routed_experts: bool = False


def sample_groups(
    engine_url: str, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[Sample]]:
    """Return `group_size` samples for each prompt, in the prompts' order.

    Raises `NotFound` for an unknown model and `ServiceError` when the engine stays away for `patience_s`.
    """
    return asyncio.run(_sample_all(engine_url, key, model, prompts, sampling))


async def _sample_all(
    engine_url: str, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[Sample]]:
    headers = {"Authorization": f"Bearer {key}", "x-graftwork-purpose": "rollout"}
    slots = asyncio.Semaphore(sampling.concurrency)
    limits = httpx.Limits(max_connections=sampling.concurrency)
    async with httpx.AsyncClient(
        base_url=engine_url, headers=headers, timeout=sampling.timeout_s, limits=limits
    ) as client:

        async def one(number: int, prompt: Sequence[int]) -> list[Sample]:
            async with slots:
                return await _sample_group(
                    client, _body(model, prompt, number, sampling), sampling.patience_s
                )

        return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


def _body(model: str, prompt: Sequence[int], number: int, sampling: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "n": sampling.group_size,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        # vLLM adds a sample's number within the group to the seed.
        "seed": sampling.seed + number * sampling.group_size,
        "vllm_xargs": {"routed_experts": int(sampling.routed_experts)},
    }


async def _sample_group(client: httpx.AsyncClient, body: dict[str, Any], patience_s: float) -> list[Sample]:
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((httpx.TransportError, Busy)),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential(0.25, max=2.0),
        reraise=True,
    )
    try:
        return await retrying(_request, client, body)
    except httpx.TransportError as error:
        raise ServiceError(f"The engine at {client.base_url} does not answer ({error!r}).") from None


async def _request(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Sample]:
    response = await client.post("/v1/completions", json=body)
    if response.status_code in AWAY:
        raise Busy(f"The engine answered {response.status_code}: {response.text[:300]}")
    if response.status_code == 404:
        raise NotFound(f"The engine does not know {body['model']!r}: {response.text[:300]}")
    if response.status_code != 200:
        raise ServiceError(f"The engine refused a rollout with {response.status_code}: {response.text[:300]}")
    return [_sample(choice) for choice in response.json()["choices"]]


def _sample(choice: dict[str, Any]) -> Sample:
    logprobs = choice["logprobs"]["token_logprobs"]
    assert len(choice["token_ids"]) == len(logprobs)
    return Sample(tuple(choice["token_ids"]), tuple(logprobs), choice["text"], choice.get("routed_experts"))
