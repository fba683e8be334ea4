"""Kills at chosen moments of a training run: planned by seed, carried out on real services, checked."""

import contextlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path

import httpx
import psutil

from engine.adapters.revision import read_revision
from engine.catalog.opening import whole_catalog
from engine.catalog.revision_rows import location
from engine.ledger.ledger import Ledger
from engine.services import lifecycle as services
from engine.settings.params import Params
from engine.store.segments import Store
from engine.training.service import state
from engine.training.service.state import Journal
from tests.helpers.live import server_and_core
from tests.helpers.repository import ROOT

# In the order in which a step goes through them.
PHASES = ("open", "export", "rollouts", "reward", "forward_backward", "optim_step", "revision")
# Where a kill of each process can break something off; the engine works in one phase alone.
HIT = {
    "engine": ("rollouts", "rollouts", "rollouts", "export", "forward_backward"),
    "trainer": ("open", "export", "rollouts", "forward_backward", "optim_step", "optim_step", "revision"),
    "flow": PHASES,
}
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Kill:
    """Kill a process in a phase of a step, or of a later one, when `share` of its usual time has passed."""

    victim: str
    step: int
    phase: str
    share: float

    @property
    def moment(self) -> tuple[int, int, float]:
        return self.step, PHASES.index(self.phase), self.share


@dataclass(frozen=True)
class Note:
    """What a flow process said of itself: when (monotonic seconds), its session's step, its phase."""

    at: float
    step: int
    phase: str
    digest: str = ""

    @staticmethod
    def read(path: Path) -> list["Note"]:
        lines = [line.split() for line in path.read_text().splitlines()] if path.is_file() else []
        return [Note(float(at), int(step), *said) for at, step, *said in lines]


def plans(seed: int, victims: Sequence[str], steps: int, runs: int) -> list[list[Kill]]:
    """Draw the moments of a kill of each victim in each run, in the order in which the run meets them.

    Steps and shares of a phase's time are uniform; all kills of a process together go evenly over its phases.
    """
    draw = random.Random(seed)
    return [
        sorted(kills, key=lambda kill: kill.moment)
        for kills in zip(*(moments(draw, victim, steps, runs) for victim in victims), strict=True)
    ]


def moments(draw: random.Random, victim: str, steps: int, count: int) -> list[Kill]:
    phases = [*islice(cycle(draw.sample(HIT[victim], len(HIT[victim]))), count)]
    draw.shuffle(phases)
    only = {"open": 0, "revision": steps - 1}
    return [
        Kill(victim, only.get(phase, draw.randrange(phase == "export", steps)), phase, draw.random())
        for phase in phases
    ]


def durations(notes: Sequence[Note]) -> dict[str, float]:
    """Return each phase's usual seconds in an uninterrupted run."""
    found: dict[str, list[float]] = {}
    for note, after in pairwise(notes):
        found.setdefault(note.phase, []).append(after.at - note.at)
    return {phase: statistics.median(values) for phase, values in found.items()}


