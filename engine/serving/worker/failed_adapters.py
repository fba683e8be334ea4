"""Requests whose adapter's bytes were lost: ranks agree, the worker names them, the scheduler ends them.

Knows the output of a vLLM step and its group of ranks (0.32), and nothing of adapters.
"""

from typing import Any

import torch
from vllm.distributed import parallel_state

# Set on the output of a step, which keeps it across processes.
FAILED = "graftwork_failed"


def has_failed_on_any_rank(failed: bool) -> bool:
    """Agree with the other tensor-parallel ranks, which ask at the same time.

    vLLM returns one rank's output alone: a loss on another would leave an answer of adapter and base mixed.
    """
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return failed
    flag = torch.tensor([int(failed)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag)


def mark_failed(runner: Any, output: Any) -> Any:
    """Write into a step's output which of its requests ran without their adapter."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None or not manager.slots.failed:
        return output
    batch = runner.input_batch
    failed = [
        request
        for request, lora_id in zip(batch.req_ids, batch.request_lora_mapping, strict=False)
        if int(lora_id) in manager.slots.failed
    ]
    # With asynchronous scheduling (CUDA) the output is still to be copied from the device.
    setattr(getattr(output, "_model_runner_output", output), FAILED, failed)
    return output


def drop_failed(scheduler: Any, output: Any) -> None:
    """Take back what a step sampled for such requests, and have the scheduler end them with an error."""
    for request in getattr(output, FAILED, ()):
        index = output.req_id_to_index.get(request)
        if index is not None and output.sampled_token_ids:
            output.sampled_token_ids[index] = []
        output.prompt_logprobs_dict.pop(request, None)
        output.prompt_token_id_logprobs_dict.pop(request, None)
        scheduler.grammar_compile_error_reqs.add(request)
