"""Record each token's routed experts on a CPU, as vLLM does on a GPU.

vLLM captures the ids after its routers, stores those of cached blocks with the KV cache, and returns them
with a finished completion (`routed_experts`: (tokens - 1, layers, experts of a token), base64 of a `.npy`).
Only its newer model runner does so, which needs Triton. Here the older runner, which the CPU uses, drives
the same parts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@dataclass(frozen=True)
class StepRequests:
    """A step's N requests as the recorder reads them: computed tokens (N,), starts in the batch (N + 1,)."""

    req_ids: list[str]
    num_computed_tokens_np: np.ndarray
    query_start_loc_np: np.ndarray


class RecordingRunner(CPUModelRunner):
    """The CPU's model runner; it records experts with `--enable-return-routed-experts`."""

    recorder: AuxOutputWorkerConnector

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the KV cache, and the recorder if it is enabled."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled:
            self.recorder = get_aux_output_connector(self.get_model(), self.vllm_config, kv_cache_config)
            if not self.vllm_config.cache_config.enable_prefix_caching:
                _keep_requests_whole(self.recorder, self.vllm_config)
            self.execute_model = self._execute_recorded  # type: ignore[method-assign, assignment]
            self.sample_tokens = self._sample_recorded  # type: ignore[method-assign, assignment]

    def _execute_recorded(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step's forward pass and record its experts."""
        self.recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _sample_recorded(self, grammar_output: Any) -> Any:
        """Sample the step's tokens and attach the recorded experts to the output."""
        if self.execute_model_state is None:
            return super().sample_tokens(grammar_output)
        drafted = self.execute_model_state.scheduler_output.scheduled_spec_decode_tokens
        pending = self.recorder.prepare_output(self._batch())  # type: ignore[arg-type]
        output = super().sample_tokens(grammar_output)
        if pending is not None:
            sampled = [len(tokens) for tokens in output.sampled_token_ids]
            # Of n drafts and the token after them, those not sampled were rejected.
            rejected = [
                len(drafted.get(name, ())) + 1 - count if count and name in drafted else 0
                for name, count in zip(pending.request_ids, sampled, strict=True)
            ]
            pending.enqueue_cpu_copy(np.array(sampled), np.array(rejected))
            output.aux_output_connector_output = pending.process_output()
        return output

    def _batch(self) -> StepRequests:
        batch, count = self.input_batch, self.input_batch.num_reqs
        starts = batch.num_computed_tokens_cpu[:count].copy()
        return StepRequests(list(batch.req_ids), starts, self.query_start_loc.np[: count + 1].copy())


def _keep_requests_whole(recorder: AuxOutputWorkerConnector, vllm_config: Any) -> None:
    """Give each request a single block: without prefix caching, blocks have no keys and would accumulate."""
    if (buffer := recorder._buffer) is None:
        # Only one tensor-parallel rank has the buffer: the one that returns the output.
        return
    scheduler = vllm_config.scheduler_config
    recorder._buffer = RoutedExpertsBuffer(
        buffer.dtype,
        buffer.shape_per_token,
        vllm_config.model_config.max_model_len + 1,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        vllm_config.max_concurrent_batches,
    )
