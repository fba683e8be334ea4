"""The verbs of the Tinker API on sessions, models and checkpoints.

Whoever calls is a tenant; what belongs to another tenant is as absent. Calls of a model wait in its line and
run in threads; the rest answers at once.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from engine.catalog.catalog import Catalog
from engine.catalog.records import Key, served_name
from engine.catalog.tinker_records import (
    TinkerCheckpoint,
    TinkerModel,
    TinkerResult,
    TinkerSampler,
    TinkerSession,
)
from engine.errors import ConfigError, Conflict, GraftworkError, NotFound, ServiceError
from engine.tinker import bodies
from engine.tinker.backend import Backend, StateSource
from engine.tinker.codec import WireBatch, write_output
from engine.tinker.lines import LOST, NO_MODEL, CallLine, Done, Lines
from engine.tinker.results import PROTOBUF, Promises, Result
from engine.tinker.sampling import SampleBatcher, outcome_of

logger = logging.getLogger(__name__)
WEIGHTS, SAMPLER = "weights", "sampler_weights"
# What the SDK calls a checkpoint of each kind.
TYPES = {WEIGHTS: "training", SAMPLER: "sampler"}
# A client says that it lives every 10 s. The sessions of one that is silent for this long leave the trainer.
SILENT_S = 900.0
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
NOT_TRAINED = "train_unembed: the output layer is not trained; all other projections are."
# Threads: calls of models, which wait for the trainer, and questions to the catalog, which are brief.
CALLS, QUESTIONS = 64, 8
# Sampling clients that are remembered.
MOST_SAMPLERS = 4096
# Prompts of an effect probe, and their longest part of a datum in tokens.
PROBES, PROBE_TOKENS = 4, 16
Answer = TypeVar("Answer")


class Models:
    """Sessions, models, checkpoints and samplers over an index, a trainer and an engine."""

    def __init__(self, catalog: Catalog, backend: Backend):
        self.catalog, self.index, self.backend = catalog, catalog.tinker, backend
        self.promises = Promises()
        self._calls = ThreadPoolExecutor(CALLS, "tinker-call")
        self._questions = ThreadPoolExecutor(QUESTIONS, "tinker-question")
        self.lines = Lines(catalog, self.promises, self._calls, backend.reopen)
        self.sampling = SampleBatcher(backend, self.promises)
        self._samplers: OrderedDict[tuple[str, str], TinkerSampler] = OrderedDict()
        self._heard: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Beginnings of each model's newest data, for the effect probe of a revision.
        self._seen: dict[str, list[list[int]]] = {}

    def close(self) -> None:
        """Drop what waits; what runs ends with its answer."""
        self.sampling.close()
        for threads in (self._calls, self._questions):
            threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Return the result of a call that may wait for the database, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._questions, call, *arguments)

    async def ask_trainer(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Return the result of a call that may wait for the trainer, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, call, *arguments)

    # Sessions

    def create_session(self, key: Key, body: bodies.SessionSent, idempotency: str) -> str:
        """Add a session and return its id; the same one for the same idempotency key, if there is one."""
        source = f"{key.owner}\0{idempotency}" if idempotency else secrets.token_hex()
        id = f"s{hashlib.sha256(source.encode()).hexdigest()[:16]}"
        self.index.add_session(TinkerSession(id, key.owner, body.user_metadata or {}, time.time()))
        return id

    def session(self, key: Key, id: str) -> TinkerSession:
        """Return a session that has not finished. Raises `NotFound`."""
        session = self.index.find(TinkerSession, key.owner, id)
        if session is None or session.finished:
            raise NotFound("There is no such session, or it has finished. Start a new client.")
        return session

    async def hear(self, key: Key, id: str) -> None:
        """Note that a session's client lives. Raises `NotFound`."""
        await self.ask(self.session, key, id)
        self._heard[key.owner, id] = time.monotonic()

    async def finish(self, key: Key, id: str, reason: str) -> None:
        """End a session and let its models' trainer sessions go; the first reason stays."""
        await self.ask(self.index.finish, key.owner, id, reason)
        if await self.ask(self.index.find, TinkerSession, key.owner, id):
            await self._release(key.owner, id)

    async def close_silent(self) -> None:
        """Let the trainer's sessions of clients go that are silent; their next call opens them again."""
        before = time.monotonic() - SILENT_S
        for line_of in self.lines.sessions() - self._heard.keys():
            # This process has just started, or the client is about to say that it lives.
            self._heard[line_of] = time.monotonic()
        for (tenant, id), heard in list(self._heard.items()):
            if heard < before:
                await self._release(tenant, id)

    async def _release(self, tenant: str, session: str) -> None:
        self._heard.pop((tenant, session), None)
        closed = self.lines.close(tenant, session)
        for model in closed:
            self._seen.pop(model.id, None)
        # Taken here: a call that comes meanwhile opens a session of its own.
        for opened in self.backend.take_open(closed):
            await self.ask_trainer(self.backend.close_session, opened)

    async def refuse(self, key: Key, model_id: str, seq_id: int, error: GraftworkError) -> str:
        """Let a numbered call fail in its turn; return the request id. Raises `NotFound`."""
        return self.lines.refuse(await self._line(key, model_id, seq_id), seq_id, error)

    async def find(self, key: Key, model_id: str) -> CallLine:
        """Return a model's line. Raises `NotFound` when the key has no such model."""
        line = await self.lines.find(key.owner, model_id)
        if not key.sees(line.model.policy):
            raise NotFound(NO_MODEL)
        return line

    async def _line(self, key: Key, model_id: str, seq_id: int) -> CallLine:
        if seq_id < 1:
            raise ConfigError("seq_id must be 1 or more.")
        return await self.find(key, model_id)

    # New models

    async def create_model(self, key: Key, body: bodies.CreateModelSent) -> str:
        """Begin a new model at the base; return the request id.

        Raises `ConfigError` for what cannot be honoured.
        """
        await self.ask(self.session, key, body.session_id)
        lora = body.lora_config or bodies.LoraSent(rank=32)
        self.backend.refuse_base(body.base_model)
        self.backend.refuse_rank(lora.rank)
        if body.optimizer_config.type != "adamw":
            raise ConfigError(
                f"The optimizer {body.optimizer_config.type!r} is not supported. Use adamw, the default."
            )
        if not (lora.train_mlp or lora.train_attn):
            raise ConfigError(
                "train_unembed alone is not supported: the output layer is not trained. Set train_mlp or "
                "train_attn."
            )
        targets = self.backend.targets(lora.train_attn, lora.train_mlp)
        model = self._new(key, body.session_id, body.model_seq_id, lora.rank, targets, body.user_metadata)
        return self._begin(model, body.model_seq_id, None, lora.seed)

    async def load_new(self, key: Key, body: bodies.LoadWeightsSent) -> str:
        """Begin a new model at a checkpoint; return the request id. Raises `NotFound` and `ConfigError`."""
        if body.session_id is None or body.model_seq_id is None:
            raise ConfigError("Give session_id and model_seq_id, or model_id and seq_id.")
        await self.ask(self.session, key, body.session_id)
        checkpoint, origin = await self.ask(self.find_path, key, body.path)
        rank, targets = origin.rank, origin.targets
        self.backend.refuse_rank(rank)
        if checkpoint.kind != WEIGHTS:
            raise ConfigError(
                "A revision has no state of the optimizer, and is not trained further. Load the path of a "
                "save_state."
            )
        model = self._new(key, body.session_id, body.model_seq_id, rank, targets, body.user_metadata)
        return self._begin(model, body.model_seq_id, StateSource(origin, checkpoint, body.optimizer), None)

    def _new(
        self, key: Key, session: str, number: int, rank: int, targets: list[str], metadata: bodies.Metadata
    ) -> TinkerModel:
        # A tenant that is limited to its policies gets names within them.
        patterns = [pattern for pattern in key.policies if pattern.endswith("*")]
        if key.policies and not patterns:
            raise ConfigError(
                "This key may use single policies only, and a model needs a policy of its own. Create a key "
                "with a prefix such as `--policy 'acme-*'`."
            )
        prefix = patterns[0][:-1] if patterns else "tinker-"
        id, now = f"{session}:train:{number}", time.time()
        policy = f"{prefix}{session}-{number}"
        if len(policy) > 63:
            raise ConfigError(f"The policy's name {policy!r} is over 63 characters. Use a shorter prefix.")
        return TinkerModel(
            id, session, key.owner, policy, rank, targets, metadata or {}, 1, 0, False, now, now
        )

    def _begin(self, model: TinkerModel, number: int, source: StateSource | None, seed: int | None) -> str:
        id = f"{model.session}:create:{number}"
        if self.promises.find(model.tenant, id):
            return id
        promise = self.promises.add(model.tenant, id)

        def work() -> tuple[Result, bool]:
            kind = "load_weights" if source else "create_model"
            path = {"path": source.checkpoint.path} if source else {}
            answer = {"model_id": model.id, "type": kind, **path}
            is_new = self.index.find(TinkerResult, model.tenant, id) is None
            if is_new:
                self.backend.create(model, source, seed)
                self.index.add(model, TinkerResult(id, model.tenant, answer, time.time()))
            return Result.of(answer), is_new

        async def begin() -> None:
            outcome = await outcome_of(self._calls, work)
            result, is_new = (outcome, False) if isinstance(outcome, Result) else outcome
            if is_new:
                self.lines.begin(model)
            self.promises.keep(promise, result)

        task = asyncio.create_task(begin())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return id

    async def load_into(self, key: Key, body: bodies.LoadWeightsSent) -> str:
        """Load a checkpoint of a model into it, in its line; return the request id."""
        if body.model_id is None or body.seq_id is None:
            raise ConfigError("Give session_id and model_seq_id, or model_id and seq_id.")
        line = await self.find(key, body.model_id)

        def work(model: TinkerModel) -> Done:
            # In its turn: the save of this state may be a call before.
            checkpoint, origin = self.find_path(key, body.path)
            if checkpoint.kind != WEIGHTS:
                raise ConfigError("A revision has no state of the optimizer. Load the path of a save_state.")
            self.backend.load_state(model, StateSource(origin, checkpoint, body.optimizer))
            after = replace(model, gathered=0, corrupted=False)
            return Done(after, Result.of({"path": body.path, "model_id": model.id, "type": "load_weights"}))

        return self.lines.submit(line, body.seq_id, work)

    # Training

    async def forward_backward(self, key: Key, batch: WireBatch) -> str:
        """Queue a call of a model's line, which fails for an unknown loss; return the request id."""
        line = await self._line(key, batch.model_id, batch.seq_id)
        if batch.loss not in LOSSES:
            sentence = (
                f"The loss {batch.loss[:64]!r} is not supported. Use one of {', '.join(LOSSES)}; the recipes "
                "of the cookbook take `loss_fn=importance_sampling`."
            )
            return self.lines.refuse(line, batch.seq_id, ConfigError(sentence))

        def work(model: TinkerModel) -> Done:
            refuse_corrupted(model)
            logprobs, metrics = self.backend.forward_backward(model, batch)
            if batch.data:
                self._seen[model.id] = probe_prompts(batch)
            after = replace(model, gathered=model.gathered + (not batch.forward_only))
            return Done(after, Result(write_output(logprobs, metrics), PROTOBUF), durable=False)

        return self.lines.submit(line, batch.seq_id, work)

    async def optim_step(self, key: Key, body: bodies.OptimStepSent) -> str:
        """Queue a step in a model's line; return the request id."""
        line = await self.find(key, body.model_id)
        settings = body.adam_params or body.optimizer_params or bodies.AdamSent()
        if isinstance(settings, bodies.OptimizerParamsSent) and settings.type != "adamw":
            sentence = f"The optimizer {settings.type!r} is not supported. Use adamw, the default."
            return self.lines.refuse(line, body.seq_id, ConfigError(sentence))

        def work(model: TinkerModel) -> Done:
            refuse_corrupted(model)
            metrics = self.backend.optim_step(model, f"{model.id}:{body.seq_id}", settings)
            return Done(replace(model, gathered=0), Result.of({"metrics": metrics, "type": "optim_step"}))

        return self.lines.submit(line, body.seq_id, work)

    # Checkpoints

    async def save(self, key: Key, body: bodies.SaveSent) -> str:
        """Queue a save of a model's state; return the request id."""
        line = await self.find(key, body.model_id)
        name = body.path or f"{body.seq_id:06d}"

        def work(model: TinkerModel) -> Done:
            refuse_corrupted(model)
            row = self._checkpoint(model, WEIGHTS, name, body)
            stored = replace(row, stored=state_name(name))
            self.backend.save_state(model, stored.stored)
            return Done(model, Result.of({"path": row.path, "type": "save_weights"}), made=stored)

        return self.lines.submit(line, body.seq_id, work)

    async def save_for_sampler(self, key: Key, body: bodies.SaveSent) -> str:
        """Queue a revision (with `path`) or a snapshot of a model; return the request id."""
        line = await self.find(key, body.model_id)
        name = body.path
        if name is None:
            if body.sampling_session_seq_id is None:
                sentence = "Give a path, or sampling_session_seq_id."
                return self.lines.refuse(line, body.seq_id, ConfigError(sentence))
            return self.lines.submit(line, body.seq_id, self._snapshot(body.sampling_session_seq_id))

        def work(model: TinkerModel) -> Done:
            refuse_corrupted(model)
            row = self._checkpoint(model, SAMPLER, name, body)
            exported = self.backend.export_revision(model, self._seen.get(model.id) or [[1, 2, 3]])
            answer = {"path": row.path, "type": "save_weights_for_sampler"}
            stored = replace(row, stored=exported.digest, bytes=exported.bytes)
            return Done(model, Result.of(answer), made=stored)

        return self.lines.submit(line, body.seq_id, work)

    def _snapshot(self, number: int) -> Callable[[TinkerModel], Done]:
        def work(model: TinkerModel) -> Done:
            refuse_corrupted(model)
            exported = self.backend.export_snapshot(model)
            id = f"{model.session}:sample:{number}"
            sampler = TinkerSampler(id, model.session, model.tenant, exported.served_name, None, time.time())
            answer = {"sampling_session_id": id, "path": None, "type": "save_weights_for_sampler"}
            return Done(model, Result.of(answer), made=sampler)

        return work

    def _checkpoint(
        self, model: TinkerModel, kind: str, name: str, body: bodies.SaveSent
    ) -> TinkerCheckpoint:
        if not body.overwrite and self.index.checkpoint(model.tenant, model.id, kind, name):
            raise Conflict(
                f"The checkpoint {name!r} exists. Choose another name, delete it, or set overwrite."
            )
        now = time.time()
        expires_at = now + body.ttl_seconds if body.ttl_seconds else None
        metadata = body.user_metadata or {}
        return TinkerCheckpoint(
            model.id, kind, name, model.tenant, "", None, False, metadata, now, expires_at
        )

    def find_path(self, key: Key, path: str) -> tuple[TinkerCheckpoint, TinkerModel]:
        """Return the checkpoint of a `tinker://` path, and its model. Raises `NotFound`, `ConfigError`."""
        model, _, rest = path.removeprefix("tinker://").partition("/")
        kind, _, name = rest.partition("/")
        if not model or not name or "/" in name:
            raise ConfigError(
                "A path has three parts: tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME."
            )
        return self.checkpoint(key, model, kind, name)

    def checkpoint(self, key: Key, model: str, kind: str, name: str) -> tuple[TinkerCheckpoint, TinkerModel]:
        """Return a checkpoint and its model. Raises `NotFound`."""
        checkpoint = self.index.checkpoint(key.owner, model, kind, name)
        origin = self.index.find(TinkerModel, key.owner, model)
        if checkpoint is None or origin is None or not key.sees(origin.policy):
            raise NotFound(
                "There is no such checkpoint, or it has expired. List them with `tinker checkpoint`."
            )
        return checkpoint, origin

    def seen_by(self, key: Key, rows: Sequence[TinkerCheckpoint]) -> list[TinkerCheckpoint]:
        """Return those of a tenant's checkpoints whose policies the key may use."""
        models = {id: self.index.find(TinkerModel, key.owner, id) for id in {row.model for row in rows}}
        return [row for row in rows if (model := models[row.model]) and key.sees(model.policy)]

    def delete(self, checkpoint: TinkerCheckpoint, model: TinkerModel) -> None:
        """Delete a checkpoint and what it names. Idempotent."""
        if not self.index.remove_checkpoint(checkpoint):
            # It is gone, or was saved again under its name.
            return
        try:
            if checkpoint.kind == WEIGHTS:
                self.backend.delete_state(model, checkpoint.stored)
            elif not self._is_shared(checkpoint):
                self.backend.retire(model.policy, checkpoint.stored)
        except ServiceError:
            self.index.add(checkpoint)
            raise

    def _is_shared(self, checkpoint: TinkerCheckpoint) -> bool:
        """Say whether another checkpoint of the model is the same revision: saved twice without a step."""
        return any(
            other.stored == checkpoint.stored and other.name != checkpoint.name
            for other in self.index.all_of(TinkerCheckpoint, checkpoint.tenant, "model", checkpoint.model)
            if other.kind == SAMPLER
        )

    def delete_expired(self) -> None:
        """Delete the checkpoints of all tenants whose time is over."""
        for checkpoint in self.index.expired():
            model = self.index.find(TinkerModel, checkpoint.tenant, checkpoint.model)
            try:
                if model:
                    self.delete(checkpoint, model)
            except GraftworkError as error:
                # The next round meets it again.
                logger.warning("The expired checkpoint %s was not deleted: %s", checkpoint.path, error)

    # Sampling

    def create_sampler(self, key: Key, body: bodies.SamplingSessionSent) -> str:
        """Add a sampling client of the base or of a checkpoint; return its id."""
        self.session(key, body.session_id)
        if body.model_path is not None:
            checkpoint, model = self.find_path(key, body.model_path)
            if checkpoint.kind != SAMPLER:
                raise ConfigError(
                    "A state is not served. Save it with save_weights_for_sampler, and give that path."
                )
            served = served_name(model.policy, checkpoint.stored)
        else:
            self.backend.refuse_base(body.base_model or "")
            served = self.backend.base_name
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self.index.add(TinkerSampler(id, body.session_id, key.owner, served, body.model_path, time.time()))
        return id

    def sampler(self, key: Key, id: str) -> TinkerSampler:
        """Return a sampling client. Raises `NotFound`."""
        sampler = self._samplers.get((key.owner, id)) or self.index.find(TinkerSampler, key.owner, id)
        if sampler is None:
            raise NotFound("There is no such sampling client. Create one.")
        self._samplers[key.owner, id] = sampler
        if len(self._samplers) > MOST_SAMPLERS:
            self._samplers.popitem(last=False)
        return sampler

    async def sample(self, key: Key, plaintext: str, body: bodies.SampleSent) -> str:
        """Begin samples of a prompt; return the request id.

        Raises `Busy` when too many wait, `ConfigError` for what is not supported.
        """
        id = f"{body.sampling_session_id}:{body.seq_id}"
        if self.promises.find(key.owner, id):
            return id
        self.sampling.check(plaintext, body)
        sampler = self._samplers.get((key.owner, body.sampling_session_id))
        if sampler is None:
            sampler = await self.ask(self.sampler, key, body.sampling_session_id)
        if not self.promises.find(key.owner, id):
            self.sampling.begin(self.promises.add(key.owner, id), sampler.served, plaintext, body)
        return id

    # Results

    async def retrieve(self, key: Key, id: str, seconds: float) -> Result | None:
        """Return a call's result; None when there is none after so many seconds.

        Raises `KeyError` when nothing is known of it.
        """
        if promise := self.promises.find(key.owner, id):
            return await self.promises.wait(promise, seconds)
        if stored := await self.ask(self.index.find, TinkerResult, key.owner, id):
            return Result.of(stored.body)
        raise KeyError(id)

    def queue_state(self, id: str) -> dict[str, str]:
        """Return what a poll is told that found no result: whether the call waits for others."""
        if ":sample:" in id and self.sampling.is_full:
            return {"queue_state": "paused_capacity", "queue_state_reason": "samples wait for the engine"}
        return {"queue_state": "active"}


def refuse_corrupted(model: TinkerModel) -> None:
    """Raise `Conflict` when a restart has lost gradients of the model."""
    if model.corrupted:
        raise Conflict(LOST)


def state_name(name: str) -> str:
    """Return the trainer's name for a checkpoint, whose own is free text."""
    return f"tinker-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def probe_prompts(batch: WireBatch) -> list[list[int]]:
    """Return the beginnings of the first data, as prompts of an effect probe."""
    prompts = [datum.tokens[:PROBE_TOKENS].tolist() for datum in batch.data[:PROBES]]
    return [prompt for prompt in prompts if prompt]
