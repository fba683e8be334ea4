"""Wall clocks for what expires: a clock that jumps forward ends nothing early.

A clock is believed while it advances as the monotonic clock does, or once it has held its new time for an
hour. One that is set back is believed at once, since nothing expires early by it.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.errors import ServiceError
from engine.files import write_whole

# Between two reads a slewed clock differs by less than this; one that was set differs by more.
JUMP_S = 60.0
HELD_S = 3600.0
# The id of this boot: within a boot, all processes share one monotonic clock.
BOOT = Path("/proc/sys/kernel/random/boot_id")


class SteadyClock:
    """Returns the wall time; after a jump forward the time that it would be without. Not persistent."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ):
        self._wall, self._monotonic = wall, monotonic
        self._offset = wall() - monotonic()
        # When (monotonic) the jump was first seen, and the offset then.
        self._ahead: tuple[float, float] | None = None

    def __call__(self) -> float:
        """Return the time (epoch seconds)."""
        wall, now = self._wall(), self._monotonic()
        is_ahead = self._look(wall, now)
        return now + self._offset if is_ahead else wall

    def _look(self, wall: float, now: float) -> bool:
        """Compare the clocks; return whether the wall clock is ahead. Any thread may do so."""
        offset, ahead = wall - now, self._ahead
        if offset - self._offset <= JUMP_S:
            ahead = None
        elif ahead is None or abs(offset - ahead[1]) > JUMP_S:
            ahead = now, offset
        if ahead is None or now - ahead[0] >= HELD_S:
            self._offset, ahead = offset, None
        self._ahead = ahead
        return ahead is not None


class TrustedClock(SteadyClock):
    """A wall clock for irreversible work, which waits after a jump forward. Not thread-safe.

    `file` carries the offset from process to process, so that a restart does not accept a jump. After a
    reboot the clock is trusted as it is.
    """

    def __init__(
        self,
        file: Path,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        super().__init__(wall, monotonic)
        self._file, self._kept = file, ""
        self._boot = BOOT.read_text().strip()
        self._remember()

    def now(self) -> float:
        """Return the wall time (epoch seconds); raises `ServiceError` within an hour after a forward jump."""
        wall = self._wall()
        self._look(wall, self._monotonic())
        self._keep()
        if self._ahead is not None:
            raise ServiceError(
                f"The clock jumped forward by {self._ahead[1] - self._offset:.0f} s. Nothing expires until "
                "it is corrected, or has kept this time for an hour."
            )
        return wall

    def _remember(self) -> None:
        # A missing or damaged file is ignored.
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._file.read_text())
            if state["boot"] == self._boot:
                ahead = state["ahead"]
                self._ahead = (float(ahead[0]), float(ahead[1])) if ahead else None
                self._offset = float(state["offset"])

    def _keep(self) -> None:
        """Write the state when it has changed by more than normal clock drift."""
        text = json.dumps({"boot": self._boot, "offset": round(self._offset), "ahead": self._ahead})
        if text != self._kept:
            write_whole(self._file, text)
            self._kept = text
