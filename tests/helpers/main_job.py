"""The main job, shortened, in a process of its own, and Ctrl-C in the middle of it."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.base.resident import ensure_base
from engine.catalog.opening import whole_catalog
from engine.errors import GraftworkError
from engine.settings.params import Paths, load_params
from engine.training.service.client import TrainerClient
from tests.helpers.live import eventually, left_behind
from tests.helpers.operated import write_settings
from tests.helpers.repository import ROOT

# Fewer steps than the main job: enough to see the reward rise and users notice.
STEPS = 16
LONGEST_S = 1000
# The random moments at which the job is interrupted, one in each tenth of it.
MOMENTS = 10
SEED = 11
# What the job says when it begins its last part.
LAST_PART = "Releasing it to users"


def short_policies() -> dict[str, dict[str, Any]]:
    """Return the settings of the main job's policies, with fewer steps."""
    policies = yaml.safe_load((ROOT / "params.yaml").read_text())["policies"]
    return {name: policy | {"steps": STEPS} for name, policy in policies.items()}


def write_job(state: Path) -> Path:
    """Write the settings of a job with a state directory of its own; the base is this checkout's."""
    return write_settings(state, policies=short_policies(), suites_dir=str(ROOT / "eval_suites"))


@contextlib.contextmanager
def graftwork(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command beside this test; killed at the end of the block if it still runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments], cwd=ROOT, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_job(params: Path) -> float:
    """Run the job to its end; return its seconds."""
    log, began = params.parent / "run.log", time.monotonic()
    with graftwork("run", "--params", str(params), log=log) as process:
        assert process.wait(timeout=LONGEST_S) == 0, log.read_text()[-6000:]
    return time.monotonic() - began


def usual_seconds(state: Path) -> float:
    """Return the seconds of a whole job, from its start, with the base built before."""
    params = write_job(state)
    settings = load_params(params)
    ensure_base(settings.base, settings.paths)
    return run_job(params)


@dataclass(frozen=True)
class Interrupted:
    """How a job ended after Ctrl-C: exit code as a shell says it, seconds, processes left behind."""

    code: int
    seconds: float
    left: list[str]


def interrupt(
    params: Path, now: Callable[[], object], log: Path, number: signal.Signals = signal.SIGINT
) -> Interrupted:
    """Start the job, press Ctrl-C or send another signal once `now` holds, and wait for its end."""
    with graftwork("run", "--params", str(params), log=log) as process:
        met = eventually(lambda: process.poll() is not None or now(), LONGEST_S)
        assert met, log.read_text()[-6000:]
        assert process.poll() is None, log.read_text()[-6000:]
        began = time.monotonic()
        os.kill(process.pid, number)
        code = process.wait(timeout=120)
    seconds = time.monotonic() - began
    # What a killed job leaves is ended by its reapers; else the kernel needs a moment.
    eventually(lambda: not left_behind(params.parent))
    return Interrupted(code if code >= 0 else 128 - code, seconds, left_behind(params.parent))


def check_moment(state: Path, number: int, usual_s: float) -> str:
    """Interrupt a job at a random moment of its tenth `number`, then run it whole; return what to print."""
    # A run that is quicker than usual may be in its last part before.
    share = 0.85 * (number + random.Random(SEED + number).random()) / MOMENTS
    log, params, due = state / "interrupted.log", write_job(state), time.monotonic() + share * usual_s
    ended = interrupt(params, lambda: time.monotonic() >= due or LAST_PART in log.read_text(), log)
    assert ended.code == 130, log.read_text()[-6000:]
    assert ended.left == []
    run_job(params)
    summary = json.loads((state / "runs" / "latest.json").read_text())
    assert [policy["verdict"] for policy in summary["policies"]] == ["promote", "promote"]
    assert summary["bad_revision"]["verdict"] == "rollback"
    return f"after {share * usual_s:.1f} of {usual_s:.1f} s: ended within {ended.seconds:.1f} s"


def is_training(params: Path) -> bool:
    """Return whether a policy has done three steps and has more to do."""
    with suppress(GraftworkError), TrainerClient.of(load_params(params), patience_s=0) as trainer:
        return any(3 <= step < STEPS for step in trainer.health()["sessions"].values())
    return False


def is_in_a_canary(params: Path) -> bool:
    """Return whether users see a canary."""
    # At the job's start there is no catalog, or an empty one.
    with suppress(GraftworkError), closing(whole_catalog(Paths(params.parent).catalog_url)) as catalog:
        return any(route.canary for route in catalog.routes.page())
    return False
