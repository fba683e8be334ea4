"""Packed adapters as blobs in append-only segments, addressed by (segment, offset, length).

Each writing process appends to its own segments, so that writers never contend; a reader needs only the
address. Bytes are fsynced first; the catalog row that names them is the commit point. Bytes that no row names
are garbage for gc and compaction.

A writer holds an flock on its segments from the append until its rows are committed, so that gc and
compaction leave them alone; a crash releases the lock. No decision depends on a clock.

A blob's checksum has 32 bytes, in hex: sha256 of small blobs, BLAKE3 of large ones. BLAKE3 takes half the
time, on cores that a cold load shares with inference. Large blobs written before BLAKE3 carry sha256, so both
are accepted for them.

Segments rather than LMDB: LMDB has one writer at a time for the whole store, its single growing file cannot
live on object storage, and it rounds values up to whole pages. Measured (lmdb 3.0, 1,024 values in a
transaction): 1.13 bytes on the disk for each byte of 7,424-byte adapters and 1.07 at 38 kB, where segments
take 1.00, and more time: 1.2 to 2 times at 7 kB, 2.1 to 4.2 times at 38 kB.
"""

import hashlib
import os
import re
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from engine.errors import DamagedBytes, MissingBytes, ServiceError
from engine.file_lock import lock, unlock
from engine.files import ALIGNMENT, aligned, replacing, sync, write_once

PAGE = 4096
# Blobs over this size start on a page, so that they can be mapped alone.
PAGE_ALIGNED_FROM = 1 << 20
# Part of the format: with another value, blobs of sizes between the two would fail verification.
BLAKE3_FROM = 1 << 20
SEGMENT_BYTES = 1 << 30
# The file, or object, with the id of the catalog that owns the store.
CATALOG_ID = "catalog.id"
SEGMENT_NAME = re.compile(r"(?:[0-9a-f]{8}-)?[0-9a-f]{32}\.seg")
# Bytes read at a time to verify a blob.
CHUNK = 8 << 20
# The most buffers that Linux takes in one write.
IOV_MAX = 1024
ZEROS = memoryview(bytes(PAGE))
Payload = bytes | bytearray | memoryview
# Why a blob cannot be used.
Fault = DamagedBytes | MissingBytes


class Location(NamedTuple):
    """Where a blob lies: `length` bytes at `offset` of `segment`, with their checksum."""

    segment: str
    offset: int
    length: int
    checksum: str


