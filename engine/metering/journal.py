"""The journal of a gateway: its requests, until the usage log's database has them.

A line costs one system call, a commit of SQLite several times that, and more where a model's work has emptied
the core's caches. So a request waits for its line alone, and many lines become one commit. What is written
here survives a kill of the process as a commit does.

The journal is the file whose lock says that its gateway lives: whoever finds the gateway dead has what is
left to be written. Each line is a JSON array: its number, its kind, and

- `ADMITTED`: the fields of `Metered`;
- `BEGUN`: the number of the request's first line, its row in the database or null;
- `ENDED`: the same two, then revision, status, and used tokens (prompt, completion) or null.
"""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from engine.file_lock import create_locked

ADMITTED, BEGUN, ENDED = "a", "b", "e"
JOURNALS = "gateways"
log = logging.getLogger("graftwork.usage")


class UsageJournal:
    """The journal of a gateway of this process, in the usage log's directory `root`."""

    def __init__(self, root: Path, gateway: str):
        folder = root / JOURNALS
        folder.mkdir(exist_ok=True, mode=0o700)
        self._file = create_locked(root / f"{gateway}.new", folder / gateway, os.O_APPEND)
        self._size = 0
        # The number of the last line.
        self.last = 0

    def append(self, *fields: Any) -> int:
        """Write a line; return its number. Raises `OSError`; nothing is then written."""
        line = orjson.dumps((self.last + 1, *fields)) + b"\n"
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)
        self.last += 1
        return self.last

    def clear(self) -> None:
        """Remove all lines, which the database has."""
        os.ftruncate(self._file, 0)
        self._size = 0

    def sync(self) -> None:
        """Write the lines to the disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Free the lock: the gateway is gone."""
        os.close(self._file)


def lines(file: Path, after: int) -> Iterator[tuple[int, str, list[Any]]]:
    """Yield number, kind and fields of the lines behind line number `after`, up to one that is damaged."""
    # A line that a crash has cut off was never answered for.
    for line in file.read_bytes().split(b"\n")[:-1]:
        try:
            number, kind, *fields = orjson.loads(line)
        except (ValueError, TypeError):
            # Some file systems leave zeros where a power failure came before the bytes.
            log.warning("What %s has behind line %d is damaged, and nothing of it counts.", file, after)
            return
        if number > after:
            yield number, kind, fields
