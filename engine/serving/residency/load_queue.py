"""Cold loads that wait for their turn: bounded, the interactive before the background, neither for ever.

Knows who waits, who runs and how long loads took of late. Does not know what a load does.
"""

import asyncio
import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from engine.catalog.catalog import Revision
from engine.errors import Busy
from engine.store.segments import PAGE_ALIGNED_FROM

INTERACTIVE, BACKGROUND = "interactive", "background"
PRIORITIES = (INTERACTIVE, BACKGROUND)
# One background load starts after so many interactive ones, if one waits.
SHARE = 4
# Of the queue's places, for the background; the rest is kept for people.
BACKGROUND_PLACES = 0.5
# And of those that run: who comes next waits for all of them.
BACKGROUND_RUNNING = 1 / 3
# Loads at once, where nobody said how many, of small adapters and of large ones. A small one's load is mostly
# Python, for which the steps wait; a large one's is checksums, outside Python's lock.
AT_ONCE, LARGE_AT_ONCE = 6, 16
# Of the sum of shares: a sixth six times is not quite one.
ROUNDING = 1e-9
# A load is taken to last as long as the median of so many before it: a burst of thousands of clients holds up
# the few loads under way by a hundredfold, and a mean of them would send the clients away for a minute.
RECENT = 64
# What the first ones are taken to last.
FIRST_S = 0.02
# Nobody who is refused is asked to stay away for longer.
AWAY_S = 60.0


def at_once(revision: Revision) -> int:
    """Return how many loads of such adapters go well beside each other."""
    return LARGE_AT_ONCE if revision.length >= PAGE_ALIGNED_FROM else AT_ONCE


@dataclass(eq=False)
class Load:
    """One cold load, shared by everybody who waits for it."""

    name: str
    revision: Revision
    priority: str
    asked_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    waiters: set["asyncio.Future[None]"] = field(default_factory=set)
    asked_by: int = 0
    # Its row may be gone since it was read.
    in_doubt: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def waited_s(self) -> float:
        """How long it has been in the queue, or was."""
        return (self.started_at or time.monotonic()) - self.asked_at


