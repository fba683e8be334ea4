"""Settings of `params.yaml`: typed models with bounds and defaults, and the paths of the state directory.

Those of services, policies and releases are in modules of their own. Reads no environment variables and
imports no heavy package, so that `graftwork --help` stays fast.
"""

import hashlib
import json
import re
import zoneinfo
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from engine.errors import ConfigError
from engine.settings.model import Settings, explain
from engine.settings.own_functions import refuse_unlisted
from engine.settings.policies import PolicyConfig
from engine.settings.releases import ReleaseConfig
from engine.settings.services import (
    CatalogConfig,
    ControllerConfig,
    EngineConfig,
    GatewayConfig,
    Listener,
    MlflowConfig,
    NetworkConfig,
    PrefectConfig,
    PricesConfig,
    ServiceConfig,
    StoreConfig,
    TinkerConfig,
    TrainerConfig,
)

POLICY_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
DIGEST12 = 12
CHECKOUT_SUITES = Path(__file__).parents[2] / "eval_suites"
# The rank that recipes of the Tinker API ask for.
RECIPES_RANK = 32
PolicyName = Annotated[str, Field(pattern=rf"^{POLICY_NAME.pattern}$")]


class BaseConfig(Settings):
    """The resident base model: one that is made here, a GGUF file, a local directory, or a hub id."""

    name: str = Field(
        "tiny-dense",
        description="Keep this base resident: tiny-dense, tiny-moe, tiny-mla or tiny-dsa (built here), "
        "smollm2-135m (converted here, after `make real`), a GGUF file of a dense Llama or Qwen3, a local "
        "directory, or a hub id.",
    )
    tool_parser: str | None = Field(
        None,
        description="Find tool calls in answers with this parser of vLLM, such as hermes. Empty: requests "
        "with a choice of tools are refused.",
    )
    revision: str | None = Field(
        None,
        pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$",
        description="Load this commit of a hub id (40 digits, required, because branches move), or refuse a "
        "GGUF file with another sha256 (64 digits).",
    )
    text_digest: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{12,64}$",
        description="Accept the base's tokenizer, chat template and generation defaults with this digest, "
        "which differ from those that its revisions were trained with.",
    )


class NightlyConfig(Settings):
    """The schedule of the nightly flow, which adapts the policies that are due."""

    cron: str = Field(
        "0 3 * * *",
        pattern=r"^\s*\S+(\s+\S+){4}\s*$",
        description="Start at these times: minute, hour, day, month, day of the week.",
    )
    timezone: str = Field("UTC", description="Read `cron` in this time zone of the tz database.")

    @field_validator("timezone")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in zoneinfo.available_timezones():
            raise ValueError("unknown time zone; use a name of the tz database, such as Europe/Berlin")
        return value


class EvaluateConfig(Settings):
    """The evaluation that `dvc repro` runs."""

    policy: PolicyName = Field("arithmetic", description="Evaluate a revision of this policy.")
    revision: str = Field(
        "adapt",
        pattern=r"^(adapt|[0-9a-f]{64})$",
        description="Evaluate this revision: `adapt` trains one, a whole digest takes an existing one.",
    )
    batch: int = Field(
        1,
        ge=1,
        description="Compute this many answers at once. With 1, no answer depends on others in its batch.",
    )


