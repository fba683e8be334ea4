"""Rollouts: groups of samples from an engine, with the log-probability of each sampled token.

One request carries all groups of a step, with prompts as token ids. The client waits for a full or absent
engine: a restart takes it some 40 s, and the step continues when it is back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.clients.engine import EngineClient


@dataclass(frozen=True)
class Sample:
    """One completion: its token ids with the end token, each one's log-probability, and its text.

    `truncated`: the completion was cut off at the token limit. `routed_experts`: the experts of prompt and
    completion in the engine's encoding, if they were requested.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool = False
    routed_experts: str | None = None


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `seed` plus a problem's number seeds its group, so a step can be repeated."""

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    timeout_s: float = 600.0
    patience_s: float = 180.0
    routed_experts: bool = False


Groups = list[list[Sample]]


class SamplesGroups(Protocol):
    """What samples groups in place of one engine: `several_engines.Engines`."""

    def sample(self, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """Return what `sample_groups` returns."""

    def close(self) -> None:
        """Close what it holds."""


def sample_groups(
    engine_url: str, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> Groups:
    """Return `group_size` samples for each prompt, in the prompts' order.

    Raises `NotFound` for an unknown model, `ConfigError` for a request that the engine will always refuse,
    such as a prompt that is too long, and `ServiceError` when the engine stays away for `patience_s`.
    """
    body = {
        "model": model,
        "prompts": [list(prompt) for prompt in prompts],
        "n": sampling.group_size,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "routed_experts": sampling.routed_experts,
        "texts": True,
    }
    with EngineClient(engine_url, key, "rollout", sampling.timeout_s, sampling.patience_s) as engine:
        groups = engine.samples(body)["groups"]
    return [[_sample(answer) for answer in group["samples"]] for group in groups]


def _sample(answer: dict[str, Any]) -> Sample:
    tokens, logprobs = tuple(answer["tokens"]), tuple(answer["logprobs"])
    assert len(tokens) == len(logprobs)
    is_truncated = answer["stop_reason"] == "length"
    return Sample(tokens, logprobs, answer["text"], is_truncated, answer.get("routed_experts"))
