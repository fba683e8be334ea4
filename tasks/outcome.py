"""The outcome of a run: adapted policies, verdicts, seconds of each stage, and `runs/latest.json`.

Also measures the time to a rollback and the requests that the revision answered after it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.catalog.records import VERDICTS, served_name
from engine.errors import ServiceError
from engine.settings.params import DIGEST12, Params

if TYPE_CHECKING:
    from engine.ledger.estimates import Estimate
    from engine.quality.term_sequence import MeanInterval
    from engine.report.data import SuiteScore
    from tasks.general import Perplexity
    from tasks.part_score import PartScore
    from tasks.score import Score

SETTLE_S = 15.0


@dataclass
class Stages:
    """Seconds of each stage, by name, in the order in which the stages began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as the stage `name`."""
        start = time.monotonic()
        self.seconds[name] = 0.0
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - start, 2)


@dataclass(frozen=True)
class Adapted:
    """One policy's new revision: its directory, its version in MLflow, the scores of base and revision.

    `general` are the perplexities of base and revision on general text, where the policy has them measured.
    `part` stands for the revision's score where only a part of the suite was read.
    """

    policy: str
    digest: str
    directory: Path
    version: int
    base: "Score | None"
    revision: "Score | None"
    seconds: Mapping[str, float]
    general: "Sequence[Perplexity]" = ()
    part: "PartScore | None" = None

    @property
    def scores(self) -> dict[str, str]:
        """Return the cells of the scores; the one on general text only where that was measured."""
        told = {"perplexity": " to ".join(f"{one.value:.2f}" for one in self.general)} if self.general else {}
        if self.base and self.revision and self.base.held_out_loss is not None:
            told["held-out loss"] = f"{self.base.held_out_loss:.3f} to {self.revision.held_out_loss:.3f}"
        scored = part_text(self.part.own) if self.part else interval_text(self.revision)
        return {"base score": interval_text(self.base), "revision score": scored, **told}

    def row(self) -> dict[str, Any]:
        """Return a table row."""
        seconds = {f"{name} (s)": seconds for name, seconds in self.seconds.items()}
        name = served_name(self.policy, self.digest)
        return {"revision": name, "version": self.version, **self.scores, **seconds}

    def to_json(self) -> dict[str, Any]:
        """Return the revision as JSON values; a score that was not measured is null."""
        return {
            "policy": self.policy,
            "digest": self.digest,
            "version": self.version,
            "directory": str(self.directory),
            "base": self.base and score_json(self.base),
            "revision": self.revision and score_json(self.revision),
            "part": self.part and part_json(self.part),
            "general": [asdict(one) for one in self.general],
            "seconds": dict(self.seconds),
        }


@dataclass(frozen=True)
class Rollback:
    """How the release of a bad revision ended.

    `seconds_to_rollback` is from its first user to its tombstone. `requests_after` counts the users' requests
    that it answered although the look at the routes that admitted them began after the tombstone's commit.
    """

    verdict: str
    seconds_to_rollback: float | None
    requests_after: int


@dataclass(frozen=True)
class Shadowed:
    """How a bad revision's release ended in its shadow; `exposed` counts users' requests that it answered."""

    verdict: str
    exposed: int


@dataclass(frozen=True)
class Outcome:
    """The main job's result: its summary as in `runs/latest.json`, a table, and the HTML report."""

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    report: Path


def local_key(params: Params) -> str:
    """Return the installation's own admin key; raises `ServiceError` before the first start."""
    if not params.paths.local_key.is_file():
        raise ServiceError("There is no local key yet. Start the services with `graftwork up`.")
    return params.paths.local_key.read_text().strip()


def interval_text(score: "Score | SuiteScore | None", missing: str = "–") -> str:
    """Return `61.5% [54.6, 67.9]`, or `missing` for no score."""
    return f"{score.mean:.1%} [{100 * score.ci_low:.1f}, {100 * score.ci_high:.1f}]" if score else missing


def part_text(found: "Estimate") -> str:
    """Return `61.5% [54.6, 67.9] of the suite, 96 of 200 items`."""
    interval = f"[{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return f"{found.mean:.1%} {interval} of the {found.target}, {found.items} of {found.available} items"


