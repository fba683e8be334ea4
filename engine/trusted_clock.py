"""The wall clock, for what cannot be undone: it is believed when it goes as the monotonic clock does."""

import time
from collections.abc import Callable

from engine.errors import ServiceError

# A clock that is slewed differs by less between two looks; one that is set differs by more.
JUMP_S = 60.0
HELD_S = 3600.0


class TrustedClock:
    """Tells the wall time, unless the clock has jumped ahead within the last hour. For one thread."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ):
        self._wall, self._monotonic = wall, monotonic
        self._offset = wall() - monotonic()
        # Since when (monotonic) the clock is ahead, and by which offset.
        self._ahead: tuple[float, float] | None = None

    def now(self) -> float:
        """Return the wall time (epoch seconds); `ServiceError` within an hour after a jump ahead.

        A clock that is set back makes nothing come too early, so it is believed at once.
        """
        wall, now = self._wall(), self._monotonic()
        offset = wall - now
        jump = offset - self._offset
        if jump > JUMP_S:
            if self._ahead is None or abs(offset - self._ahead[1]) > JUMP_S:
                self._ahead = now, offset
            if now - self._ahead[0] < HELD_S:
                raise ServiceError(
                    f"The clock has jumped ahead by {self._ahead[1] - self._offset:.0f} s. Nothing expires "
                    "until it is set right, or has held for an hour."
                )
        self._offset, self._ahead = offset, None
        return wall
