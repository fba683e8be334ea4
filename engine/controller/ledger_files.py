"""Copies and rewrites of the ledger's file beside the loop, which begins and ends each of them in a turn.

The readers' copy is a copy of the file, and a purge, an erasure and the retention copy the rows that stay
into a new file. Of a large ledger that takes minutes, in which the loop must judge canaries and roll back.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

from engine.errors import ServiceError
from engine.ledger.ledger import Ledger
from engine.ledger.purge import Removal, of_keys, of_policy, purge_rejected
from engine.settings.params import Paths
from engine.threads import background

# A smaller file is copied faster than a thread and two turns could do it.
SMALL = 32 << 20
# The second time a removal copies what came during the first, so that little is left for the loop.
ROUNDS = 2
# Of a large ledger the readers' copy is written in a tenth of the time at most.
PAUSES = 9
# How long a caller waits for a removal, which goes on without it; and a thread for another one's.
ANSWER_S = 300.0
OTHERS_S = 3600.0
Removed = dict[str, int]


class LedgerFiles:
    """Copies and rewrites one ledger.

    `on_ledger` does short work on the loop's thread, where everything that is spooled is in the ledger;
    `tell` raises the alarm of work that nobody waits for, or with None ends it.
    """

    def __init__(
        self,
        paths: Paths,
        on_ledger: Callable[[Callable[[Ledger], Any]], Any],
        tell: Callable[[str, str | None], None],
    ):
        self._paths, self._on_ledger, self._tell = paths, on_ledger, tell
        # Called when rows were removed: copies of the ledger elsewhere have them still.
        self.rewritten: Callable[[], None] = lambda: None
        # One copy at a time, and none during the switch to another file: the next would change the first.
        self._copying = threading.RLock()
        self._removing = threading.Lock()
        self._starting = threading.Lock()
        self._under_way: dict[tuple[str, Hashable], Future[Any]] = {}
        self._copy_due = 0.0

    def purge(self, policy: str) -> Removed:
        """Remove a policy's rows from ledger, snapshot and rejected lines; return how many, by table."""
        removal = of_policy(self._paths.ledger, policy)
        return self._answer("purge", policy, partial(self._remove, removal))

    def erase(self, keys: Sequence[str]) -> Removed:
        """Remove what these keys (ids or hashes) asked and rated, as `purge` does."""
        removal = of_keys(self._paths.ledger, keys)
        return self._answer("erase", tuple(sorted(keys)), partial(self._remove, removal))

    def start_removal(self, name: str, removal: Removal) -> None:
        """Remove rows while the loop goes on, unless the last one of this name is still under way."""
        self._start(name, None, partial(self._attempt, name, partial(self._remove, removal)))

    def refresh(self, ledger: Ledger) -> None:
        """Bring the readers' copy up to the ledger; the loop, which calls this, waits for no large one."""
        if monotonic() < self._copy_due or ledger.is_copied(self._paths.ledger_snapshot):
            return
        if not self._copying.acquire(blocking=False):
            return
        try:
            if ledger.size() <= SMALL:
                ledger.snapshot(self._paths.ledger_snapshot)
                return
        finally:
            self._copying.release()
        self._start("copy", None, partial(self._attempt, "ledger copy", self._copy))

    def _copy(self) -> None:
        started = monotonic()
        self.publish()
        self._copy_due = monotonic() + PAUSES * (monotonic() - started)

    def publish(self) -> None:
        """Write the readers' copy with all that is spooled; on any thread but the loop's."""
        with _held(self._copying):
            copy = self._on_ledger(lambda ledger: ledger.begin_copy(self._paths.ledger_snapshot))
            if copy is not None:
                copy.write()

    def is_removing(self) -> bool:
        """Return whether rows are being removed."""
        return self._removing.locked()

    def under_way(self) -> list[str]:
        """Return what is done now: `copy`, `purge`, `erase`, `retention`."""
        with self._starting:
            return sorted({name for (name, _), future in self._under_way.items() if not future.done()})

    def _remove(self, removal: Removal) -> Removed:
        with _held(self._removing):
            for _ in range(ROUNDS):
                self.publish()
                removal.copy(self._paths.ledger_snapshot)
            with _held(self._copying):
                removed: Removed = self._on_ledger(removal.switch)
                # Readers would see the rows, and their bytes, until the next copy.
                self.publish()
            if removal.field:
                removed["rejected"] = purge_rejected(self._paths.spool, removal)
            self.rewritten()
        return removed

    def _start(self, name: str, of: Hashable, work: Callable[[], Any]) -> Future[Any]:
        """Begin work in a thread of its own, or return the future of the same work that is under way."""
        with self._starting:
            self._under_way = {one: future for one, future in self._under_way.items() if not future.done()}
            if (name, of) not in self._under_way:
                self._under_way[name, of] = background(work)
            return self._under_way[name, of]

    def _answer(self, name: str, of: Hashable, work: Callable[[], Removed]) -> Removed:
        """Wait for a removal; who asks again while it is under way waits for the same one."""
        future = self._start(name, of, work)
        try:
            return dict(future.result(ANSWER_S))
        except TimeoutError:
            if future.done():
                raise
            raise ServiceError(
                f"The ledger is large: after {ANSWER_S:.0f} s this still goes on. Ask again to wait on."
            ) from None

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            # Whatever failed is tried again when it is due.
            self._tell(name, str(error))
        else:
            self._tell(name, None)


@contextmanager
def _held(lock: Any) -> Iterator[None]:
    if not lock.acquire(timeout=OTHERS_S):
        raise ServiceError(f"Others copied the ledger for {OTHERS_S:.0f} s. Ask again when they have ended.")
    try:
        yield
    finally:
        lock.release()
