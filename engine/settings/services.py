"""Settings of the services, and of the databases and stores that they share: a typed model for each.

Knows names, types, bounds and defaults. Imports no heavy package.
"""

from typing import Annotated, Literal

from pydantic import Field

from engine.settings.model import Settings

Port = Annotated[int, Field(ge=1024, le=65535)]
MOST_SLOTS = 1024
GPU_SLOTS = 8


class EngineConfig(Settings):
    """vLLM's server with our plugin and gateway inside."""

    port: Port = 8460
    slots: int | None = Field(
        None,
        ge=2,
        le=MOST_SLOTS,
        description="adapters that one batch can hold; empty: 8 on a GPU, on a CPU what a quarter of the "
        "memory holds, at most 4 for each of max_num_seqs",
    )
    max_rank: Literal[1, 8, 16, 32, 64, 128] = 8
    max_model_len: int = Field(256, ge=16)
    max_num_seqs: int = Field(128, ge=1)
    threads: int = Field(0, ge=0, description="0: every core but one, which is left to the others")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="over how many devices a layer is cut; on a CPU ranks share out the cores"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of base and served adapters; auto: bfloat16 on CUDA, float32 on a CPU"
    )
    kv_cache_gib: float | None = Field(
        None, gt=0, description="empty: 0.25 on a CPU; on CUDA what max_num_seqs whole sequences need"
    )
    routed_experts: bool = Field(
        False, description="record each token's experts on a mixture of them, for policies with router_replay"
    )
    speculative: int = Field(
        0, ge=0, le=16, description="tokens that vLLM drafts from n-grams of a request's own text; 0: none"
    )
    start_timeout_s: float = Field(300, gt=0, description="for engine and trainer, each, to load the base")
    host_bytes: int | None = Field(
        None, ge=1 << 20, description="budget of the host tier, bytes; empty: half of the memory"
    )
    host_adapters: int = Field(4096, ge=1, description="adapters that the host tier holds at most")
    load_concurrency: int | None = Field(
        None,
        ge=1,
        description="cold loads under way at once; more of them let a burst in sooner, and others feel it; "
        "empty: 6, or 16 where adapters take a MiB or more",
    )
    load_queue: int = Field(1024, ge=1, description="cold loads that wait or run before clients get 429")
    load_timeout_s: float = Field(60, gt=0, description="for one cold load, its wait in the queue included")

    @property
    def gpu_slots(self) -> int:
        """Return the slots of an engine on a GPU."""
        return self.slots or GPU_SLOTS

    def dtype_on(self, cuda: bool) -> Literal["float32", "bfloat16"]:
        """Return the dtype of base and served adapters on CUDA, or on a CPU."""
        if self.dtype == "auto":
            return "bfloat16" if cuda else "float32"
        return self.dtype


class TrainerConfig(Settings):
    """The resident trainer."""

    port: Port = 8461
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one")
    gradient_checkpointing: bool | None = Field(
        None, description="compute activations again in the backward; empty: on CUDA only"
    )
    threads: int = Field(0, ge=0, description="0: half of the cores, since the engine works beside it")
    sessions: int = Field(8, ge=1, description="policies of engine.max_rank that a GPU's plan holds at once")
    session_bytes: int | None = Field(
        None,
        ge=1,
        description="memory of all sessions' adapters, gradients and Adam moments; empty: the plan's part on "
        "a GPU, a quarter of what is free on a CPU",
    )
    queue: int = Field(256, ge=1, description="operations of all sessions that may wait")
    queue_of_session: int = Field(16, ge=1, description="operations of one session that may wait")
    microbatch_tokens: int = Field(8192, ge=64)
    fuse: Literal["auto", "never"] = Field(
        "auto",
        description="auto: small batches of several sessions share a pass where it is faster, to rounding; "
        "never: turns, bit for bit as alone",
    )
    operation_timeout_s: float = Field(
        600, gt=0, description="how long a training run waits for one operation"
    )

    def checkpoints_on(self, cuda: bool) -> bool:
        """Say whether activations are computed again in the backward on CUDA, or on a CPU."""
        return cuda if self.gradient_checkpointing is None else self.gradient_checkpointing


class ControllerConfig(Settings):
    """The only writer of routes, releases and ledger."""

    port: Port = 8462
    tick_s: float = Field(0.25, gt=0, le=5)
    lease_s: float = Field(5, gt=0, description="how long its lease in the catalog lasts")
    snapshot_s: float = Field(2, gt=0, description="how often readers get a new ledger snapshot")


class CatalogConfig(Settings):
    """The durable index of bases, policies, revisions, routes and releases."""

    url: str | None = Field(
        None, description="postgresql://USER@HOST/NAME; empty is SQLite in the state dir, for one machine"
    )


class StoreConfig(Settings):
    """Where packed bytes lie: in the state directory, or behind a URL with a local cache."""

    url: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.]*://[^?#]+$",
        description="any fsspec URL such as s3://bucket/prefix, credentials from its own environment; "
        "None: the state dir",
    )
    cache_bytes: int = Field(10 << 30, ge=0, description="of local copies of what lies behind the URL")


class MlflowConfig(Settings):
    port: Port = 8463
    backend: str | None = Field(None, description="database URL; None is SQLite in the state dir")


class PrefectConfig(Settings):
    port: Port = 8464
    work_pool: str = Field("graftwork", description="the pool whose worker runs the deployments")
    notify_url: str | None = Field(
        None, description="where notifications are posted; None is the controller's own page"
    )
