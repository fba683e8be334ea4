"""The resources of one training run, opened and checked before its first rollout."""

import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.base.families import BaseShapes
from engine.base.prompts import tokenizer_of
from engine.base.resident import ensure_base
from engine.catalog.catalog import Catalog
from engine.errors import ConfigError, NotFound
from engine.ledger.sender import open_spool
from engine.ledger.spool import Spool
from engine.planning.gpu import cuda_bytes
from engine.problems.verifiers import Verifier
from engine.settings.own_functions import refuse_unlisted
from engine.settings.params import Params, content_hash
from engine.settings.policies import PolicyConfig
from engine.training.line_of_training import Line, line_of
from engine.training.rollout_data import Ahead, Source
from engine.training.sample_groups import SamplesGroups
from engine.training.service.client import TrainerClient
from engine.training.service.protocol import Exported
from engine.training.service.train_step import TrainStep
from engine.version import code_version

# What a row holds for a restarted run, and the ledger does not: the revision that was exported before the
# step, and the position in the stream of replacements.
FOR_RESTARTS = ("handed", "replaced")


@dataclass(frozen=True)
class Run:
    """A policy's line of training with its open clients; call `close` at the end.

    `holder` names the run as the session's writer. It is unique: two runs in one process never share a lease.
    """

    params: Params
    policy: str
    config: PolicyConfig
    line: Line
    source: Source
    ahead: Ahead
    client: TrainerClient
    spool: Spool
    # Of samples; other methods have none.
    verifier: Verifier | None
    # Of the rows of DPO's validations, once known: the base's sums of log-probabilities.
    base_sums: list[float] = field(default_factory=list)
    holder: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}")

    @cached_property
    def loss_settings(self) -> dict[str, Any]:
        """Return the loss's settings as the trainer takes them."""
        return self.config.loss_sent()

    @cached_property
    def identity(self) -> dict[str, str]:
        """Return what every row of the run carries: the versions of code and settings."""
        return {"code_version": code_version(), "config_hash": content_hash(self.config)}

    def record(self, row: Mapping[str, Any]) -> None:
        """Append a step's row to the ledger's spool; the row's id makes a repeated append harmless."""
        fields = {name: value for name, value in row.items() if name not in FOR_RESTARTS}
        self.spool.emit("train_steps", id=f"{self.line.session}-{row['step']}", **fields, **self.identity)

    def record_export(self, exported: Exported, history: Sequence[Mapping[str, Any]]) -> None:
        """Tell the ledger which revision the line made, and its cost by the rows of its steps.

        The row's id makes a repeated export harmless.
        """
        line, steps = self.line, [TrainStep.of(row) for row in history if row["step"] <= exported.step]
        self.spool.emit(
            "revisions", id=f"{line.session}@{exported.digest}", policy=self.policy, digest=exported.digest,
            parent=line.parent, session=line.session, step=exported.step,
            tokens=sum(step.tokens or 0 for step in steps),
            seconds=sum(sum(step.phases.values()) for step in steps), **self.identity,
        )  # fmt: skip

    def close(self) -> None:
        """Release the session, and close the trainer's client, the spool, the verifier and the engines."""
        self.client.release()
        for part in (self.client, self.spool, self.verifier, self.source.engines):
            if part:
                part.close()


def learning_rate(config: PolicyConfig, step: int) -> float:
    """Return the rate of the step after `step` steps: `config.lr`, less during the warm-up."""
    return config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps))


# Returns the engines that sample for a run, given the base's digest; None: the one of this machine.
EnginesOf = Callable[[Params, str], SamplesGroups | None]


def prepare(
    params: Params, policy: str, config: PolicyConfig, key: str, engines_of: EnginesOf | None = None
) -> Run:
    """Open a run's resources; `ConfigError` for settings that would otherwise fail after the rollouts."""
    from engine.training.loss.grpo import loss_of

    refuse_unlisted("verifier", config.verifier, params.python_modules)
    refuse_unlisted("loss", config.loss, params.python_modules)
    if config.method == "grpo":
        # A custom loss that cannot be loaded fails before the first rollout.
        loss_of(config.loss)
    if config.rank > params.engine.max_rank:
        raise ConfigError(
            f"The policy {policy!r} has rank {config.rank}, and the engine serves up to "
            f"{params.engine.max_rank}. Raise engine.max_rank and restart the services, or lower `rank`."
        )
    base = ensure_base(params.base, params.paths)
    with suppress(NotFound), Catalog(params.paths.catalog_url) as catalog:
        catalog.bases.check_text(base)
    tokenizer = tokenizer_of(base.path)
    shapes = BaseShapes.read(base.path)
    targets = shapes.targets_on(cuda_bytes() is not None)
    line = line_of(params.paths, policy, config, targets)
    base_name = Path(params.base.name).name
    replays = config.method == "grpo" and config.router_replay and bool(shapes.experts)
    if replays and not params.engine.routed_experts:
        raise ConfigError(
            f"The policy {policy!r} has router_replay, and the engine does not record experts. Set "
            "engine.routed_experts to true and restart the services, or set router_replay to false."
        )
    url = params.url("engine")
    engines = engines_of(params, base.digest) if engines_of and config.method == "grpo" else None
    source = Source(policy, config, line, tokenizer, url, key, base_name, replays, engines)
    spool = open_spool(params, f"train-{policy}")
    client = TrainerClient.of(params)
    verifier = Verifier(config) if config.method == "grpo" else None
    return Run(params, policy, config, line, source, Ahead(source), client, spool, verifier)
