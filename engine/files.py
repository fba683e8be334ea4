"""Files that are written whole or not at all, and bytes and names that outlast a power cut."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a file beside `path` to write, which takes its place when the block ends, and else goes.

    `durable` forces its bytes and its name to the disk. A kill leaves the old file and a `NAME.*` beside it.
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
    """Put a file with this content in the place of `path`, as `replacing` does."""
    with replacing(path, durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def write_once(path: Path, text: str) -> str:
    """Write a small file, whole, unless it is there already; return what it says. Raises `OSError`."""
    if not path.is_file():
        draft = path.with_name(f".{uuid.uuid4().hex}")
        try:
            draft.write_text(text)
            sync(draft)
            try:
                # Who comes second finds what the first one wrote.
                with suppress(FileExistsError):
                    os.link(draft, path)
            except OSError:
                # A file system without links: of two at the same moment the later one has it.
                draft.rename(path)
            sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)
    return path.read_text().strip()
