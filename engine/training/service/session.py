"""A session: one policy's line of training on the resident base, durable after every step.

`optim_step` stores adapter, Adam moments, step, random state, data position and the writer's fence atomically
before it answers. The step's row and the request's result are appended to a journal, so a step costs the same
however many came before. A killed session continues from its last step bit for bit. Gradients are not stored:
after a restart or an eviction the step must be repeated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import BaseModelError, Conflict, NotFound, ServiceError
from engine.training.model.lora import ResidentBase
from engine.training.service import state
from engine.training.service.protocol import CreateSession, LoadState, OptimStep
from engine.training.service.state import VERSION, Journal, Row

CURRENT = "current"
# The settings that determine an adapter's shape and scale.
SHAPE = ("rank", "alpha", "targets", "ranks", "alphas")


def state_file(directory: Path, name: str = CURRENT) -> Path:
    """Return the state file of a name in a session's directory."""
    return directory / f"{name}.state"


class Session:
    """Open or create a session in `directory`; used by one thread at a time.

    `opened` is the request that opened it last, with rank, alpha and targets resolved. `journal` holds the
    results of all requests that changed what is stored, so that none is ever done twice, however late it
    comes again. `row` is that of the last step. `calls` counts the forward_backward calls whose gradients the
    adapter has gathered; the caller maintains it.
    """

    def __init__(
        self,
        directory: Path,
        base: ResidentBase,
        base_digest: str,
        opened: CreateSession,
        journal: Journal | None = None,
    ):
        assert opened.rank is not None
        assert opened.alpha is not None
        assert opened.targets is not None
        assert opened.seed is not None
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
        self.journal = journal or Journal(directory)
        self.row: Row | None = None
        self._last: int | None = None

    @property
    def history(self) -> list[Row]:
        """Return the row of each step, read from the journal."""
        return self.journal.rows(self._last)

    def _described(self) -> dict[str, Any]:
        return {
            "session": self.name,
            "policy": self.policy,
            "step": self.step,
            "position": self.position,
            "fence": self.fence,
            "base": self.base_digest,
            "parent": self.parent,
        }

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
        if self.is_done(request.request_id):
            # The first call may have been applied but not stored, when the disk was full.
            self.save()
            return self.journal.answer(request.request_id)
        if not request.skip:
            self.expect(request.gathered)
        if not self.calls and not request.skip:
            raise ServiceError(
                f"Session {self.name!r} has no gradients after step {self.step}; the trainer may have "
                "restarted since then. Open the session again and repeat the step."
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
        self.row = {**request.record, **result}
        self._last = self.journal.append(self._last, id=request.request_id, result=result, row=self.row)
        self.save()
        return result

    def is_done(self, request_id: str) -> bool:
        """Say whether a request has a result; `journal.answer` returns it."""
        return request_id in self.journal.done

    def save(self, *names: str) -> Path:
        """Store the session atomically, under each name and as the current state.

        Raises `ServiceError` when writing fails; the previous state is then intact.
        """
        paths = [state_file(self.directory, name) for name in (*names, CURRENT)]
        try:
            state.write(self._state(self.journal.flush()), paths)
        except OSError as error:
            raise ServiceError(
                f"Could not store a session in {self.directory}: {error.strerror}. "
                "Free some disk space and repeat the step; the last stored step is intact."
            ) from None
        self.journal.commit()
        return paths[0]

    def save_answer(self, request_id: str, result: dict[str, Any] | None = None, *names: str) -> None:
        """Store the session with a request's result, by default its description; both or none of them."""
        line = self.journal.append(self._last, id=request_id, result=result or self._described())
        try:
            self.save(*names)
        except ServiceError:
            self.journal.withdraw(line, request_id)
            raise

    def save_as(self, name: str, request_id: str) -> dict[str, Any]:
        """Store the session under a name, once for each request."""
        if not self.is_done(request_id):
            self.save_answer(request_id, {"path": str(state_file(self.directory, name))}, name)
        return self.journal.answer(request_id)

    def load(self, name: str = CURRENT, moments: bool = True) -> None:
        """Load the state of a name. Raises `NotFound`, `Conflict` or `BaseModelError`."""
        stored = self._stored(self.directory, name)
        has = {**stored["settings"], "policy": stored["policy"], "parent": stored["parent"]}
        wanted = {**self.settings, "policy": self.policy, "parent": self.parent}
        if other := [
            f"{name} {has[name]!r}, not {wanted[name]!r}" for name in wanted if has[name] != wanted[name]
        ]:
            raise Conflict(
                f"Session {self.name!r} exists with {' and '.join(other)}. "
                "Choose another session name, or leave these settings out."
            )
        self.adapter.load_state_dict(stored["adapter"], moments)
        self.generator.set_state(stored["generator"])
        self.step, self.position, self.calls = stored["step"], stored["position"], 0
        if name == CURRENT:
            self.fence = stored["fence"]
            self.journal.read(stored["journal"])
        self._last, self.row = stored["last"], stored["row"]

    def load_from(self, request: LoadState) -> dict[str, Any]:
        """Load the state of a name, of this session or another, once for each request."""
        if not self.is_done(request.request_id):
            if request.source and request.source != self.name:
                self._take(request)
            else:
                self.load(request.name, request.moments)
            self.save_answer(request.request_id)
        return self.journal.answer(request.request_id)

    def _take(self, request: LoadState) -> None:
        """Take factors and moments of another session's state; raises `Conflict` for another shape."""
        stored = self._stored(self.directory.parent / str(request.source), request.name)
        has = stored["settings"]
        if other := [f"{name} {has[name]!r}" for name in SHAPE if has[name] != self.settings[name]]:
            raise Conflict(
                f"The state {request.name!r} of session {request.source!r} has {' and '.join(other)}, unlike "
                f"session {self.name!r}. Open a new session with `fork_session` instead."
            )
        self.adapter.load_state_dict(stored["adapter"], request.moments)
        self.calls = 0

    def _stored(self, directory: Path, name: str) -> dict[str, Any]:
        path = state_file(directory, name)
        if not path.exists():
            raise NotFound(f"Session {directory.name!r} has no state {name!r}.")
        stored = state.read(path)
        check_base(directory.name, stored, self.base_digest)
        return stored

    def _state(self, journal: int) -> dict[str, Any]:
        return {
            "version": VERSION,
            "base": self.base_digest,
            "policy": self.policy,
            "settings": self.settings,
            "opened": self.opened.model_dump(mode="json"),
            "fence": self.fence,
            "parent": self.parent,
            "step": self.step,
            "position": self.position,
            "journal": journal,
            "last": self._last,
            "row": self.row,
            "generator": self.generator.get_state(),
            "adapter": self.adapter.state_dict(),
        }


def check_base(name: str, stored: Mapping[str, Any], base_digest: str) -> None:
    """Raise `BaseModelError` unless a stored state belongs to the resident base."""
    if stored["base"] != base_digest:
        raise BaseModelError(
            f"Session {name!r} was trained on the base {stored['base'][:12]}, not on the resident "
            f"base {base_digest[:12]}. Start another session, or the trainer with that base."
        )
