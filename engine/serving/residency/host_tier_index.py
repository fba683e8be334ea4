"""Which adapters are on this machine: the state of each, and the gateway's half of the host tier.

`HostTierIndex` has the names and sizes of the host tier's adapters and chooses which are evicted;
`HostTierBytes` in the engine's worker (serving/worker/host_tier_bytes.py) has their bytes. Both do what
residency.py tells them, and it tells each change as an event of `TRANSITIONS`. A request for an adapter that
is in the host tier changes nothing, and is not told.

Eviction is W-TinyLFU, that is LRU eviction with admission by popularity. New adapters enter a window, a
small share of the tier. An adapter that leaves the window is admitted to the main part only if it was
requested more often than the one it would evict there (TinyLFU: Einziger, Friedman and Manes, 2017), so a
scan of cold names passes through the window alone. Ties evict the least recently used. Adapters in use are
never evicted.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from engine.catalog.catalog import Revision
from engine.catalog.records import served_name
from engine.errors import Conflict, ServiceError

# The window's share of the tier.
WINDOW = 0.1
# New adapters in use may fill the tier to twice its size before warm ones are evicted for them.
OVERSHOOT = 2.0
ROWS, WIDTH = 4, 1 << 16
MOST = 15
HALVES = bytes(count // 2 for count in range(256))
AGE_ASKS = 40_000
AGE_S = 1800.0
# Half-life of a use in `hits`, in seconds.
HALF_LIFE_S = 1800.0


class AdapterState(StrEnum):
    """Where an adapter is."""

    STORED = "stored"
    # Its load waits in the queue; its load runs.
    QUEUED = "queued"
    LOADING = "loading"
    # Ready for requests: in the host tier; in the host tier and a slot of the engine.
    HOST = "host"
    SLOT = "slot"
    # In the host tier, but its bytes are gone: its requests fail, and it leaves after the last one.
    LOST = "lost"
    # The engine is about to forget it; the same, and it was requested again meanwhile.
    LEAVING = "leaving"
    RETURNING = "returning"


class AdapterEvent(StrEnum):
    """What happens to an adapter."""

    # A request or prewarm asks for it; its load starts; the last waiter of its load has left.
    ASK = "ask"
    START = "start"
    CANCEL = "cancel"
    # How a load ends.
    READY = "ready"
    REFUSE = "refuse"
    # Reported by the engine's worker: it is in a slot; in none; its bytes are gone (or in quarantine).
    FILL = "fill"
    CLEAR = "clear"
    LOSE = "lose"
    # It has no users and makes room, or its row is gone; the last request on lost bytes has ended; the
    # engine has forgotten it.
    EVICT = "evict"
    RELEASE = "release"
    FORGET = "forget"


S, E = AdapterState, AdapterEvent
# An event that is missing for a state cannot happen there. A worker's reports are asynchronous, so they may
# concern adapters that are leaving.
TRANSITIONS: dict[AdapterState, dict[AdapterEvent, AdapterState]] = {
    S.STORED: {E.ASK: S.QUEUED},
    S.QUEUED: {E.ASK: S.QUEUED, E.START: S.LOADING, E.CANCEL: S.STORED},
    S.LOADING: {E.ASK: S.LOADING, E.READY: S.HOST, E.REFUSE: S.LEAVING, E.CANCEL: S.LEAVING},
    S.HOST: {E.ASK: S.HOST, E.FILL: S.SLOT, E.LOSE: S.LOST, E.EVICT: S.LEAVING},
    S.SLOT: {E.ASK: S.SLOT, E.FILL: S.SLOT, E.CLEAR: S.HOST, E.LOSE: S.LOST, E.EVICT: S.LEAVING},
    S.LOST: {E.FILL: S.LOST, E.LOSE: S.LOST, E.RELEASE: S.LEAVING},
    S.LEAVING: {
        E.ASK: S.RETURNING, E.FILL: S.LEAVING, E.LOSE: S.LEAVING, E.FORGET: S.STORED,
    },
    S.RETURNING: {
        E.ASK: S.RETURNING, E.FILL: S.RETURNING, E.LOSE: S.RETURNING, E.CANCEL: S.LEAVING,
        E.FORGET: S.QUEUED,
    },
}  # fmt: skip


class AdapterStates:
    """The state of each adapter by served name, and a count of each transition to another state.

    `stored` is the default, so only adapters in another state have an entry.
    """

    def __init__(self) -> None:
        self._states: dict[str, AdapterState] = {}
        # Served names in a slot; a report that lacks one of them clears it.
        self.in_slots: set[str] = set()
        self.transitions: Counter[tuple[AdapterState, AdapterEvent, AdapterState]] = Counter()

    def state(self, name: str) -> AdapterState:
        """Return an adapter's state."""
        return self._states.get(name, AdapterState.STORED)

    def counts(self) -> dict[AdapterState, int]:
        """Return how many adapters are in each state but `stored`."""
        return dict(Counter(self._states.values()))

    def move(self, name: str, event: AdapterEvent) -> AdapterState:
        """Apply an event and return the new state. Raises `RuntimeError` where the event cannot happen."""
        before = self._states.get(name, AdapterState.STORED)
        after = TRANSITIONS[before].get(event)
        if after is None:
            raise RuntimeError(
                f"{name} is {before}, where '{event}' cannot happen. This is a bug in Graftwork; report it."
            )
        if after is not before:
            self._enter(name, before, after)
            self.transitions[before, event, after] += 1
        return after

    def _enter(self, name: str, before: AdapterState, after: AdapterState) -> None:
        if after is AdapterState.STORED:
            del self._states[name]
        else:
            self._states[name] = after
        if after is AdapterState.SLOT:
            self.in_slots.add(name)
        elif before is AdapterState.SLOT:
            self.in_slots.discard(name)


