"""What is on disk of a session: its state file and its journal.

The state file is written atomically, with its tensors as one flat tensor. Hundreds of small tensors would
each be an entry of torch's archive. One flat tensor is written six times as fast, and the header can be read
without touching it.

The journal is an append-only file with the row of each step and the result of each durable request.

A line is a JSON object. `id` and `result` belong to a request, `row` to a training step, and `after` is the
offset of the row before this line (null: none), so the rows form a chain that a return to an earlier state
can branch. The session's state file is the commit point: it says how many bytes of the journal count. What a
kill leaves after them is ignored and overwritten.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from engine.errors import ServiceError
from engine.files import sync

VERSION = 3
# Marks a tensor's place, by its number, in a flattened tree.
PLACE = "tensor"
# The journal's file.
NAME = "journal.jsonl"
Row = Mapping[str, Any]


def write(state: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Store a state at every path, the last path last: write a draft, fsync, rename, fsync the directory."""
    directory, last = paths[-1].parent, paths[-1]
    directory.mkdir(parents=True, exist_ok=True)
    draft, link = last.with_suffix(".draft"), last.with_suffix(".link")
    try:
        with draft.open("wb") as file:
            torch.save(_flattened(state), file)
            file.flush()
            os.fsync(file.fileno())
        for path in paths[:-1]:
            link.unlink(missing_ok=True)
            link.hardlink_to(draft)
            link.replace(path)
        draft.replace(last)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    # Without this fsync a power failure could undo a step that was answered.
    sync(directory)


def read(path: Path) -> dict[str, Any]:
    """Return a stored state with its tensors on the CPU. `ServiceError` for a damaged or too old one."""
    stored = _load(path)
    parts = stored["flat"].split([torch.Size(shape).numel() for shape in stored["shapes"]])
    shaped = [part.view(shape) for part, shape in zip(parts, stored["shapes"], strict=True)]
    return dict(_replanted(stored["tree"], shaped))


def read_header(path: Path) -> dict[str, Any]:
    """Return a stored state without reading its tensors. Raises as `read`."""
    return dict(_load(path, mmap=True)["tree"])


def policy_of(path: Path) -> str | None:
    """Return the policy of a stored state of any version; None for a damaged one."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return str(stored.get("tree", stored)["policy"])
    except (RuntimeError, UnpicklingError, EOFError, KeyError):
        return None


def _load(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        stored = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except (RuntimeError, UnpicklingError, EOFError) as error:
        raise ServiceError(
            f"The stored session {path} is damaged ({error}). Restore the file from a copy, or remove it to "
            "start over."
        ) from None
    if (version := stored.get("tree", stored).get("version", 0)) < VERSION:
        raise ServiceError(
            f"The stored session {path} has version {version}, which is older than {VERSION}. Take a step on "
            "it with commit 265b009, which stores it anew, or train the policy from its champion."
        )
    return stored


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as one flat float32 tensor, the tensors' shapes, and the tree of all other values."""
    tensors: list[Tensor] = []

    def planted(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: planted(value) for key, value in node.items()}
        if not isinstance(node, Tensor) or node.dtype != torch.float32:
            return node
        tensors.append(node)
        return (PLACE, len(tensors) - 1)

    tree = planted(state)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return {"tree": tree, "shapes": [tuple(tensor.shape) for tensor in tensors], "flat": flat}


def _replanted(node: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(node, dict):
        return {key: _replanted(value, tensors) for key, value in node.items()}
    return tensors[node[1]] if isinstance(node, tuple) and node[:1] == (PLACE,) else node


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
        rows = []
        while last is not None:
            entry = json.loads(whole[last : whole.index(b"\n", last)])
            rows.append(entry["row"])
            last = entry["after"]
        return rows[::-1]

    def answer(self, request_id: str) -> dict[str, Any]:
        """Return a request's result; a session's description is completed with the history up to its step."""
        result, after = self.done[request_id]
        return {**result, "history": tuple(self.rows(after))} if "fence" in result else result

    def _note(self, entry: Mapping[str, Any]) -> None:
        if "id" in entry:
            self.done[entry["id"]] = entry["result"], entry["after"]


def find_answer(directory: Path, header: Mapping[str, Any], request_id: str) -> dict[str, Any] | None:
    """Return a request's stored result from a session's header and journal; None when there is none."""
    journal = Journal(directory)
    if json.dumps(request_id).encode() in _committed(journal.path, header["journal"]):
        journal.read(header["journal"])
    return journal.answer(request_id) if request_id in journal.done else None


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
