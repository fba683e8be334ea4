"""Atomic file writes, whole or not at all and on request durable across a power cut; where parts begin."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Blocks of a packed file, and blobs of a store, begin at multiples of this.
ALIGNMENT = 64


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


def write_whole(path: Path, content: str | bytes, durable: bool = False, mode: int = 0o666) -> None:
    """Replace `path` atomically by a file with this content and mode, as `replacing` does."""
    with replacing(path, durable) as draft:
        draft.touch(mode)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def write_once(path: Path, text: str, mode: int = 0o666) -> str:
    """Create a small file of this mode unless it exists; return its content: of two writers one wins.

    Raises `OSError`, also for an empty file.
    """
    if not path.is_file():
        draft = path.with_name(f".{uuid.uuid4().hex}")
        try:
            draft.touch(mode)
            draft.write_text(text)
            sync(draft)
            # The loser of a race reads what the winner wrote.
            with suppress(FileExistsError):
                _link(draft, path)
            sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)
    if content := path.read_text().strip():
        return content
    raise OSError(errno.EAGAIN, "it is empty; try again, and remove it if it stays so (a kill left it)")


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links: who creates the file is the winner, though it is empty at first.
        path.touch(draft.stat().st_mode & 0o777, exist_ok=False)
        path.write_text(draft.read_text())
        sync(path)


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of `to`."""
    return -(-nbytes // to) * to
