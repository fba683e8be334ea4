"""kill -9 of register, import, compact, gc, repack and publish at random moments, several at once.

Afterwards every revision that the catalog shows is whole by its tensors, none that was reported as
committed is lost, and what no row names is gone after one gc. Meanwhile an engine's own parts read the store:
they serve no bytes but those of committed rows, and these whole.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

import pytest

from engine.publishing.maintenance import gc, pages, verify
from engine.settings.params import Params
from tests.helpers.engine_reader import reading
from tests.helpers.repository import ROOT
from tests.helpers.store_children import IMPORTED, OPERATIONS, POLICIES, SEEDS
from tests.helpers.stored import Stored, opened, prepare

KILLED = ("register", "import", "compact", "gc", "repack", "publish")
TOGETHER = 3
SEED = 6
# What one operation takes, so that a kill by the clock lands inside it or the next ones.
LONGEST_S = 0.6
PATIENCE_S = 30.0
# Calls of C functions in an operation: a thousand at least, some hundred thousand in a long one.
CALLS = (100, 200_000)


@dataclass(frozen=True)
class Kill:
    """How one child ends: by our signal after `after_s`, or by itself at a moment."""

    operation: str
    seed: int
    moment: str
    value: int
    after_s: float


def plan(seed: int, count: int) -> list[Kill]:
    """Draw kills, as many of each operation, by the clock, between two calls, and inside a write."""
    draw = random.Random(seed)
    operations = [KILLED[i % len(KILLED)] for i in range(count)]
    draw.shuffle(operations)
    kills = []
    for number, operation in enumerate(operations):
        moment = draw.choice(("never", "call", "call", "write"))
        value = (
            int(CALLS[0] * (CALLS[1] / CALLS[0]) ** draw.random())
            if moment == "call"
            else draw.randrange(1 << 16)
        )
        if moment == "write" and operation in ("gc", "repack"):
            moment = "never"
        after = draw.uniform(0.0, LONGEST_S) if moment == "never" else PATIENCE_S / 10
        kills.append(Kill(operation, seed * 1000 + number, moment, value, after))
    return kills


class Nursery:
    """The process whose children do the work."""

    def __init__(self, params: Params):
        self.params = params
        command = [
            sys.executable,
            str(ROOT / "tests/helpers/store_children.py"),
            params.state_dir,
            params.base.name,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def start(self, kill: Kill) -> int:
        requests: IO[str] | None = self.process.stdin
        assert requests
        requests.write(f"{kill.operation} {kill.seed} {kill.moment} {kill.value}\n")
        requests.flush()
        return int(self._line())

    def _line(self) -> str:
        answers = self.process.stdout
        assert answers
        return answers.readline().strip()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)


@contextmanager
def nursery(params: Params) -> Iterator[Nursery]:
    opened_one = Nursery(params)
    try:
        yield opened_one
    finally:
        opened_one.close()


def carry_out(nursery: Nursery, kills: list[Kill]) -> Counter[str]:
    """Run the children side by side, a few at once, until each has died; count how they did."""
    hits: Counter[str] = Counter()
    for first in range(0, len(kills), TOGETHER):
        group = kills[first : first + TOGETHER]
        began = time.monotonic()
        running = {nursery.start(kill): kill for kill in group}
        while running:
            for pid, kill in list(running.items()):
                if time.monotonic() - began > kill.after_s:
                    end(pid)
                if is_gone(pid):
                    hits[kill.operation] += 1
                    del running[pid]
            assert time.monotonic() - began < PATIENCE_S, running
            time.sleep(0.002)
        faults = [path.read_text() for path in (nursery.params.state_dir / "faults").iterdir()]
        assert not faults, faults[0]
    return hits


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def assert_whole(state: Stored) -> int:
    """Everything visible is whole, everything reported is visible, and only that is left after a gc."""
    rows = [row for page in pages(state.catalog) for row in page]
    for row in rows:
        assert state.is_whole(row), row
    visible = {(row.policy, row.digest) for row in rows}
    for file in (state.params.state_dir / "notes").iterdir():
        # A line that the kill cut short was reported to nobody.
        for line in file.read_text().split("\n")[:-1]:
            assert tuple(line.split()) in visible, line
    assert not verify(state.catalog, state.store).examples
    state.catalog.lifecycle.expire(time.time())
    gc(state.catalog, state.store)
    named = {row.segment for page in pages(state.catalog) for row in page}
    assert {segment for segment, _ in state.store.segments()} == named
    return len(rows)


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Params:
    from engine.base.toys.build import build
    from engine.base.toys.recipes import RECIPES

    state = tmp_path_factory.mktemp("store")
    base = state / "real"
    base.mkdir()
    recipe = replace(RECIPES["tiny-dense"], steps=0, problems=2048)
    build(recipe, seed=1, directory=base, progress=lambda step, steps, loss: None)
    found = Params(state_dir=state / "state", base={"name": str(base)})
    prepare(found, *POLICIES)
    for name in ("notes", "faults", "made"):
        (found.state_dir / name).mkdir()
    return found


def survives(params: Params, kills: list[Kill]) -> tuple[Counter[str], int, Counter[str]]:
    """Carry out kills while an engine reads, with a whole check in between now and then."""
    hits: Counter[str] = Counter()
    with nursery(params) as children, reading(params, POLICIES, 3 * SEEDS) as read:
        for first in range(0, len(kills), 10 * TOGETHER):
            hits += carry_out(children, kills[first : first + 10 * TOGETHER])
            with opened(params) as state:
                rows = assert_whole(state)
    assert read["served"] >= len(kills), read
    assert read["invisible"], read
    return hits, rows, read


def test_every_operation_can_be_killed() -> None:
    assert set(KILLED) < set(OPERATIONS)
    assert Counter(kill.operation for kill in plan(SEED, 12)) == dict.fromkeys(KILLED, 2)
    assert IMPORTED not in POLICIES


@pytest.mark.services
def test_some_kills(params: Params) -> None:
    hits, rows, _ = survives(params, plan(SEED, 12))
    assert hits.total() == 12
    assert rows


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_kills(params: Params, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    hits, rows, read = survives(params, plan(SEED + 1, 204))
    with capsys.disabled():
        print(f"\n  {dict(hits)} killed in {time.monotonic() - began:.0f} s, {rows} revisions, all whole")
        print(f"  An engine read meanwhile: {dict(read)}")
    assert min(hits.values()) >= 200 // len(KILLED)
