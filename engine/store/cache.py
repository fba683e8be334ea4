"""Local cache of a remote store's blobs, keyed by checksum, with LRU eviction within a byte budget.

Keys are checksums, not addresses: a signed URL changes with every request and would fill the disk. A copy is
verified before it gets its name. Several processes may share the directory. Recency is a counter of uses, so
that a clock that jumps changes nothing.
"""

import os
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engine.errors import ServiceError
from engine.file_lock import lock
from engine.store.segments import Checked, Location, damaged

DRAFT = ".draft-"
INDEX = "index.db"
# Entries evicted in one transaction.
BATCH = 256
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    checksum BLOB PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS oldest ON entries (used);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON entries
BEGIN UPDATE total SET bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON entries
BEGIN UPDATE total SET bytes = bytes - old.bytes; END;
"""
NEXT = "(SELECT ifnull(max(used), 0) + 1 FROM entries)"


class Cache:
    """A directory of verified copies; safe for several threads and processes."""

    def __init__(self, root: Path, budget: int):
        self.root, self.budget = root, budget
        self._guard = threading.Lock()
        self._index: sqlite3.Connection | None = None

    def path(self, checksum: str) -> Path:
        """Return where the copy of the blob with this checksum lies."""
        return self.root / checksum[:2] / checksum

    def find(self, location: Location) -> Path | None:
        """Return the copy of a blob and count it as used; None when there is none."""
        path = self.path(location.checksum)
        if not path.is_file():
            return None
        # On a full or read-only disk copies can still be read.
        with suppress(ServiceError):
            self._note(location)
        return path

    def add(self, location: Location, chunks: Iterable[bytes]) -> Path:
        """Verify and keep a copy of what `chunks` yield; evict older copies when over budget.

        Raises `DamagedBytes` when the bytes do not match the location's checksum, `ServiceError` when the
        disk is full or read-only; then nothing is kept.
        """
        path = self.path(location.checksum)
        draft: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft, handle = open_draft(path.parent)
            with os.fdopen(handle, "wb") as file:
                _fill(file, location, chunks)
            # Row before file, so that every file is counted.
            self._note(location)
            os.replace(draft, path)
        except OSError as error:
            raise ServiceError(
                f"Could not write {location.length} bytes to the cache {self.root}: {error.strerror}. "
                "Free some space, or set a smaller `store.cache_bytes`."
            ) from None
        finally:
            if draft is not None:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
        self._evict(location.checksum)
        return path

    def drop(self, checksum: str) -> None:
        """Remove a copy, for instance a damaged one."""
        with self._transaction() as index:
            index.execute("DELETE FROM entries WHERE checksum = ?", (bytes.fromhex(checksum),))
        self.path(checksum).unlink(missing_ok=True)

    def bytes(self) -> int:
        """Return the size of all copies in bytes."""
        with self._transaction() as index:
            return int(index.execute("SELECT bytes FROM total").fetchone()[0])

    def clean(self) -> int:
        """Remove drafts of dead processes and index files that a crash left out; return how many drafts."""
        removed = 0
        for path in self.root.glob(f"??/{DRAFT}*"):
            with suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDWR)
                try:
                    if lock(handle):
                        path.unlink(missing_ok=True)
                        removed += 1
                finally:
                    os.close(handle)
        with self._transaction() as index:
            self._count(index)
        if self.root.is_dir():
            self._evict("")
        return removed

    def _note(self, location: Location) -> None:
        """Mark a blob as the most recently used."""
        row = {"checksum": bytes.fromhex(location.checksum), "bytes": location.length}
        with self._transaction() as index:
            index.execute(
                f"INSERT INTO entries VALUES (:checksum, :bytes, {NEXT}) "
                f"ON CONFLICT DO UPDATE SET used = {NEXT}",
                row,
            )

    def _evict(self, newest: str) -> None:
        """Evict the least recently used copies, never `newest`: one over the budget must be readable once."""
        kept = bytes.fromhex(newest)
        while True:
            with self._transaction() as index:
                excess = index.execute("SELECT bytes FROM total").fetchone()[0] - self.budget
                query = "SELECT checksum, bytes FROM entries WHERE checksum != ? ORDER BY used LIMIT ?"
                leaving = []
                for checksum, size in index.execute(query, (kept, BATCH)):
                    if excess <= 0:
                        break
                    leaving.append((checksum,))
                    excess -= size
                index.executemany("DELETE FROM entries WHERE checksum = ?", leaving)
            for (checksum,) in leaving:
                self.path(checksum.hex()).unlink(missing_ok=True)
            if not leaving:
                return

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            if self._index is None:
                self._index = self._open()
            try:
                self._index.execute("BEGIN IMMEDIATE")
                with self._index:
                    yield self._index
            except sqlite3.OperationalError as error:
                raise ServiceError(f"The cache {self.root} cannot be written: {error}.") from None
            except sqlite3.DatabaseError as error:
                self._begin_anew()
                raise ServiceError(
                    f"The index of the cache {self.root} was damaged ({error}) and is rebuilt. Try again."
                ) from None

    def _begin_anew(self) -> None:
        """Remove a damaged index; opening a new one indexes the files again."""
        self._close()
        for path in self.root.glob(f"{INDEX}*"):
            path.unlink(missing_ok=True)

    def _count(self, index: sqlite3.Connection) -> None:
        for path in self.root.glob("??/*"):
            if len(path.name) == 64:
                with suppress(FileNotFoundError):
                    row = (bytes.fromhex(path.name), path.stat().st_size)
                    index.execute("INSERT OR IGNORE INTO entries VALUES (?, ?, 0)", row)

    def _open(self) -> sqlite3.Connection:
        try:
            return self._opened()
        except (OSError, sqlite3.OperationalError) as error:
            raise ServiceError(f"The cache {self.root} cannot be opened: {error}.") from None
        except sqlite3.DatabaseError:
            self._begin_anew()
        try:
            return self._opened()
        except (OSError, sqlite3.DatabaseError) as error:
            raise ServiceError(f"The cache {self.root} cannot be opened: {error}.") from None

    def _opened(self) -> sqlite3.Connection:
        self.root.mkdir(parents=True, exist_ok=True)
        is_new = not (self.root / INDEX).exists()
        index = sqlite3.connect(self.root / INDEX, timeout=15, isolation_level=None, check_same_thread=False)
        try:
            with suppress(sqlite3.OperationalError):
                # Another process may be setting it; the mode belongs to the file.
                index.execute("PRAGMA journal_mode=WAL")
            index.execute("PRAGMA synchronous=NORMAL")
            index.executescript(SCHEMA)
            if is_new:
                index.execute("BEGIN IMMEDIATE")
                with index:
                    self._count(index)
        except BaseException:
            # An open connection would keep the file locked.
            index.close()
            raise
        return index

    def close(self) -> None:
        """Close the index; the next use opens it again."""
        with self._guard:
            self._close()

    def _close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


def open_draft(directory: Path) -> tuple[Path, int]:
    """Create a draft that `clean` leaves alone: it is locked while it is open."""
    while True:
        draft = directory / f"{DRAFT}{uuid.uuid4().hex}"
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        if lock(handle):
            return draft, handle
        os.close(handle)


def _fill(file: BinaryIO, location: Location, chunks: Iterable[bytes]) -> None:
    seen = Checked(location.length)
    file.writelines(seen.through(chunks))
    file.flush()
    os.fsync(file.fileno())
    if not seen.is_whole(location.checksum):
        raise damaged(location, seen.size)