class LoadQueue:
    """What waits and what runs. Interactive loads start first; `SHARE` keeps the background going."""

    def __init__(self, places: int, concurrency: int | None = None):
        self.places, self._concurrency = places, concurrency
        self.waiting: dict[str, OrderedDict[str, Load]] = {priority: OrderedDict() for priority in PRIORITIES}
        # Before they may wait for their turn, the engine has to forget their adapters.
        self.returning: dict[str, Load] = {}
        self.running: dict[str, Load] = {}
        # When the last of those who were refused has a place, if all come back.
        self._promised = dict.fromkeys(PRIORITIES, 0.0)
        self._took_s = deque([FIRST_S] * RECENT, RECENT)
        self._in_a_row = 0

    def __len__(self) -> int:
        return sum(map(len, (*self.waiting.values(), self.returning, self.running)))

    def waits(self, priority: str) -> int:
        """Return how many loads of a priority have not begun."""
        returning = sum(load.priority == priority for load in self.returning.values())
        return len(self.waiting[priority]) + returning

    @property
    def concurrency(self) -> int:
        """How many may run at once, of such as run now."""
        if self._concurrency is not None:
            return self._concurrency
        return round(len(self.running) / self._taken(self.running.values())) if self.running else AT_ONCE

    @property
    def usual_s(self) -> float:
        """For how long a load takes its place."""
        return statistics.median(self._took_s)

    def _share(self, priority: str) -> int:
        """Return how many of a priority may run at once."""
        most = self.concurrency
        return max(1, int(most * BACKGROUND_RUNNING)) if priority == BACKGROUND else most

    def loads(self) -> list[Load]:
        """Return every load, those that run first."""
        return [load for loads in self._all() for load in loads.values()]

    def find(self, name: str) -> Load | None:
        return next((loads[name] for loads in self._all() if name in loads), None)

    def _all(self) -> "tuple[dict[str, Load], ...]":
        return (self.running, *self.waiting.values(), self.returning)

    def add(self, load: Load, is_returning: bool = False) -> None:
        """Let a load wait. Raises `Busy`, with when to come again, if the queue has no place for it.

        One that `is_returning` has a place, and its turn once `line_up` has put it into the line.
        """
        background = load.priority == BACKGROUND
        taken = self.waits(BACKGROUND) if background else len(self)
        places = math.ceil(self.places * BACKGROUND_PLACES) if background else self.places
        if taken >= places or len(self) >= self.places:
            raise Busy(
                f"{len(self)} cold loads wait or run; ask for {load.name} again later.",
                self._away_s(load.priority),
                {"waiting": len(self) - len(self.running), "running": len(self.running)},
            )
        (self.returning if is_returning else self.waiting[load.priority])[load.name] = load

    def line_up(self, name: str) -> None:
        """Let a load that was returning wait for its turn."""
        load = self.returning.pop(name)
        self.waiting[load.priority][name] = load

    def _away_s(self, priority: str) -> float:
        """Return in how many seconds one who is refused has a place, behind those who were refused before.

        All of them together keep the queue full. One answer for all would bring them back together, most of
        them in vain, and leave the queue empty until then.
        """
        now = time.monotonic()
        free_each_s = self.usual_s / self._share(priority)
        until = min(max(self._promised[priority], now) + free_each_s, now + AWAY_S)
        self._promised[priority] = until
        return max(1.0, until - now)

    def raise_priority(self, load: Load) -> None:
        """Let a background load that a person now waits for go with the interactive ones."""
        if load.priority == BACKGROUND:
            load.priority = INTERACTIVE
            if self.waiting[BACKGROUND].pop(load.name, None):
                self.waiting[INTERACTIVE][load.name] = load

    def next(self) -> Load | None:
        """Return the load to start now, which then counts as running; None when none may start."""
        people, background = self.waiting[INTERACTIVE], self.waiting[BACKGROUND]
        held = [load for load in self.running.values() if load.priority == BACKGROUND]
        may = background and (not held or self._fits(background, held, BACKGROUND_RUNNING))
        if may and (not people or self._in_a_row >= SHARE):
            line = background
        elif people:
            line = people
        else:
            return None
        if not self._fits(line, self.running.values(), 1.0):
            return None
        self._in_a_row = self._in_a_row + 1 if line is people and background else 0
        name, load = line.popitem(last=False)
        self.running[name] = load
        load.started_at = time.monotonic()
        return load

    def _fits(self, line: "OrderedDict[str, Load]", held: Collection[Load], most: float) -> bool:
        """Say whether the first of a line may run beside those that hold places."""
        return self._taken([*held, next(iter(line.values()))]) <= most + ROUNDING

    def _taken(self, loads: Iterable[Load]) -> float:
        """Return the share of all places that these take."""
        return sum(1 / (self._concurrency or at_once(load.revision)) for load in loads)

    def discard(self, load: Load) -> None:
        """Forget a load that waits, or one that runs and did not end well: it teaches nothing of times."""
        for loads in self._all():
            loads.pop(load.name, None)

    def end(self, load: Load) -> None:
        """Let a load that ended well go, and learn how long it took."""
        assert load.started_at is not None
        del self.running[load.name]
        self._took_s.append(time.monotonic() - load.started_at)

    def estimate_s(self, load: Load | None = None) -> float:
        """Return in how many seconds a load will be ready; by default a person's that joins the queue now."""
        if load is not None and load.started_at is not None:
            return max(0.0, self.usual_s - (time.monotonic() - load.started_at))
        if load is None or load.priority == INTERACTIVE:
            return self.usual_s * (1 + len(self) / self.concurrency)
        # The background has a share of the places, and of those that people want a smaller one.
        line = list(self.waiting[BACKGROUND])
        before = line.index(load.name) + 1 if load.name in self.waiting[BACKGROUND] else len(line) + 1
        running = sum(one.priority == BACKGROUND for one in self.running.values())
        people = len(self) - len(line) - running
        alone = (before + running) / self._share(BACKGROUND)
        behind = min(people, SHARE * before) / self.concurrency
        return self.usual_s * (1 + alone + behind)

    def told(self) -> dict[str, object]:
        """Return the queue for people: how many wait and run, the limits, and every load by name."""
        return {
            **{priority: self.waits(priority) for priority in PRIORITIES},
            "running": len(self.running),
            "places": self.places,
            "concurrency": self.concurrency,
            "estimate_s": self.estimate_s(),
            "loads": {
                load.name: {
                    "state": "queued" if load.started_at is None else "loading",
                    "priority": load.priority,
                    "waiters": len(load.waiters),
                    "waited_s": load.waited_s,
                }
                for load in self.loads()
            },
        }
