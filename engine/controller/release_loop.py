"""The controller's loop: the only writer of routes, releases and ledger while it runs.

Each turn renews the lease, ingests the spool and advances every running release: read its evidence, decide,
apply. The chores that it does besides are handed in. At last it publishes a new copy of the ledger, a large
one beside the loop (`ledger_files.py`). The HTTP API is in `api.py`.

One controller is active: the ledger's lock ensures it on one machine, the lease in the catalog between
machines.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import duckdb
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.catalog.access import acting
from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import Evidence, advance
from engine.controller.apply import Applier, OnChange
from engine.controller.evidence import EvidenceReader
from engine.controller.ledger_files import LedgerFiles
from engine.controller.release_decisions import ReleaseDecisions
from engine.controller.route_changes import LEASE, LEASE_S, take_lease
from engine.errors import Conflict, ServiceError
from engine.ledger.ledger import Ledger, Spool
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from engine.threads import LoopRequests
from engine.work_metrics import WorkMetrics

# Other threads wait this long for the loop: a few turns, also slow ones.
TURNS_S = 60.0
STALLED_S = 5.0
# How often releases advance, and how often a changed ledger is copied for its readers. No user meets a
# shadow, and reading its evidence takes 20 ms of a core.
TICK_S, SHADOW_S, SNAPSHOT_S = 0.25, 1.0, 2.0
T = TypeVar("T")
log = logging.getLogger("graftwork.controller")


class ControllerMetrics:
    """The controller's Prometheus metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        WorkMetrics(self.registry)
        self.events = Counter("graftwork_events", "Events taken into the ledger.", registry=self.registry)
        self.faults = Counter("graftwork_faults", "Failed parts of a tick.", ["part"], registry=self.registry)
        self.verdicts = Counter(
            "graftwork_verdicts", "Releases that ended.", ["verdict"], registry=self.registry
        )
        self.releases = Gauge("graftwork_open_releases", "Releases that run.", registry=self.registry)
        self.tick = Histogram("graftwork_tick_seconds", "One turn of the loop.", registry=self.registry)
        self.decision = Histogram(
            "graftwork_verdict_seconds", "From verdict to its end in the catalog.", registry=self.registry
        )


@dataclass(frozen=True)
class Chore:
    """What the loop does besides its releases: `do`, on the loop's thread, every `every_s` seconds."""

    name: str
    every_s: float
    do: Callable[["Controller"], object]


