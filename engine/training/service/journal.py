"""A session's journal: an append-only file with the row of each step and the result of each durable request.

A line is a JSON object. `id` and `result` belong to a request, `row` to a training step, and `after` is the
offset of the row before this line (null: none), so the rows form a chain that a return to an earlier state
can branch. The session's state file is the commit point: it says how many bytes of the journal count. What a
kill leaves after them is ignored and overwritten.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ServiceError
from engine.files import sync

NAME = "journal.jsonl"
Row = Mapping[str, Any]


class Journal:
    """The journal of the session in `directory`; used by one thread at a time.

    `size` are the bytes that count. `done` has each request's result and the offset of the row before it.
    """

    def __init__(self, directory: Path):
        self.path = directory / NAME
        self.size = 0
        self.done: dict[str, tuple[dict[str, Any], int | None]] = {}
        self._pending = b""

    def read(self, size: int) -> None:
        """Index the first `size` bytes. Raises `ServiceError` when they are missing or damaged."""
        if (self.size, self._pending) == (size, b""):
            return
        self.size, self.done, self._pending = 0, {}, b""
        try:
            for line in _committed(self.path, size).splitlines():
                self._note(json.loads(line))
        except ValueError as error:
            raise _damaged(self.path, str(error)) from None
        self.size = size

    def append(self, after: int | None, **entry: Any) -> int:
        """Add a line after the row at `after`, which `flush` will write; return the line's offset."""
        offset, entry = self.size + len(self._pending), {**entry, "after": after}
        self._pending += json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._note(entry)
        return offset

    def withdraw(self, offset: int, request_id: str) -> None:
        """Remove the last line, at `offset`, before it was committed."""
        self._pending = self._pending[: offset - self.size]
        del self.done[request_id]

    def flush(self) -> int:
        """Write and fsync the pending lines; return the size that `commit` will make count."""
        if self._pending:
            is_new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self.size)
                file.write(self._pending)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync(self.path.parent)
        return self.size + len(self._pending)

    def commit(self) -> None:
        """Let the flushed lines count, once the state file says so."""
        self.size, self._pending = self.size + len(self._pending), b""

    def rows(self, last: int | None) -> list[Row]:
        """Return the chain of rows that ends with the one at offset `last`, oldest first."""
        whole = _committed(self.path, self.size) + self._pending
        found = []
        while last is not None:
            entry = json.loads(whole[last : whole.index(b"\n", last)])
            found.append(entry["row"])
            last = entry["after"]
        return found[::-1]

    def answer(self, request_id: str) -> dict[str, Any]:
        """Return a request's result; a session's description is completed with the history up to its step."""
        result, after = self.done[request_id]
        return {**result, "history": tuple(self.rows(after))} if "fence" in result else result

    def _note(self, entry: Mapping[str, Any]) -> None:
        if "id" in entry:
            self.done[entry["id"]] = entry["result"], entry["after"]


def find_answer(directory: Path, header: Mapping[str, Any], request_id: str) -> dict[str, Any] | None:
    """Return a request's stored result from a session's header and journal; None when there is none."""
    journal, size = Journal(directory), header.get("journal", 0)
    if "history" in header:
        add_earlier(journal, header["history"], header["done"])
    elif json.dumps(request_id).encode() in _committed(journal.path, size):
        journal.read(size)
    return journal.answer(request_id) if request_id in journal.done else None


def add_earlier(
    journal: Journal, history: list[Row], done: Mapping[str, dict[str, Any]] | None = None
) -> int | None:
    """Append the history of a version 2 state, which held it itself; return the offset of its last row."""
    offsets: list[int | None] = [None]
    for row in history:
        offsets.append(journal.append(offsets[-1], row=row))
    for request_id, result in (done or {}).items():
        after = offsets[: result["step"] + 1][-1] if "fence" in result else offsets[-1]
        journal.append(after, id=request_id, result=result)
    return offsets[-1]


def _committed(path: Path, size: int) -> bytes:
    stored = path.read_bytes()[:size] if size and path.is_file() else b""
    if len(stored) < size or (stored and not stored.endswith(b"\n")):
        raise _damaged(path, f"{len(stored)} of {size} bytes are there")
    return stored


def _damaged(path: Path, fault: str) -> ServiceError:
    return ServiceError(
        f"The journal {path} is damaged ({fault}). Restore the session's directory from a copy, or remove it "
        "to start over."
    )
