"""A vLLM executor that runs a single CPU worker inside the engine's process.

On a CPU vLLM replaces `uni` by `mp`, to bind threads through the worker's environment; we set that before
the engine starts. With `mp`, engine and worker spin on shared memory for a second after each message: on
2 cores that takes the trainer's CPU time, and a third of a step.
"""

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InProcessExecutor(UniProcExecutor):
    """vLLM's executor in one process, chosen by its import path so that vLLM does not replace it."""
