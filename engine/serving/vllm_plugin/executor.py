"""A vLLM executor that runs a single CPU worker inside the engine's process.

On a CPU vLLM replaces `uni` by `mp`, to bind threads through the worker's environment; we set that before
the engine starts. With `mp`, engine and worker spin on shared memory for a second after each message: on
2 cores that takes the trainer's CPU time, and a third of a step.
"""

from pathlib import Path
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from engine.shared_cores import SharedCores


class InProcessExecutor(UniProcExecutor):
    """vLLM's executor in one process, chosen by its import path so that vLLM does not replace it."""

    def _init_executor(self) -> None:
        super()._init_executor()
        ours: Any = self.vllm_config.additional_config
        if settings := (ours or {}).get("graftwork", {}).get("cores"):
            cores = SharedCores(Path(settings["folder"]), "engine", settings["share"])
            stock = self.execute_model

            def execute_model(scheduler_output: Any, non_block: bool = False) -> Any:
                """Run one step of the model, on all cores while the trainer does not compute."""
                with cores.computing():
                    return stock(scheduler_output, non_block)

            self.execute_model = execute_model  # type: ignore[method-assign]
