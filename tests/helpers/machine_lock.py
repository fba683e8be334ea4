"""One lock for the machine: a test run and a benchmark beside each other would spoil each other's times."""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import Conflict

# Set for what runs under the lock, so that a child of the holder does not wait for it.
HELD = "GRAFTWORK_MACHINE_LOCK"
FILE = Path(tempfile.gettempdir(), f"graftwork-machine-{os.getuid()}.lock")
PATIENCE_S = 1800.0
LOOK_S = 0.5


@contextmanager
def machine_lock(file: Path = FILE, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the machine's lock, unless this process or a parent holds it already.

    Raises `Conflict`, naming the holder, after waiting for `patience_s` seconds.
    """
    if HELD in os.environ:
        yield
        return
    with file.open("a+") as lock:
        wait_for(lock.fileno(), file, patience_s)
        lock.truncate(0)
        command = " ".join(" ".join(sys.orig_argv).split())
        lock.write(f"Process {os.getpid()} ({command[:200]})")
        lock.flush()
        os.environ[HELD] = str(os.getpid())
        try:
            yield
        finally:
            del os.environ[HELD]


def wait_for(lock: int, file: Path, patience_s: float) -> None:
    """Lock an open file, and say on stderr for whom this waits."""
    deadline, said = time.monotonic() + patience_s, ""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read_text()
        if time.monotonic() >= deadline:
            raise Conflict(
                f"Tests and benchmarks run one at a time on a machine. {holder} holds {file}, also after "
                f"{patience_s:g} s; wait for it or end it, then try again."
            )
        if holder != said:
            print(f"Waiting for the machine: {holder} holds {file}.", file=sys.stderr, flush=True)
            said = holder
        time.sleep(LOOK_S)
