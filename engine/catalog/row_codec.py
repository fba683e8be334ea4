"""Encoding of a revision as a row, and back.

Rows are short: digests and checksums are bytes, strings that many rows share are ids of the table `names`.
Callers of the catalog never see that.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.catalog import tables
from engine.catalog.records import STATES, Revision
from engine.errors import AdapterError

# Columns that say where and how a revision's bytes lie; the others describe the revision itself.
PLACE = ("layout", "segment", "offset", "length", "checksum")
# A row's values in the order of the fields of `Revision`.
COLUMNS = tuple(tables.revisions.c[field.name] for field in fields(Revision))
BASE, LAYOUT, SEGMENT, OWNER = (
    [column.name for column in COLUMNS].index(name) for name in ("base", "layout", "segment", "owner")
)
DIGEST_BYTES = 32
NO_DIGEST = "00" * DIGEST_BYTES
HEX = re.compile(r"[0-9a-f]*")


def blob(digest: str) -> bytes | None:
    """Return a digest's bytes; None when it is not hex, so that it matches no row."""
    if HEX.fullmatch(digest) and len(digest) % 2 == 0:
        return bytes.fromhex(digest)
    return None


def prefix_range(prefix: str) -> tuple[bytes, bytes] | None:
    """Return the first and the last digest with this prefix; None when no digest can have it."""
    if not HEX.fullmatch(prefix) or len(prefix) > 2 * DIGEST_BYTES:
        return None
    first = prefix if len(prefix) % 2 == 0 else prefix + "0"
    return bytes.fromhex(first), bytes.fromhex(prefix.ljust(2 * DIGEST_BYTES, "f"))


def blobs(digests: Sequence[str | None], is_sqlite: bool) -> bytes | list[bytes | None]:
    """Return a column of digests as one parameter of a statement; in SQLite one blob, see `cut`."""
    if is_sqlite:
        return bytes.fromhex("".join([digest or NO_DIGEST for digest in digests]))
    return [bytes.fromhex(digest) if digest else None for digest in digests]


def cut(column: str, number: str) -> str:
    """Return the SQL that cuts digest `number` out of a parameter made by `blobs`."""
    return f"substr(:{column}, {DIGEST_BYTES} * {number} + 1, {DIGEST_BYTES})"


def words(row: Revision) -> tuple[str, str, str, str]:
    """Return the strings of a revision that its row holds as ids of `names`."""
    return row.base, row.layout, row.segment, row.owner


def encode(row: Revision, ids: Mapping[str, int]) -> tuple[Any, ...]:
    """Return a row's values in the order of `COLUMNS`; `ids` maps at least its `words`.

    Raises `AdapterError` when digest, parent or checksum is not hex, or the state is unknown.
    """
    try:
        return (
            row.policy,
            bytes.fromhex(row.digest),
            ids[row.base],
            bytes.fromhex(row.parent) if row.parent else None,
            row.step,
            row.rank,
            row.bytes,
            ids[row.layout],
            ids[row.segment],
            row.offset,
            row.length,
            bytes.fromhex(row.checksum),
            STATES.index(row.state),
            ids[row.owner],
            row.created_at,
            row.expires_at,
            None if row.probe is None else json.dumps(row.probe),
            row.retired_at,
            row.retired_by,
            row.retired_reason,
        )
    except ValueError:
        raise AdapterError(
            f"The digests {row.digest!r}, {row.parent!r} and {row.checksum!r} of a revision of "
            f"{row.policy!r} must be hexadecimal digits, its state {' or '.join(STATES)}, not {row.state!r}."
        ) from None


def decode(row: Any, names: Mapping[int, str]) -> Revision:
    """Return the revision of a row whose values are in the order of `COLUMNS`."""
    (policy, digest, base, parent, step, rank, size, layout, segment, offset) = row[:10]
    (length, checksum, state, owner, created_at, expires_at, probe, *retired) = row[10:]
    return Revision(
        policy,
        digest.hex(),
        names[base],
        parent and parent.hex(),
        step,
        rank,
        size,
        names[layout],
        names[segment],
        offset,
        length,
        checksum.hex(),
        STATES[state],
        names[owner],
        created_at,
        expires_at,
        json.loads(probe) if isinstance(probe, str) else probe,
        *retired,
    )
