"""Settings of the services, and of the catalog and the store that they share: a typed model for each."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from engine.settings.model import Settings

Port = Annotated[int, Field(ge=1024, le=65535, description="Listen on this port.")]
MOST_SLOTS = 1024
GPU_SLOTS = 8
MICROBATCH_TOKENS = 8192


class NetworkConfig(Settings):
    """How other machines reach all services of this one: by which names, with which certificate or proxy."""

    hosts: tuple[str, ...] = Field(
        (),
        description="Also answer requests whose Host header is one of these names. localhost and the address "
        "of `listen` are always answered. With TLS, our own clients connect to the first.",
    )
    tls_certificate: Path | None = Field(
        None,
        description="Serve HTTPS with the certificate chain in this PEM file, wherever `listen` is not a "
        "loopback address.",
    )
    tls_key: Path | None = Field(None, description="Its private key, a PEM file.")
    behind_proxy: bool = Field(
        False,
        description="A proxy in front of the services ends TLS, and nothing else can reach their addresses: "
        "docs/security.md.",
    )

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both `tls_certificate` and `tls_key`")
        if any(path and not path.is_absolute() for path in (self.tls_certificate, self.tls_key)):
            raise ValueError("`tls_certificate` and `tls_key` must be absolute paths")
        return self


class ServiceConfig(Settings):
    """Where a service is."""

    port: Port
    at: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@]+$",
        description="The service runs elsewhere, at this URL: it is not started here. Beyond this machine it "
        "is https, unless `network.behind_proxy`.",
    )
    listen: IPv4Address | IPv6Address = Field(
        ip_address("127.0.0.1"),
        description="Listen on this address. Any but a loopback address needs `network.tls_certificate` and "
        "`network.tls_key`, or `network.behind_proxy`.",
    )

    def listener(self, network: NetworkConfig) -> "Listener":
        """Return where the service listens, with what the network says of all services."""
        return Listener(self.port, self.at, self.listen, network)


@dataclass(frozen=True)
class Listener:
    """Where a service listens, and by which names callers reach it."""

    port: int
    at: str | None
    listen: IPv4Address | IPv6Address
    network: NetworkConfig

    def refuse_clear_text(self) -> None:
        """Raise `ValueError` where keys and prompts would cross a network in clear text."""
        if not (self.listen.is_loopback or self.tls or self.network.behind_proxy):
            raise ValueError(
                f"`listen: {self.listen}` would send keys and prompts over the network in clear text; give "
                "`network.tls_certificate` and `network.tls_key`, or set `network.behind_proxy: true` behind "
                "a proxy with TLS"
            )
        is_encrypted = self.at is None or self.at.startswith("https:") or self.network.behind_proxy
        if not (is_encrypted or _is_loopback(self.host)):
            raise ValueError(
                f"`at: {self.at}` would send keys over the network in clear text; write https://, or set "
                "`network.behind_proxy: true` where the network between the machines is encrypted"
            )

    @property
    def tls(self) -> tuple[str, str] | None:
        """The files of certificate and key; None where the service answers in clear text."""
        if self.listen.is_loopback or self.network.tls_certificate is None:
            return None
        return str(self.network.tls_certificate), str(self.network.tls_key)

    @property
    def address(self) -> str:
        """The address at which processes of this machine reach the service."""
        loopback = "127.0.0.1" if self.listen.version == 4 else "::1"
        return loopback if self.listen.is_unspecified else str(self.listen)

    @property
    def host(self) -> str:
        """The host to which our own clients connect: with TLS a name of the certificate."""
        if self.at:
            return urlsplit(self.at).hostname or ""
        if self.tls and self.network.hosts:
            return self.network.hosts[0]
        return self._written

    @property
    def _written(self) -> str:
        return f"[{self.address}]" if self.listen.version == 6 else self.address

    @property
    def url(self) -> str:
        """The URL that our own clients use."""
        if self.at:
            return self.at
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request's Host header may have, without a port."""
        return tuple(dict.fromkeys(("localhost", "127.0.0.1", self._written, *self.network.hosts)))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class EngineConfig(ServiceConfig):
    """The engine: vLLM's server with Graftwork's plugin and gateway."""

    def answering(self) -> dict[str, Any]:
        """Return the settings that answers may depend on: all but where it listens and how long it starts."""
        return self.model_dump(mode="json", exclude={*ServiceConfig.model_fields, "start_timeout_s"})

    port: Port = 8460
    slots: int | None = Field(
        None,
        ge=2,
        le=MOST_SLOTS,
        description="Allow this many different adapters in a batch. Empty: 8 on a GPU; on a CPU what a "
        "quarter of the memory holds, at most 4 for each of max_num_seqs.",
    )
    # Those of vLLM 0.32 (`MaxLoRARanks` in vllm/config/lora.py).
    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        8, description="Serve adapters up to this LoRA rank."
    )
    max_model_len: int = Field(
        256, ge=16, description="Serve sequences up to this many tokens, prompt and answer together."
    )
    max_num_seqs: int = Field(128, ge=1, description="Compute up to this many sequences in a batch.")
    threads: int = Field(
        0,
        ge=0,
        description="Compute with this many CPU threads. 0: every core but one; on a base 512 wide or more "
        "every core while the trainer does not compute.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Shard each layer over this many devices. On a CPU, ranks share the cores.",
    )
    shutdown_s: int = Field(
        5,
        ge=0,
        le=600,
        description="When the engine is stopped, let requests under way end for up to this many seconds.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Compute base and adapters in this dtype. auto: bfloat16 on CUDA, float32 on a CPU.",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="Reserve this many GiB for the KV cache. Empty: what max_num_seqs sequences of "
        "max_model_len need; on a CPU at least 0.25, at most an eighth of the memory.",
    )
    routed_experts: bool = Field(
        False,
        description="Record the experts of each token on mixture-of-experts bases, for policies with "
        "router_replay.",
    )
    start_timeout_s: float = Field(
        300, gt=0, description="Wait this many seconds for engine and trainer, each, to load the base."
    )
    host_bytes: int | None = Field(
        None, ge=1 << 20, description="Limit the host tier to this many bytes. Empty: half of the memory."
    )
    load_concurrency: int | None = Field(
        None,
        ge=1,
        description="Run this many cold loads at once. More of them serve a burst sooner and slow warm "
        "requests down. Empty: 6, or 16 for adapters of 1 MiB or more.",
    )

    @property
    def gpu_slots(self) -> int:
        """Return the slots of an engine on a GPU."""
        return self.slots or GPU_SLOTS

    def dtype_on(self, cuda: bool) -> Literal["float32", "bfloat16"]:
        """Return the dtype of base and served adapters on CUDA (`cuda`) or on a CPU."""
        if self.dtype == "auto":
            return "bfloat16" if cuda else "float32"
        return self.dtype


