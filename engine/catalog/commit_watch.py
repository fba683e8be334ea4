"""Whether somebody has committed to a SQLite database, which a gateway asks at each request."""

import os
import sqlite3
from pathlib import Path

# Both copies of the header of the index that connections share of a write-ahead log: each commit changes it
# (https://www.sqlite.org/walformat.html, 2.2). Whatever else may change there costs a query, no more.
HEADER_BYTES = 96


class CommitWatch:
    """Watches one database. For one thread at a time."""

    def __init__(self, path: str):
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._index_path = Path(f"{path}-shm")
        self._index: int | None = None
        self._header = b""
        self._commits = -1

    def close(self) -> None:
        """Close the connection."""
        if self._index is not None:
            os.close(self._index)
        self._index, self._header = None, b""
        self.connection.close()

    def commits(self) -> int:
        """Return a number that changes when another connection commits.

        Where the header is as it was, it is the last number: reading it takes a tenth of the query. Raises
        `sqlite3.DatabaseError`.
        """
        header = b"" if self._index is None else os.pread(self._index, HEADER_BYTES, 0)
        if header and header == self._header:
            return self._commits
        self._commits = int(self.connection.execute("PRAGMA data_version").fetchone()[0])
        self._header = header
        # The connection has it open now, so that nobody removes it.
        if self._index is None and self._has_index():
            self._index = os.open(self._index_path, os.O_RDONLY)
        return self._commits

    def _has_index(self) -> bool:
        (mode,) = self.connection.execute("PRAGMA journal_mode").fetchone()
        return mode == "wal" and self._index_path.exists()
