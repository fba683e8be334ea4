"""A session: one policy's line of training on the resident base, durable after every step.

`optim_step` stores adapter, Adam moments, step, random state, data position, history, the writer's fence and
the results of its requests atomically before it answers. A killed session continues from its last step bit
for bit. Gradients are not stored: after a restart or an eviction the step must be repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.errors import BaseModelError, Conflict, NotFound, ServiceError
from engine.training.model.lora import ResidentBase
from engine.training.service import state
from engine.training.service.protocol import CreateSession, OptimStep, SessionInfo

STATE_VERSION = 2
CURRENT = "current"
# The settings that determine an adapter's shape and scale.
SHAPE = ("rank", "alpha", "targets", "ranks", "alphas")


def state_file(directory: Path, name: str = CURRENT) -> Path:
    """Return the state file of a name in a session's directory."""
    return directory / f"{name}.state"


class Session:
    """Open or create a session in `directory`; used by one thread at a time.

    `opened` is the request that opened it last, with rank, alpha and targets said; `done` are the results
    of all requests that changed what is stored, so that none is ever done twice, however late it comes
    again: a tenth of what the history takes. `calls` are the forward_backward calls whose gradients the
    adapter has gathered; who makes them counts them.
    """

    def __init__(self, directory: Path, base: ResidentBase, base_digest: str, opened: CreateSession):
        assert opened.rank is not None
        assert opened.alpha is not None
        assert opened.targets is not None
        self.directory, self.base, self.base_digest, self.opened = directory, base, base_digest, opened
        self.name, self.policy, self.parent = opened.session, opened.policy, opened.parent
        self.settings: dict[str, Any] = {
            "rank": opened.rank,
            "alpha": opened.alpha,
            "targets": sorted(opened.targets),
            "ranks": opened.ranks or {},
            "alphas": opened.alphas or {},
            "seed": opened.seed,
        }
        self.generator = torch.Generator().manual_seed(opened.seed)
        self.adapter = base.new_adapter(
            opened.rank, opened.alpha, opened.targets, self.generator, opened.ranks, opened.alphas
        )
        self.step = self.position = self.fence = self.calls = 0
        self.history: list[Mapping[str, Any]] = []
        self.done: dict[str, dict[str, Any]] = {}

    @property
    def exists(self) -> bool:
        """Say whether a state is stored."""
        return state_file(self.directory).exists()

    def info(self) -> SessionInfo:
        """Describe the session for its client."""
        return SessionInfo(
            self.name, self.policy, self.step, self.position, self.fence, self.base_digest, self.parent,
            tuple(self.history),
        )  # fmt: skip

    def drop_gradients(self) -> None:
        """Drop the gradients of an unfinished step."""
        self.adapter.clear_gradients()
        self.calls = 0

    def expect(self, gathered: int | None) -> None:
        """Raise `ServiceError` unless the gradients of this many calls are present; None checks nothing."""
        if gathered is None or gathered == self.calls:
            return
        raise ServiceError(
            f"Session {self.name!r} has gradients of {self.calls} calls after step {self.step}, not of "
            f"{gathered}; the trainer may have restarted since then. Open it again and repeat the step."
        )

    def optim_step(self, request: OptimStep) -> dict[str, Any]:
        """Apply the gathered gradients and store everything. The same request twice is applied once.

        Raises `ServiceError` when gradients are missing, because the trainer restarted after gathering them.
        """
        if request.request_id in self.done:
            # The first call may have been applied but not stored, when the disk was full.
            self.save()
            return self.answer(request.request_id)
        if not request.skip:
            self.expect(request.gathered)
        if not self.calls and not request.skip:
            raise ServiceError(
                f"Session {self.name!r} has no gradients after step {self.step}; the trainer may have been "
                "restarted since. Open the session again and repeat the step."
            )
        adam = request.adam_params
        betas = adam.beta1, adam.beta2
        norm = 0.0
        if not request.skip:
            norm = self.adapter.step(
                adam.learning_rate, betas, adam.eps, adam.weight_decay, adam.grad_clip_norm
            )
        self.drop_gradients()
        self.step, self.position = self.step + 1, request.position
        result = {"step": self.step, "grad_norm": norm}
        self.history.append({**request.record, **result})
        self.remember(request.request_id, result)
        self.save()
        return result

    def remember(self, request_id: str, result: dict[str, Any] | None = None) -> None:
        """Keep a request's result; without one, this session's description."""
        if result is None:
            result = {name: value for name, value in asdict(self.info()).items() if name != "history"}
        self.done[request_id] = result

    def answer(self, request_id: str) -> dict[str, Any]:
        """Return the result of a finished request."""
        return answer(self.done[request_id], self.history)

    def save(self, *names: str) -> Path:
        """Store the session atomically, under each name and as the current state."""
        paths = [state_file(self.directory, name) for name in (*names, CURRENT)]
        state.write(self._state(), paths)
        return paths[0]

    def save_as(self, name: str, request_id: str) -> dict[str, Any]:
        """Store the session under a name, once for each request."""
        if request_id not in self.done:
            self._save_with(request_id, {"path": str(state_file(self.directory, name))}, name)
        return self.answer(request_id)

    def load(self, name: str = CURRENT) -> None:
        """Load the state of a name. Raises `NotFound`, `Conflict` or `BaseModelError`."""
        path = state_file(self.directory, name)
        if not path.exists():
            raise NotFound(f"Session {self.name!r} has no state {name!r}.")
        stored = state.read(path)
        check_base(self.name, stored, self.base_digest)
        has = {**settings_of(stored), "policy": stored["policy"], "parent": stored["parent"]}
        wanted = {**self.settings, "policy": self.policy, "parent": self.parent}
        if other := [
            f"{name} {has[name]!r}, not {wanted[name]!r}" for name in wanted if has[name] != wanted[name]
        ]:
            raise Conflict(
                f"Session {self.name!r} exists with {' and '.join(other)}. "
                "Choose another session name, or leave these settings out."
            )
        self.adapter.load_state_dict(stored["adapter"])
        self.generator.set_state(stored["generator"])
        self.step, self.position = stored["step"], stored["position"]
        self.history, self.calls = stored["history"], 0
        if name == CURRENT:
            self.done, self.fence = stored["done"], stored.get("fence", 0)

    def load_from(self, name: str, request_id: str) -> dict[str, Any]:
        """Load the state of a name, once for each request."""
        if request_id not in self.done:
            self.load(name)
            self._save_with(request_id)
        return self.answer(request_id)

    def _save_with(self, request_id: str, result: dict[str, Any] | None = None, *names: str) -> None:
        """Store the session together with a request's result; a result that is not stored is forgotten."""
        self.remember(request_id, result)
        try:
            self.save(*names)
        except ServiceError:
            del self.done[request_id]
            raise

    def _state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "base": self.base_digest,
            "policy": self.policy,
            "settings": self.settings,
            "opened": self.opened.model_dump(mode="json"),
            "fence": self.fence,
            "parent": self.parent,
            "step": self.step,
            "position": self.position,
            "history": self.history,
            "done": self.done,
            "generator": self.generator.get_state(),
            "adapter": self.adapter.state_dict(),
        }


def settings_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored state's settings; version 1 states have one rank and one alpha everywhere."""
    return {"ranks": {}, "alphas": {}, **stored["settings"]}


def check_base(name: str, stored: Mapping[str, Any], base_digest: str) -> None:
    """Raise `BaseModelError` unless a stored state belongs to the resident base."""
    if stored["base"] != base_digest:
        raise BaseModelError(
            f"Session {name!r} was trained on the base {stored['base'][:12]}, not on the resident "
            f"base {base_digest[:12]}. Start another session, or the trainer with that base."
        )


def answer(result: dict[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Complete a stored result: a session's description gets the history up to its step."""
    return {**result, "history": tuple(history[: result["step"]])} if "fence" in result else result
