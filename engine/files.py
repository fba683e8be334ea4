"""Atomic file writes: whole or not at all, and on request durable across a power cut."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Fsync a file, or a directory and so the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a draft beside `path` to write; rename it over `path` when the block ends.

    An exception removes the draft and keeps `path`. `durable` fsyncs the file and its directory. A kill
    leaves the old file, and a draft `NAME.*` beside it.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        yield draft
        if durable:
            sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Replace `path` atomically by a file with this content, as `replacing` does."""
    with replacing(path, durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def write_once(path: Path, text: str) -> str:
    """Create a small file atomically unless it exists; return its content. Raises `OSError`."""
    if not path.is_file():
        draft = path.with_name(f".{uuid.uuid4().hex}")
        try:
            draft.write_text(text)
            sync(draft)
            try:
                # The loser of a race reads what the winner wrote.
                with suppress(FileExistsError):
                    os.link(draft, path)
            except OSError:
                # A file system without hard links: of two concurrent writers the later one wins.
                draft.rename(path)
            sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)
    return path.read_text().strip()
