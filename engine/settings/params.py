"""Settings: the whole of `params.yaml`, and where state lies on disk.

Knows names, types, bounds and defaults (the vetted recipe); those of the services are in
`service_config.py`. Reads no environment and imports no heavy package, so that `graftwork --help` stays fast.
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
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from engine.errors import ConfigError
from engine.settings.losses import LossConfig, LossName, loss_config
from engine.settings.model import Settings, explain
from engine.settings.own_functions import OWN_RULES
from engine.settings.services import (
    CatalogConfig,
    ControllerConfig,
    EngineConfig,
    MlflowConfig,
    PrefectConfig,
    StoreConfig,
    TrainerConfig,
)

POLICY_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
DIGEST12 = 12
PolicyName = Annotated[str, Field(pattern=rf"^{POLICY_NAME.pattern}$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]


class BaseConfig(Settings):
    """Which base stays resident: one that is built here, a local directory, or a hub id."""

    name: str = Field(
        "tiny-dense", description="tiny-dense, tiny-moe, tiny-mla, tiny-dsa, a local directory, or a hub id"
    )
    seed: int = Field(20260513, ge=0)
    revision: str | None = Field(
        None, pattern=r"^[0-9a-f]{40}$", description="the commit of a hub id, which needs one; a branch moves"
    )


Contract = Literal["terse", "json", "sentence", "boxed"]
Rank = Literal[1, 2, 4, 8, 16, 32, 64, 128]
Verifier = Annotated[
    str,
    Field(
        pattern=rf"^(contract|{OWN_RULES})$",
        description="contract (generated tasks), exact, numeric, regex, json-schema or python:MODULE:FUNC",
    ),
]


class FewShotExample(Settings):
    """One worked question before the real one."""

    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class PolicyConfig(Settings):
    """One line of training. The defaults are the recipe of the main job."""

    task: str = Field(description="a key of engine/problems/procedural.py: TASKS, or a .jsonl file")
    contract: Contract = Field("terse", description="the answer format that earns the reward")
    verifier: Verifier = "contract"
    owner: str = Field("local", min_length=1, max_length=100)
    verifier_timeout_s: float = Field(5, gt=0, le=300, description="for one answer; then it scores 0")
    system: str | None = Field(None, description="system prompt before every question")
    few_shot: tuple[FewShotExample, ...] = Field((), description="worked questions before every question")
    rank: Rank = 8
    alpha: float = Field(16, gt=0)
    targets: tuple[str, ...] | None = Field(
        None, min_length=1, description="projections that carry LoRA; empty: all that the base has"
    )
    steps: int = Field(20, ge=1)
    groups: int = Field(16, ge=1, description="problems a step")
    refills: int = Field(
        1,
        ge=0,
        le=16,
        description="dapo, cispo: up to so many times `groups` more problems replace those without spread",
    )
    no_signal_steps: int = Field(3, ge=1, description="steps without a gradient that end the training")
    group_size: int = Field(8, ge=2, description="samples a problem")
    lr: float = Field(2e-3, gt=0)
    loss: LossName = "dapo"
    loss_config: LossConfig = LossConfig()
    max_tokens: int = Field(24, ge=1)
    temperature: float = Field(1.0, gt=0, description="1: samples must come from the distribution learned")
    router_replay: bool = Field(
        False,
        description="train each token on the experts that the engine chose; needs engine.routed_experts",
    )
    staleness: int = Field(
        0, ge=0, le=16, description="steps that a rollout's revision may be behind; 0: on-policy"
    )
    seed: int = Field(1, ge=0)
    suite: str = Field(description="a directory under eval_suites/")
    snapshot_ttl_s: float = Field(3600, gt=0, description="how long single steps are kept")
    data_digest: str | None = Field(None, description="sha256 of the training file, set at its import")
    scheduled: bool = Field(False, description="the nightly flow adapts this policy when it is due")
    max_age_s: float | None = Field(None, gt=0, description="due when the newest revision is older than this")
    drift_after_s: float | None = Field(
        None, gt=0, description="due when users' rewards stayed under the offline interval for so long"
    )

    @field_validator("temperature")
    @classmethod
    def _as_learned(cls, value: float) -> float:
        if value != 1:
            raise ValueError(
                "engine and trainer give log-probabilities at temperature 1, so samples drawn at another one "
                "would bias the loss while the importance ratio reads 1; leave it at 1"
            )
        return value

    @model_validator(mode="after")
    def _loss_has_its_settings(self) -> Self:
        try:
            loss_config(self.loss, self.loss_config.sent())
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def loss_sent(self) -> dict[str, Any]:
        """Return the loss's settings as the trainer takes them."""
        budget = {"budget": self.max_tokens} if self.loss == "dr_grpo" else {}
        return budget | self.loss_config.sent()