class GatewayConfig(Settings):
    """The gateway inside the engine: what its callers may ask for."""

    key_max_age_s: float = Field(
        60,
        ge=1,
        description="Answer 503 when the catalog has been unreadable for this many seconds, since the key "
        "may be revoked by now.",
    )
    shared_prefix_cache: bool = Field(
        False,
        description="Let tenants share the prefix cache. Each can then find out by timing what others ask.",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Let web pages of these origins call the API from a browser."
    )
    proxy_sets_id: bool = Field(
        False,
        description="The proxy in front sets x-request-id (32 hex digits) on every request, whatever its "
        "client sent, so a request that it sends again has one id: docs/scale-out.md.",
    )


class PricesConfig(Settings):
    """Prices of a million tokens, in any currency, for `graftwork usage`."""

    prompt: float = Field(0.0, ge=0, description="Price a million prompt tokens at this.")
    completion: float = Field(0.0, ge=0, description="Price a million completion tokens at this.")


class TrainerConfig(ServiceConfig):
    """The resident trainer service."""

    port: Port = 8461
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Train on this device. auto: CUDA if there is one."
    )
    gradient_checkpointing: bool | None = Field(
        None, description="Recompute activations in the backward pass. Empty: on CUDA only."
    )
    threads: int = Field(
        0,
        ge=0,
        description="Compute with this many CPU threads. 0: half of the cores; on a base 512 wide or more "
        "every core while the engine does not compute.",
    )
    sessions: int = Field(
        8, ge=1, description="Plan a GPU's memory for this many sessions of rank engine.max_rank."
    )
    microbatch_tokens: int | None = Field(
        None,
        ge=64,
        description="Compute up to this many tokens in a microbatch. Empty: 8192; on a CPU at most what "
        "1 GiB of activations hold.",
    )
    fuse: Literal["auto", "never"] = Field(
        "auto",
        description="auto: compute small batches of several sessions in one pass where that is faster; "
        "results are equal up to rounding. never: one session after another, with results bit for bit as "
        "alone.",
    )

    @property
    def most_tokens(self) -> int:
        """Return the tokens that a microbatch, and so a row, may have at most."""
        return self.microbatch_tokens or MICROBATCH_TOKENS

    def checkpoints_on(self, cuda: bool) -> bool:
        """Whether to use gradient checkpointing on CUDA (`cuda`) or on a CPU."""
        return cuda if self.gradient_checkpointing is None else self.gradient_checkpointing


class ControllerConfig(ServiceConfig):
    """The controller: the only writer of routes, releases and ledger."""

    port: Port = 8462
    observations_days: int | None = Field(
        None,
        ge=1,
        description="Delete observations of requests, and what belongs to them, after this many days. Empty: "
        "keep them.",
    )
    archive: str | None = Field(
        None,
        pattern=r"^([a-z][a-z0-9+.]*://[^?#]+|/.+)$",
        description="Write the ledger's days as Parquet into this directory (an absolute path) or behind "
        "this fsspec URL, such as s3://bucket/prefix. Credentials come from the environment. Empty: nowhere.",
    )


class CatalogConfig(Settings):
    """The catalog: the durable index of bases, policies, revisions, routes and releases."""

    url: str | None = Field(
        None,
        description="Use the Postgres database at postgresql://USER@HOST/NAME. Empty: SQLite in state_dir, "
        "for one machine.",
    )


class StoreConfig(Settings):
    """The store of packed adapters: in the state directory, or behind a URL with a local cache."""

    url: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.]*://[^?#]+$",
        description="Store packed adapters behind this fsspec URL, such as s3://bucket/prefix. Credentials "
        "come from the environment. Empty: in state_dir.",
    )
    cache_bytes: int = Field(
        10 << 30, ge=0, description="Limit the local cache of a store behind a URL to this many bytes."
    )


class MlflowConfig(ServiceConfig):
    """The MLflow server: registry, runs and artifacts."""

    port: Port = 8463
    backend: str | None = Field(
        None, description="Use the database at this SQLAlchemy URL. Empty: SQLite in state_dir."
    )


class TinkerConfig(ServiceConfig):
    """The Tinker API, a service for Tinker's own SDK."""

    port: Port = 8465
    enabled: bool = Field(
        False,
        description="Start the Tinker API, for the SDK `tinker` and its cookbook. engine.max_rank is then 32 "
        "by default, the rank that recipes ask for.",
    )


class PrefectConfig(ServiceConfig):
    """The Prefect server: flow runs, schedules, automations."""

    port: Port = 8464
    notify_url: str | None = Field(
        None, description="Post notifications to this URL. Empty: to the controller, which shows them."
    )