def part_json(part: "PartScore") -> dict[str, Any]:
    """Return what a part of a suite's items says as JSON values."""
    return {
        "own": asdict(part.own), "difference": asdict(part.difference), "has_fallen": part.has_fallen
    }  # fmt: skip


def part_row(part: "PartScore") -> dict[str, Any]:
    """Return its table row: the score, the difference, and whether the gate will hold it."""
    own, found = part.own, part.difference
    against = "base" if found.against == "base" else str(found.against)[:DIGEST12]
    return {
        "revision": served_name(str(own.policy), str(own.digest)),
        "suite": f"{own.suite} version {own.suite_version}",
        "score": part_text(own),
        "against": against,
        "difference": f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}] points",
        "gate": "held" if part.has_fallen else "passed",
        "seconds": round(own.seconds or 0.0, 1),
    }


def age(seconds: float) -> str:
    """Return a duration in its largest unit, as `40s`, `12m`, `3h` or `5d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def policy_row(adapted: Adapted, ended: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's row of the main job's table: scores, verdict, seconds of each stage."""
    seconds = {**adapted.seconds, "release": ended["updated_at"] - ended["created_at"]}
    told = {f"{name} (s)": f"{value:.1f}" for name, value in seconds.items()}
    name, verdict = served_name(adapted.policy, adapted.digest), VERDICTS[ended["state"]]
    return {"revision": name, **adapted.scores, "verdict": verdict, **told}


def score_row(score: "Score") -> dict[str, Any]:
    """Return a score's table row."""
    suite, shown = f"{score.suite} version {score.suite_version}", {"score": interval_text(score)}
    return _scored_row(score, suite, shown, len(score.items))


def score_json(score: "Score") -> dict[str, Any]:
    """Return a score as JSON values, with the number of its items."""
    return asdict(score) | {"items": len(score.items), "held_out_loss": score.held_out_loss}


def perplexity_row(perplexity: "Perplexity") -> dict[str, Any]:
    """Return the table row of a perplexity on general text."""
    suite, shown = f"general version {perplexity.version}", {"perplexity": f"{perplexity.value:.2f}"}
    return _scored_row(perplexity, suite, shown, perplexity.windows)


def _scored_row(
    measured: "Score | Perplexity", suite: str, shown: Mapping[str, str], items: int
) -> dict[str, Any]:
    model = served_name(measured.policy, measured.digest) if measured.digest else "base"
    return {"model": model, "suite": suite, **shown, "items": items, "seconds": round(measured.seconds, 1)}


def release_row(release: Mapping[str, Any]) -> dict[str, Any]:
    """Return an ended release's table row."""
    return {
        "revision": served_name(release["policy"], release["revision"]),
        "verdict": VERDICTS[release["state"]],
        "reason": release["reason"],
        "skipped": ", ".join(release["skip_gates"]) or "nothing",
        "seconds": round(release["updated_at"] - release["created_at"], 1),
    }


def release_json(release: Mapping[str, Any]) -> dict[str, Any]:
    """Return an ended release as JSON values."""
    return {"id": release["id"], **release_row(release), "skipped": list(release["skip_gates"])}


def wait_row(wait: Mapping[str, Any]) -> dict[str, str]:
    """Return the table row of something that a running release waits for."""
    told = {name: wait[name] for name in ("gate", "has", "needs")}
    return {**told, "since": age(wait["waited_s"]), "ends": wait["ends"]}


def judge_rollback(params: Params, release: Mapping[str, Any], answered: Sequence[str]) -> Rollback:
    """Read from catalog and ledger how the release of a bad revision ended.

    Waits until the ledger has every request of `answered`; raises `ServiceError` if it does not in time.
    """
    from engine.catalog.opening import open_catalog

    with open_catalog(params.paths) as catalog:
        stone = catalog.tombstones.find(release["policy"], release["revision"])
        # The rollback changes the route next, so its time is the first one known to be after the commit.
        committed = catalog.routes.get(release["policy"]).updated_at
    if stone is None:
        return Rollback(VERDICTS[release["state"]], None, 0)
    times = _canary_requests(params, release, answered)
    after = sum(at > max(stone.at, committed) for at in times)
    return Rollback(VERDICTS[release["state"]], round(stone.at - times[0], 2), after)


