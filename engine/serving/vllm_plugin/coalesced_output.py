"""Answers that are told whole: what a request has sampled stays in the scheduler until its last token.

vLLM tells its frontend every token of every request by itself, also of those whose client wants nothing
before the end: the frontend then takes a quarter of the CPU that a rollout costs. Knows a scheduler's
outputs (0.32), and nothing of who asks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from engine.serving.vllm_plugin.extra_args import COALESCED

# What each request has sampled so far, by its id.
Held = dict[str, list[EngineCoreOutput]]


def coalesce(
    outputs: Iterable[EngineCoreOutput], held: Held, requests: Mapping[str, Any]
) -> list[EngineCoreOutput]:
    """Return what of a step is to be told now; the rest is in `held` until its request ends."""
    told = []
    for output in outputs:
        if output.finished:
            parts = held.pop(output.request_id, None)
            told.append(merge([*parts, output]) if parts else output)
        elif output.new_sampling_mask is None and _is_coalesced(requests[output.request_id]):
            held.setdefault(output.request_id, []).append(output)
        else:
            told.append(output)
    return told


def merge(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return one output for several of a request; the last one says how it ended."""
    first, last = parts[0], parts[-1]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if logprobs:
        tokens, values, ranks = zip(*(one[:3] for one in logprobs), strict=True)
        # A step has as many columns as the request of its batch that wants most.
        width = min(one.shape[1] for one in tokens)
        last.new_logprobs = LogprobsLists(
            np.concatenate([one[:, :width] for one in tokens]),
            np.concatenate([one[:, :width] for one in values]),
            np.concatenate(ranks),
        )
    routes = [part.routed_experts for part in parts if part.routed_experts is not None]
    if routes:
        last.routed_experts = np.concatenate(routes)
    last.events = [event for part in parts for event in part.events or ()] or None
    # Said with the first token alone.
    last.prefill_stats = first.prefill_stats
    last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
    last.prompt_token_id_logprobs = first.prompt_token_id_logprobs
    return last


def _is_coalesced(request: Any) -> bool:
    return bool((request.sampling_params.extra_args or {}).get(COALESCED))
