"""What a run has brought: the adapted policies, the verdicts, the seconds of each stage, the summary.

Knows the form of `runs/latest.json` and how the time and traffic after a rollback are counted.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Params, served_name
from engine.errors import ServiceError
from engine.quality.release import VERDICTS

if TYPE_CHECKING:
    from tasks.score import Score

# From a tombstone on, every gateway must have stopped sending users within this time.
ROLLBACK_S = 1.0


@dataclass
class Stages:
    """Seconds of each stage, by name, in the order in which the stages began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        self.seconds[name] = 0.0
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - start, 2)


@dataclass(frozen=True)
class Adapted:
    """One policy's new revision: where it lies, its version in MLflow, the scores of base and revision."""

    policy: str
    digest: str
    directory: Path
    version: int
    base: "Score | None"
    revision: "Score | None"
    seconds: Mapping[str, float]

    def row(self) -> dict[str, Any]:
        """Return one line of a table for people."""
        return {
            "revision": served_name(self.policy, self.digest),
            "version": self.version,
            "base score": interval_text(self.base),
            "revision score": interval_text(self.revision),
            **{f"{name} (s)": seconds for name, seconds in self.seconds.items()},
        }


@dataclass(frozen=True)
class Rollback:
    """How a bad revision ended.

    `seconds_to_rollback` is from its first user to its tombstone; `requests_after` counts the users'
    requests that it answered although they came more than ROLLBACK_S after the tombstone.
    """

    verdict: str
    seconds_to_rollback: float | None
    requests_after: int


@dataclass(frozen=True)
class Outcome:
    """What the main job shows: its summary as in `runs/latest.json`, a table, and the HTML report."""

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    report: Path


def local_key(params: Params) -> str:
    """Return the installation's own admin key."""
    if not params.paths.local_key.is_file():
        raise ServiceError("There is no local key yet; start the services with `graftwork up`.")
    return params.paths.local_key.read_text().strip()


def interval_text(score: "Score | None") -> str:
    """Return `61.5% [54.6, 67.9]`, or a dash for no score."""
    if score is None:
        return "–"
    return f"{score.mean:.1%} [{100 * score.ci_low:.1f}, {100 * score.ci_high:.1f}]"


def policy_row(adapted: Adapted, ended: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's line of the main job's table: scores, verdict, seconds of each stage."""
    release_s = round(ended["updated_at"] - ended["created_at"], 1)
    return {
        "revision": served_name(adapted.policy, adapted.digest),
        "base score": interval_text(adapted.base),
        "revision score": interval_text(adapted.revision),
        "verdict": VERDICTS[ended["state"]],
        **{f"{name} (s)": f"{seconds:.1f}" for name, seconds in adapted.seconds.items()},
        "release (s)": f"{release_s:.1f}",
    }


def score_row(score: "Score") -> dict[str, Any]:
    """Return one line of a table for people."""
    model = served_name(score.policy, score.digest) if score.digest else "base"
    return {
        "model": model,
        "suite": f"{score.suite} version {score.suite_version}",
        "score": interval_text(score),
        "items": len(score.items),
        "seconds": round(score.seconds, 1),
    }


def release_row(release: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of a table for people."""
    return {
        "revision": served_name(release["policy"], release["revision"]),
        "verdict": VERDICTS[release["state"]],
        "reason": release["reason"],
        "skipped": ", ".join(release["skip_gates"]) or "nothing",
        "seconds": round(release["updated_at"] - release["created_at"], 1),
    }


def judge_rollback(params: Params, release: Mapping[str, Any], settle_s: float = 15) -> Rollback:
    """Read from catalog and ledger how a release of a bad revision ended.

    Waits until the ledger's snapshot holds what was observed up to now; `ServiceError` if it never does.
    """
    from engine.adapters.catalog import Catalog

    catalog = Catalog(params.paths.catalog_url)
    stone = catalog.tombstone(release["policy"], release["revision"])
    catalog.close()
    _await_snapshot(params, time.time(), settle_s)
    if stone is None:
        return Rollback(VERDICTS[release["state"]], None, 0)
    first, after = _canary_traffic(params, release, stone.at + ROLLBACK_S)
    return Rollback(VERDICTS[release["state"]], round(stone.at - first, 2), after)


def _canary_traffic(params: Params, release: Mapping[str, Any], since: float) -> tuple[float, int]:
    from engine.quality.ledger import open_snapshot

    query = """
        SELECT min("at"), count(*) FILTER ("at" > ?) FROM observations
        WHERE policy = ? AND digest = ? AND purpose = 'user' AND status = 200 AND "at" >= ?
    """
    values = [since, release["policy"], release["revision"], release["created_at"]]
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        first, after = ledger.execute(query, values).fetchall()[0]
    return float(first), int(after)


def _await_snapshot(params: Params, moment: float, settle_s: float) -> None:
    # Events reach the ledger within a second, the snapshot follows on the controller's clock.
    moment += 2.0
    deadline = time.monotonic() + settle_s + params.controller.snapshot_s
    while time.monotonic() < deadline:
        snapshot = params.paths.ledger_snapshot
        if snapshot.is_file() and snapshot.stat().st_mtime >= moment:
            return
        time.sleep(0.1)
    raise ServiceError(f"The controller writes no ledger snapshot; see {params.paths.logs}/controller.log.")


def summary(
    adapted: list[Adapted],
    releases: list[Mapping[str, Any]],
    bad: Rollback,
    stages: Mapping[str, float],
    seconds: float,
) -> dict[str, Any]:
    """Return what `runs/latest.json` holds; scores are fractions in [0, 1]."""
    policies = []
    for revision, ended in zip(adapted, releases, strict=True):
        assert revision.base
        assert revision.revision
        policies.append({
            "name": revision.policy,
            "base_score": revision.base.mean,
            "base_ci_low": revision.base.ci_low,
            "base_ci_high": revision.base.ci_high,
            "revision_score": revision.revision.mean,
            "ci_low": revision.revision.ci_low,
            "ci_high": revision.revision.ci_high,
            "verdict": VERDICTS[ended["state"]],
            "digest": revision.digest,
        })  # fmt: skip
    bad_revision = {
        "verdict": bad.verdict,
        "seconds_to_rollback": bad.seconds_to_rollback,
        "requests_after": bad.requests_after,
    }
    return {
        "seconds": round(seconds, 2),
        "policies": policies,
        "bad_revision": bad_revision,
        "stages": dict(stages),
    }


def write_summary(data: Mapping[str, Any], path: Path) -> None:
    """Write the summary, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data, indent=2) + "\n")
    draft.replace(path)
