"""CPU cores that engine and trainer share: whoever computes alone takes all of them.

Each holds a lock on a file of its own while it computes, and looks at the other's before each piece of work.
The kernel releases a lock when its process ends, so a crash leaves no core unused. Bits do not depend on the
number of threads: matrix products divide their rows and columns, not their sums.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

# By name: vLLM's CPU worker replaces the attribute of torch by a function that does nothing.
from torch import set_num_threads

from engine.file_lock import is_locked, lock, unlock

Service = Literal["engine", "trainer"]


class SharedCores:
    """One service's view of the cores; for one thread, whose number of threads in torch it sets."""

    def __init__(self, folder: Path, service: Service, share: int):
        """Open both locks in `folder`; `share` is the number of threads while the other service computes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.share, self.all = share, len(os.sched_getaffinity(0))
        other: Service = "trainer" if service == "engine" else "engine"
        self._own, self._other = (
            os.open(folder / f"{name}.computing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in (service, other)
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Say that this service computes, inside the `with` block."""
        # Whoever looks at it holds it for a moment.
        lock(self._own, waits=True)
        try:
            self.divide()
            yield
        finally:
            unlock(self._own)

    def divide(self) -> None:
        """Set the threads for the next piece of work: the share, or all while the other does not compute."""
        set_num_threads(self.share if is_locked(self._other) else self.all)
