"""Fetch a cold adapter: read its row, get its bytes from the store, and have the engine prepare them.

Damaged or missing bytes are looked for once more, in case they have moved or a cached copy was bad. Bytes
that are still damaged put the revision into quarantine.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

from engine.catalog.catalog import Catalog, Revision
from engine.catalog.revision_rows import location
from engine.catalog.waits import ANSWER_S, limit_waits
from engine.errors import AdapterError, DamagedBytes, MissingBytes
from engine.settings.params import served_name
from engine.store.segments import Store

# Cached layouts: one for each shape of adapter, a few kilobytes of text.
LAYOUTS = 64
# Threads that read the catalog and fetch bytes: fewer than the catalog has connections.
THREADS = 8


class Engine(Protocol):
    """What a load needs of the engine."""

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        """Return once the engine takes requests for this name. Raises `AdapterError` if it refuses it."""

    async def forget(self, name: str) -> None:
        """Remove every trace of a name once the engine's last request for it has ended."""


class AdapterFetch:
    """Fetches revisions and has one engine prepare them."""

    def __init__(self, engine: Engine, catalog: Catalog, store: Store):
        self._engine, self._catalog, self._store = engine, catalog, store
        self._is_local = catalog.is_file and not store.is_remote
        self._threads = ThreadPoolExecutor(THREADS, "graftwork-fetch", limit_waits, (ANSWER_S,))
        self._layout = lru_cache(LAYOUTS)(catalog.layouts.get)

    async def bring(self, name: str, row: Revision) -> None:
        """Fetch a revision and have the engine prepare it; retry damaged or missing bytes once.

        Raises `DamagedBytes` after it has put the revision into quarantine, `MissingBytes`, and the errors
        of the engine's `prepare`.
        """
        for last in (False, True):
            try:
                return await self._engine.prepare(name, await self._fetched(row))
            except (DamagedBytes, MissingBytes) as fault:
                await self._engine.forget(name)
                better = None if last else await self.in_thread(self._look_again, row)
                if better is None:
                    if isinstance(fault, DamagedBytes):
                        await self.in_thread(self._catalog.quarantine.add, row.policy, row.digest, str(fault))
                    raise
                row = better

    async def confirm(self, row: Revision) -> None:
        """Raise `NotFound` when the row is gone by now, and `AdapterError` when it is in quarantine."""
        await self.in_thread(self._confirm, row)

    async def refuse_quarantined(self, row: Revision) -> None:
        """Raise `AdapterError` with the reason when a revision is in quarantine."""
        if self._catalog.is_file:
            return self._refuse_quarantined(row)
        return await self.in_thread(self._refuse_quarantined, row)

    def _refuse_quarantined(self, row: Revision) -> None:
        reason = self._catalog.quarantine.reason(row.policy, row.digest)
        if reason is not None:
            raise AdapterError(
                f"{served_name(row.policy, row.digest)} is in quarantine: {reason} "
                "Export the revision again to replace its bytes under the same name."
            )

    async def _fetched(self, row: Revision) -> dict[str, Any]:
        # A thread costs as much as the rest of a small load, so a local catalog and store do without.
        return self._fetch(row) if self._is_local else await self.in_thread(self._fetch, row)

    def _fetch(self, row: Revision) -> dict[str, Any]:
        """Return the bytes' local address, after downloading them if the store is remote."""
        self._refuse_quarantined(row)
        path, offset = self._store.fetch(location(row))
        return {
            "path": str(path),
            "offset": offset,
            "length": row.length,
            "checksum": row.checksum,
            "layout": self._layout(row.layout),
        }

    def _confirm(self, row: Revision) -> None:
        self._catalog.revisions.get(row.policy, row.digest)
        self._refuse_quarantined(row)

    def _look_again(self, row: Revision) -> Revision | None:
        """Return the current row if a retry may succeed: the bytes moved, or a cached copy was dropped."""
        now = self._catalog.revisions.get(row.policy, row.digest)
        was_copy = self._store.drop_cached(location(row))
        return now if was_copy or location(now) != location(row) else None

    async def in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns that waits for the catalog or the store."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, work, *args)