class Params(Settings):
    """The whole of `params.yaml`."""

    # The file that these settings were read from; not a setting itself.
    source: Path | None = Field(None, exclude=True)
    state_dir: Path = Field(
        Path(".graftwork"),
        validate_default=True,
        description="Keep all state in this directory. A relative path starts at the settings file.",
    )
    suites_dir: Path = Field(
        CHECKOUT_SUITES,
        description="Keep evaluation suites and your own policies in this directory. Default: eval_suites "
        "beside the settings file; where there is none, the checkout's.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Have engine, trainer, controller and Tinker API log lines for people, or JSON with the "
        "id of the request.",
    )
    base: BaseConfig = Field(default_factory=BaseConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    prices: PricesConfig = Field(default_factory=PricesConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    catalog: CatalogConfig = Field(default_factory=CatalogConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    prefect: PrefectConfig = Field(default_factory=PrefectConfig)
    tinker: TinkerConfig = Field(default_factory=TinkerConfig)
    python_modules: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")], ...] = Field(
        ("engine.problems.language", "examples"),
        description="Import python:MODULE:FUNC verifiers and losses from these modules and their submodules "
        "alone. Their code runs as the services' user.",
    )
    policies: dict[PolicyName, PolicyConfig] = Field(default_factory=dict, description="Policies by name.")
    release: ReleaseConfig = Field(default_factory=ReleaseConfig)
    releases: dict[PolicyName, dict[str, Any]] = Field(
        default_factory=dict, description="Settings of `release` that differ for a policy, by its name."
    )
    nightly: NightlyConfig = Field(default_factory=NightlyConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)

    @field_validator("state_dir", "suites_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="before")
    @classmethod
    def _ranks_of_recipes(cls, data: Any) -> Any:
        tinker, engine = data.get("tinker") or {}, data.get("engine") or {}
        if isinstance(tinker, dict) and isinstance(engine, dict) and tinker.get("enabled") is True:
            return {**data, "engine": {"max_rank": RECIPES_RANK, **engine}}
        return data

    @field_validator("engine", "trainer", "controller", "mlflow", "prefect", "tinker")
    @classmethod
    def _protected(cls, value: ServiceConfig, info: ValidationInfo) -> ServiceConfig:
        # Without it the network's own fault is reported.
        if network := info.data.get("network"):
            value.listener(network).refuse_clear_text()
        return value

    @model_validator(mode="after")
    def _releases_are_valid(self) -> Self:
        for name in self.releases:
            try:
                release = self.release_of(name)
            except ValidationError as error:
                raise ValueError(f"of {name!r}: {explain(error, ReleaseConfig)}") from None
            for evaluator in release.evaluators.values():
                refuse_unlisted("evaluator", evaluator.kind, self.python_modules)
        return self

    def release_of(self, policy: str) -> ReleaseConfig:
        """Return the settings of a policy's releases."""
        return ReleaseConfig.model_validate(self.release.model_dump() | self.releases.get(policy, {}))

    @property
    def paths(self) -> "Paths":
        """The files and directories of the state directory."""
        return Paths(self.state_dir, self.catalog.url)

    def policy(self, name: str) -> PolicyConfig:
        """Return a policy's settings as given, without those that fit the base; see `resolve_policy`."""
        return resolve_policy(self, name).config

    def to_json(self) -> str:
        """Return the text of a settings file; what a policy does not set is left to what fits the base."""
        policies = {
            name: policy.model_dump(mode="json", exclude_unset=True) for name, policy in self.policies.items()
        }
        return json.dumps(self.model_dump(mode="json") | {"policies": policies}, indent=2)

    def url(self, service: str) -> str:
        """Return the local address of a service, such as `engine`."""
        return self.listener(service).url

    def listener(self, service: str) -> Listener:
        """Return where a service such as `engine` listens."""
        own: ServiceConfig = getattr(self, service)
        return own.listener(self.network)


@dataclass(frozen=True)
class Resolved:
    """A policy's settings, and the source of each: `default`, a file name, or `request`."""

    config: PolicyConfig
    sources: dict[str, str]


def policy_file(params: Params, name: str) -> Path:
    """Return the path of a policy's own settings file, in the directory of its suite."""
    return params.suites_dir / name / "policy.yaml"


def known_policies(params: Params) -> list[str]:
    """Return the sorted names of policies in `params.yaml` and of those with a `policy.yaml`."""
    own = {file.parent.name for file in params.suites_dir.glob("*/policy.yaml")}
    return sorted({name for name in own if POLICY_NAME.fullmatch(name)} | set(params.policies))


def resolve_policy(
    params: Params,
    name: str,
    changes: Mapping[str, Any] | None = None,
    fitting: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge a policy's settings: defaults, `fitting`, `params.yaml`, its own file, then `changes`.

    `fitting` are settings that fit the base. Settings of the loss are merged one by one. A change of None
    means "as configured". Raises `ConfigError` for an unknown policy or invalid settings.
    """
    file = policy_file(params, name)
    layers: dict[str, Mapping[str, Any]] = {}
    if name in params.policies:
        layers["params.yaml"] = params.policies[name].model_dump(exclude_unset=True)
    if POLICY_NAME.fullmatch(name) and file.is_file():
        own = _read_mapping(file)
        # Its data lies beside it.
        layers[f"{name}/policy.yaml"] = own | {"task": str(file.parent / str(own.get("task", "")))}
    if not layers:
        known = ", ".join(known_policies(params)) or "none"
        raise ConfigError(f"There is no policy {name!r}. Known policies: {known}.")
    layers = {"the base": fitting or {}, **layers}
    layers["request"] = {key: value for key, value in (changes or {}).items() if value is not None}
    values = {key: value for layer in layers.values() for key, value in layer.items()}
    losses = [layer["loss_config"] for layer in layers.values() if isinstance(layer.get("loss_config"), dict)]
    if isinstance(values.get("loss_config"), dict):
        values["loss_config"] = {key: value for loss in losses for key, value in loss.items()}
    try:
        config = PolicyConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"The settings of {name!r} are not valid. {explain(error, PolicyConfig)}") from None
    sources = dict.fromkeys(PolicyConfig.model_fields, "default")
    for source, layer in layers.items():
        sources |= dict.fromkeys(layer, source)
    return Resolved(config, sources)


class Paths:
    """The paths of everything in the state directory. Creates nothing.

    Only the catalog may be elsewhere, at `catalog_url`.
    """

    def __init__(self, root: Path, catalog_url: str | None = None):
        """Derive the paths from the state directory `root` (absolute)."""
        self.root = root
        self._catalog_url = catalog_url
        self.bases = root / "bases"
        self.store = root / "store"
        self.cache = root / "cache"
        self.holds = root / "holds"
        self.revisions = root / "revisions"
        self.sessions = root / "sessions"
        self.catalog = root / "catalog.db"
        self.ledger = root / "ledger.duckdb"
        self.ledger_snapshot = root / "ledger.snapshot.duckdb"
        self.ledger_archive = root / "ledger.archive.json"
        self.spool = root / "spool"
        self.usage = root / "usage"
        self.mlflow_db = root / "mlflow.db"
        self.mlflow_logins = root / "mlflow-logins.db"
        self.mlartifacts = root / "mlartifacts"
        self.prefect = root / "prefect"
        self.logs = root / "logs"
        self.runs = root / "runs"
        self.bench = root / "bench"
        self.local_key = root / "local.key"
        self.credentials = root / "credentials"
        self.clock = root / "clock.json"
        self.cores = root / "cores"
        # Of a restore into a directory that cannot be replaced, while it is under way.
        self.restoring = root / ".restoring"

    def revision(self, policy: str, digest: str) -> Path:
        """Return the directory of an exported revision."""
        return self.revisions / policy / digest[:DIGEST12]

    @property
    def catalog_url(self) -> str:
        """The catalog's SQLAlchemy URL: the configured one, or SQLite in the state directory."""
        return self._catalog_url or f"sqlite:///{self.catalog}"

    @property
    def has_catalog(self) -> bool:
        """Whether a catalog exists in the state directory, or is configured by URL."""
        return self._catalog_url is not None or self.catalog.is_file()


def load_params(path: Path | str = "params.yaml", **overrides: Any) -> Params:
    """Read settings from a YAML file; `overrides` replace whole top-level values.

    Relative paths start at the file's directory. Raises `ConfigError` with each invalid key and its bounds.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"The settings file {path} does not exist. Run from the checkout, or give its path with "
            "--params. `graftwork init DIR` writes one for a directory of your own."
        )
    here = path.absolute().parent
    data = {"state_dir": ".graftwork", **_read_mapping(path), **overrides, "source": path.absolute()}
    # An installed package is in no checkout.
    if "suites_dir" not in data and ((here / "eval_suites").is_dir() or not CHECKOUT_SUITES.is_dir()):
        data["suites_dir"] = "eval_suites"
    # Paths in a file of settings are relative to that file.
    data |= {key: here / str(data[key]) for key in ("state_dir", "suites_dir") if key in data}
    try:
        params = Params.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path} is not valid. {explain(error, Params)}") from None
    policies = {name: _beside(here, policy) for name, policy in params.policies.items()}
    return params.model_copy(update={"policies": policies}) if policies else params


def _beside(here: Path, policy: PolicyConfig) -> PolicyConfig:
    if not policy.task.endswith(".jsonl"):
        return policy
    return policy.model_copy(update={"task": str(here / policy.task)})


class SettingsLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: YAML's own reader would keep the last one silently."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return the next mapping as it is written; what it merges from others comes later."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if doubled := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.composer.ComposerError(
                None, None, f"the key {doubled!r} is there twice", node.start_mark
            )
        return node


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), SettingsLoader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(data).__name__}.")
    return data


def content_hash(value: Any) -> str:
    """Return the sha256 (hex) of a JSON-serialisable value or model, independent of key order."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
