"""Prewarming: load adapters before the first request for them.

After a restart it loads the adapters that were popular before, from a small file for each engine; while the
engine runs it loads the revisions under release. It also evicts adapters that are gone from the catalog. All
its loads have background priority: requests of users go first.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.catalog.records import served_name
from engine.catalog.replicas import Loads
from engine.errors import Busy, GraftworkError, NotFound
from engine.files import write_whole
from engine.serving.gateway.routing import Router
from engine.serving.residency.residency import Residency
from engine.threads import Work

LOOK_S = 0.25
NOTE_S = 15.0
# Most prewarms in the queue at once: a load that waits past its timeout is cancelled, and other background
# work, such as scoring, queues behind prewarms.
AHEAD = 32
# A start loads adapters that were used within this time, up to half of the host tier.
RECENT_S = 3600.0
START_SHARE = 0.5
log = logging.getLogger("graftwork.prewarming")


class Prewarmer:
    """The prewarming loop of one engine; `run` continues until it is cancelled."""

    def __init__(
        self,
        residency: Residency,
        router: Router,
        file: Path,
        tell: Callable[[Loads], object] = lambda loads: None,
    ):
        """`tell` is called after each look with what is loaded of the revisions under release."""
        self._residency = residency
        self._router = router
        self._file, self._tell = file, tell
        self._pending: list[tuple[str, str]] = []
        self._seen: frozenset[tuple[str, str]] = frozenset()
        self._known: frozenset[tuple[str, str]] = frozenset()
        # Served names whose prewarm may still be loading.
        self._asked: set[str] = set()
        # How often popularity was written since a revision last came under release.
        self._notes = 0
        # Popularity before the restart, of adapters without a request since.
        self._noted: dict[str, dict[str, Any]] = {}
        # Policies that may have residents without a catalog row; None: any policy.
        self._to_check: set[str] | None = set()

    async def run(self) -> None:
        """Prewarm popular adapters, then revisions under release; write popularity to disk every 15 s."""
        self._pending = self.popular(time.time())
        noted_at = time.monotonic()
        work = Work("prewarming")
        while True:
            with work.turning():
                await self.look()
                self._tell(self.loads())
                if time.monotonic() - noted_at >= NOTE_S:
                    noted_at = time.monotonic()
                    # Retry loads that failed, for instance while the store was down, after 15 s, 30 s,
                    # 60 s and so on.
                    self._notes += 1
                    if self._notes & (self._notes - 1) == 0:
                        self._seen = frozenset()
                    rows = self.rows(time.time())
                    await asyncio.to_thread(self.write, rows)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Prewarm revisions that are newly under release, then pending ones, as far as the queue has room."""
        router = self._router
        changed = await router.ask(router.take_changed)
        self._to_check = None if changed is None or self._to_check is None else self._to_check | changed
        if self._to_check is None or self._to_check:
            await self._evict_what_is_gone(self._to_check)
        released = await router.ask(router.under_release)
        fresh = released - self._seen
        if not released <= self._known:
            self._known, self._notes = released, 0
        self._pending = [*fresh, *(one for one in self._pending if one not in fresh)]
        self._seen = released
        self._asked = {name for name in self._asked if self._residency.is_loading(name)}
        while self._pending and len(self._asked) < AHEAD:
            policy, digest = self._pending[0]
            try:
                # Not a use: prewarming must not make an adapter more popular.
                revision = await router.ask(router.revision, policy, digest)
                self._residency.prewarm(revision, is_use=False)
                self._asked.add(served_name(policy, digest))
            except Busy:
                return
            except GraftworkError as error:
                # It may be gone or belong to another base; a request for it gets the error.
                log.info("Cannot prewarm %s: %s", served_name(policy, digest), error)
            self._pending.pop(0)

    def loads(self) -> dict[tuple[str, str], str | None]:
        """Return which revisions under release are loaded (None) or why not, without those on their way."""
        residents, faults = self._residency.residents, self._residency.faults
        names = {pair: served_name(*pair) for pair in self._seen}
        loaded = {pair: None for pair, name in names.items() if name in residents}
        return loaded | {
            pair: faults[name] for pair, name in names.items() if name in faults and pair not in loaded
        }

    def missing(self) -> list[str]:
        """Return the served names under release that are not loaded."""
        names = served_names(self._router.under_release())
        return sorted(name for name in names if name not in self._residency.residents)

    async def _evict_what_is_gone(self, policies: set[str] | None) -> None:
        """Evict residents whose rows were purged or have expired, and those in quarantine.

        Quarantined ones must go because a slot may be filled from damaged bytes. Rows that cannot be read
        now, and adapters still in use, are checked again at the next look.
        """
        self._residency.doubt(policies)
        rows = {
            name: resident.revision
            for name, resident in self._residency.residents.items()
            if policies is None or resident.revision.policy in policies
        }
        router = self._router
        damaged = await router.ask(router.in_quarantine, rows.values())
        in_use = set()
        for name, row in rows.items():
            if name not in self._residency.residents:
                continue
            if (row.policy, row.digest) in damaged:
                self._residency.lose(name)
                continue
            try:
                await router.ask(partial(router.revision, row.policy, row.digest, may_be_old=False))
            except NotFound:
                if not self._residency.evict(name):
                    in_use.add(row.policy)
        self._to_check = in_use

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return residents used within an hour: bytes, hits and time of last use (epoch seconds)."""
        idle_since = now - time.monotonic()
        rows: list[dict[str, Any] | None] = [
            {
                "policy": resident.revision.policy,
                "digest": resident.revision.digest,
                "bytes": resident.bytes,
                "hits": round(resident.hits, 2),
                "used_at": round(idle_since + resident.used_at, 3),
            }
            if resident.hits
            else self._noted.get(name)
            for name, resident in self._residency.residents.items()
        ]
        return [row for row in rows if row is not None and row["used_at"] > now - RECENT_S]

    def popular(self, now: float) -> list[tuple[str, str]]:
        """Return (policy, digest) of the last hour's most used adapters that fit half of the host tier."""
        tier = self._residency.tier
        names: list[tuple[str, str]] = []
        size = 0
        rows = [row for row in self._read() if now - row["used_at"] <= RECENT_S]
        for row in sorted(rows, key=lambda row: -row["hits"]):
            size += row["bytes"]
            if size > START_SHARE * tier.max_bytes or len(names) >= START_SHARE * tier.max_adapters:
                break
            names.append((row["policy"], row["digest"]))
            self._noted[served_name(row["policy"], row["digest"])] = row
            # Restore its popularity, so that a scan of cold names does not evict it first.
            for _ in range(min(int(row["hits"]), 3)):
                tier.popularity.add(served_name(row["policy"], row["digest"]))
        return names

    def _read(self) -> list[dict[str, Any]]:
        try:
            return [row for row in json.loads(self._file.read_text()) if _is_note(row)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("Cannot read %s; starting without prewarmed adapters: %s", self._file, error)
            return []

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Write what `rows` returned, for the next start."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps(rows))


def _is_note(row: dict[str, Any]) -> bool:
    """Return whether a row has the fields that `rows` writes: the file may hold anything."""
    words, numbers = ("policy", "digest"), ("bytes", "hits", "used_at")
    return all(isinstance(row.get(name), str) for name in words) and all(
        isinstance(row.get(name), int | float) for name in numbers
    )


def served_names(revisions: frozenset[tuple[str, str]]) -> frozenset[str]:
    """Return the served names of revisions (policy, digest)."""
    return frozenset(served_name(policy, digest) for policy, digest in revisions)