class ReleaseConfig(Settings):
    """How a canary is judged."""

    weight: OpenFraction = Field(0.2, description="share of users on the canary")
    alpha: OpenFraction = Field(0.05, description="false alarms over the whole canary")
    margin: Fraction = Field(0.1, description="a canary within this of the baseline may promote")
    min_units: int = Field(20, ge=1, description="rated users on the canary before a promotion")
    max_seconds: float = Field(600, gt=0, description="a canary without a verdict then holds")
    score_margin: Fraction = Field(
        0.05, description="offline score may fall by this, not more; three sigma of 200 paired items"
    )
    approval_s: float = Field(
        0,
        ge=0,
        description="a person must approve within this before users see it; 0: nobody asks",
    )


class DemoConfig(Settings):
    """The simulated users of the main job and its bad revision."""

    users_per_second: float = Field(30, gt=0)
    max_users: int = Field(4000, ge=1)
    bad_policy: PolicyName = "arithmetic"
    bad_contract: Contract = "json"
    bad_steps: int = Field(12, ge=1)


class NightlyConfig(Settings):
    """The scheduled flow that adapts what is due."""

    cron: str = Field(
        "0 3 * * *",
        pattern=r"^\s*\S+(\s+\S+){4}\s*$",
        description="minute, hour, day, month, day of the week",
    )
    timezone: str = Field("UTC", description="a name of the time zone database")

    @field_validator("timezone")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in zoneinfo.available_timezones():
            raise ValueError("this is no name of the time zone database, such as Europe/Berlin")
        return value


class EvaluateConfig(Settings):
    """What `dvc repro` evaluates."""

    policy: PolicyName = "arithmetic"
    revision: str = Field(
        "adapt", pattern=r"^(adapt|[0-9a-f]{64})$", description="`adapt`, or a revision's whole digest"
    )
    batch: int = Field(
        1, ge=1, description="answers computed at once; with 1 no answer depends on what is beside it"
    )
    tolerance: Fraction = Field(
        0.02, description="by how much a mean score on other hardware may differ: 4 of 200 items"
    )


