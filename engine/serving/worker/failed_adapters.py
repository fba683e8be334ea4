"""Requests whose adapter's bytes were lost: ranks agree, the worker names them, the scheduler ends them.

Knows the output of a vLLM step and its group of ranks (0.32), and nothing of adapters.
"""

from typing import Any

import torch
from vllm.distributed import parallel_state

# Set on the output of a step, which keeps it across processes.
LOST = "graftwork_lost"


def is_lost_on_any_rank(lost: bool) -> bool:
    """Agree with the other tensor-parallel ranks, which ask at the same time.

    vLLM returns one rank's output alone: a loss on another would leave an answer of adapter and base mixed.
    """
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return lost
    flag = torch.tensor([int(lost)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag)


def name_lost(runner: Any, output: Any) -> Any:
    """Write into a step's output which of its requests ran without their adapter."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None or not manager.slots.lost:
        return output
    batch = runner.input_batch
    lost = [
        request
        for request, lora_id in zip(batch.req_ids, batch.request_lora_mapping, strict=False)
        if int(lora_id) in manager.slots.lost
    ]
    # With asynchronous scheduling (CUDA) the output is still to be copied from the device.
    setattr(getattr(output, "_model_runner_output", output), LOST, lost)
    return output


def drop_lost(scheduler: Any, output: Any) -> None:
    """Take back what a step sampled for such requests, and have the scheduler end them with an error."""
    for request in getattr(output, LOST, ()):
        index = output.req_id_to_index.get(request)
        if index is not None and output.sampled_token_ids:
            output.sampled_token_ids[index] = []
        output.prompt_logprobs_dict.pop(request, None)
        output.prompt_token_id_logprobs_dict.pop(request, None)
        scheduler.grammar_compile_error_reqs.add(request)
