"""Which adapters are on this machine: the state of each, and the gateway's half of the host tier.

`HostTierIndex` has the names and sizes of the host tier's adapters and chooses which are evicted;
`HostTierBytes` in the engine's worker (serving/worker/host_tier_bytes.py) has their bytes. Both do what
residency.py tells them, and it tells each change as an event of `TRANSITIONS`. A request for an adapter that
is in the host tier changes nothing, and is not told.

Eviction is a segmented LRU (Karedy and others, 1994). An adapter that is used a second time becomes warm,
also when it was evicted between its uses, not long ago (as in 2Q, Johnson and Shasha, 1994). Warm adapters
take at most 80% of the tier; beyond that the least recently used one is an ordinary adapter again. Ordinary
adapters leave first, so that a scan of cold names passes by the warm ones. Adapters in use are never evicted.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from engine.catalog.catalog import Revision
from engine.catalog.records import served_name
from engine.errors import Conflict, ServiceError

# The share of the tier that warm adapters may take.
WARM_SHARE = 0.8
# Adapters in use may fill the tier to twice its size before idle warm ones are evicted for them.
OVERSHOOT = 2.0


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

    # A request or a load ahead asks for it; its load starts; the last waiter of its load has left.
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


@dataclass(eq=False)
class Resident:
    """An adapter in the host tier; `users` counts requests in flight, times are monotonic seconds.

    `is_used`: a request has used it, in this stay or shortly before its last eviction; `is_warm`: and then
    another one has.
    """

    revision: Revision
    users: int = 0
    used_at: float = 0.0
    loaded_at: float = 0.0
    is_used: bool = False
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

    def __init__(self, max_bytes: int, max_adapters: int, on_hit: Callable[[], object] = lambda: None):
        """`on_hit` is called for each adapter that is asked for and here."""
        self._on_hit = on_hit
        self.residents: dict[str, Resident] = {}
        self.bytes = 0
        self.max_bytes, self.max_adapters = max_bytes, max_adapters
        self._warm_bytes = self._warm_adapters = 0
        self._idle_bytes = 0
        # Names that were evicted, the latest last: who returns from here is used a second time.
        self._evicted: OrderedDict[str, None] = OrderedDict()
        # Adapters not in use, least recently used first.
        self._idle: OrderedDict[str, Resident] = OrderedDict()
        self._idle_warm: OrderedDict[str, Resident] = OrderedDict()

    def ready(self, name: str, revision: Revision) -> None:
        """Add an adapter, not in use yet."""
        now = time.monotonic()
        resident = self.residents[name] = Resident(revision, used_at=now, loaded_at=now)
        resident.is_used = name in self._evicted
        self._evicted.pop(name, None)
        self._idle[name] = resident
        self.bytes += resident.bytes
        self._idle_bytes += resident.bytes

    def ask(self, revision: Revision) -> str | None:
        """Hold a revision for a request and return its served name; None when it is not in the tier.

        Raises as `find`.
        """
        name = self.find(revision)
        if name is not None:
            self.hold(name)
            self._on_hit()
        return name

    def find(self, revision: Revision) -> str | None:
        """Return a revision's served name; None when it is not in the tier.

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
        return name

    def hold(self, name: str) -> None:
        """Count one more user of an adapter in the tier."""
        resident = self.residents[name]
        resident.users += 1
        if resident.users == 1:
            del (self._idle_warm if resident.is_warm else self._idle)[name]
            self._idle_bytes -= resident.bytes

    def release(self, name: str, is_use: bool = True) -> bool:
        """Count one user less; without users the adapter may be evicted. A load ahead is no use (`is_use`).

        Return whether something is to leave: the adapter itself, whose bytes are lost, or any other.
        """
        resident = self.residents[name]
        assert resident.users > 0
        resident.users -= 1
        if is_use:
            if resident.is_used and not resident.is_warm:
                resident.is_warm = True
                self._count_warm(resident, 1)
            resident.is_used, resident.used_at = True, time.monotonic()
        if resident.users == 0:
            (self._idle_warm if resident.is_warm else self._idle)[name] = resident
            self._idle_bytes += resident.bytes
        self._cool_down()
        return resident.is_lost or self._is_over()

    def lose(self, name: str) -> None:
        """Note that an adapter's bytes are lost, so that nobody else is to hold it."""
        self.residents[name].is_lost = True

    def evict(self, name: str) -> Resident:
        """Evict and return an adapter that is not in use, whatever its popularity."""
        resident = self.residents.pop(name)
        assert resident.users == 0
        self.bytes -= resident.bytes
        self._idle_bytes -= resident.bytes
        if resident.is_warm:
            del self._idle_warm[name]
            self._count_warm(resident, -1)
        else:
            del self._idle[name]
        return resident

    def make_room(self, pinned: Callable[[], Collection[str]]) -> list[tuple[str, Resident]]:
        """Evict adapters until the tier is within its limits; return them. Pinned and used ones stay."""
        gone: list[tuple[str, Resident]] = []
        if not self._is_over():
            return gone
        stay = pinned()
        while self._is_over() and (name := self._next_out(stay)) is not None:
            gone.append((name, self.evict(name)))
            self._evicted[name] = None
            if len(self._evicted) > self.max_adapters:
                self._evicted.popitem(last=False)
        return gone

    def _is_over(self, share: float = 1.0) -> bool:
        return self.bytes > share * self.max_bytes or len(self.residents) > share * self.max_adapters

    def _next_out(self, stay: Collection[str]) -> str | None:
        name = next((name for name in self._idle if name not in stay), None)
        idle = len(self._idle) + len(self._idle_warm)
        if name is None and (
            self._is_over(OVERSHOOT) or self._idle_bytes > self.max_bytes or idle > self.max_adapters
        ):
            name = next((name for name in self._idle_warm if name not in stay), None)
        return name

    def _count_warm(self, resident: Resident, change: int) -> None:
        self._warm_bytes += change * resident.bytes
        self._warm_adapters += change

    def _cool_down(self) -> None:
        """Make the least recently used warm adapters ordinary while the warm take more than their share."""
        while self._idle_warm and (
            self._warm_bytes > WARM_SHARE * self.max_bytes
            or self._warm_adapters > WARM_SHARE * self.max_adapters
        ):
            name, resident = self._idle_warm.popitem(last=False)
            resident.is_warm = False
            self._count_warm(resident, -1)
            self._idle[name] = resident


def refuse_twin(held: Revision, asked: Revision) -> None:
    """Raise `Conflict` when two revisions share a served name: it holds 12 of a digest's 64 digits."""
    if held.digest != asked.digest:
        raise Conflict(
            f"{served_name(asked.policy, asked.digest)} is the name of two revisions, and the other one, "
            f"{held.digest}, is in the engine. Train one of them again, or let it expire."
        )