class Params(Settings):
    """The whole of `params.yaml`."""

    # The file that these settings were read from; not a setting itself.
    source: Path | None = Field(None, exclude=True)
    state_dir: Path = Field(Path(".graftwork"), validate_default=True)
    suites_dir: Path = Path(__file__).parents[2] / "eval_suites"
    base: BaseConfig = BaseConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    controller: ControllerConfig = ControllerConfig()
    catalog: CatalogConfig = CatalogConfig()
    store: StoreConfig = StoreConfig()
    mlflow: MlflowConfig = MlflowConfig()
    prefect: PrefectConfig = PrefectConfig()
    policies: dict[PolicyName, PolicyConfig] = Field(default_factory=dict)
    release: ReleaseConfig = ReleaseConfig()
    demo: DemoConfig = DemoConfig()
    nightly: NightlyConfig = NightlyConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @field_validator("state_dir", "suites_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def paths(self) -> "Paths":
        return Paths(self.state_dir, self.catalog.url)

    def policy(self, name: str) -> PolicyConfig:
        """Return a policy's settings, from here and from its own file; `ConfigError` names the known ones."""
        return resolve_policy(self, name).config

    def url(self, service: str) -> str:
        """Return the local address of `engine`, `trainer`, `controller`, `mlflow` or `prefect`."""
        return f"http://127.0.0.1:{getattr(self, service).port}"


@dataclass(frozen=True)
class Resolved:
    """A policy's settings, and where each of them comes from: `default`, a file, or `request`."""

    config: PolicyConfig
    sources: dict[str, str]


def policy_file(params: Params, name: str) -> Path:
    """Return where a policy's own settings lie: beside its frozen items."""
    return params.suites_dir / name / "policy.yaml"


def known_policies(params: Params) -> list[str]:
    """Return the names of the policies of `params.yaml` and of those with a file of their own."""
    own = {file.parent.name for file in params.suites_dir.glob("*/policy.yaml")}
    return sorted({name for name in own if POLICY_NAME.fullmatch(name)} | set(params.policies))


def resolve_policy(params: Params, name: str, changes: Mapping[str, Any] | None = None) -> Resolved:
    """Lay a policy's settings over one another: defaults, `params.yaml`, its own file, then `changes`.

    A change of None means "as configured". Raises `ConfigError` for an unknown policy or wrong settings.
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
    layers["request"] = {key: value for key, value in (changes or {}).items() if value is not None}
    values = {key: value for layer in layers.values() for key, value in layer.items()}
    try:
        config = PolicyConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"The settings of {name!r} are not valid. {explain(error, PolicyConfig)}") from None
    sources = dict.fromkeys(PolicyConfig.model_fields, "default")
    for source, layer in layers.items():
        sources |= dict.fromkeys(layer, source)
    return Resolved(config, sources)


class Paths:
    """Where everything lies under the state directory. Creates nothing.

    The catalog alone may lie elsewhere: at `catalog_url`.
    """

    def __init__(self, root: Path, catalog_url: str | None = None):
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
        self.spool = root / "spool"
        self.warm = root / "warm"
        self.mlflow_db = root / "mlflow.db"
        self.mlartifacts = root / "mlartifacts"
        self.prefect = root / "prefect"
        self.logs = root / "logs"
        self.runs = root / "runs"
        self.bench = root / "bench"
        self.local_key = root / "local.key"
        self.clock = root / "clock.json"

    def revision(self, policy: str, digest: str) -> Path:
        """Return the directory of an exported revision."""
        return self.revisions / policy / digest[:DIGEST12]

    @property
    def catalog_url(self) -> str:
        return self._catalog_url or f"sqlite:///{self.catalog}"

    @property
    def has_catalog(self) -> bool:
        """Say whether a catalog was made here, or is named by its address."""
        return self._catalog_url is not None or self.catalog.is_file()


def load_params(path: Path | str = "params.yaml", **overrides: Any) -> Params:
    """Read settings from a YAML file; `overrides` replace whole top-level values.

    Raises `ConfigError` that names each wrong key and what is allowed there.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"The settings file {path} does not exist. Run from the checkout, or give --params."
        )
    here = path.absolute().parent
    data = {"state_dir": ".graftwork", **_read_mapping(path), **overrides, "source": path.absolute()}
    if "suites_dir" not in data and (here / "eval_suites").is_dir():
        data["suites_dir"] = "eval_suites"
    # Paths in a file of settings are relative to that file.
    data |= {key: here / str(data[key]) for key in ("state_dir", "suites_dir") if key in data}
    try:
        return Params.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path} is not valid. {explain(error, Params)}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(data).__name__}.")
    return data


def content_hash(value: Any) -> str:
    """Return the sha256 of a JSON-able value or model, independent of key order."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def served_name(policy: str, digest: str) -> str:
    """Return `policy@digest12`, the only adapter name that vLLM ever sees."""
    return f"{policy}@{digest[:DIGEST12]}"


def split_served_name(name: str) -> tuple[str, str | None]:
    """Split `policy@digest` into policy and digest prefix; the prefix is None for a bare policy."""
    policy, at, digest = name.partition("@")
    return policy, digest if at else None
