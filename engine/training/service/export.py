"""Publish a session's adapter as a revision: canonical tensors, packed bytes, catalog row.

A merged checkpoint is never written. Bytes are written and fsynced first, then the revision's directory; the
catalog row is the commit point. Everything is idempotent by digest.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.adapters.revision import make_manifest, read_revision, validate, write_revision
from engine.catalog.catalog import Catalog
from engine.catalog.records import served_name
from engine.errors import AdapterError, ConfigError
from engine.publishing.publish import publish, put, stored_tensors
from engine.quality.probe import Probe, ProbeRow
from engine.settings.params import Params
from engine.store.open import open_store
from engine.training.model.adapter import Adapter
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import TokenRow
from engine.training.service.protocol import Export, Exported, ProbeRevision
from engine.training.service.session import Session


class Exporter:
    """Publish revisions in the engine's `dtype`, with the base's text digest.

    Used by the training thread only.
    """

    def __init__(
        self,
        params: Params,
        catalog: Catalog,
        dtype: torch.dtype,
        ends: Collection[int],
        text_digest: str | None = None,
    ):
        self.paths, self.catalog, self.dtype, self.ends = params.paths, catalog, dtype, ends
        self.text_digest = text_digest
        self.store = open_store(params)

    def export(
        self, session: Session, request: Export, between: Callable[[], None] = lambda: None
    ) -> Exported:
        """Publish the session's adapter as it is now. Raises `AdapterError` when it holds NaN or Inf.

        `between` is called before each pass of the base for the probe; if it raises, nothing is published.
        """
        if request.ttl_s and request.kind == "revision":
            raise ConfigError("A revision does not expire. Leave `ttl_s` out, or export a snapshot.")
        began = time.monotonic()
        tensors = session.adapter.canonical(self.dtype)
        validate(tensors, None, session.base.modules)
        manifest = make_manifest(
            tensors,
            policy=session.policy,
            base_digest=session.base_digest,
            rank=session.adapter.rank,
            targets=session.adapter.targets,
            step=session.step,
            parent=session.parent,
            config=session.opened.config,
            text_digest=self.text_digest,
        )
        is_revision, opened, directory = request.kind == "revision", session.opened, None
        if is_revision:
            if not request.probe_prompts:
                raise ConfigError("A revision needs prompts for its effect probe; give `probe_prompts`.")
            asked = (manifest.digest, request.probe_prompts, request.probe_tokens)
            probe = self._probe(session.base, session.base_digest, session.adapter, *asked, between)
            path = self.paths.revision(session.policy, manifest.digest)
            directory = write_revision(path, tensors, manifest, probe.to_json())
        # After the effect probe, which may take minutes.
        shapes, now = session.base.shapes, time.time()
        arguments = (self.catalog, self.store, tensors, manifest, self.dtype, shapes, opened.owner, now)
        publish(
            self.catalog,
            self.store,
            partial(put, *arguments),
            state="exported" if is_revision else "snapshot",
            expires_at=None if is_revision else now + (request.ttl_s or opened.snapshot_ttl_s),
        )
        name = served_name(session.policy, manifest.digest)
        seconds = time.monotonic() - began
        return Exported(
            manifest.digest, name, directory, manifest.rank, manifest.step, manifest.bytes, seconds
        )

    def parent_tensors(self, policy: str, digest: str) -> dict[str, Tensor]:
        """Return the canonical tensors of a revision in the store."""
        return stored_tensors(self.catalog, self.store, self.catalog.revisions.get(policy, digest))

    def probe_revision(
        self,
        base: ResidentBase,
        base_digest: str,
        request: ProbeRevision,
        between: Callable[[], None] = lambda: None,
    ) -> Probe:
        """Compute the effect probe of a revision from a directory or the store.

        `between` is called before each pass of the base and may raise to end the call.
        Raises `AdapterError` when the directory holds another revision or the revision does not fit the base.
        """
        if request.directory is None:
            tensors = self.parent_tensors(request.policy, request.digest)
        else:
            tensors, manifest = read_revision(Path(request.directory), base_digest)
            if manifest.digest != request.digest:
                raise AdapterError(
                    f"{request.directory} holds the revision {manifest.digest}, not {request.digest}. "
                    "Give the directory of the right revision."
                )
        adapter = base.hold(tensors)
        return self._probe(
            base, base_digest, adapter, request.digest, request.prompts, request.tokens, between
        )

    def _probe(
        self,
        base: ResidentBase,
        base_digest: str,
        adapter: Adapter,
        digest: str,
        prompts: Sequence[Sequence[int]],
        limit: int,
        between: Callable[[], None],
    ) -> Probe:
        """Complete the prompts greedily and record every token's log-probability under adapter and base."""
        rows = [TokenRow(row.tokens, 1) for row in base.greedy(adapter, prompts, self.ends, limit, between)]
        scores = (base.score(scored, rows, between) for scored in (adapter, None))
        values = zip(rows, *scores, strict=True)
        name = str(self.dtype).removeprefix("torch.")
        probed = tuple(
            ProbeRow(row.tokens, tuple(with_it), tuple(without)) for row, with_it, without in values
        )
        return Probe(digest, base_digest, name, probed)
