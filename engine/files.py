"""What is written must outlast a power cut: files and directories that are forced to the disk."""

import os
import uuid
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