class Flow:
    """A flow process that trains one policy, and that is started again when it was killed."""

    def __init__(self, file: Path, policy: str):
        self.file, self.policy = file, policy
        self.notes = file.parent / f"{policy}.notes"
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            str(ROOT / "tests/helpers/watched_flow.py"),
            self.file,
            self.policy,
            self.notes,
        ]
        with (self.file.parent / f"{self.policy}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def await_phase(self, kill: Kill) -> bool:
        """Wait until the flow is in the phase, or has just been; False when it has ended instead."""
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE_S:
            ended = self.process.poll() is not None
            notes = Note.read(self.notes)
            recent = [note for note in notes if note.at > began] or notes[-1:]
            if any(note.phase == kill.phase and note.step >= kill.step for note in recent):
                return True
            if ended:
                return False
            time.sleep(0.002)
        raise AssertionError(f"The flow did not reach {kill}; see {self.file.parent}.")

    def finish(self) -> str:
        """Wait for the end; return the revision's digest."""
        try:
            assert self.process.wait(PATIENCE_S) == 0, self.notes.with_suffix(".log").read_text()[-3000:]
        finally:
            self.process.kill()
        return Note.read(self.notes)[-1].digest


def reaper_of(params: Params, name: str) -> int | None:
    return next(one.pid for one in services.status(params) if one.name == name)


def processes_of(params: Params, name: str) -> list[psutil.Process]:
    """Return a service's processes that do work: the server first, then the engine's core."""
    reaper = reaper_of(params, name)
    # psutil takes None for the caller itself.
    assert reaper
    return [*server_and_core(reaper)] if name == "engine" else psutil.Process(reaper).children()[:1]


def await_return(params: Params, name: str, gone: int | None) -> None:
    """Wait until the supervisor has put a new process in the place of the reaper `gone`, and it answers.

    Killed while it starts, a service would be given up after three times.
    """
    health = f"{params.url(name)}/health"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if reaper_of(params, name) not in (None, gone) and httpx.get(health, timeout=5).is_success:
                return
        time.sleep(0.1)
    raise AssertionError(f"The {name} service did not come back; see {params.paths.logs}.")


def interrupted(
    params: Params, file: Path, policy: str, kills: Sequence[Kill], usual: Mapping[str, float]
) -> tuple[str, list[str]]:
    """Train a policy and carry out the kills; return its digest and what was hit, one line a kill.

    A service is killed again only when it has come back.
    """
    flow, hits = Flow(file, policy), list[str]()
    gone: dict[str, int | None] = {}
    try:
        for kill in kills:
            # Looked up before the wait: the moment itself may last milliseconds.
            victim: subprocess.Popen[bytes] | psutil.Process = flow.process
            if kill.victim != "flow":
                await_return(params, kill.victim, gone.get(kill.victim))
                gone[kill.victim] = reaper_of(params, kill.victim)
                victim = random.Random(kill.share).choice(processes_of(params, kill.victim))
            if not flow.await_phase(kill):
                break
            time.sleep(kill.share * usual.get(kill.phase, 0.0))
            victim.kill()
            hits.append(f"{kill.victim:8} {traces(params, flow)}")
            if kill.victim == "flow":
                victim.wait(10)
                flow.start()
        return flow.finish(), hits
    finally:
        flow.process.kill()


def traces(params: Params, flow: Flow) -> str:
    """Say what was going on: the flow's last note, and a file that is half written."""
    seen = Note.read(flow.notes)[-1]
    sessions, exported = params.paths.sessions, params.paths.revisions / flow.policy
    drafts = [*sessions.glob(f"{flow.policy}-*/*.draft"), *exported.glob(".draft*")]
    return f"at step {seen.step} in {seen.phase}" + (f", {drafts[0].name} half written" if drafts else "")


def assert_whole(params: Params, policy: str, steps: int, want: dict[int, str]) -> None:
    """Every step once in session and ledger, and each one's revision whole and the uninterrupted run's."""
    (file,) = params.paths.sessions.glob(f"{policy}-*/current.state")
    header = state.read_header(file)
    every = list(range(1, steps + 1))
    assert header["step"] == steps
    journal = Journal(file.parent)
    journal.read(header["journal"])
    assert [row["step"] for row in journal.rows(header["last"])] == every
    assert recorded(params, policy) == every
    assert {path.name for path in file.parent.iterdir()} == {file.name, journal.path.name}
    assert revisions(params, policy) == want
    (directory,) = (params.paths.revisions / policy).iterdir()
    assert read_revision(directory)[1].digest == want[steps]


def recorded(params: Params, policy: str) -> list[int]:
    """Return the ledger's steps of a policy, after everything in the spool has been taken in."""
    ledger = Ledger(params.paths.root / "chaos.duckdb")
    ledger.ingest(params.paths.spool)
    assert not (params.paths.spool / "rejected").exists()
    query = "SELECT step FROM train_steps WHERE policy = ? ORDER BY step"
    found = ledger.connection.execute(query, [policy]).fetchall()
    ledger.close()
    return [step for (step,) in found]


def revisions(params: Params, policy: str) -> dict[int, str]:
    """Return the digest after each step, of every revision that the catalog shows; their bytes are read."""
    catalog, store = whole_catalog(params.paths.catalog_url), Store(params.paths.store)
    rows = catalog.revisions.page(policy)
    catalog.close()
    for row in rows:
        store.read(location(row))
    found = {row.step: row.digest for row in rows}
    assert len(found) == len(rows)
    return found
