"""The states of an adapter on this machine, and the events that lead from one to the next.

A revision of which this process knows nothing else is `stored`, so that only the others have an entry.
Knows neither engine nor queue: residency.py acts, and every change that it makes is an event here.
"""

from collections import Counter
from enum import StrEnum


class AdapterState(StrEnum):
    """Where an adapter is."""

    STORED = "stored"
    # A load of it waits for its turn, or runs.
    QUEUED = "queued"
    LOADING = "loading"
    # In the host tier: ready for requests; and in a slot of the engine besides.
    HOST = "host"
    SLOT = "slot"
    # In the host tier without its bytes: requests under way fail, and it leaves with the last of them.
    LOST = "lost"
    # The engine is to forget it; and somebody has asked for it meanwhile.
    LEAVING = "leaving"
    RETURNING = "returning"


class AdapterEvent(StrEnum):
    """What happens to an adapter; a transition is named by its event."""

    # A request or a prewarm wants it; the queue starts its load; nobody waits for the load any more.
    ASK = "ask"
    START = "start"
    CANCEL = "cancel"
    # How a load ends.
    READY = "ready"
    REFUSE = "refuse"
    # What the engine's worker reports: it is in a slot, in none, or its bytes are gone. Bytes in quarantine
    # are lost, too.
    FILL = "fill"
    CLEAR = "clear"
    LOSE = "lose"
    # Without users: it makes room or is gone from the catalog; its last request failed; the engine forgot it.
    EVICT = "evict"
    RELEASE = "release"
    FORGET = "forget"


S, E = AdapterState, AdapterEvent
# An event that is missing at a state cannot happen there. A worker reports at its own time, also of adapters
# that are leaving.
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
    """The state of every adapter by served name, and how often each transition to another state was made."""

    def __init__(self) -> None:
        self._states: dict[str, AdapterState] = {}
        # Names in a slot: the ones that a report may find missing.
        self.in_slots: set[str] = set()
        self.transitions: Counter[tuple[AdapterState, AdapterEvent, AdapterState]] = Counter()

    def state(self, name: str) -> AdapterState:
        return self._states.get(name, AdapterState.STORED)

    def counts(self) -> dict[AdapterState, int]:
        """Return how many adapters are in each state but `stored`."""
        return dict(Counter(self._states.values()))

    def move(self, name: str, event: AdapterEvent) -> AdapterState:
        """Return the state after an event. Raises `RuntimeError` where the event cannot happen."""
        before = self._states.get(name, AdapterState.STORED)
        after = TRANSITIONS[before].get(event)
        if after is None:
            raise RuntimeError(f"{name} is {before}, where '{event}' cannot happen: a fault of Graftwork.")
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
