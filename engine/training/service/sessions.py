"""All sessions of the trainer: their writers, which are in memory, and which are evicted.

An idle session is only in its state files; its next operation loads it again. The trainer's one thread
changes sessions. Other threads may read them and renew a writer's lease.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from engine.errors import Busy, ConfigError, Conflict, NotFound, ServiceError
from engine.planning.memory import TRAINED_BYTES
from engine.training.model.adapter import by_pattern, chosen_sites
from engine.training.model.lora import ResidentBase
from engine.training.service import state
from engine.training.service.protocol import CreateSession, SessionRequest
from engine.training.service.session import CURRENT, SHAPE, Session, state_file
from engine.training.service.session_deletion import LEASE_S, open_sentence, refuse_open, remove_sessions
from engine.training.service.state import Journal

NEVER = float("-inf")
# Share of the memory that is free once the base is loaded. The rest is for activations, for one session's
# temporary copies (earlier gradients, the state being stored), and for the engine on the same machine.
FREE_SHARE = 0.25


@dataclass
class Known:
    """One session: its writer's request and fence, the time of the writer's last call, and its bytes.

    `heard` is in monotonic seconds. `session` is None while the session is only on disk.
    """

    opened: CreateSession
    fence: int
    heard: float
    bytes: int
    step: int
    session: Session | None = None

    @property
    def is_active(self) -> bool:
        """Say whether the writer's lease has not expired."""
        return time.monotonic() - self.heard < LEASE_S

    @property
    def can_leave(self) -> bool:
        """Say whether the session can be evicted without losing gradients that its writer will apply."""
        return self.session is None or not (self.session.calls and self.is_active)


