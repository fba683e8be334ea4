"""Copies of the ledger's file: begun by its writer, written on any thread while the writer goes on.

Between two checkpoints DuckDB writes only where the last one refers to nothing. The ledger checkpoints when a
copy begins and at no other time, so the file holds that state until the next copy begins.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from engine.errors import ServiceError
from engine.files import replacing

CLOSED = -1
# DuckDB's three headers; each checkpoint writes one of the last two.
HEADERS = 3 * 4096
# The ledger waits for a piece before it closes its file.
PIECE = 1 << 24


class LedgerFile:
    """The ledger's file, open for copies.

    DuckDB's lock ends when this process closes any descriptor of the file, so there is only this one, and it
    stays open as long as the ledger.
    """

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDONLY)
        self._lock = threading.Lock()

    def close(self) -> None:
        """End every copy of this file; a second time does nothing."""
        with self._lock:
            if self._descriptor != CLOSED:
                os.close(self._descriptor)
                # The descriptor's number may be reused from now on.
                self._descriptor = CLOSED

    def size(self) -> int:
        """Return the file's size in bytes."""
        with self._lock:
            return os.fstat(self._open_descriptor()).st_size

    def headers(self) -> bytes:
        """Return what changes with every checkpoint."""
        with self._lock:
            return os.pread(self._open_descriptor(), HEADERS, 0)

    def send(self, target: int, offset: int, count: int) -> int:
        """Copy up to `count` bytes from `offset` to the end of another file; return how many."""
        with self._lock:
            return os.sendfile(target, self._open_descriptor(), offset, count)

    def _open_descriptor(self) -> int:
        if self._descriptor == CLOSED:
            raise _changed()
        return self._descriptor


class LedgerCopy:
    """A copy of the ledger as it was at the checkpoint just done; `written` is called when it is in place."""

    def __init__(self, source: LedgerFile, destination: Path, written: Callable[[], object]):
        self._source, self._destination, self._written = source, destination, written
        self._size, self._headers = source.size(), source.headers()

    def write(self) -> None:
        """Write the copy and rename it into place, on any thread.

        Raises `ServiceError` when the ledger was closed or checkpointed meanwhile; the copy before it stays.
        """
        with replacing(self._destination) as draft, draft.open("wb") as target:
            offset = 0
            while offset < self._size:
                sent = self._source.send(target.fileno(), offset, min(PIECE, self._size - offset))
                if not sent:
                    raise _changed()
                offset += sent
            if self._source.headers() != self._headers:
                raise _changed()
        self._written()


def _changed() -> ServiceError:
    return ServiceError("The ledger was closed or changed while it was copied. The next copy will be whole.")
