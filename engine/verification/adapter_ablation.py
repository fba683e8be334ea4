"""Compare parts of a revision between engine and trainer, each part as a short-lived adapter.

For the engine a part is a snapshot that expires, loaded like every adapter; lists for people never show
snapshots. For the trainer it is a revision directory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.adapters.revision import (
    Manifest,
    Tensors,
    largest_rank,
    make_manifest,
    targets_of,
    write_revision,
)
from engine.base.families import BaseShapes
from engine.catalog.catalog import Catalog, Revision
from engine.catalog.records import served_name
from engine.clients.engine import EngineClient
from engine.publishing.publish import publish, put
from engine.quality.probe import MEASURES, Probe, gaps
from engine.store.segments import Store
from engine.training.service.client import TrainerClient

KEPT_S = 600.0
Reference = Callable[[Tensors], Probe]


@dataclass(frozen=True)
class AdapterAblation:
    """Compare parts of the revision `row`, whose effect as a whole is in `probe`."""

    catalog: Catalog
    store: Store
    row: Revision
    base: BaseShapes
    probe: Probe
    engine: EngineClient
    base_name: str
    reference: Reference

    def compare(self, served: Tensors, shipped: Tensors) -> float:
        """Return the distance, in nats, between the engine under `served` and the trainer under `shipped`.

        Either may be empty, which means the base.
        """
        rows = self.reference(shipped).rows if shipped else self.probe.rows
        wanted = [row.adapter if shipped else row.base for row in rows]
        name = self._publish(served) if served else self.base_name
        probe_gaps = gaps([self.engine.logprobs(name, row.tokens) for row in rows], wanted)
        return MEASURES[self.probe.dtype](probe_gaps, gaps([r.adapter for r in rows], [r.base for r in rows]))

    def _publish(self, tensors: Tensors) -> str:
        manifest, now = describe(self.row, tensors), time.time()
        dtype = next(iter(tensors.values())).dtype
        given = (self.catalog, self.store, tensors, manifest, dtype, self.base, self.row.owner, now)
        expires_at = now + KEPT_S
        publish(self.catalog, self.store, partial(put, *given), state="snapshot", expires_at=expires_at)
        return served_name(self.row.policy, manifest.digest)


def describe(row: Revision, tensors: Tensors) -> Manifest:
    """Return the manifest of a part of the revision `row`."""
    return make_manifest(
        tensors,
        policy=row.policy,
        base_digest=row.base,
        rank=largest_rank(tensors),
        targets=targets_of(tensors),
        step=row.step,
    )


def trainer_reference(trainer: TrainerClient, row: Revision, probe: Probe, scratch: Path) -> Reference:
    """Return a function that gets a part's probe from the trainer, on the rows of the revision's probe.

    The trainer generates each row's last token again, so rows never exceed the engine's longest prompt.
    """
    prompts = [row.tokens[:-1] for row in probe.rows]

    def reference(tensors: Tensors) -> Probe:
        manifest = describe(row, tensors)
        directory = write_revision(scratch / manifest.digest, tensors, manifest, {})
        return trainer.probe_revision(row.policy, manifest.digest, prompts, tokens=1, directory=directory)

    return reference
