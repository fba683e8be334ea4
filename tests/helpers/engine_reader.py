"""Reads of a store by an engine's own parts while others work on it: from a served name to a slot.

The router finds the row, `AdapterFetch` the bytes, the host tier verifies them, and they are copied into a
slot of vLLM's own layers. What lies there must be the adapter that the name stands for.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.adapters import packed
from engine.catalog.records import Revision, served_name
from engine.catalog.revision_rows import location
from engine.errors import AdapterError, DamagedBytes, MissingBytes, NotFound
from engine.serving.gateway.routing import Router
from engine.serving.residency.loads import AdapterFetch
from engine.serving.worker.host_tier_bytes import READY, REFUSED, HostTierBytes
from engine.serving.worker.loader import SlotManager
from engine.settings.params import Params
from engine.threads import background
from tests.helpers import vllm_layers as made
from tests.helpers.base_layers import layers_of, slot_values
from tests.helpers.made_adapters import CONFIGS, canonical
from tests.helpers.stored import BASE, KIND, SHAPES, Stored, manifest_of, opened

# Of the adapters, and of the slots: the least that vLLM has of its own.
RANK, SLOT_RANK = 2, 8
WAIT_S = 60.0


class Worker:
    """One slot of an engine's layers, and the host tier beside it: `Engine` for an `AdapterFetch`."""

    def __init__(self) -> None:
        self._layers = layers_of({"model_type": KIND, **CONFIGS[KIND]}, 1, SLOT_RANK, torch.float32)
        config = made.lora_config(1, SLOT_RANK, torch.float32)
        self._tier = HostTierBytes(made.manager(SlotManager, self._layers, config).buffers)
        self._before: Any = None

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[tuple[str, str]] = loop.create_future()
        self._tier.prepare(name, address, lambda said: loop.call_soon_threadsafe(told.set_result, said))
        kind, sentence = await told
        if (kind, sentence) != READY:
            raise REFUSED.get(kind, AdapterError)(sentence)

    async def forget(self, name: str) -> None:
        self._tier.forget(name)

    def assert_holds(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Copy a prepared adapter into the slot and compare it with these canonical tensors."""
        adapter = self._tier.adapters[name]
        adapter.copy_to_slot(0, self._before)
        self._before = adapter.plan
        for module in SHAPES.modules():
            a, b = slot_values(self._layers, SHAPES, module)
            assert torch.equal(a[:RANK], tensors[f"{module}.lora_A"]), name
            assert torch.equal(b[:, :RANK], tensors[f"{module}.lora_B"]), name
            assert not a[RANK:].any(), name


class Reader:
    """Asks for adapters, each known by its seed, whether or not their names are visible."""

    def __init__(self, state: Stored, seeds: int):
        self._catalog = state.catalog
        self._worker = Worker()
        self._fetch = AdapterFetch(self._worker, state.catalog, state.store)
        self._router = Router(state.catalog, "base", BASE)
        self._tensors = [canonical(SHAPES, seed=seed, default=RANK) for seed in range(seeds)]
        self._digests = [manifest_of("any", one, 0, RANK).digest for one in self._tensors]
        self._layout = packed.pack(self._tensors[0], torch.float32, SHAPES.fused).layout.digest

    async def ask(self, policy: str, seed: int) -> str:
        """Ask for one adapter by its name, and return what came of it; raise when other bytes came."""
        digest = self._digests[seed]
        name = served_name(policy, digest)
        try:
            row = self._router.revision(policy, self._router.resolve(name, "unit").digest)
        except NotFound:
            return "invisible"
        assert row.digest == digest
        try:
            await self._fetch.bring(name, row)
        except (NotFound, AdapterError, MissingBytes) as error:
            return self._excuse(row, error)
        self._worker.assert_holds(name, self._tensors[seed])
        await self._worker.forget(name)
        return "served"

    def _excuse(self, row: Revision, error: Exception) -> str:
        """Return why a visible revision could not be served, or raise when there is no good reason."""
        if isinstance(error, DamagedBytes):
            raise error
        now = self._catalog.revisions.find(row.policy, row.digest)
        if now is None or isinstance(error, NotFound):
            return "expired"
        if isinstance(error, MissingBytes) and location(now) != location(row):
            return "moved twice"
        if isinstance(error, AdapterError) and row.layout != self._layout:
            return "packed by an older engine"
        raise error


@contextmanager
def reading(params: Params, policies: Sequence[str], seeds: int) -> Iterator[Counter[str]]:
    """Ask for adapters at random in another thread while the block runs; yield what comes of it, counted.

    What was wrong is raised at the end of the block.
    """
    ended, counts = threading.Event(), Counter[str]()
    started = threading.Event()

    async def ask(reader: Reader) -> None:
        draw = random.Random(seeds)
        while not ended.is_set():
            counts[await reader.ask(draw.choice(policies), draw.randrange(seeds))] += 1
            started.set()

    def run() -> None:
        try:
            with opened(params) as state:
                asyncio.run(ask(Reader(state, seeds)))
        finally:
            started.set()

    done = background(run)
    try:
        assert started.wait(WAIT_S)
        yield counts
    finally:
        ended.set()
        done.result(WAIT_S)