class Checked:
    """Size and checksum of a blob of `length` bytes, computed while it streams."""

    def __init__(self, length: int):
        self.size = 0
        self._states: list[Any] = [hashlib.sha256(), *([blake3()] if length >= BLAKE3_FROM else [])]

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield every chunk after hashing it."""
        for chunk in chunks:
            for state in self._states:
                state.update(chunk)
            self.size += len(chunk)
            yield chunk

    def is_whole(self, expected: str) -> bool:
        """Say whether the streamed bytes have this checksum."""
        return any(state.hexdigest() == expected for state in self._states)


class Store:
    """A directory of segments to append to and read from. One instance per writing thread.

    A writer keeps it open until its rows are committed, then calls `committed` or `close`.
    """

    # Whether `fetch` may take as long as a download.
    is_remote = False

    def __init__(self, root: Path):
        self.root = root
        # Id of the owning catalog, once known.
        self.claimed_by: str | None = None
        self._file: int | None = None
        self._is_held = False
        # Earlier segments that may hold bytes whose rows are not committed yet.
        self._earlier: list[int] = []
        self._segment = ""
        self._end = 0

    @property
    def place(self) -> str:
        """Return the location, for messages."""
        return str(self.root)

    def append(self, payload: Payload) -> Location:
        """Write a blob and fsync it. Raises as `append_many`."""
        return self.append_many([payload])[0]

    def append_many(
        self, payloads: Sequence[Payload], checksums: Sequence[str] | None = None, cached: bool = True
    ) -> list[Location]:
        """Write blobs next to each other with one fsync; `checksums` are theirs where known.

        Unless `cached` their pages leave the page cache, so that a bulk write takes no memory from what is
        served.

        Raises `ServiceError` when the disk is full, read-only or faulty; then none of them is stored.
        """
        views = [memoryview(payload).cast("B") for payload in payloads]
        if not views:
            return []
        checksums = checksums or list(map(checksum_of, views))
        try:
            self._hold()
            offsets, buffers, end = lay_out(views, self._end)
            assert self._file is not None
            _write(self._file, buffers, self._end)
            os.fdatasync(self._file)
            if not cached:
                os.posix_fadvise(self._file, self._end, end - self._end, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._abandon()
            raise ServiceError(
                f"Could not write {sum(map(len, views))} bytes to the store {self.root}: {error.strerror}. "
                "Free some space or make it writable, and run this again; nothing was published."
            ) from None
        self._end = end
        return list(map(Location, repeat(self._segment), offsets, map(len, views), checksums))

    def committed(self) -> None:
        """Release the segments: the rows of everything appended are committed, or never will be."""
        for file in self._earlier:
            os.close(file)
        self._earlier.clear()
        if self._file is not None:
            unlock(self._file)
        self._is_held = False

    def read(self, location: Location) -> bytes:
        """Read a blob and verify its checksum. Raises `DamagedBytes` or `MissingBytes`."""
        return checked(location, b"".join(self.chunks(location)))

    def fetch(self, location: Location) -> tuple[Path, int]:
        """Return a local file and the offset of the blob in it, for a reader that verifies the bytes itself.

        A store that `is_remote` downloads it first. Raises `DamagedBytes` or `MissingBytes`.
        """
        return self.path(location.segment), location.offset

    def drop_cached(self, location: Location) -> bool:
        """Remove a local copy of the blob, so that it is fetched again; say whether the store has any."""
        return False

    def check(self, locations: Sequence[Location]) -> list[Fault | None]:
        """Verify blobs where they lie, in bounded memory; return the fault of each, or None.

        Raises `ServiceError` when a remote store does not answer.
        """
        return [self._fault(location) for location in locations]

    def segments(self) -> Iterator[tuple[str, int]]:
        """Yield each segment's name and size in bytes; skip other names in the directory."""
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if SEGMENT_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat().st_size

    def bring(self, segment: str, chunks: Iterable[bytes]) -> None:
        """Write a whole segment of another store, as a restore does: under its name, or not at all.

        Raises `ServiceError` when there is no room for it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with replacing(self.path(segment), durable=True) as draft, draft.open("wb") as file:
                file.writelines(chunks)
        except OSError as error:
            raise ServiceError(f"Could not write {self.path(segment)}: {error.strerror}.") from None

    @contextmanager
    def claim(self, segment: str) -> Iterator[bool]:
        """Lock a segment against writers; yields False when a living writer holds it, or it is gone."""
        try:
            handle = os.open(self.path(segment), os.O_RDWR)
        except FileNotFoundError:
            yield False
            return
        except OSError as error:
            raise ServiceError(f"Could not open {self.path(segment)}: {error.strerror}.") from None
        try:
            yield lock(handle)
        finally:
            os.close(handle)

    def remove(self, segment: str) -> None:
        """Delete a segment that is claimed and that no row names."""
        try:
            self.path(segment).unlink(missing_ok=True)
        except OSError as error:
            raise ServiceError(f"Could not remove {self.path(segment)}: {error.strerror}.") from None

    def clean(self) -> int:
        """Remove leftovers of crashes other than segments; return how many."""
        return 0

    def catalog_id(self) -> str | None:
        """Return the id of the catalog that owns the store; None when none has claimed it."""
        try:
            return (self.root / CATALOG_ID).read_text().strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ServiceError(f"Could not read {self.root / CATALOG_ID}: {error.strerror}.") from None

    def belong_to(self, catalog_id: str) -> str:
        """Claim the store for a catalog unless it has an owner; return the owner's id."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            return write_once(self.root / CATALOG_ID, catalog_id)
        except OSError as error:
            raise ServiceError(f"Could not write {self.root / CATALOG_ID}: {error.strerror}.") from None

    def path(self, segment: str) -> Path:
        """Return a segment's file."""
        return self.root / segment

    def close(self) -> None:
        """Release all segments and close the current one."""
        self.committed()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _hold(self) -> None:
        """Open and lock a segment of our own with room in it."""
        if self._file is not None and not self._is_held and not lock(self._file):
            # Garbage collection has claimed or removed it: its rows are committed, and a new one is started.
            os.close(self._file)
            self._file = None
        self._is_held = self._file is not None
        if self._file is None or self._end > SEGMENT_BYTES:
            self._open_segment()

    def _open_segment(self) -> None:
        if self._file is not None:
            self._earlier.append(self._file)
            self._file = None
        self.root.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            segment = f"{uuid.uuid4().hex}.seg"
            file = os.open(self.path(segment), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            # Between its creation and its lock garbage collection may have claimed it.
            if lock(file):
                self._file, self._segment, self._end, self._is_held = file, segment, 0, True
            else:
                os.close(file)
        sync(self.root)

    def _abandon(self) -> None:
        """Never write to this segment again: after a failed fsync the disk's content is unknown."""
        if self._file is None:
            return
        with suppress(OSError):
            # Keep what was acknowledged; the rest would keep a full disk full.
            os.ftruncate(self._file, self._end)
            if not self._end:
                self.path(self._segment).unlink(missing_ok=True)
        self._earlier.append(self._file)
        self._file, self._is_held = None, False

    def chunks(self, location: Location) -> Iterator[bytes]:
        """Yield a blob's bytes, as far as they exist, without a look at the checksum.

        Raises `MissingBytes` when the segment is gone or cannot be read.
        """
        path = self.path(location.segment)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise MissingBytes(
                f"The segment {path} cannot be opened ({error.strerror}). "
                "Restore it or make it readable, or export the revision again."
            ) from None
        try:
            at, end = location.offset, location.offset + location.length
            while at < end and (chunk := os.pread(file, min(CHUNK, end - at), at)):
                yield chunk
                at += len(chunk)
        except OSError as error:
            raise MissingBytes(f"{path} cannot be read ({error.strerror}). Check its disk.") from None
        finally:
            os.close(file)

    def _fault(self, location: Location) -> Fault | None:
        seen = Checked(location.length)
        try:
            deque(seen.through(self.chunks(location)), maxlen=0)
        except MissingBytes as error:
            return error
        return None if seen.is_whole(location.checksum) else damaged(location, seen.size)


def checksum_of(data: Payload) -> str:
    """Return a blob's checksum."""
    return blake3(data).hexdigest() if len(data) >= BLAKE3_FROM else hashlib.sha256(data).hexdigest()


def is_whole(data: Payload, expected: str) -> bool:
    """Say whether a blob has this checksum."""
    return checksum_of(data) == expected or (
        len(data) >= BLAKE3_FROM and hashlib.sha256(data).hexdigest() == expected
    )


def checked(location: Location, data: bytes) -> bytes:
    """Return the bytes if they match the location's checksum; raise `DamagedBytes` otherwise."""
    if not is_whole(data, location.checksum):
        raise damaged(location, len(data))
    return data


def damaged(location: Location, size: int) -> DamagedBytes:
    """Return the error for a blob of which `size` bytes were read."""
    return DamagedBytes(
        f"The bytes at {location.segment}:{location.offset} are damaged: read {size} of "
        f"{location.length} bytes, and their checksum differs. Export the revision again."
    )


def room(length: int) -> int:
    """Return the bytes that a blob takes in a segment, padding included."""
    return aligned(length, _alignment(length))


def _alignment(length: int) -> int:
    return PAGE if length >= PAGE_ALIGNED_FROM else ALIGNMENT


def lay_out(views: Sequence[memoryview], end: int) -> tuple[list[int], list[memoryview], int]:
    """Return each blob's offset from `end` on, the buffers to write there (padding too), and the new end."""
    offsets, buffers = [], []
    for view in views:
        offset = aligned(end, _alignment(len(view)))
        if offset > end:
            buffers.append(ZEROS[: offset - end])
        buffers.append(view)
        offsets.append(offset)
        end = offset + len(view)
    return offsets, buffers, end


def _write(file: int, buffers: list[memoryview], offset: int) -> None:
    """Write all buffers at `offset`, also when the system takes fewer bytes at once."""
    first = 0
    while first < len(buffers):
        written = os.pwritev(file, buffers[first : first + IOV_MAX], offset)
        offset += written
        while first < len(buffers) and written >= len(buffers[first]):
            written -= len(buffers[first])
            first += 1
        if written:
            buffers[first] = buffers[first][written:]
