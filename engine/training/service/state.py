"""A session's state file: written atomically, with its tensors as one flat tensor.

Hundreds of small tensors would each be an entry of torch's archive. One flat tensor is written six times as
fast, and the header can be read without touching it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from engine.errors import ServiceError
from engine.files import sync

# Marks a tensor's place, by its number, in a flattened tree.
PLACE = "tensor"


def write(state: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Store a state at every path, the last path last: write a draft, fsync, rename, fsync the directory.

    Use it within `storing`.
    """
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


@contextmanager
def storing(directory: Path) -> Iterator[None]:
    """Raise `ServiceError` when writing inside fails; the previous state is then intact."""
    try:
        yield
    except OSError as error:
        raise ServiceError(
            f"Could not store a session in {directory}: {error.strerror}. "
            "Free some disk space and repeat the step; the last stored step is intact."
        ) from None


def read(path: Path) -> dict[str, Any]:
    """Return a stored state with its tensors on the CPU. Raises `ServiceError` when it is damaged."""
    stored = _load(path)
    flat = stored.pop("flat", None)
    if flat is None:
        return dict(stored)
    parts = flat.split([torch.Size(shape).numel() for shape in stored["shapes"]])
    shaped = [part.view(shape) for part, shape in zip(parts, stored["shapes"], strict=True)]
    return dict(_replanted(stored["tree"], shaped))


def read_header(path: Path) -> dict[str, Any]:
    """Return a stored state without reading its tensors; `ServiceError` when it is damaged."""
    stored = _load(path, mmap=True)
    return dict(stored.get("tree", stored))


def _load(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except (RuntimeError, UnpicklingError, EOFError) as error:
        raise ServiceError(
            f"The stored session {path} is damaged ({error}). Restore the file from a copy, or remove it to "
            "start over."
        ) from None


def _flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as one flat float32 tensor, the tensors' shapes, and the tree of all other values."""
    found: list[Tensor] = []

    def planted(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: planted(value) for key, value in node.items()}
        if not isinstance(node, Tensor) or node.dtype != torch.float32:
            return node
        found.append(node)
        return (PLACE, len(found) - 1)

    tree = planted(state)
    flat = torch.cat([tensor.reshape(-1) for tensor in found])
    return {"tree": tree, "shapes": [tuple(tensor.shape) for tensor in found], "flat": flat}


def _replanted(node: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(node, dict):
        return {key: _replanted(value, tensors) for key, value in node.items()}
    return tensors[node[1]] if isinstance(node, tuple) and node[:1] == (PLACE,) else node
