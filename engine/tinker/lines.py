"""The calls of each model in the order of their numbers, whatever order they come in.

A call that is cut into chunks sends its first chunk last; what comes early waits here.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import orjson

from engine.catalog.catalog import Catalog
from engine.catalog.tinker_records import TinkerCheckpoint, TinkerModel, TinkerResult, TinkerSampler
from engine.errors import Busy, GraftworkError, NotFound, ServiceError
from engine.tinker.results import Promise, Promises, Result, error_result

# Calls of a model that wait: chunks of one call, and the next pairs of steps.
MOST_HELD = 4096
NO_MODEL = "There is no such model. Create one, or load a checkpoint."
LOST = (
    "Gradients of this model were lost when the server restarted. Start from your last checkpoint: the "
    "recipes of the cookbook do so when they are run again."
)


@dataclass(frozen=True)
class Done:
    """What a call has done: the model after it, its answer, and what it made.

    A `durable` answer outlives this process.
    """

    model: TinkerModel
    result: Result
    durable: bool = True
    made: TinkerCheckpoint | TinkerSampler | None = None


Work = Callable[[TinkerModel], Done]


@dataclass(eq=False)
class CallLine:
    """One model's calls. `is_open` says whether this process has opened its trainer's session."""

    model: TinkerModel
    is_open: bool = False
    held: dict[int, tuple[Promise, Work]] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None


class Lines:
    """The lines of all models that this process has seen. Used on the event loop only.

    `reopen` opens a model's session in the trainer again; it and the work run in threads of `executor`.
    """

    def __init__(
        self,
        catalog: Catalog,
        promises: Promises,
        executor: Executor,
        reopen: Callable[[TinkerModel], None],
    ):
        self.catalog, self.promises, self.executor, self.reopen = catalog, promises, executor, reopen
        self._lines: dict[str, CallLine] = {}

    async def find(self, tenant: str, id: str) -> CallLine:
        """Return a model's line. Raises `NotFound` when the tenant has no such model."""
        line = self._lines.get(id)
        if line is None:
            loop, index = asyncio.get_running_loop(), self.catalog.tinker
            model = await loop.run_in_executor(self.executor, index.find, TinkerModel, tenant, id)
            if model is not None:
                line = self._lines.setdefault(id, CallLine(model))
        if line is None or line.model.tenant != tenant:
            raise NotFound(NO_MODEL)
        return line

    def begin(self, model: TinkerModel) -> None:
        """Add a model that was just created, and so is open."""
        self._lines.setdefault(model.id, CallLine(model, is_open=True))

    def submit(self, line: CallLine, seq: int, work: Work) -> str:
        """Queue a call under its number and return its request id; the same number twice is one call.

        Raises `Busy` when too many calls of the model wait.
        """
        id = f"{line.model.id}:{seq}"
        if seq < line.model.next_seq or self.promises.find(line.model.tenant, id):
            return id
        if len(line.held) >= MOST_HELD:
            raise Busy(f"{MOST_HELD} calls of this model wait. Send the call again in a second.")
        line.held[seq] = (self.promises.add(line.model.tenant, id), work)
        if line.task is None:
            line.task = asyncio.create_task(self._drain(line))
        return id

    def sessions(self) -> set[tuple[str, str]]:
        """Return tenant and id of the sessions that have lines."""
        return {(line.model.tenant, line.model.session) for line in self._lines.values()}

    def close(self, tenant: str, session: str) -> list[TinkerModel]:
        """Forget the idle lines of a session; return their models."""
        mine = [
            line
            for line in self._lines.values()
            if (line.model.tenant, line.model.session) == (tenant, session) and line.task is None
        ]
        for line in mine:
            for promise, _ in line.held.values():
                self.promises.drop(promise)
            del self._lines[line.model.id]
        return [line.model for line in mine]

    def refuse(self, line: CallLine, seq: int, error: GraftworkError) -> str:
        """Queue a call that fails with `error` in its turn: later numbers wait for this one."""

        def work(_model: TinkerModel) -> Done:
            raise error

        return self.submit(line, seq, work)

    async def _drain(self, line: CallLine) -> None:
        loop = asyncio.get_running_loop()
        try:
            while call := line.held.pop(line.model.next_seq, None):
                promise, work = call
                result = await loop.run_in_executor(self.executor, self._perform, line, promise, work)
                self.promises.keep(promise, result)
        finally:
            line.task = None

    def _perform(self, line: CallLine, promise: Promise, work: Work) -> Result:
        before, now = line.model, time.time()
        after = replace(before, next_seq=before.next_seq + 1, used_at=now)
        try:
            if not line.is_open:
                after = replace(after, corrupted=before.corrupted or before.gathered > 0)
                self.reopen(before)
                line.is_open = True
            done = work(after)
        except Exception as error:
            if not isinstance(error, GraftworkError) or (
                isinstance(error, ServiceError) and not isinstance(error, Busy)
            ):
                # What the trainer has gathered is not known. The next call opens the session again.
                line.is_open = False
            result = error_result(error, f"A call of the model {before.id} failed")
            done = Done(after, result, durable=False)
        line.model = done.model
        durable = (
            TinkerResult(promise.id, promise.tenant, orjson.loads(done.result.body), now)
            if done.durable
            else None
        )
        try:
            self.catalog.tinker.advance(done.model, *filter(None, (durable, done.made)))
        except Exception as error:
            return error_result(error, f"A call of the model {before.id} was not stored")
        return done.result
