"""Batches: thousands of revisions, published in one transaction.

A statement takes each column as one parameter, which the database takes apart outside of the GIL. A parameter
for each value would hold the GIL longer than the database works.
"""

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import compress
from typing import Any

from sqlalchemy import func, select

from engine.catalog.access import Access
from engine.catalog.purges import refuse_purged
from engine.catalog.records import Revision
from engine.catalog.revision_rows import DIGEST_BYTES, EXPORTED, RevisionRows, blobs, cut, table
from engine.catalog.revisions import marks, moved, publish_again
from engine.catalog.withheld import lift_quarantine


@dataclass(frozen=True)
class RevisionBatch:
    """Exported revisions of one layout, column by column; fields that differ between rows are sequences.

    Digests, parents and checksums are 32 bytes in hex.
    """

    base: str
    rank: int
    bytes: int
    layout: str
    length: int
    owner: str
    created_at: float
    policies: Sequence[str]
    digests: Sequence[str]
    parents: Sequence[str | None]
    steps: Sequence[int]
    segments: Sequence[str]
    offsets: Sequence[int]
    checksums: Sequence[str]

    def __len__(self) -> int:
        return len(self.digests)

    def row(self, number: int) -> Revision:
        """Return the row with this number, from 0, as a `Revision`."""
        return Revision(
            policy=self.policies[number],
            digest=self.digests[number],
            base=self.base,
            parent=self.parents[number],
            step=self.steps[number],
            rank=self.rank,
            bytes=self.bytes,
            layout=self.layout,
            segment=self.segments[number],
            offset=self.offsets[number],
            length=self.length,
            checksum=self.checksums[number],
            state="exported",
            owner=self.owner,
            created_at=self.created_at,
        )


# What differs between the rows of a batch, and what they share.
EACH = ("policy", "digest", "parent", "step", "segment", "offset", "checksum")
SHARED = ("base", "rank", "bytes", "layout", "length", "state", "owner", "created_at")


# The batch as a relation of `EACH` and of `number`, from 0. SQLite cannot parse hex, so digests are cut out
# of one blob there; the rest is JSON.
SQLITE_BATCH = f"""
    WITH batch AS (
        SELECT
            key AS number,
            json_extract(value, '$[0]') AS policy,
            json_extract(value, '$[1]') AS step,
            json_extract(value, '$[2]') AS segment,
            json_extract(value, '$[3]') AS "offset",
            {cut("digests", "key")} AS digest,
            {cut("checksums", "key")} AS checksum,
            nullif({cut("parents", "key")}, zeroblob({DIGEST_BYTES})) AS parent
        FROM json_each(:rows)
    )"""
POSTGRES_BATCH = """
    WITH batch AS (
        SELECT given.*, ordinality - 1 AS number
        FROM unnest(
            %(policies)s::text[], %(digests)s::bytea[], %(parents)s::bytea[], %(steps)s::bigint[],
            %(segments)s::bigint[], %(offsets)s::bigint[], %(checksums)s::bytea[]
        ) WITH ORDINALITY AS given (policy, digest, parent, step, segment, "offset", checksum)
    )"""


class Batches:
    """The catalog's batches of revisions; `catalog.batches`."""

    def __init__(self, access: Access, rows: RevisionRows):
        self._access = access
        self._rows = rows
        batch, mark = (SQLITE_BATCH, ":{}") if access.is_sqlite else (POSTGRES_BATCH, "%({})s")
        names = ", ".join(f'"{name}"' for name in EACH + SHARED)
        values = ", ".join([f'"{name}"' for name in EACH] + [mark.format(name) for name in SHARED])
        # In key order: neighbouring keys share index pages.
        self._add = f"""
            INSERT INTO revisions ({names}) {batch} SELECT {values} FROM batch
            WHERE true ORDER BY digest, number ON CONFLICT DO NOTHING"""
        # Of duplicates in one batch the first is new.
        self._added = f"""
            {batch} SELECT min(number) FROM batch JOIN revisions USING (digest, policy)
            WHERE id > {mark.format("last")} GROUP BY digest, policy"""
        self._unnamed = f"""
            {batch} SELECT number FROM batch WHERE NOT EXISTS (
                SELECT 1 FROM revisions AS known WHERE known.digest = batch.digest
                AND known.segment = batch.segment AND known."offset" = batch."offset")"""

    def add(self, batch: RevisionBatch, shared: Set[int] = frozenset()) -> list[bool]:
        """Publish a batch as `Revisions.add_many` does; `shared` holds the numbers of rows, from 0."""
        values = self._values(batch)
        with self._access.write() as connection:
            any_purged, any_held = marks(connection)
            if any_purged:
                refuse_purged(connection, set(batch.policies))
            if shared:
                for (number,) in connection.exec_driver_sql(self._unnamed, values):
                    if number in shared:
                        raise moved(batch.policies[number], batch.digests[number])
            values["last"] = connection.scalar(select(func.coalesce(func.max(table.id), 0)))
            added = connection.exec_driver_sql(self._add, values).rowcount
            if added == len(batch):
                is_new = [True] * added
            else:
                fresh = set(connection.exec_driver_sql(self._added, values).scalars())
                is_new = [number in fresh for number in range(len(batch))]
                publish_again(connection, [batch.row(i) for i, new in enumerate(is_new) if not new])
            if any_held:
                # A quarantine left by a deleted row says nothing about these bytes.
                lift_quarantine(connection, compress(zip(batch.policies, batch.digests, strict=True), is_new))
        return is_new

    def _values(self, batch: RevisionBatch) -> dict[str, Any]:
        """Return a statement's parameters for a batch."""
        is_sqlite = self._access.is_sqlite
        ids = self._rows.intern({batch.base, batch.layout, batch.owner, *batch.segments})
        segments = [ids[segment] for segment in batch.segments]
        values = {
            "digests": blobs(batch.digests, is_sqlite),
            "checksums": blobs(batch.checksums, is_sqlite),
            "parents": blobs(batch.parents, is_sqlite),
            "base": ids[batch.base],
            "rank": batch.rank,
            "bytes": batch.bytes,
            "layout": ids[batch.layout],
            "length": batch.length,
            "state": EXPORTED,
            "owner": ids[batch.owner],
            "created_at": batch.created_at,
        }
        if is_sqlite:
            rows = zip(batch.policies, batch.steps, segments, batch.offsets, strict=True)
            return values | {"rows": json.dumps(list(rows))}
        return values | {
            "policies": list(batch.policies),
            "steps": list(batch.steps),
            "segments": segments,
            "offsets": list(batch.offsets),
        }
