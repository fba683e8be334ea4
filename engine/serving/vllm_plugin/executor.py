"""vLLM's executor for one worker on a CPU: in the engine's own process.

vLLM turns `uni` into `mp` on a CPU, since it binds threads through the worker's environment; ours is set
before the engine starts. Over shared memory engine and worker spin for a second after every message:
on 2 cores that is the trainer's time, and a third of a step.
"""

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InProcessExecutor(UniProcExecutor):
    """Called by its import path, which vLLM takes as it is."""
