"""What the Tinker API asks of trainer, engine and catalog, in their own words.

A model is a policy with one session of the trainer, which has the policy's name. Its checkpoints are named
states of that session, or revisions of that policy.
"""

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.base.families import PROJECTIONS, BaseShapes
from engine.base.resident import base_config
from engine.catalog.catalog import Catalog
from engine.catalog.tinker_records import TinkerCheckpoint, TinkerModel
from engine.clients.engine import EngineClient
from engine.errors import ConfigError, Conflict, NotFound
from engine.settings.params import Params
from engine.tinker import bodies
from engine.tinker.codec import Array, WireBatch, write_samples
from engine.training.service import protocol
from engine.training.service.client import TrainerClient
from engine.training.service.protocol import Exported, SessionInfo

# LoRA's alpha is not on the wire; this is Tinker's own.
ALPHA = 32.0
# How long an answer of the engine may take.
TIMEOUT_S = 600.0
# Connections of so many keys are kept.
MOST_KEYS = 256
# A snapshot's time to live: clients sample from it until the next one, and that may take long.
SNAPSHOT_S = 86400.0
# Absolute bounds of the ratio where a call has none: the documented ones.
BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2)}
BETA = 0.05
LIMITS = ("clip_low_threshold", "clip_high_threshold")
KNOWN_INPUTS = ("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", *LIMITS)


@dataclass(frozen=True)
class StateSource:
    """Where a new model starts: another model's state, with its Adam moments or without."""

    model: TinkerModel
    checkpoint: TinkerCheckpoint
    moments: bool


