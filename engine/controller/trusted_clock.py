"""The wall clock, for what cannot be undone: it is believed when it goes as the monotonic clock does."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.errors import ServiceError
from engine.files import write_whole

# A clock that is slewed differs by less between two looks; one that is set differs by more.
JUMP_S = 60.0
HELD_S = 3600.0
# Names this run of the kernel, in which the monotonic clock goes on from process to process.
BOOT = Path("/proc/sys/kernel/random/boot_id")


class TrustedClock:
    """Tells the wall time, unless the clock has jumped ahead within the last hour. For one thread.

    `file` tells the next process what this one knew, or a restart would make a jump believed. Whether the
    clock was right before the machine itself was restarted nobody knows; it is believed then.
    """

    def __init__(
        self,
        file: Path,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self._file, self._wall, self._monotonic = file, wall, monotonic
        self._boot = BOOT.read_text().strip()
        self._offset = wall() - monotonic()
        # Since when (monotonic) the clock is ahead, and by which offset.
        self._ahead: tuple[float, float] | None = None
        self._kept = ""
        self._remember()

    def now(self) -> float:
        """Return the wall time (epoch seconds); `ServiceError` within an hour after a jump ahead.

        A clock that is set back makes nothing come too early, so it is believed at once.
        """
        wall, now = self._wall(), self._monotonic()
        offset = wall - now
        if offset - self._offset <= JUMP_S:
            self._ahead = None
        elif self._ahead is None or abs(offset - self._ahead[1]) > JUMP_S:
            self._ahead = now, offset
        if self._ahead is None or now - self._ahead[0] >= HELD_S:
            self._offset, self._ahead = offset, None
        self._keep()
        if self._ahead is not None:
            raise ServiceError(
                f"The clock has jumped ahead by {self._ahead[1] - self._offset:.0f} s. Nothing expires "
                "until it is set right, or has held for an hour."
            )
        return wall

    def _remember(self) -> None:
        # A file that is not there, or torn, says nothing.
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file.read_text())
            if known["boot"] == self._boot:
                ahead = known["ahead"]
                self._ahead = (float(ahead[0]), float(ahead[1])) if ahead else None
                self._offset = float(known["offset"])

    def _keep(self) -> None:
        """Write what is known where it has changed by more than a clock drifts within seconds."""
        text = json.dumps({"boot": self._boot, "offset": round(self._offset), "ahead": self._ahead})
        if text != self._kept:
            write_whole(self._file, text)
            self._kept = text