class Popularity:
    """How often each name was requested recently: a count-min sketch with aging, in constant memory.

    Counts saturate at 15; all are halved after 40,000 requests or half an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows = [bytearray(WIDTH) for _ in range(ROWS)]
        self._clock = clock
        self._asks, self._aged_at = 0, clock()

    def add(self, name: str) -> None:
        """Count one request for a name."""
        cells = self._cells(name)
        least = min(row[cell] for row, cell in zip(self._rows, cells, strict=True))
        if least < MOST:
            for row, cell in zip(self._rows, cells, strict=True):
                if row[cell] == least:
                    row[cell] += 1
        self._asks += 1
        if self._asks >= AGE_ASKS or self._clock() - self._aged_at >= AGE_S:
            self._age()

    def of(self, name: str) -> int:
        """Return the estimated count of a name, at most 15."""
        return min(row[cell] for row, cell in zip(self._rows, self._cells(name), strict=True))

    def _cells(self, name: str) -> list[int]:
        # Python's hash has 64 bits, salted in each process: 16 bits for each of four rows.
        word = hash(name)
        return [(word >> 16 * row) & (WIDTH - 1) for row in range(ROWS)]

    def _age(self) -> None:
        self._rows = [row.translate(HALVES) for row in self._rows]
        self._asks, self._aged_at = self._asks // 2, self._clock()


@dataclass(eq=False)
class Resident:
    """An adapter in the host tier; `users` counts requests in flight, `hits` decays, times are in seconds."""

    revision: Revision
    users: int = 0
    used_at: float = 0.0
    loaded_at: float = 0.0
    hits: float = 0.0
    is_warm: bool = False
    # Its bytes are gone: its requests fail, and it leaves after the last one.
    is_lost: bool = False

    @property
    def bytes(self) -> int:
        """The size of its packed file."""
        return self.revision.length


class HostTierIndex:
    """The adapters in the host tier by served name, bounded by bytes and by count.

    Their bytes are in each worker's `HostTierBytes`, from before they are ready until they are forgotten.
    """

    def __init__(
        self,
        max_bytes: int,
        max_adapters: int,
        clock: Callable[[], float] = time.monotonic,
        on_hit: Callable[[], object] = lambda: None,
    ):
        """`on_hit` is called for each adapter that is asked for and here."""
        self._on_hit = on_hit
        self.residents: dict[str, Resident] = {}
        self.bytes = 0
        self.max_bytes, self.max_adapters = max_bytes, max_adapters
        self.popularity = Popularity(clock)
        self._clock = clock
        self._window_bytes = self._window_adapters = 0
        # Adapters not in use, least recently used first: of the window, and of the main part.
        self._idle_new: OrderedDict[str, Resident] = OrderedDict()
        self._idle_warm: OrderedDict[str, Resident] = OrderedDict()

    def ready(self, name: str, revision: Revision) -> None:
        """Add an adapter, not in use yet, to the window."""
        now = self._clock()
        resident = self.residents[name] = Resident(revision, used_at=now, loaded_at=now)
        self._idle_new[name] = resident
        self.bytes += resident.bytes
        self._window_bytes += resident.bytes
        self._window_adapters += 1

    def ask(self, revision: Revision) -> str | None:
        """Hold a revision for a request and return its served name; None when it is not in the tier.

        Raises `ServiceError` while it leaves because its bytes were lost, and `Conflict` when
        another revision has the same served name.
        """
        name = served_name(revision.policy, revision.digest)
        resident = self.residents.get(name)
        if resident is None:
            return None
        if resident.is_lost:
            raise ServiceError(f"The engine has lost the bytes of {name}. Try again: it will be reloaded.")
        refuse_twin(resident.revision, revision)
        self.hold(name)
        self.popularity.add(name)
        self._on_hit()
        return name

    def hold(self, name: str) -> None:
        """Count one more user of an adapter in the tier."""
        resident = self.residents[name]
        resident.users += 1
        (self._idle_warm if resident.is_warm else self._idle_new).pop(name, None)

    def release(self, name: str, is_use: bool = True) -> bool:
        """Count one user less; without users the adapter may be evicted. A prewarm is no use (`is_use`).

        Return whether something is to leave: the adapter itself, whose bytes are lost, or any other.
        """
        resident, now = self.residents[name], self._clock()
        assert resident.users > 0
        resident.users -= 1
        if is_use:
            resident.hits = resident.hits * 0.5 ** ((now - resident.used_at) / HALF_LIFE_S) + 1
            resident.used_at = now
        if resident.users == 0:
            (self._idle_warm if resident.is_warm else self._idle_new)[name] = resident
        return resident.is_lost or self._is_over() or self._window_is_over()

    def lose(self, name: str) -> None:
        """Note that an adapter's bytes are lost, so that nobody else is to hold it."""
        self.residents[name].is_lost = True

    def evict(self, name: str) -> Resident:
        """Evict and return an adapter that is not in use, whatever its popularity."""
        resident = self.residents.pop(name)
        assert resident.users == 0
        self.bytes -= resident.bytes
        if resident.is_warm:
            del self._idle_warm[name]
        else:
            del self._idle_new[name]
            self._window_bytes -= resident.bytes
            self._window_adapters -= 1
        return resident

    def make_room(self, pinned: Callable[[], Collection[str]]) -> list[tuple[str, Resident]]:
        """Evict adapters until the tier is within its limits; return them. Pinned and used ones stay."""
        while self._window_is_over() and not self._is_over() and self._idle_new:
            self._warm(next(iter(self._idle_new)))
        gone: list[tuple[str, Resident]] = []
        if not self._is_over():
            return gone
        stay = pinned()
        while self._is_over():
            name = self._next_out(stay)
            if name is None:
                break
            gone.append((name, self.evict(name)))
        return gone

    def _is_over(self, share: float = 1.0) -> bool:
        return self.bytes > share * self.max_bytes or len(self.residents) > share * self.max_adapters

    def _window_is_over(self) -> bool:
        return (
            self._window_bytes > WINDOW * self.max_bytes or self._window_adapters > WINDOW * self.max_adapters
        )

    def _next_out(self, stay: Collection[str]) -> str | None:
        new = next((name for name in self._idle_new if name not in stay), None)
        warm = next((name for name in self._idle_warm if name not in stay), None)
        if new is not None and (warm is None or not self._window_is_over()):
            return new if warm is None else warm
        if new is None or warm is None:
            return warm if self._is_over(OVERSHOOT) or not self._window_is_over() else None
        if self._merit(new) <= self._merit(warm):
            return new
        self._warm(new)
        return warm

    def _merit(self, name: str) -> tuple[int, float]:
        return self.popularity.of(name), self.residents[name].used_at

    def _warm(self, name: str) -> None:
        resident = self._idle_new.pop(name)
        resident.is_warm = True
        self._window_bytes -= resident.bytes
        self._window_adapters -= 1
        self._idle_warm[name] = resident


def refuse_twin(held: Revision, asked: Revision) -> None:
    """Raise `Conflict` when two revisions share a served name: it holds 12 of a digest's 64 digits."""
    if held.digest != asked.digest:
        raise Conflict(
            f"{served_name(asked.policy, asked.digest)} is the name of two revisions, and the other one, "
            f"{held.digest}, is in the engine. Train one of them again, or let it expire."
        )