def judge_shadow(params: Params, release: Mapping[str, Any], answered: Sequence[str]) -> Shadowed:
    """Read from the ledger how many users of `answered` met a revision whose release ended in its shadow.

    Waits until the ledger has every request; raises `ServiceError` if it does not in time.
    """
    exposed = len(_canary_requests(params, release, answered))
    return Shadowed(VERDICTS[release["state"]], exposed)


def _canary_requests(params: Params, release: Mapping[str, Any], answered: Sequence[str]) -> list[float]:
    """Return when the revision's users were admitted, in order (epoch seconds)."""
    from engine.controller.release_loop import SNAPSHOT_S
    from engine.ledger.ledger import open_snapshot

    # Events reach the ledger within a second, its snapshot after `SNAPSHOT_S`.
    deadline = time.monotonic() + SETTLE_S + SNAPSHOT_S
    query = """SELECT digest, "at" FROM observations WHERE id IN (SELECT unnest($ids)) ORDER BY "at" """
    while time.monotonic() < deadline:
        with open_snapshot(params.paths.ledger_snapshot) as ledger:
            rows = ledger.execute(query, {"ids": list(answered)}).fetchall()
        if len(rows) == len(answered):
            return [at for digest, at in rows if digest == release["revision"]]
        time.sleep(0.2)
    raise ServiceError(
        f"The ledger lacks {len(answered) - len(rows)} of {len(answered)} requests. "
        f"Check {params.paths.logs}/controller.log."
    )


def summary(
    adapted: Sequence[Adapted],
    releases: Sequence[Mapping[str, Any]],
    bad: Rollback,
    stages: Mapping[str, float],
    seconds: float,
    shadowed: Shadowed | None = None,
) -> dict[str, Any]:
    """Return the content of `runs/latest.json`; scores are fractions in [0, 1]."""
    policies = []
    for revision, ended in zip(adapted, releases, strict=True):
        assert revision.base
        assert revision.revision
        gained = gain(revision.base, revision.revision)
        policies.append({
            "name": revision.policy,
            "base_score": revision.base.mean,
            "base_ci_low": revision.base.ci_low,
            "base_ci_high": revision.base.ci_high,
            "revision_score": revision.revision.mean,
            "ci_low": revision.revision.ci_low,
            "ci_high": revision.revision.ci_high,
            "gain": gained.mean,
            "gain_ci_low": gained.low,
            "gain_ci_high": gained.high,
            "verdict": VERDICTS[ended["state"]],
            "digest": revision.digest,
        })  # fmt: skip
    return {
        "seconds": round(seconds, 2),
        "policies": policies,
        "bad_revision": asdict(bad),
        **({"shadow": asdict(shadowed)} if shadowed else {}),
        "stages": dict(stages),
    }


def gain(base: "Score", revision: "Score") -> "MeanInterval":
    """Return the paired difference of a revision's scores and the base's on the same items, in [-1, 1]."""
    # It imports SciPy, which `graftwork --help` does not need.
    from engine.quality.estimate import paired_difference

    return paired_difference([item.score for item in revision.items], [item.score for item in base.items])


def shortcomings(result: Mapping[str, Any], apart: bool) -> list[str]:
    """Return the main job's missed expectations as sentences; empty when it met all.

    With `apart` the intervals of base and revision must not overlap, as on the bases that are built here;
    otherwise the paired difference must be above 0.
    """
    faults = []
    for policy in result["policies"]:
        if policy["verdict"] != "promote":
            faults.append(f"{policy['name']} ended with the verdict {policy['verdict']}, not with promote.")
        if apart and policy["ci_low"] <= policy["base_ci_high"]:
            faults.append(f"The score interval of {policy['name']} is not above the base's.")
        elif policy["gain_ci_low"] <= 0:
            faults.append(f"The score of {policy['name']} is not surely above the base's on the same items.")
    if shadow := result.get("shadow"):
        if shadow["verdict"] != "rollback":
            faults.append(f"The bad revision's shadow ended with {shadow['verdict']}, not with rollback.")
        if shadow["exposed"]:
            faults.append(f"{shadow['exposed']} requests of users met the bad revision in its shadow.")
    bad = result["bad_revision"]
    if bad["verdict"] != "rollback":
        faults.append(f"The bad revision ended with the verdict {bad['verdict']}, not with rollback.")
    if bad["requests_after"]:
        faults.append(f"The bad revision answered {bad['requests_after']} requests after its rollback.")
    return faults
