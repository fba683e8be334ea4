"""A host tier on a fake engine: revisions without bytes, loads that take as long as a test wants."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from engine.catalog.catalog import Revision
from engine.catalog.records import served_name
from engine.catalog.revision_rows import Standing
from engine.errors import AdapterError
from engine.serving.residency.residency import Residency
from engine.settings.services import EngineConfig


class FakeEngine:
    """The two calls; a load takes `seconds`, and names in `faults` are refused with theirs.

    While `may_end` is not set, no load ends: what a test does meanwhile may take any time.
    """

    def __init__(self, seconds: float = 0.01):
        self.seconds = seconds
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.prepared: list[str] = []
        self.addresses: list[dict] = []
        self.running = 0
        self.peak = 0
        self.held: set[str] = set()
        self.forgotten: list[str] = []
        self.faults: dict[str, list[Exception]] = {}

    async def prepare(self, name, address):
        self.prepared.append(name)
        self.addresses.append(address)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.seconds)
            await self.may_end.wait()
            if self.faults.get(name):
                raise self.faults[name].pop(0)
        finally:
            self.running -= 1
        self.held.add(name)

    async def forget(self, name):
        self.held.discard(name)
        self.forgotten.append(name)


class FakeCatalog:
    """Knows every revision; `moved` maps a digest to the segments that its row names one after the other."""

    is_file = True

    def __init__(self):
        self.moved: dict[str, list[str]] = {}
        self.damaged: dict[str, str] = {}
        self.revisions = SimpleNamespace(
            get=self._revision,
            standing=lambda policy, digest: Standing(revision(0), None, self.damaged.get(digest)),
        )
        self.layouts = SimpleNamespace(get=lambda digest: "{}")
        self.quarantine = SimpleNamespace(
            add=lambda policy, digest, reason: self.damaged.update({digest: reason})
        )

    def _revision(self, policy, digest):
        row = replace(revision(0), policy=policy, digest=digest)
        segments = self.moved.get(digest)
        if segments:
            row = replace(row, segment=segments[0])
            if len(segments) > 1:
                segments.pop(0)
        return row


class FakeStore:
    """Finds every blob; `copies` says whether what it returns are copies of something remote."""

    def __init__(self, copies: bool = False):
        self.copies = self.is_remote = copies
        self.dropped: list[str] = []

    def fetch(self, location):
        return Path("/store") / location.segment, location.offset

    def drop_cached(self, location):
        self.dropped.append(location.segment)
        return self.copies


def revision(i: int, size: int = 100) -> Revision:
    digest = f"{i:064x}"[::-1]
    return Revision(
        "sums", digest, "base", None, 1, 8, size, "layout", "s", 0, size, "c", "exported", "me", 0.0
    )


def name_of(i: int) -> str:
    return served_name("sums", revision(i).digest)


def residency(engine, events=None, catalog=None, store=None, pinned=frozenset, **settings) -> Residency:
    on_load = (lambda **fields: events.append(fields)) if events is not None else (lambda **fields: None)
    names = {"load_places", "timeout_s", "most_adapters"} & settings.keys()
    own = {name: settings.pop(name) for name in names}
    catalog, store, config = catalog or FakeCatalog(), store or FakeStore(), EngineConfig(**settings)
    return Residency(engine, catalog, store, config, on_load, pinned, **own)


async def use(residency, revision, seconds=0.0, **more):
    async with using(residency, revision, **more) as name:
        await asyncio.sleep(seconds)
        return name


@asynccontextmanager
async def using(residency, revision, **more):
    """Hold a revision inside the block, as a request does; yields its served name."""
    name = await residency.hold(revision, **more)
    try:
        yield name
    finally:
        residency.release(name)


async def settle(condition, seconds: float = 60.0):
    """Let the loop turn until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def refusal() -> AdapterError:
    return AdapterError("It cannot be loaded: rank 16 is over the engine's maximum of 8.")
