"""The state machine of an adapter on this machine: states, events and transitions.

`stored` is the default, so only adapters in another state have an entry. residency.py acts and reports each
change as an event here. A request for an adapter that is in the host tier changes nothing, and is not told.
"""

from collections import Counter
from enum import StrEnum


class AdapterState(StrEnum):
    """Where an adapter is."""

    STORED = "stored"
    # Its load waits in the queue; its load runs.
    QUEUED = "queued"
    LOADING = "loading"
    # Ready for requests: in the host tier; in the host tier and a slot of the engine.
    HOST = "host"
    SLOT = "slot"
    # In the host tier, but its bytes are gone: its requests fail, and it is removed after the last one.
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
    """The state of each adapter by served name, and a count of each transition to another state."""

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