class Sessions:
    """Sessions under `directory`, at most `budget` bytes of them in memory.

    `waiting` returns the number of queued operations of a session."""

    def __init__(
        self,
        directory: Path,
        base: ResidentBase,
        base_digest: str,
        budget: int,
        waiting: Callable[[str], int],
    ):
        self.directory, self.base, self.base_digest = directory, base, base_digest
        self.budget, self.waiting = budget, waiting
        self._known: dict[str, Known] = {}
        # Of every open session, also while it is evicted: a journal is indexed once.
        self._journals: dict[str, Journal] = {}
        # Writers from before a restart may still be active.
        for name, stored in self._newest():
            if not stored.is_active:
                break
            self._known[name] = stored

    def find(self, name: str) -> Known | None:
        """Return a known or stored session; None when there is none."""
        if name not in self._known and (stored := self._stored(name)):
            # A writer that opened it while the file was read is newer than the file.
            self._known.setdefault(name, stored)
        return self._known.get(name)

    def _stored(self, name: str) -> Known | None:
        file = state_file(self.directory / name)
        return self._described(file, state.read_header(file)) if file.is_file() else None

    def _described(self, file: Path, header: dict[str, Any]) -> Known:
        opened = CreateSession.model_validate(header["opened"])
        heard = time.monotonic() - (time.time() - file.stat().st_mtime)
        return Known(opened, header["fence"], heard, self.bytes_of(opened), header["step"])

    def bytes_of(self, opened: CreateSession) -> int:
        """Return a session's bytes in memory: factors, gradients and Adam moments."""
        assert opened.rank is not None
        assert opened.targets is not None
        chosen = chosen_sites(self.base.sites, opened.targets)
        ranks = by_pattern(chosen, opened.rank, opened.ranks or {})
        values = (
            ranks[name] * (site.inputs + site.outputs) * max(1, site.experts) for name, site in chosen.items()
        )
        return TRAINED_BYTES * sum(values)

    def hear(self, name: str, fence: int) -> bool:
        """Renew the lease of the writer with this fence; say whether it still holds the session.

        An expired lease is renewed unless the writer closed the session or another writer is active.
        """
        entry = self.find(name)
        if entry is None or entry.fence != fence or entry.heard == NEVER:
            return False
        if not entry.is_active and self._other_writer(entry.opened):
            return False
        entry.heard = time.monotonic()
        return True

    def _other_writer(self, opened: CreateSession) -> CreateSession | None:
        """Return the request of another active writer of the same policy."""
        active = [one.opened for one in list(self._known.values()) if one.is_active]
        same = (one for one in active if one.policy == opened.policy and one.holder != opened.holder)
        return next(same, None)

    def refuse_other_writers(self, opened: CreateSession) -> None:
        """Raise `Conflict` while another writer holds any session of this policy."""
        if other := self._other_writer(opened):
            raise Conflict(
                f"Policy {opened.policy!r} is being written by {other.holder!r} in the session "
                f"{other.session!r}. Wait until that writer closes the session or its lease of "
                f"{LEASE_S:.0f} s ends."
            )

    def checked(self, request: SessionRequest) -> Known:
        """Return a request's session; `Conflict` for an old fence or while another writer is active."""
        entry = self.find(request.session)
        if entry is None:
            raise NotFound(f"There is no session {request.session!r}. Create it first.")
        if entry.fence != request.fence:
            raise Conflict(f"Session {request.session!r} has another writer now. Stop this run.")
        if not entry.is_active:
            self.refuse_other_writers(entry.opened)
        entry.heard = time.monotonic()
        return entry

    def writable(self, request: SessionRequest) -> Session:
        """Return a request's session, loaded from its last step if it was evicted."""
        entry = self.checked(request)
        session = entry.session or self._bring(entry.opened)
        self.keep(session)
        return session

    def resume(self, request: CreateSession) -> Session | None:
        """Load a stored session for this request's writer; None when there is none.

        Fields that the request leaves out keep their stored values. Raises `Conflict` when others differ.
        """
        file = state_file(self.directory / request.session)
        if not file.is_file():
            return None
        header = state.read_header(file)
        has = {"parent": header["parent"], **{name: header["settings"][name] for name in (*SHAPE, "seed")}}
        left_open = {name: value for name, value in has.items() if getattr(request, name) is None}
        return self._bring(request.model_copy(update=left_open))

    def _bring(self, opened: CreateSession) -> Session:
        session = self.fresh(opened, self._journals.get(opened.session))
        session.load(CURRENT)
        return session

    def fresh(self, opened: CreateSession, journal: Journal | None = None) -> Session:
        """Return a session before its first step, after evicting others to make room."""
        self.make_room(opened)
        return Session(self.directory / opened.session, self.base, self.base_digest, opened, journal)

    def keep(self, session: Session) -> None:
        """Keep a session in memory and renew its writer's lease."""
        entry, opened = self._known.get(session.name), session.opened
        size = entry.bytes if entry and entry.session is session else self.bytes_of(opened)
        self._journals[session.name] = session.journal
        self._known[session.name] = Known(
            opened, session.fence, time.monotonic(), size, session.step, session
        )

    def release(self, name: str) -> None:
        """Evict a session and end its writer's lease, also for after a restart."""
        self._known[name].heard = NEVER
        # After a restart the file's modification time stands for the writer's last call.
        long_ago = time.time() - LEASE_S
        os.utime(state_file(self.directory / name), (long_ago, long_ago))
        self._leave(self._known[name])
        self._journals.pop(name, None)

    def delete(self, policy: str, only_ask: bool = False) -> dict[str, int]:
        """Remove every session of a policy, from memory and disk; `Conflict` while one is open.

        Returns the number of stored sessions and their bytes. With `only_ask` nothing is removed.
        """
        mine = [name for name, one in dict(self._known).items() if one.opened.policy == policy]
        for name in mine:
            if self._known[name].is_active:
                raise Conflict(open_sentence(policy, name, self._known[name].opened.holder))
        if only_ask:
            refuse_open(self.directory, policy)
            return {}
        removed = remove_sessions(self.directory, policy)
        for name in mine:
            del self._known[name]
            self._journals.pop(name, None)
        return removed

    def make_room(self, opened: CreateSession) -> None:
        """Evict least recently used sessions until this one fits.

        Raises `ConfigError` when the session is larger than the whole budget, `Busy` while all sessions in
        memory are in the middle of a step.
        """
        needed = self.bytes_of(opened)
        if needed > self.budget:
            raise ConfigError(
                f"A session of rank {opened.rank} needs {needed:,} bytes with gradients and Adam moments; "
                f"the trainer has {self.budget:,} for all sessions. Lower `rank`, or raise trainer.sessions "
                "on a GPU and the free memory on a CPU."
            )
        others = {name: entry for name, entry in self._known.items() if name != opened.session}
        leaving = iter(sorted((entry for entry in others.values() if entry.session), key=self._idleness))
        while sum(entry.bytes for entry in others.values() if entry.session) + needed > self.budget:
            entry = next(leaving)
            if not entry.can_leave:
                raise Busy(
                    f"The {self.budget:,} bytes for sessions are taken by policies in the middle of a step.",
                    1.0,
                    {"queue_state": "paused_capacity"},
                )
            self._leave(entry)

    def _idleness(self, entry: Known) -> tuple[bool, bool, float]:
        return not entry.can_leave, self.waiting(entry.opened.session) > 0, entry.heard

    def _leave(self, entry: Known) -> None:
        if entry.session:
            entry.step = entry.session.step
        entry.session = None

    def headers(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield each stored session's file and header, newest first; damaged files are skipped."""
        files = self.directory.glob(f"*/{CURRENT}.state")
        for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
            with suppress(ServiceError):
                yield file, state.read_header(file)

    def _newest(self) -> Iterator[tuple[str, Known]]:
        return ((file.parent.name, self._described(file, header)) for file, header in self.headers())

    def resident(self) -> list[Session]:
        """Return the sessions in memory, the most recently used last."""
        held = [one for one in list(self._known.values()) if one.session]
        return [one.session for one in sorted(held, key=lambda one: one.heard) if one.session]

    def rows(self, stored: int = 0) -> list[dict[str, Any]]:
        """Describe the known sessions and the newest `stored` ones, the most recently used first."""
        entries = dict(self._known)
        entries |= {name: entry for name, entry in islice(self._newest(), stored) if name not in entries}
        now = time.monotonic()
        ordered = sorted(entries.items(), key=lambda item: item[1].heard, reverse=True)
        return [
            {
                "session": name,
                "policy": entry.opened.policy,
                "step": entry.session.step if entry.session else entry.step,
                "resident": entry.session is not None,
                "bytes": entry.bytes,
                "heard_s": None if entry.heard == NEVER else round(now - entry.heard, 3),
                "holder": entry.opened.holder if entry.is_active else None,
                "queued": self.waiting(name),
            }
            for name, entry in ordered
        ]
