"""Bytes of packed adapters, addressed as (segment, offset, length) in append-only segments.

Every writing process appends to segments of its own, so that writers never meet; a reader needs
nothing but the address. Bytes come first and are fsynced; the catalog row that names them is the
commit point, and bytes that no row names are garbage to be compacted away.

Segments rather than LMDB, for two reasons that no measurement changes: LMDB has one writer at a time
for the whole store, and its single growing file cannot live on object storage.
"""

import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from engine.errors import AdapterError, ServiceError
from engine.files import sync

ALIGNMENT = 64
PAGE = 4096
# Blobs over this size start on a page, so that they can be mapped alone.
PAGE_ALIGNED_FROM = 1 << 20
SEGMENT_BYTES = 1 << 30


@dataclass(frozen=True)
class Location:
    """Where a blob lies: `length` bytes at `offset` of `segment`, with their sha256."""

    segment: str
    offset: int
    length: int
    checksum: str


class Store:
    """Append to and read from a directory of segments. One instance per thread that writes."""

    def __init__(self, root: Path):
        self.root = root
        self._file: int | None = None
        self._segment = ""
        self._end = 0

    def append(self, payload: bytes | memoryview) -> Location:
        """Write a blob and fsync it. Raises `ServiceError` when the disk is full; nothing is lost."""
        view = memoryview(payload).cast("B")
        align = PAGE if len(view) >= PAGE_ALIGNED_FROM else ALIGNMENT
        if self._file is None or self._end > SEGMENT_BYTES:
            self._open_segment()
        assert self._file is not None
        offset = -(-self._end // align) * align
        try:
            written = 0
            while written < len(view):
                written += os.pwrite(self._file, view[written:], offset + written)
            os.fdatasync(self._file)
        except OSError as error:
            raise ServiceError(
                f"Could not write {len(view)} bytes to {self.root / self._segment}: {error.strerror}. "
                "Free some space and run the step again; nothing was published."
            ) from None
        self._end = offset + len(view)
        return Location(self._segment, offset, len(view), hashlib.sha256(view).hexdigest())

    def read(self, location: Location) -> bytes:
        """Read a blob and verify its checksum. Raises `AdapterError` when bytes are missing or changed."""
        path = self.path(location.segment)
        try:
            with path.open("rb") as file:
                data = os.pread(file.fileno(), location.length, location.offset)
        except FileNotFoundError:
            raise AdapterError(
                f"The segment {path} is missing from the store. Restore it, or export again."
            ) from None
        if hashlib.sha256(data).hexdigest() != location.checksum:
            raise AdapterError(
                f"The bytes at {location.segment}:{location.offset} are damaged: {len(data)} of "
                f"{location.length} bytes, and the checksum differs. Export the revision again."
            )
        return data

    def path(self, segment: str) -> Path:
        return self.root / segment

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_segment(self) -> None:
        self.close()
        self.root.mkdir(parents=True, exist_ok=True)
        self._segment = f"{uuid.uuid4().hex}.seg"
        self._file = os.open(self.path(self._segment), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._end = 0
        sync(self.root)
