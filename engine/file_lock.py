"""Locks on files. The kernel frees one when its process ends: a held lock means that its holder lives."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock(handle: int, waits: bool = False) -> bool:
    """Lock a file; False when another process holds it, unless this one `waits`, or when it was removed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(handle).st_nlink > 0


def unlock(handle: int) -> None:
    """Free a lock; closing the file does it, too."""
    fcntl.flock(handle, fcntl.LOCK_UN)


def is_locked(handle: int) -> bool:
    """Return whether another open file holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    unlock(handle)
    return False


def has_holder(path: Path, gone: bool) -> bool:
    """Return whether the process that has locked a file lives; `gone` where there is no such file."""
    try:
        with path.open("rb") as file:
            return is_locked(file.fileno())
    except FileNotFoundError:
        return gone


def create_locked(fresh: Path, path: Path, flags: int = 0) -> int:
    """Create a file that is locked before it has the name that others look for; return its descriptor."""
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
    try:
        lock(handle)
        fresh.rename(path)
    except OSError:
        os.close(handle)
        fresh.unlink(missing_ok=True)
        raise
    return handle


@contextmanager
def alone_in(path: Path, waits: bool = False) -> Iterator[bool]:
    """Yield whether nobody else, threads included, is in here by this directory or file; or wait for it."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield lock(handle, waits)
    finally:
        os.close(handle)
