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

from engine.serving.plugin import WHOLE

# What each request has sampled so far, by its id.
Held = dict[str, list[EngineCoreOutput]]


def hold_back(
    outputs: Iterable[EngineCoreOutput], held: Held, requests: Mapping[str, Any]
) -> list[EngineCoreOutput]:
    """Return what of a step is to be told now; the rest is in `held` until its request ends."""
    told = []
    for output in outputs:
        if output.finished:
            parts = held.pop(output.request_id, None)
            told.append(joined([*parts, output]) if parts else output)
        elif (requests[output.request_id].sampling_params.extra_args or {}).get(WHOLE):
            held.setdefault(output.request_id, []).append(output)
        else:
            told.append(output)
    return told


def joined(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return one output for several of a request; the last one says how it ended."""
    whole = parts[-1]
    whole.new_token_ids = [token for part in parts for token in part.new_token_ids]
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if logprobs:
        tokens, values, ranks = zip(*(one[:3] for one in logprobs), strict=True)
        whole.new_logprobs = LogprobsLists(
            np.concatenate(tokens), np.concatenate(values), np.concatenate(ranks)
        )
    routes = [part.routed_experts for part in parts if part.routed_experts is not None]
    if routes:
        whole.routed_experts = np.concatenate(routes)
    whole.events = [event for part in parts for event in part.events or ()] or None
    # Said with the first token alone.
    whole.prefill_stats = parts[0].prefill_stats
    return whole
