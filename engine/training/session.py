"""A session: one policy's line of training on the resident base, durable after every step.

`optim_step` writes adapter, Adam moments, step, random state, data position, history and the results of
recent requests to one file, atomically, before it answers. Killed at any moment, the session goes on
from its last step bit for bit. Gradients are not stored: after a restart the step is to be repeated.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.errors import BaseModelError, Conflict, NotFound, ServiceError
from engine.training.lora import Example, ResidentBase
from engine.training.protocol import CreateSession, OptimStep, SessionInfo
from engine.training.update import Backward, forward_backward

STATE_VERSION = 1
CURRENT = "current"
REMEMBERED = 64


class Session:
    """Open or create a session in `directory`; used by one thread at a time."""

    def __init__(self, directory: Path, base: ResidentBase, base_digest: str, request: CreateSession):
        self.directory, self.base, self.base_digest = directory, base, base_digest
        self.name, self.policy, self.parent = request.session, request.policy, request.parent
        self.settings = {
            "rank": request.rank,
            "alpha": request.alpha,
            "targets": sorted(request.targets),
            "seed": request.seed,
        }
        self.generator = torch.Generator().manual_seed(request.seed)
        self.adapter = base.new_adapter(request.rank, request.alpha, request.targets, self.generator)
        self.step = self.position = self.fence = 0
        self.history: list[Mapping[str, Any]] = []
        self.done: dict[str, Mapping[str, Any]] = {}
        self.gathered = 0

    @property
    def exists(self) -> bool:
        return self._file(CURRENT).exists()

    def info(self) -> SessionInfo:
        return SessionInfo(
            self.name, self.policy, self.step, self.position, self.fence, self.base_digest, self.parent,
            tuple(self.history),
        )  # fmt: skip

    def drop_gradients(self) -> None:
        self.adapter.clear_gradients()
        self.gathered = 0

    def forward_backward(self, data: Sequence[Example], loss: str, config: Mapping[str, Any]) -> Backward:
        """Add the gradients of `data` to those gathered since the last step; what fails leaves them alone."""
        found = forward_backward(self.base, self.adapter, data, loss, config)
        self.gathered += found.metrics.tokens
        return found

    def optim_step(self, request: OptimStep) -> Mapping[str, Any]:
        """Apply the gathered gradients and store everything. The same request twice is applied once.

        Raises `ServiceError` when there are no gradients: the trainer was restarted since they were gathered.
        """
        if request.request_id in self.done:
            # Its first time may have been applied but not stored: the disk was full.
            self.save(CURRENT)
            return self.done[request.request_id]
        if not self.gathered and not request.skip:
            raise ServiceError(
                f"Session {self.name!r} has no gradients after step {self.step}; the trainer may have been "
                "restarted since. Open the session again and repeat the step."
            )
        adam = request.adam_params
        betas = adam.beta1, adam.beta2
        norm = 0.0
        if request.skip:
            self.drop_gradients()
        else:
            norm = self.adapter.step(
                adam.learning_rate, betas, adam.eps, adam.weight_decay, adam.grad_clip_norm
            )
        self.gathered = 0
        self.step, self.position = self.step + 1, request.position
        result = {"step": self.step, "grad_norm": norm}
        self.history.append({**request.record, **result})
        self.done[request.request_id] = result
        for old in list(self.done)[:-REMEMBERED]:
            del self.done[old]
        self.save(CURRENT)
        return result

    def save(self, name: str) -> Path:
        """Store the session under a name: written beside, fsynced, renamed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path, draft = self._file(name), self._file(name).with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                torch.save(self._state(), file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ServiceError(
                f"Could not store session {self.name!r} in {self.directory}: {error.strerror}. "
                "Free some space and run the step again; the last stored step is intact."
            ) from None
        return path

    def load(self, name: str) -> None:
        """Go back to what was stored under a name. Raises `NotFound`, or an error when it does not fit."""
        path = self._file(name)
        if not path.exists():
            raise NotFound(f"Session {self.name!r} has no state {name!r}.")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["base"] != self.base_digest:
            raise BaseModelError(
                f"Session {self.name!r} was trained on the base {state['base'][:12]}, not on the resident "
                f"base {self.base_digest[:12]}. Start another session, or the trainer with that base."
            )
        if state["settings"] != self.settings or state["policy"] != self.policy:
            raise Conflict(
                f"Session {self.name!r} exists with the settings {state['settings']}, not {self.settings}. "
                "Give the new line of training another session name."
            )
        self.adapter.load_state_dict(state["adapter"])
        self.generator.set_state(state["generator"])
        self.parent, self.step, self.position = state["parent"], state["step"], state["position"]
        self.history, self.done, self.gathered = state["history"], state["done"], 0

    def _state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "base": self.base_digest,
            "policy": self.policy,
            "settings": self.settings,
            "parent": self.parent,
            "step": self.step,
            "position": self.position,
            "history": self.history,
            "done": self.done,
            "generator": self.generator.get_state(),
            "adapter": self.adapter.state_dict(),
        }

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.state"
