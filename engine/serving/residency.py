"""Where adapters are now: a cold load is scheduled work with its own queue, never a request's side effect.

A request waits here, outside the engine, until its adapter is in the host tier. Identical misses
share one load; the queue is bounded; what nobody uses leaves when the budget is full.
Knows nothing of HTTP; reaches the engine by the four calls of `Engine`.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.adapters.catalog import Catalog, Revision
from engine.config import EngineConfig, served_name
from engine.errors import AdapterError, Busy, ServiceError

POLL_S = 0.002
POLL_MAX_S = 0.05
RETRY_AFTER_S = 1.0


class Engine(Protocol):
    """What residency asks of the engine."""

    async def prepare(self, name: str, address: dict[str, Any]) -> None: ...
    async def poll(self, name: str) -> str: ...
    async def register(self, name: str) -> None: ...
    async def forget(self, name: str) -> None: ...


@dataclass
class Resident:
    """An adapter in the host tier; `users` counts the requests under way on it."""

    bytes: int
    users: int = 0
    used_at: float = 0.0


class Residency:
    """The host tier as the gateway sees it. For one event loop."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        store: Path,
        config: EngineConfig,
        on_load: Callable[..., object] = lambda **fields: None,
        pinned: Callable[[], frozenset[str]] = frozenset,
    ):
        self.residents: dict[str, Resident] = {}
        self.evictions = 0
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._config = config
        self._on_load = on_load
        self._pinned = pinned
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._running = asyncio.Semaphore(config.load_concurrency)
        self._layouts: dict[str, str] = {}

    @property
    def loading(self) -> int:
        """How many cold loads wait or run."""
        return len(self._loading)

    @asynccontextmanager
    async def use(self, revision: Revision) -> Any:
        """Hold a revision in the host tier while a request runs on it; yields its served name.

        Raises `Busy` when the queue is full, `AdapterError` when the engine refuses the adapter and
        `ServiceError` when the load takes longer than `engine.load_timeout_s`.
        """
        name = served_name(revision.policy, revision.digest)
        # A crowd of other loads may push it out again before this request gets to hold it.
        while (resident := self.residents.get(name)) is None:
            await self._load_shared(name, revision)
        resident.users += 1
        try:
            yield name
        finally:
            resident.users -= 1
            resident.used_at = time.monotonic()

    async def _load_shared(self, name: str, revision: Revision) -> None:
        task = self._loading.get(name)
        if task is None:
            if len(self._loading) >= self._config.load_queue:
                raise Busy(
                    f"{len(self._loading)} cold loads are waiting; try {name} again later.", RETRY_AFTER_S
                )
            task = asyncio.create_task(self._load(name, revision))
            self._loading[name] = task
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        # Shielded: one waiter that goes away must not end the load of the others.
        await asyncio.shield(task)

    async def _load(self, name: str, revision: Revision) -> None:
        started = time.monotonic()
        error = ""
        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                if name in self._leaving:
                    await self._leaving[name]
                async with self._running:
                    await self._prepare(name, revision)
                    await self._engine.register(name)
        except TimeoutError:
            error = f"{name} was not loaded within {self._config.load_timeout_s:g} s."
            raise ServiceError(error) from None
        except Exception as fault:
            error = str(fault)
            raise
        finally:
            self._on_load(
                policy=revision.policy,
                digest=revision.digest,
                tier="host",
                bytes=revision.length,
                seconds=time.monotonic() - started,
                error=error or None,
            )
        self.residents[name] = Resident(revision.length, used_at=time.monotonic())
        self._make_room(name)

    async def _prepare(self, name: str, revision: Revision) -> None:
        # Read anew: a revision whose bytes were damaged may lie elsewhere by now.
        row = self._catalog.revision(revision.policy, revision.digest)
        await self._engine.prepare(name, self._address(row))
        pause = POLL_S
        while (state := await self._engine.poll(name)) != "ready":
            if state != "loading":
                await self._engine.forget(name)
                raise AdapterError(state)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_MAX_S)

    def _address(self, revision: Revision) -> dict[str, Any]:
        layout = self._layouts.get(revision.layout)
        if layout is None:
            layout = self._layouts[revision.layout] = self._catalog.layout(revision.layout)
        return {
            "path": str(self._store / revision.segment),
            "offset": revision.offset,
            "length": revision.length,
            "checksum": revision.checksum,
            "layout": layout,
        }

    def _make_room(self, newest: str) -> None:
        """Let the least recently used adapters go while the budget is exceeded."""
        excess = sum(resident.bytes for resident in self.residents.values()) - self._config.host_bytes
        pinned = self._pinned() | {newest}
        for name, resident in sorted(self.residents.items(), key=lambda item: item[1].used_at):
            if excess <= 0:
                return
            if resident.users == 0 and name not in pinned:
                excess -= resident.bytes
                del self.residents[name]
                self.evictions += 1
                self._leaving[name] = asyncio.create_task(self._leave(name))

    async def _leave(self, name: str) -> None:
        try:
            await self._engine.forget(name)
        finally:
            del self._leaving[name]
