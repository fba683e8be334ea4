"""Revisions by the thousand: published in one transaction, their bytes looked up in one query.

A statement is given a whole column as one parameter and the database takes it apart, outside of Python's
lock. A parameter for each value would hold that lock longer than the database works.
"""

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import compress
from typing import Any

from sqlalchemy import func, select

from engine.catalog import tables
from engine.catalog.records import Revision
from engine.catalog.revisions import (
    CHUNK,
    EXPORTED,
    Revisions,
    key_of,
    lift_quarantine,
    moved,
    publish_again,
    refuse_purged,
    table,
)
from engine.catalog.row_codec import DIGEST_BYTES
from engine.store.segments import Location


@dataclass(frozen=True)
class RevisionBatch:
    """Exported revisions of one layout, column by column: what differs is a sequence.

    Digests, parents and checksums are sha256 in hexadecimal digits.
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
NO_DIGEST = "00" * DIGEST_BYTES


def _cut(column: str, number: str) -> str:
    return f"substr(:{column}, {DIGEST_BYTES} * {number} + 1, {DIGEST_BYTES})"


# The batch as a relation of `EACH` and of `number`, which counts from 0. In SQLite digests are cut out of
# one value, since it reads no hexadecimal digits, and the rest is JSON.
SQLITE_BATCH = f"""
    WITH batch AS (
        SELECT
            key AS number,
            json_extract(value, '$[0]') AS policy,
            json_extract(value, '$[1]') AS step,
            json_extract(value, '$[2]') AS segment,
            json_extract(value, '$[3]') AS "offset",
            {_cut("digests", "key")} AS digest,
            {_cut("checksums", "key")} AS checksum,
            nullif({_cut("parents", "key")}, zeroblob({DIGEST_BYTES})) AS parent
        FROM json_each(:rows)
    )"""
SQLITE_DIGESTS = f"""
    WITH RECURSIVE numbers (number) AS (
        SELECT 0 UNION ALL
        SELECT number + 1 FROM numbers WHERE {DIGEST_BYTES} * (number + 1) < length(:digests)
    )
    SELECT {_cut("digests", "number")} FROM numbers"""
POSTGRES_BATCH = """
    WITH batch AS (
        SELECT given.*, ordinality - 1 AS number
        FROM unnest(
            %(policies)s::text[], %(digests)s::bytea[], %(parents)s::bytea[], %(steps)s::bigint[],
            %(segments)s::bigint[], %(offsets)s::bigint[], %(checksums)s::bytea[]
        ) WITH ORDINALITY AS given (policy, digest, parent, step, segment, "offset", checksum)
    )"""
POSTGRES_DIGESTS = "SELECT unnest(%(digests)s::bytea[])"


class Batches(Revisions):
    """The catalog's batches of revisions; part of `Catalog`."""

    def __init__(self, url: str):
        super().__init__(url)
        batch, digests, mark = (
            (SQLITE_BATCH, SQLITE_DIGESTS, ":{}")
            if self._is_sqlite
            else (POSTGRES_BATCH, POSTGRES_DIGESTS, "%({})s")
        )
        names = ", ".join(f'"{name}"' for name in EACH + SHARED)
        values = ", ".join([f'"{name}"' for name in EACH] + [mark.format(name) for name in SHARED])
        # In the order of the key: neighbours lie on the same pages.
        self._add_batch = f"""
            INSERT INTO revisions ({names}) {batch} SELECT {values} FROM batch
            WHERE true ORDER BY digest, number ON CONFLICT DO NOTHING"""
        # Of twins in one batch the first is new.
        self._added = f"""
            {batch} SELECT min(number) FROM batch JOIN revisions USING (digest, policy)
            WHERE id > {mark.format("last")} GROUP BY digest, policy"""
        self._unnamed = f"""
            {batch} SELECT number FROM batch WHERE NOT EXISTS (
                SELECT 1 FROM revisions AS known WHERE known.digest = batch.digest
                AND known.segment = batch.segment AND known."offset" = batch."offset")"""
        self._find_places = f"""
            SELECT DISTINCT digest, segment, "offset", length, checksum FROM revisions
            WHERE digest IN ({digests})"""

    def add_batch(self, batch: RevisionBatch, shared: Set[int] = frozenset()) -> list[bool]:
        """Publish a batch as `add_revisions` does its rows; `shared` are the numbers of rows, from 0."""
        values = self._values(batch)
        with self._write() as connection:
            refuse_purged(connection, set(batch.policies))
            if shared:
                for (number,) in connection.exec_driver_sql(self._unnamed, values):
                    if number in shared:
                        raise moved(batch.policies[number], batch.digests[number])
            values["last"] = connection.scalar(select(func.coalesce(func.max(table.id), 0)))
            added = connection.exec_driver_sql(self._add_batch, values).rowcount
            if added == len(batch):
                is_new = [True] * added
            else:
                fresh = set(connection.exec_driver_sql(self._added, values).scalars())
                is_new = [number in fresh for number in range(len(batch))]
                publish_again(connection, [batch.row(i) for i, new in enumerate(is_new) if not new])
            # What was said of the bytes of a row that is gone says nothing of this one's.
            lift_quarantine(connection, compress(zip(batch.policies, batch.digests, strict=True), is_new))
        return is_new

    def places(self, digests: Sequence[str]) -> dict[str, Location]:
        """Return where bytes of these digests lie already, whatever their policy; no quarantined ones."""
        stones = tables.quarantine.c
        with self._read() as connection:
            rows = connection.exec_driver_sql(self._find_places, {"digests": self._blobs(digests)}).all()
            named = list({row.digest.hex() for row in rows})
            bad: set[tuple[int, int]] = set()
            for at in range(0, len(named), CHUNK):
                held = select(stones.digest, stones.policy).where(stones.digest.in_(named[at : at + CHUNK]))
                for digest, policy in connection.execute(held).all():
                    row = select(table.segment, table.offset).where(*key_of(policy, digest))
                    bad |= {tuple(place) for place in connection.execute(row)}
        segments = self._words({row.segment for row in rows})
        return {
            digest.hex(): Location(segments[segment], offset, length, checksum.hex())
            for digest, segment, offset, length, checksum in rows
            if (segment, offset) not in bad
        }

    def _values(self, batch: RevisionBatch) -> dict[str, Any]:
        """Return the parameters that a statement takes for a batch."""
        ids = self._intern({batch.base, batch.layout, batch.owner, *batch.segments})
        segments = [ids[segment] for segment in batch.segments]
        values = {
            "digests": self._blobs(batch.digests),
            "checksums": self._blobs(batch.checksums),
            "parents": self._blobs(batch.parents),
            "base": ids[batch.base],
            "rank": batch.rank,
            "bytes": batch.bytes,
            "layout": ids[batch.layout],
            "length": batch.length,
            "state": EXPORTED,
            "owner": ids[batch.owner],
            "created_at": batch.created_at,
        }
        if self._is_sqlite:
            rows = zip(batch.policies, batch.steps, segments, batch.offsets, strict=True)
            return values | {"rows": json.dumps(list(rows))}
        return values | {
            "policies": list(batch.policies),
            "steps": list(batch.steps),
            "segments": segments,
            "offsets": list(batch.offsets),
        }

    def _blobs(self, digests: Sequence[str | None]) -> bytes | list[bytes | None]:
        if self._is_sqlite:
            return bytes.fromhex("".join([digest or NO_DIGEST for digest in digests]))
        return [bytes.fromhex(digest) if digest else None for digest in digests]
