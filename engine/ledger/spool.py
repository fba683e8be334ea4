"""The spool: a write-ahead log by which any process hands events to the ledger.

A writer appends JSON lines to a file of its own and holds a lock on it (`.open`); a file that is
full or old enough is renamed to `.jsonl`. A reader takes `.jsonl` files, and `.open` files whose
writer is dead and whose lock is therefore free. An event is acknowledged once `emit` returns: it then
survives a kill of the writer. The writer's thread has the next file ready, so that no event waits for one.
Where the controller is on another machine, it also sends the files (`sender.py`).
"""

import contextlib
import errno
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from engine.errors import ConfigError
from engine.file_lock import create_locked, has_holder
from engine.threads import PeriodicThread

ROTATE_S = 0.25
# A writer needs microseconds from creating a file to giving it the name that readers look for.
OLDEST_NEW_S = 3600.0
ROTATE_BYTES = 1 << 20
# In a spool's directory: what no ledger takes. A purge and an erasure look there, too.
REJECTED = "rejected"
# Tables of what quality is judged by: a figure that is not finite has no place there, not even as NULL.
FINITE = ("scores", "readings", "estimates")


class LineFile:
    """A file to which this process alone appends lines, under a lock that ends with it."""

    def __init__(self, fresh: Path, path: Path):
        """`fresh` is its name until it is locked, where nobody looks for it."""
        self.path = path
        self._file = create_locked(fresh, path, os.O_APPEND)
        # In bytes.
        self.size = 0

    def append(self, line: bytes) -> None:
        """Append a line. Raises `OSError`; nothing is then written."""
        try:
            written = os.write(self._file, line)
            if written != len(line):
                said = f"No space left on device: it took {written} of {len(line)} bytes of an event"
                raise OSError(errno.ENOSPC, said)
        except OSError:
            # A torn line would corrupt the next event.
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(line)

    def clear(self) -> None:
        """Remove all lines."""
        os.ftruncate(self._file, 0)
        self.size = 0

    def sync(self) -> None:
        """Write the lines to the disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Free the lock."""
        os.close(self._file)


class Spool:
    """The writer's side, for one process; safe in its threads and after a fork."""

    def __init__(self, root: Path | str, writer: str, send: Callable[[], object] | None = None):
        """`send` is called as often as events are handed over, in a thread from now on, and at the end."""
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._writer, self._send = writer, send
        self._lock, self._handing = threading.Lock(), threading.Lock()
        self._file: LineFile | None = None
        self._pid = 0
        self._threads: list[PeriodicThread] = []
        if send is not None:
            self._start_threads()

    def emit(self, table: str, **fields: Any) -> str:
        """Append one event and return its id; `id` and `at` (epoch seconds) may be given.

        Raises `OSError` when the disk is full and `ConfigError` for a score that is not finite; the event is
        then not in the file.
        """
        if table in FINITE and (fault := infinite(fields)):
            raise ConfigError(fault)
        event = {"id": fields.get("id") or str(uuid.uuid4()), "table": table, "at": time.time(), **fields}
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            is_full = self._append(line) >= ROTATE_BYTES
        if is_full:
            self.rotate()
        return str(event["id"])

    def rotate(self) -> None:
        """Hand the written events to the reader; wait for a hand-over by another thread."""
        # After a fork the open file is the parent's.
        if self._pid == os.getpid():
            with self._handing:
                self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            file = self._file
            if file is None or not file.size:
                return
            self._file = None
        try:
            file.sync()
            file.path.rename(file.path.with_suffix(".jsonl"))
        finally:
            # Once unlocked, the reader takes the file even if the rename failed.
            file.close()

    def close(self) -> None:
        """Hand the written events over and end the threads."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.stop()
        for thread in threads:
            # A turn that is sending holds the lock of the sender, and has not listed the last file.
            thread.join()
        self.rotate()
        with self._lock:
            if self._file is not None and not self._file.size and self._pid == os.getpid():
                self._file.path.unlink(missing_ok=True)
                self._file.close()
                self._file = None
        if self._send is not None:
            self._send()

    def _turn(self) -> None:
        """Hand over what is written, and have a file ready for the next event."""
        self.rotate()
        with self._lock:
            if self._file is None and self._threads:
                self._file = self._open()

    def _append(self, line: bytes) -> int:
        """Append a line; return the size of its file."""
        if self._pid != os.getpid():
            # After a fork the open file and the threads are the parent's, which may have held the lock.
            self._file, self._handing = None, threading.Lock()
            self._start_threads()
        if self._file is None:
            self._file = self._open()
        self._file.append(line)
        return self._file.size

    def _start_threads(self) -> None:
        self._pid = os.getpid()
        self._threads = [PeriodicThread(f"spool-{self._writer}", ROTATE_S, self._turn, at_once=False)]
        if self._send is not None:
            name = f"spool-{self._writer}-send"
            self._threads.append(PeriodicThread(name, ROTATE_S, self._send, at_once=False))
        for thread in self._threads:
            thread.start()

    def _open(self) -> LineFile:
        name = f"{self._writer}-{os.getpid()}-{uuid.uuid4()}"
        return LineFile(self.root / f"{name}.new", self.root / f"{name}.open")


def infinite(fields: Mapping[str, Any]) -> str:
    """Return a sentence on the first figure that is NaN or infinite, empty when there is none."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            what = ", ".join(str(fields[key]) for key in ("suite", "item", "segment") if fields.get(key))
            return (
                f"The {name} of {what or 'a row'} is {value}, which no mean can hold. Correct the verifier "
                "or scorer that returned it, and score again."
            )
    return ""


def ready_files(root: Path) -> list[Path]:
    """Return the files that a reader may take, oldest first.

    An empty `.new` file, whose writer was killed before it could write, goes after an hour.
    """
    files: list[tuple[int, Path]] = []
    for path in root.glob("*"):
        if path.suffix == ".new":
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > OLDEST_NEW_S:
                    path.unlink()
        elif path.suffix == ".jsonl" or (path.suffix == ".open" and not has_holder(path, gone=True)):
            try:
                files.append((path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                # Renamed by its writer meanwhile; the next call finds it.
                continue
    return [path for _, path in sorted(files)]


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the acknowledged lines of a file; a torn last line was never acknowledged."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield line
