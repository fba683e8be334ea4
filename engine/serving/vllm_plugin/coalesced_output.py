"""Coalesced outputs: the scheduler keeps a request's tokens and sends them to the frontend at its end.

vLLM sends every token of every request to its frontend, even when the client needs nothing before the end;
that takes a quarter of a rollout's CPU time. Written for the scheduler outputs of vLLM 0.32.
"""

from collections.abc import Iterable

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

# The outputs held back so far of each coalesced request, by its id.
Held = dict[str, list[EngineCoreOutput]]


def coalesce(outputs: Iterable[EngineCoreOutput], held: Held) -> list[EngineCoreOutput]:
    """Return the outputs of a step to send now; those of coalesced requests are kept in `held`."""
    told = []
    for output in outputs:
        if output.finished:
            parts = held.pop(output.request_id, None)
            told.append(merge([*parts, output]) if parts else output)
        elif output.new_sampling_mask is None and output.request_id in held:
            held[output.request_id].append(output)
        else:
            told.append(output)
    return told


def merge(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Merge a request's outputs, in order, into the last one, which holds the finish reason; return it."""
    first, last = parts[0], parts[-1]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if logprobs:
        tokens, values, ranks = zip(*(one[:3] for one in logprobs), strict=True)
        # A step's width is that of the request in its batch with the most log-probabilities.
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
    # These come with the first token only.
    last.prefill_stats = first.prefill_stats
    last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
    last.prompt_token_id_logprobs = first.prompt_token_id_logprobs
    return last
