"""Notifications of alarms: of one that lasts when it begins and when it ends, like a verdict.

A sender that cannot send is an alarm, too; the notifications wait in the catalog.
"""

import time
from collections.abc import Callable

from engine.controller.alarms import alarms
from engine.controller.release_loop import Controller
from engine.notifications.notices import notify
from engine.threads import PeriodicThread

LOOK_S = 5.0
# A fault that is over within this time is nobody's business.
LASTS_S = 15.0


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
        now, faults = self._clock(), alarms(self._controller)
        link = f"{self._controller.params.url('controller')}/"
        catalog = self._controller.catalog
        for part, fault in faults.items():
            since = self._since.setdefault(part, now)
            if part not in self._told and now - since >= LASTS_S:
                notify(catalog, "alarm.began", f"{part}: {fault}", link, f"{part} {since}")
                self._told.add(part)
        for part in self._since.keys() - faults.keys():
            since = self._since[part]
            if part in self._told:
                over = f"{part}: over after {now - since:.0f} s."
                notify(catalog, "alarm.ended", over, link, f"{part} {since}")
            # Only now: a notification that could not be stored is tried again.
            self._told.discard(part)
            del self._since[part]