class Backend:
    """Trainer, engine and catalog of an installation. Thread-safe."""

    def __init__(self, params: Params, catalog: Catalog):
        self.params, self.catalog = params, catalog
        config = base_config(params.base, params.paths)
        self.base_name = params.base.name
        self.architecture = str(config["model_type"])
        self._targets = BaseShapes.of(config).targets
        self.trainer = TrainerClient.of(params)
        self._open: dict[str, SessionInfo] = {}
        self._engines: dict[str, EngineClient] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections; the trainer's sessions stay until their leases expire."""
        self.trainer.close()
        for engine in self._engines.values():
            engine.close()

    # What can be honoured

    def described(self) -> dict[str, Any]:
        """Return the resident base as a supported model."""
        return {
            "model_name": self.base_name,
            "max_context_length": self.params.engine.max_model_len,
            "trainable": True,
            "sampleable": True,
        }

    def refuse_base(self, name: str) -> None:
        """Raise `ConfigError` unless this is the resident base."""
        if name != self.base_name:
            raise ConfigError(f"The base {name[:100]!r} is not resident. Use {self.base_name!r}.")

    def refuse_rank(self, rank: int) -> None:
        """Raise `ConfigError` for a rank that the engine does not serve."""
        if rank > (most := self.params.engine.max_rank):
            raise ConfigError(
                f"Rank {rank} is over engine.max_rank, {most}. Ask for {most} or less, or raise the setting."
            )

    def targets(self, attention: bool, mlp: bool) -> list[str]:
        """Return the projections of attention or MLP, or both."""
        return [name for name in self._targets if (mlp if name in PROJECTIONS else attention)]

    def trains(self, targets: list[str]) -> tuple[bool, bool]:
        """Say whether these projections are of the attention, and whether of the MLP."""
        return any(name not in PROJECTIONS for name in targets), any(name in PROJECTIONS for name in targets)

    # Models

    def create(self, model: TinkerModel, source: StateSource | None, seed: int | None) -> None:
        """Open a model's session, at the base or at another model's state."""
        start: dict[str, Any] = {}
        if source:
            start = {
                "fork_session": source.model.policy,
                "fork_state": source.checkpoint.stored,
                "fork_moments": source.moments,
            }
        if seed is None:
            seed = int(hashlib.sha256(model.id.encode()).hexdigest()[:8], 16)
        self._open[model.id] = self._session(model, seed=seed, **start)

    def reopen(self, model: TinkerModel) -> None:
        """Open a model's session again at its last step; gradients that were never applied are dropped."""
        self._open[model.id] = self._session(model)

    def _session(self, model: TinkerModel, **start: Any) -> SessionInfo:
        return self.trainer.create_session(
            model.policy,
            model.policy,
            rank=model.rank,
            alpha=ALPHA,
            targets=model.targets,
            # The same in every process of the face: after a restart it goes on at once.
            holder=f"tinker-{model.id}",
            owner=model.tenant,
            config={"source": "tinker", "model": model.id},
            policy_config={},
            snapshot_ttl_s=SNAPSHOT_S,
            **start,
        )

    def take_open(self, models: Iterable[TinkerModel]) -> list[SessionInfo]:
        """Forget the sessions of some models; return those that were open."""
        sessions = [self._open.pop(model.id, None) for model in models]
        return [session for session in sessions if session]

    def close_session(self, session: SessionInfo) -> None:
        """Let a session go."""
        with suppress(Conflict, NotFound):
            self.trainer.close_session(session)

    def forward_backward(self, model: TinkerModel, batch: WireBatch) -> tuple[list[Array], dict[str, float]]:
        """Gather gradients of a batch, or only score it.

        Returns each datum's log-probabilities in the shape of its targets, and the metrics.
        """
        data = [_datum(one.tokens, one.inputs) for one in batch.data]
        config, session = loss_config(batch), self._open[model.id]
        id = f"{model.id}:{batch.seq_id}"
        if batch.forward_only:
            answer = self.trainer.forward_only(session, data, batch.loss, config, id)
        else:
            answer = self.trainer.forward_backward(session, data, batch.loss, config, id, reduction="sum")
        shapes = (one.inputs["target_tokens"].shape for one in batch.data)
        outputs = zip(answer["loss_fn_outputs"], shapes, strict=True)
        logprobs = [np.asarray(row["logprobs"]["data"], "<f4").reshape(shape) for row, shape in outputs]
        return logprobs, {"loss:sum": answer["metrics"]["loss"]}

    def optim_step(self, model: TinkerModel, request: str, adam: bodies.AdamSent) -> dict[str, float]:
        """Apply the gathered gradients, once for each request; without any the step counts alone."""
        settings = protocol.AdamParams(**adam.model_dump(include=set(protocol.AdamParams.model_fields)))
        done = self.trainer.optim_step(self._open[model.id], settings, request, skip=not model.gathered)
        # Recipes log these beside their own, of which one is called `step`.
        return {"optim/grad_norm": done["grad_norm"], "optim/steps": done["step"]}

    def save_state(self, model: TinkerModel, name: str) -> None:
        """Store a model under a name."""
        self.trainer.save_state(self._open[model.id], name)

    def load_state(self, model: TinkerModel, source: StateSource) -> None:
        """Load a state of this model or another of its shape, with its Adam moments or without."""
        self._open[model.id] = self.trainer.load_state(
            self._open[model.id], source.checkpoint.stored, source.model.policy, source.moments
        )

    def delete_state(self, model: TinkerModel, name: str) -> None:
        """Delete a model's state. Idempotent."""
        self.trainer.delete_state(model.policy, name)

    # Revisions

    def export_revision(self, model: TinkerModel, prompts: list[list[int]]) -> Exported:
        """Publish a model as a revision with its effect probe over these prompts."""
        return self.trainer.export(self._open[model.id], "revision", probe_prompts=prompts)

    def export_snapshot(self, model: TinkerModel) -> Exported:
        """Publish a model as a snapshot, which expires."""
        return self.trainer.export(self._open[model.id], "snapshot")

    def retire(self, policy: str, digest: str) -> None:
        """Stop serving a revision whose checkpoint is deleted, unless a route or a release names it."""
        with suppress(Conflict, NotFound):
            self.catalog.lifecycle.retire(policy, digest, "tinker", "its checkpoint was deleted")

    def sample(
        self, served: str, plaintext: str, calls: Sequence[bodies.SampleSent], patience_s: float
    ) -> list[bytes]:
        """Return a SampleResponse for each call, metered as this key's; all have the first one's settings.

        Retries for `patience_s` while the engine is full or down, or the key's limits are reached.
        """
        body = calls[0]
        params = body.sampling_params
        request = {
            "model": served,
            "prompts": [[token for chunk in one.prompt.chunks for token in chunk.tokens] for one in calls],
            "n": body.num_samples,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "prompt_logprobs": bool(body.prompt_logprobs),
            "topk_prompt_logprobs": body.topk_prompt_logprobs,
            **{
                name: value
                for name in ("max_tokens", "seed", "stop")
                if (value := getattr(params, name)) is not None
            },
        }
        if params.top_k > 0:
            request["top_k"] = params.top_k
        if isinstance(params.stop, str):
            request["stop"] = [params.stop]
        groups = self._engine(plaintext).samples(request, patience_s)["groups"]
        return [
            write_samples(one["samples"], one["prompt_logprobs"], _topk(one["topk_prompt_logprobs"]))
            for one in groups
        ]

    def _engine(self, plaintext: str) -> EngineClient:
        with self._lock:
            if plaintext not in self._engines:
                if len(self._engines) >= MOST_KEYS:
                    # A request under way keeps its own.
                    self._engines.clear()
                url = self.params.url("engine")
                self._engines[plaintext] = EngineClient(url, plaintext, "rollout", timeout_s=TIMEOUT_S)
            return self._engines[plaintext]


