"""Bytes of packed adapters, addressed as (segment, offset, length) in append-only segments.

Every writing process appends to segments of its own, so that writers never meet; a reader needs
nothing but the address. Bytes come first and are fsynced; the catalog row that names them is the
commit point, and bytes that no row names are garbage to be compacted away.

A writer holds a lock (flock) on its segments from the append until it says that the rows are committed,
so that nobody takes bytes whose row is on its way; a crash frees the lock. No clock is asked.

Segments rather than LMDB: LMDB has one writer at a time for the whole store, its single growing file cannot
live on object storage, and it rounds values up to whole pages. Measured (lmdb 3.0, 1,024 values in a
transaction): 1.13 bytes on the disk for each byte of 7,424-byte adapters and 1.07 at 38 kB, where segments
take 1.00, and more time: 1.2 to 2 times at 7 kB, 2.1 to 4.2 times at 38 kB.
"""

import fcntl
import os
import re
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from engine.adapters.sizes import ALIGNMENT, aligned
from engine.errors import DamagedBytes, MissingBytes, ServiceError
from engine.files import sync, write_once
from engine.store.checksums import Checked, Payload, checksum_of, is_whole

PAGE = 4096
# Blobs over this size start on a page, so that they can be mapped alone.
PAGE_ALIGNED_FROM = 1 << 20
SEGMENT_BYTES = 1 << 30
# The file, or object, that says whose the store is.
CATALOG_ID = "catalog.id"
SEGMENT_NAME = re.compile(r"(?:[0-9a-f]{8}-)?[0-9a-f]{32}\.seg")
# What is read at once to compare a checksum.
CHUNK = 8 << 20
# Linux takes this many buffers in one write.
IOV_MAX = 1024
ZEROS = memoryview(bytes(PAGE))
# What keeps a blob from being used.
Fault = DamagedBytes | MissingBytes


class Location(NamedTuple):
    """Where a blob lies: `length` bytes at `offset` of `segment`, with their checksum."""

    segment: str
    offset: int
    length: int
    checksum: str


