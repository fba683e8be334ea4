"""Alarms: what is wrong with a controller now, and the notifications of it.

An alarm that lasts is a notification when it begins and when it ends, like a verdict. A sender that cannot
send is an alarm, too: `/status`, `/metrics` and the page show it, and the notifications wait in the catalog.
"""

import shutil
import time
from collections.abc import Callable

from engine.controller.loop import Controller
from engine.controller.notifications import alarmed
from engine.ledger.spool import REJECTED
from engine.threads import WORKS, PeriodicThread

LOOK_S = 5.0
# A fault that is over within this time is nobody's business.
LASTS_S = 15.0
LEAST_FREE = 1 << 30


def alarms(controller: Controller) -> dict[str, str]:
    """Return what is wrong now, by part: of the loop, of the work beside it, of spool and disk."""
    found = dict(controller.faults)
    # Some turns are a minute apart: one that failed is no alarm yet.
    failed = {name: work.error for name, work in list(WORKS.items()) if work.failed > 1}
    found |= {name: f"{type(error).__name__}: {error}" for name, error in failed.items()}
    if controller.is_stalled():
        found["loop"] = f"The last turn ended {time.monotonic() - controller.last_tick:.0f} s ago."
    paths = controller.params.paths
    if rejected := len(list(paths.spool.glob(f"{REJECTED}/*"))):
        found["spool"] = (
            f"{rejected} spool files hold lines that no ledger table accepts. They are in spool/{REJECTED}."
        )
    if (free := shutil.disk_usage(paths.root).free) < LEAST_FREE:
        found["disk"] = f"{free / 2**30:.1f} GiB are free in {paths.root}. See `graftwork doctor`."
    return found


class AlarmWatch(PeriodicThread):
    """Notifies of alarms that last, and of their end."""

    def __init__(self, controller: Controller, clock: Callable[[], float] = time.time):
        super().__init__("alarms", LOOK_S, self.look)
        self._controller, self._clock = controller, clock
        # Since when each part has been at fault, and which of them people were told of.
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def look(self) -> None:
        """Compare what is wrong now with the last look."""
        now, found = self._clock(), alarms(self._controller)
        link = f"{self._controller.params.url('controller')}/"
        catalog = self._controller.catalog
        for part, fault in found.items():
            since = self._since.setdefault(part, now)
            if part not in self._told and now - since >= LASTS_S:
                alarmed(catalog, True, f"{part}: {fault}", link, f"{part} {since}")
                self._told.add(part)
        for part in self._since.keys() - found.keys():
            since = self._since[part]
            if part in self._told:
                alarmed(catalog, False, f"{part}: over after {now - since:.0f} s.", link, f"{part} {since}")
            # Only now: a notification that could not be stored is tried again.
            self._told.discard(part)
            del self._since[part]
