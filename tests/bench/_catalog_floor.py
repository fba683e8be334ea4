"""The floor of `bench catalog`: what registration and a lookup do at the least, by the plainest code.

Registration hashes each adapter for its digest and for its checksum, appends a batch, fsyncs it, inserts its
rows and commits. A lookup is one indexed read. The schema and its indexes are the catalog's; the code is
`hashlib`, `os` and `sqlite3` alone, in one thread.
"""

import os
import shutil
import sqlite3
import struct
import time
import uuid
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from engine.catalog.access import CACHE_KIB, CHECKPOINT_PAGES
from engine.catalog.catalog import migrate
from engine.catalog.revision_rows import prefix_range

# What one fsync and one commit are for, at most: about as much as in bulk registration.
BATCH, BATCH_BYTES = 16_384, 128 << 20
INSERT = """
    INSERT INTO revisions (
        digest, policy, base, step, rank, bytes, layout, segment, "offset", length, checksum, state, owner,
        created_at
    ) VALUES (?, ?, 1, 0, 1, ?, 2, 3, ?, ?, ?, 1, 4, ?)"""
# Told, since without statistics SQLite would take the index on policies.
FIND = """
    SELECT * FROM revisions INDEXED BY revisions_key WHERE digest >= ? AND digest <= ? AND policy = ?"""


def register(state: str, entries: int, nbytes: int, policies: int) -> dict[str, float]:
    """Register so many adapters of `nbytes` under `state`; return the seconds, and leave nothing there.

    They are made while the clock stands still.
    """
    folder = Path(state) / f"floor-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    migrate(f"sqlite:///{folder / 'catalog.db'}")
    connection = _open(folder / "catalog.db")
    segment = os.open(folder / "floor.seg", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    batch = max(1, min(entries, BATCH, BATCH_BYTES // nbytes))
    adapters, seconds = memoryview(bytearray(os.urandom(batch * nbytes))), 0.0
    for start in range(0, entries, batch):
        count = min(batch, entries - start)
        for i in range(count):
            struct.pack_into("<Q", adapters, i * nbytes, start + i)
        began = time.perf_counter()
        rows = []
        for i in range(count):
            adapter = adapters[i * nbytes : (i + 1) * nbytes]
            digest, checksum = sha256(adapter).digest(), sha256(adapter).digest()
            at = (start + i) * nbytes
            rows.append((digest, f"bulk-{(start + i) % policies}", nbytes, at, nbytes, checksum, began))
        written = os.write(segment, adapters[: count * nbytes])
        assert written == count * nbytes
        os.fdatasync(segment)
        # Neighbours share pages of the index.
        rows.sort()
        with connection:
            connection.executemany(INSERT, rows)
        seconds += time.perf_counter() - began
    found = connection.execute("SELECT count(*) FROM revisions").fetchone()[0]
    connection.close()
    os.close(segment)
    shutil.rmtree(folder)
    return {"seconds": seconds, "rows": found}


def reader(database: Path) -> Callable[[str], tuple]:
    """Return what finds the row of a served name by one indexed read."""
    connection = sqlite3.connect(database)

    def read(name: str) -> tuple:
        policy, _, digits = name.partition("@")
        (row,) = connection.execute(FIND, (*(prefix_range(digits) or ()), policy)).fetchall()
        return tuple(row)

    return read


def _open(database: Path) -> sqlite3.Connection:
    """Open a migrated catalog as the catalog itself does: every commit is on the disk."""
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
    return connection