class Store:
    """Append to and read from a directory of segments. One instance per thread that writes.

    Whoever appends keeps it open until the rows are committed, and then closes it or calls `committed`.
    """

    # Whether `fetch` may take as long as a download.
    is_remote = False

    def __init__(self, root: Path):
        self.root = root
        # The id of the catalog whose bytes go here, once that is known.
        self.claimed_by: str | None = None
        self._file: int | None = None
        self._is_held = False
        # Segments before the present one that may hold bytes whose rows are not committed yet.
        self._earlier: list[int] = []
        self._segment = ""
        self._end = 0

    @property
    def place(self) -> str:
        """Return where it is, for people."""
        return str(self.root)

    def append(self, payload: Payload) -> Location:
        """Write a blob and fsync it. Raises `ServiceError` when the disk is full; nothing is lost."""
        return self.append_many([payload])[0]

    def append_many(
        self, payloads: Sequence[Payload], checksums: Sequence[str] | None = None, cached: bool = True
    ) -> list[Location]:
        """Write blobs next to each other with one fsync; `checksums` are theirs where known.

        Unless `cached` their pages are given back, so that what is written in bulk takes no memory from
        what is served, nor the time to find more and more of it.

        Raises `ServiceError` when the disk is full, read-only or faulty; then none of them is there.
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
        """Say that the rows of everything appended so far are committed, or never will be."""
        for file in self._earlier:
            os.close(file)
        self._earlier.clear()
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._is_held = False

    def read(self, location: Location) -> bytes:
        """Read a blob and verify its checksum. Raises `DamagedBytes` or `MissingBytes`."""
        return checked(location, b"".join(self._chunks(location)))

    def fetch(self, location: Location) -> tuple[Path, int]:
        """Return a local file and the offset of the blob in it, for a reader that verifies it itself.

        Downloads it first where the store `is_remote`. Raises `DamagedBytes` or `MissingBytes`.
        """
        return self.path(location.segment), location.offset

    def drop_cached(self, location: Location) -> bool:
        """Forget a local copy of the blob, so that it is fetched anew; say whether there can be one."""
        return False

    def check(self, locations: Sequence[Location]) -> list[Fault | None]:
        """Compare checksums where the bytes lie, in bounded memory; say what is wrong with each, if anything.

        Raises `ServiceError` when a service that has them does not answer.
        """
        return [self._fault(location) for location in locations]

    def segments(self) -> Iterator[tuple[str, int]]:
        """Yield each segment and its bytes; other names in the directory are nobody's business."""
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if SEGMENT_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat().st_size

    @contextmanager
    def claim(self, segment: str) -> Iterator[bool]:
        """Hold a segment against writers for a while; yields False when one of them lives and holds it."""
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
        """Delete a segment. Only for one that is claimed and that no row names."""
        try:
            self.path(segment).unlink(missing_ok=True)
        except OSError as error:
            raise ServiceError(f"Could not remove {self.path(segment)}: {error.strerror}.") from None

    def clean(self) -> int:
        """Remove what a crash left of other files than segments; return how many."""
        return 0

    def catalog_id(self) -> str | None:
        """Return the id of the catalog that the store belongs to; None when nobody has said so."""
        try:
            return (self.root / CATALOG_ID).read_text().strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ServiceError(f"Could not read {self.root / CATALOG_ID}: {error.strerror}.") from None

    def belong_to(self, catalog_id: str) -> str:
        """Let the store belong to a catalog, unless it belongs to one; return to which."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            return write_once(self.root / CATALOG_ID, catalog_id)
        except OSError as error:
            raise ServiceError(f"Could not write {self.root / CATALOG_ID}: {error.strerror}.") from None

    def path(self, segment: str) -> Path:
        return self.root / segment

    def close(self) -> None:
        self.committed()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _hold(self) -> None:
        """Have a segment open that is ours alone, with room in it."""
        if self._file is not None and not self._is_held and not lock(self._file):
            # Somebody cleans up there, or has: its rows are safe, and we go elsewhere.
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
            # Between its creation and its lock somebody may have taken it for garbage.
            if lock(file):
                self._file, self._segment, self._end, self._is_held = file, segment, 0, True
            else:
                os.close(file)
        sync(self.root)

    def _abandon(self) -> None:
        """Never write to this segment again: after a failed fsync nobody knows what the disk holds."""
        if self._file is None:
            return
        with suppress(OSError):
            # What was acknowledged stays; the rest would keep a full disk full.
            os.ftruncate(self._file, self._end)
            if not self._end:
                self.path(self._segment).unlink(missing_ok=True)
        self._earlier.append(self._file)
        self._file, self._is_held = None, False

    def _chunks(self, location: Location) -> Iterator[bytes]:
        """Yield a blob's bytes, as far as they are there."""
        path = self.path(location.segment)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise MissingBytes(
                f"The segment {path} cannot be opened ({error.strerror}). "
                "Restore it and make it readable, or export again."
            ) from None
        try:
            at, end = location.offset, location.offset + location.length
            while at < end and (chunk := os.pread(file, min(CHUNK, end - at), at)):
                yield chunk
                at += len(chunk)
        except OSError as error:
            raise MissingBytes(f"{path} cannot be read ({error.strerror}). Look at its disk.") from None
        finally:
            os.close(file)

    def _fault(self, location: Location) -> Fault | None:
        seen = Checked(location.length)
        try:
            deque(seen.through(self._chunks(location)), maxlen=0)
        except MissingBytes as error:
            return error
        return None if seen.is_whole(location.checksum) else damaged(location, seen.size)


def checked(location: Location, data: bytes) -> bytes:
    """Return the bytes if they are those of the location; `DamagedBytes` otherwise."""
    if not is_whole(data, location.checksum):
        raise damaged(location, len(data))
    return data


def damaged(location: Location, size: int) -> DamagedBytes:
    return DamagedBytes(
        f"The bytes at {location.segment}:{location.offset} are damaged: {size} of "
        f"{location.length} bytes, and the checksum differs. Export the revision again."
    )


def room(length: int) -> int:
    """Return how many bytes of a segment a blob takes, with what lies between it and its like."""
    return aligned(length, _alignment(length))


def _alignment(length: int) -> int:
    return PAGE if length >= PAGE_ALIGNED_FROM else ALIGNMENT


def lay_out(views: Sequence[memoryview], end: int) -> tuple[list[int], list[memoryview], int]:
    """Return where each blob starts from `end` on, what is to be written there, and the new end."""
    offsets, buffers = [], []
    for view in views:
        offset = aligned(end, _alignment(len(view)))
        if offset > end:
            buffers.append(ZEROS[: offset - end])
        buffers.append(view)
        offsets.append(offset)
        end = offset + len(view)
    return offsets, buffers, end


def lock(handle: int) -> bool:
    """Take a file's lock if it is free; False when it is held, or when the file has no name any more."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(handle).st_nlink > 0


def _write(file: int, buffers: list[memoryview], offset: int) -> None:
    """Write buffers one after another, however few bytes the system takes at once."""
    first = 0
    while first < len(buffers):
        written = os.pwritev(file, buffers[first : first + IOV_MAX], offset)
        offset += written
        while first < len(buffers) and written >= len(buffers[first]):
            written -= len(buffers[first])
            first += 1
        if written:
            buffers[first] = buffers[first][written:]
