"""What is written must outlast a power cut: files and directories that are forced to the disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
