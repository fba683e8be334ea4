"""One run of a benchmark: its time, what it says meanwhile, and how it ends.

A benchmark's default form measures for `MINUTES` at most, its `--long` form until its figures are known; the
starts of services before and between its parts are not cut off. Ctrl-C ends both with what they have: what
was measured until then is shown, and nothing is written.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from _record import Bounds, bounds_of
from _verdicts import UNDECIDED, MedianInterval

MINUTES, LONG_MINUTES = 4.0, 480.0
# Pairs of the long form, at least, so that a spread is known.
LEAST_LONG = 10
# Seconds between two lines on progress.
SAYS_S = 5.0
INTERRUPTED = 130
T = TypeVar("T")


class TimeOverError(KeyboardInterrupt):
    """The time of a part is over; asyncio and threads treat it as Ctrl-C."""


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a benchmark's parser with the options that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="whose built bases are used")
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    parser.add_argument("--long", action="store_true", help="the form that decides, however long it takes")
    return parser


def start(main: Callable[[], None]) -> None:
    """Run a benchmark; Ctrl-C beside what is measured ends it with a sentence."""
    try:
        main()
    except KeyboardInterrupt:
        print(
            f"bench {Path(sys.argv[0]).stem}: ended by Ctrl-C while it prepared; nothing was written.",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)


class Run:
    """The time of one run of the benchmark `name`."""

    def __init__(self, name: str, is_long: bool, minutes: float = MINUTES):
        self.name, self.is_long, self.is_interrupted = name, is_long, False
        self.minutes = LONG_MINUTES if is_long else minutes
        self._began = time.monotonic()
        self._said = -SAYS_S
        print(f"bench {name}: measures until {clock(60 * self.minutes)}; Ctrl-C ends it.", flush=True)

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._began + 60 * self.minutes - time.monotonic()

    def repeats(
        self, what: str, take: Callable[[int], T], *, share: float = 1.0, most: int | None = None,
        is_enough: Callable[[list[T]], bool] = lambda _: False,
    ) -> list[T]:  # fmt: skip
        """Return what `take` gives for 0, 1, ... until there are `most`, they are enough, or time is over.

        The part may take a `share` of the time that is left. What is under way then, or at Ctrl-C, does not
        count.
        """
        found: list[T] = []
        began = time.monotonic()
        ends = began + share * self.left_s
        while not self.is_interrupted and len(found) != most and not is_enough(found):
            each = (time.monotonic() - began) / max(1, len(found))
            if time.monotonic() + each >= ends:
                break
            try:
                with until(ends):
                    found.append(take(len(found)))
            except TimeOverError:
                break
            except KeyboardInterrupt:
                self.is_interrupted = True
            self._say(what, len(found), most, began, ends)
        return found

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Let Ctrl-C end what prepares a part, and so the run, with what it has."""
        try:
            yield
        except KeyboardInterrupt:
            self.is_interrupted = True

    def go_on(self) -> None:
        """Raise `KeyboardInterrupt` where the run was interrupted."""
        if self.is_interrupted:
            raise KeyboardInterrupt

    def parts(self, *calls: Callable[[], T]) -> list[T]:
        """Return what these calls give, one after another, as far as time and Ctrl-C allow."""
        return self.repeats("part", lambda number: calls[number](), most=len(calls))

    def pairs(
        self, what: str, take: Callable[[int], Mapping[str, float]], bounds: Bounds, *, suffix: str = "",
        share: float = 1.0, most: int | None = None,
    ) -> dict[str, list[float]]:  # fmt: skip
        """Return each figure's value of each pair, until every bounded one is decided or the time is over.

        `bounds` name the figures with the suffix.
        """
        intervals: dict[str, MedianInterval] = {}

        def one(number: int) -> Mapping[str, float]:
            found = take(number)
            for name, value in found.items():
                intervals.setdefault(name + suffix, MedianInterval()).add(value)
            return found

        def is_enough(found: list[Mapping[str, float]]) -> bool:
            known = bounds_of(dict.fromkeys(intervals, 0.0), bounds)
            return len(found) >= (LEAST_LONG if self.is_long else 1) and all(
                intervals[name].now().says(bound.least, bound.most) != UNDECIDED
                for name, bound in known.items()
            )

        taken = self.repeats(what, one, share=share, most=most, is_enough=is_enough)
        return {name: [pair[name] for pair in taken] for name in (taken[0] if taken else ())}

    def _say(self, what: str, done: int, most: int | None, began: float, ends: float) -> None:
        now = time.monotonic()
        if now - self._said < SAYS_S:
            return
        self._said = now
        left = ends - now
        if most and done:
            left = min(left, (most - done) * (now - began) / done)
        count = f"{done} of {most}" if most else f"{done}"
        print(f"bench {self.name}: {what}, {count} done; ends by {clock(left)}.", flush=True)


def clock(seconds: float) -> str:
    """Return the time of day in so many seconds."""
    return (datetime.now() + timedelta(seconds=max(0.0, seconds))).strftime("%H:%M:%S")


@contextmanager
def until(ends: float) -> Iterator[None]:
    """Raise `TimeOverError` in the block at a time of the monotonic clock."""

    def over(*_: object) -> None:
        raise TimeOverError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, ends - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
