"""End the requests of an adapter whose bytes were lost.

The ranks agree on the loss (loader.py), the worker lists the requests in the step's output, and the scheduler
ends them with an error. Written for vLLM 0.32.
"""

from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

# An attribute of a step's output; it survives the output's pickling.
FAILED = "graftwork_failed"


def mark_failed(runner: Any, output: Any) -> Any:
    """Record in a step's output the requests that ran without their adapter; return the output.

    With asynchronous scheduling (CUDA) the output is a wrapper whose copy from the device is pending.
    """
    lost = runner.lora_manager.slots.failed
    if (state := getattr(runner, "lora_state", None)) is not None:
        # vLLM's second model runner, which only a GPU has.
        told = getattr(output, "model_runner_output", output)
        adapters = {request: one.lora_int_id for request, one in state.lora_requests.items()}
        failed = [request for request in told.req_ids if adapters.get(request) in lost]
    else:
        told, batch = getattr(output, "_model_runner_output", output), runner.input_batch
        pairs = zip(batch.req_ids, batch.request_lora_mapping, strict=False)
        failed = [request for request, lora_id in pairs if int(lora_id) in lost]
    setattr(told, FAILED, failed)
    return output


def drop_failed(scheduler: Any, output: ModelRunnerOutput) -> None:
    """Drop a step's samples for such requests and have the scheduler end them with an error."""
    for request in getattr(output, FAILED):
        index = output.req_id_to_index.get(request)
        if index is not None and output.sampled_token_ids:
            output.sampled_token_ids[index] = []
        output.prompt_logprobs_dict.pop(request, None)
        output.prompt_token_id_logprobs_dict.pop(request, None)
        scheduler.grammar_compile_error_reqs.add(request)