class Controller:
    """The loop and its state. `tick` is one turn; `run` repeats it until `stop`."""

    def __init__(
        self,
        params: Params,
        holder: str,
        chores: Sequence[Chore] = (),
        on_change: Sequence[OnChange] = (),
        reader: Callable[[Catalog], EvidenceReader] = EvidenceReader,
        catalog: Callable[[str], Catalog] = Catalog,
        evaluate: Callable[[bool], object] = lambda _: None,
    ):
        """Open catalog, ledger and spool; raises `Conflict` while another process holds ledger or lease.

        `on_change` is told of each release that has changed, `reader` makes what reads the evidence,
        `catalog` opens the catalog at a URL, `evaluate` is told when the first release with evaluators runs
        and when none does any more.
        """
        self.params = params
        self.metrics = ControllerMetrics()
        self.catalog = catalog(params.paths.catalog_url)
        self.ledger: Ledger | None = Ledger(params.paths.ledger)
        self.spool = Spool(params.paths.spool, "controller")
        self.applier = Applier(self.catalog, self.spool, on_change)
        self.latest: dict[str, Evidence] = {}
        self.decisions = ReleaseDecisions(self.catalog, self.applier, params.release_of, self.latest)
        self.faults: dict[str, str] = {}
        # Of each policy the champion that has lost against its predecessor, and the figures.
        self.lost: dict[str, tuple[str, str]] = {}
        self.last_tick = time.monotonic()
        self.requests = LoopRequests()
        self.files = LedgerFiles(params.paths, self.on_ledger, self.tell)
        self.reader = reader(self.catalog)
        self.chores = chores
        self._evaluate, self._is_evaluated = evaluate, False
        self._holder = holder
        self._fence = take_lease(self.catalog, holder, LEASE_S)
        self._stopped = threading.Event()
        # When each part runs next (monotonic); what is not in it runs in the next turn.
        self.due: dict[str, float] = {}
        self._caught_up = False
        # Epoch seconds of the start, and of the newest ingest that took everything.
        self.started_at, self.ingested_at = time.time(), 0.0
        # Releases that were there before the last whole ingest began, and those of the last turn.
        self._ready: set[str] = set()
        self._running: set[str] = set()

    def run(self) -> None:
        """Repeat `tick` until `stop`; raises `Conflict` when another controller has taken the lease."""
        while not self._stopped.is_set():
            started = time.monotonic()
            with acting("controller"):
                self.tick()
            self._stopped.wait(max(0.0, TICK_S - (time.monotonic() - started)))

    def stop(self) -> None:
        """Make `run` return after its current turn."""
        self._stopped.set()

    def close(self) -> None:
        """Ingest and publish what is spooled, then release lease, ledger and catalog."""
        self.due.clear()
        self.spool.close()
        self._part("ingest", self._ingest)
        if self.ledger:
            self._part("snapshot", partial(self.ledger.snapshot, self.params.paths.ledger_snapshot))
        self.catalog.leases.release(LEASE, self._holder)
        if self.ledger:
            self.ledger.close()
        self.catalog.close()

    def tick(self) -> None:
        """Run every part that is due. A part that fails raises an alarm and does not stop the others."""
        with self.metrics.tick.time():
            # Not on every turn: each commit makes the gateways read the catalog.
            self._part("lease", self._renew_lease, LEASE_S / 3)
            self._part("ingest", self._ingest)
            self._part("requests", self.requests.run_waiting)
            self._part("releases", self._look_at_releases)
            for chore in self.chores:
                self._part(chore.name, partial(chore.do, self), chore.every_s)
            self._part("snapshot", self._snapshot, SNAPSHOT_S)
        self.last_tick = time.monotonic()

    def tell(self, part: str, fault: str | None) -> None:
        """Raise the alarm of a part that runs beside the loop, or with None end it."""
        if fault is None:
            self.faults.pop(part, None)
        else:
            if self.faults.get(part) != fault:
                log.warning("Part %r failed; it is retried. %s", part, fault)
            self.faults[part] = fault

    def is_stalled(self) -> bool:
        """Return whether the last turn ended too long ago."""
        return time.monotonic() - self.last_tick > STALLED_S

    def _part(self, name: str, work: Callable[[], object], every_s: float = 0.0) -> None:
        if time.monotonic() < self.due.get(name, 0.0):
            return
        if every_s:
            self.due[name] = time.monotonic() + every_s
        try:
            work()
            self.faults.pop(name, None)
        except _LeaseLost:
            raise
        except Exception as error:
            # Any failure must not block the parts after it, such as rollbacks.
            self.metrics.faults.labels(name).inc()
            if isinstance(error, OSError):
                # The disk of the spool may be full: a decision that has been made was not said then.
                self._caught_up = False
            if self.faults.get(name) != str(error):
                log.exception("Part %r of the loop failed; it is retried.", name)
            self.faults[name] = str(error)

    def _renew_lease(self) -> None:
        if not self.catalog.leases.renew(LEASE, self._holder, self._fence, LEASE_S):
            raise _LeaseLost("Another controller has taken the lease of this catalog. This one stops.")

    def _ingest(self) -> None:
        started = time.time()
        created = {release.id for release in self.catalog.releases.all(open_only=True)}
        try:
            if self.ledger is None:
                self.ledger = Ledger(self.params.paths.ledger)
            self.metrics.events.inc(self.ledger.ingest(self.params.paths.spool, self.catalog.purges.gone))
            self.ingested_at, self._ready = started, created
            if not self._caught_up:
                self.applier.say_missing(self.ledger)
                self._caught_up = True
        except duckdb.Error:
            # After a failed write DuckDB may refuse all work until it is reopened.
            if self.ledger:
                self.ledger.close()
            self.ledger = None
            raise

    def _look_at_releases(self) -> None:
        releases = self.catalog.releases.all(open_only=True)
        self.metrics.releases.set(len(releases))
        running = {release.id for release in releases}
        self._forget_all_but(running)
        if running != self._running:
            self._part("evaluators", partial(self._tell_evaluation, releases))
        if releases and self.ledger is None:
            raise ServiceError("The ledger cannot be opened. Releases wait until it can; nothing is lost.")
        for release in releases:
            # Scores spooled just before a release's start may not be in the ledger yet.
            if release.id in self._ready:
                every_s = SHADOW_S if release.step == "shadow" else 0.0
                self._part(f"release {release.id}", partial(self._advance, release), every_s)

    def _tell_evaluation(self, releases: Sequence[Release]) -> None:
        is_evaluated = any(ReleaseConfig.stored(one.settings).asked_evaluators for one in releases)
        if is_evaluated != self._is_evaluated:
            self._evaluate(is_evaluated)
        self._running, self._is_evaluated = {release.id for release in releases}, is_evaluated

    def _advance(self, release: Release) -> None:
        """Read a release's evidence, decide, apply; again until it waits or ends."""
        assert self.ledger is not None
        with self.decisions.lock:
            release = self.catalog.releases.get(release.id)
            looked = None
            while release.state == "running":
                looked = time.monotonic()
                evidence = self.latest[release.id] = self.reader.read(release, self.ledger)
                action = advance(release, evidence)
                if action.kind == "wait":
                    return
                log.info("%s %s: %s. %s", release.policy, release.revision[:12], action.kind, action.reason)
                release = self.applier.apply(release, action, evidence)
            self.metrics.verdicts.labels(release.state).inc()
            if looked is not None:
                self.metrics.decision.observe(time.monotonic() - looked)

    def _forget_all_but(self, running: set[str]) -> None:
        for ended in set(self.latest) - running:
            self.latest.pop(ended, None)
            self.faults.pop(f"release {ended}", None)
            self.due.pop(f"release {ended}", None)
            self.reader.forget(ended)

    def on_ledger(self, work: Callable[[Ledger], T]) -> T:
        """Do short work on the loop's thread, on a ledger with everything that is spooled."""

        def on_loop() -> T:
            self._ingest()
            assert self.ledger is not None
            try:
                return work(self.ledger)
            except (duckdb.Error, OSError):
                # The next turn reopens the ledger, whichever file is in its place.
                with suppress(duckdb.Error, OSError):
                    self.ledger.close()
                self.ledger = None
                raise

        return self.requests.call(on_loop, TURNS_S)

    def _snapshot(self) -> None:
        if self.ledger:
            self.files.refresh(self.ledger)


class _LeaseLost(Conflict):
    """The only error that ends the loop."""
