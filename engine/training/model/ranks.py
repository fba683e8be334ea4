"""The ranks of one trainer: processes that compute in step, started by torchrun or a launcher like it.

Ranks that are out of step cannot be brought together again. So a rank that fails, or waits longer than the
limit, ends its process at once. The others lose their connection to it and end too, and the launcher starts
all again. Only rank 0 has state, and that is on disk after each step.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine.threads import PeriodicThread

# How often rank 0 shows the others that it lives, while it has nothing to compute.
BEAT_S = 5.0
# The message that means nothing else.
BEAT = ()


class Ranks:
    """This process's place among the ranks of one trainer; `limit_s` bounds each wait for the others.

    `place` is its number among the `near` ranks of its machine. Rank 0 leads: it sends each message to all
    others. `torch.distributed` reads the launcher's variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """

    def __init__(self, limit_s: float, cuda: bool = False, place: int = 0, near: int = 1):
        self.place, self.near = place, near
        self.limit_s, limit = limit_s, timedelta(seconds=limit_s)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=limit)
        # Messages take Gloo on a GPU too: it notices a lost peer at once.
        self._messages = dist.new_group(backend="gloo", timeout=limit)
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self._together = threading.Lock()
        self._beats = PeriodicThread("rank-beats", BEAT_S, self._beat)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Compute together with the other ranks; an error or a wait beyond the limit ends this process."""
        late = f"another rank did not answer within {self.limit_s:g} s"
        watch = threading.Timer(self.limit_s, self._end, (late,))
        watch.daemon = True
        with self._together:
            watch.start()
            try:
                yield
            except BaseException as error:
                # Whatever it is: the others wait for this rank in a collective.
                self._end(repr(error))
            finally:
                watch.cancel()

    def send(self, message: Any = None) -> Any:
        """Send rank 0's message to all ranks, which all call this; return it. Use it within `in_step`."""
        held = [message]
        dist.broadcast_object_list(held, 0, group=self._messages)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on rank 0; empty on the others."""
        values = [None] * self.count if self.number == 0 else None
        dist.gather_object(value, values, 0, group=self._messages)
        return values or []

    def every(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on every rank."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._messages)
        return values

    def lead(self) -> None:
        """Begin to show the others that rank 0 lives."""
        self._beats.start()

    def close(self) -> None:
        """Let the other ranks end, where they still run."""
        self._beats.stop()
        with self._together, suppress(RuntimeError):
            self.send()

    def _beat(self) -> None:
        # While the ranks compute, they hear of each other anyway.
        if not self._together.locked():
            with self.in_step():
                self.send(BEAT)

    def _end(self, reason: str) -> None:
        print(
            f"Rank {self.number} of {self.count} ends: {reason}. The launcher starts all ranks again; each "
            "session goes on at its last step.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