def _datum(tokens: Array, inputs: Mapping[str, Array]) -> protocol.Datum:
    if "target_tokens" not in inputs:
        raise ConfigError("A datum has no target_tokens. Give one or more for each of its tokens.")
    if unknown := sorted(inputs.keys() - KNOWN_INPUTS):
        raise ConfigError(f"The loss input {unknown[0][:64]!r} is not known. Use {', '.join(KNOWN_INPUTS)}.")
    tensors = {
        name: protocol.TensorData(
            data=array.ravel().tolist(),
            dtype="int64" if name == "target_tokens" else "float32",
            shape=list(array.shape),
        )
        for name, array in inputs.items()
    }
    text = protocol.EncodedText(tokens=tokens.tolist())
    # The names are checked above.
    return protocol.Datum(model_input=protocol.ModelInput(chunks=[text]), loss_fn_inputs=tensors)  # type: ignore[arg-type]


def loss_config(batch: WireBatch) -> dict[str, float]:
    """Return a call's settings as the trainer takes them: distances of the bounds from 1."""
    settings = dict(batch.settings)
    if batch.loss == "dro":
        config = {"beta": _number(settings.pop("beta", BETA), "beta")}
    elif batch.loss in BOUNDS:
        low, high = (
            _number(settings.pop(name, default), name)
            for name, default in zip(LIMITS, BOUNDS[batch.loss], strict=True)
        )
        if not (0 <= low <= 1 <= high):
            raise ConfigError(f"The bounds {low:g} and {high:g} of the ratio must be around 1, none below 0.")
        config = {"clip_low": 1 - low, "clip_high": high - 1}
    else:
        config = {}
    if settings:
        raise ConfigError(f"{batch.loss} has no setting {next(iter(settings))[:64]!r}. Leave it out.")
    return config


def _number(value: float | str, name: str) -> float:
    if isinstance(value, str):
        raise ConfigError(f"{name} must be a number, not {value[:32]!r}.")
    return value


def _topk(rows: list[list[tuple[int, float]] | None] | None) -> tuple[Array, Array] | None:
    """Return token ids and log-probabilities (N, K); empty cells are 0 and -99999."""
    if rows is None:
        return None
    width = max((len(row) for row in rows if row), default=0)
    ids, values = np.zeros((len(rows), width)), np.full((len(rows), width), -99999.0)
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            ids[place, column], values[place, column] = token, logprob
    return ids, values
