"""Rollouts: groups of samples from the engine, with the log-probabilities that they were drawn at.

One request for all groups of a step, prompts as token ids. A full or absent engine is waited for: a restart
takes it some 40 s, and the step goes on when it is back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from engine import tls
from engine.errors import Busy, ConfigError, NotFound, ServiceError

AWAY = {429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Sample:
    """One completion: its token ids with the end token, each one's log-probability, and its text.

    `truncated` says that it was cut off at the limit. `routed_experts` are those of prompt and completion as
    the engine encodes them, if they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool = False
    routed_experts: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How to sample. `seed` plus a problem's number seeds its group, so that a step can be repeated."""

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    timeout_s: float = 600.0
    patience_s: float = 180.0
    routed_experts: bool = False


def sample_groups(
    engine_url: str, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[Sample]]:
    """Return `group_size` samples for each prompt, in the prompts' order.

    Raises `NotFound` for an unknown model, `ConfigError` for what the engine refuses however often it is
    asked, such as a prompt that is too long, and `ServiceError` when it stays away for `patience_s`.
    """
    headers = {"Authorization": f"Bearer {key}", "x-graftwork-purpose": "rollout"}
    retrying = Retrying(
        retry=retry_if_exception_type((httpx.TransportError, Busy)),
        stop=stop_after_delay(sampling.patience_s),
        wait=wait_exponential(0.25, max=2.0),
        reraise=True,
    )
    timeout = sampling.timeout_s
    with httpx.Client(base_url=engine_url, headers=headers, timeout=timeout, verify=tls.context()) as client:
        try:
            return retrying(_request, client, _body(model, prompts, sampling))
        except httpx.TransportError as error:
            raise ServiceError(f"The engine at {engine_url} does not answer ({error!r}).") from None


def _body(model: str, prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "prompts": [list(prompt) for prompt in prompts],
        "n": sampling.group_size,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "routed_experts": sampling.routed_experts,
    }


def _request(client: httpx.Client, body: dict[str, Any]) -> list[list[Sample]]:
    response = client.post("/graftwork/rollouts", json=body)
    if response.status_code in AWAY:
        raise Busy(f"The engine answered {response.status_code}: {response.text[:300]}")
    if response.status_code == 404:
        raise NotFound(f"The engine does not know {body['model']!r}: {response.text[:300]}")
    if response.status_code != 200:
        raise ConfigError(
            f"The engine refused the rollouts of {body['model']!r} with {response.status_code}: "
            f"{response.text[:300]} Look at the policy's questions and sampling, and at engine.max_model_len."
        )
    return [[_sample(told) for told in group] for group in response.json()["groups"]]


def _sample(told: dict[str, Any]) -> Sample:
    tokens, logprobs = tuple(told["tokens"]), tuple(told["logprobs"])
    assert len(tokens) == len(logprobs)
    return Sample(tokens, logprobs, told["text"], told["truncated"], told.get("routed_experts"))
