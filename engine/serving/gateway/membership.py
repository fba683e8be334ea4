"""This engine's row among the catalog's engines: heartbeats, what it has loaded, whether it takes users."""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from engine.catalog.catalog import Catalog, Replica
from engine.catalog.replicas import Loads
from engine.serving.gateway.routing import Router
from engine.threads import PeriodicThread

BEAT_S = 2.0
# How long an engine that was never ready waits for the revisions under release.
LOADING_S = 120.0
log = logging.getLogger("graftwork.membership")


class Membership(PeriodicThread):
    """Joins at its first turn, then beats every `BEAT_S` seconds and whenever the loads have changed."""

    def __init__(
        self,
        catalog: Catalog,
        id: str,
        url: str,
        base: str,
        version: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__("membership", BEAT_S, self.beat)
        self._clock, self._began = clock, clock()
        self._catalog = catalog
        self.replica = Replica(id, url, base, version, uuid.uuid4().hex, 0, 0.0, draining=False)
        # Whether another engine that started later has this one's id.
        self.is_replaced = False
        self._loads: Loads = {}
        self._has_joined = self._was_ready = False
        self._said = ""

    def tell(self, loads: Loads) -> None:
        """Take what is loaded of the revisions under release."""
        if loads != self._loads:
            self._loads = loads
            self.wake()

    def drain(self) -> None:
        """Take no new users from now on: `why_not_ready` says so, and the controller waits for it no more."""
        self.replica = replace(self.replica, draining=True)
        self.wake()

    def beat(self) -> None:
        """Join, or record that this engine lives."""
        replicas = self._catalog.replicas
        # A catalog that was restored from a backup may not know it.
        if not self._has_joined or replicas.find(self.replica.id) is None:
            replicas.join(self.replica)
            self._has_joined = True
        self.is_replaced = not replicas.beat(self.replica, self._loads)

    def leave(self) -> None:
        """Stop beating and remove the row."""
        self.stop()
        self._catalog.replicas.leave(self.replica)

    def why_not_ready(self, router: Router, missing: Callable[[], list[str]]) -> str | None:
        """Return a word for why users should be sent to another engine, or None.

        What befalls every engine, such as a silent catalog, is no reason: whoever was ready goes on serving
        what is resident to keys that are known, and with all engines out nobody would be served.

        Anybody may ask. The whole sentence, which names revisions and engines, goes to the log, once.
        """
        word, said = self._why_not_ready(router, missing) or (None, "")
        if said and said != self._said:
            log.warning("Not ready: %s", said)
        self._said = said
        return word

    def _why_not_ready(self, router: Router, missing: Callable[[], list[str]]) -> tuple[str, str] | None:
        if self.replica.draining:
            return "draining", "the engine is draining."
        if self.is_replaced:
            return (
                "replaced",
                f"another engine has the id {self.replica.id}. Give each its own host name or port.",
            )
        if self._was_ready:
            return None
        if not self._has_joined or router.is_stale():
            return "catalog", "the engine cannot read the catalog."
        # Not for ever: what no engine can load must not keep users from this one.
        is_late = self._clock() - self._began > LOADING_S
        if not is_late and (waiting := missing()):
            return "loading", f"revisions under release are not loaded: {', '.join(waiting[:5])}."
        self._was_ready = True
        return None
