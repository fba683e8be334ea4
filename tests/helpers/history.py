"""A small history for pages: one policy, two revisions, a canary that runs, its users and its training."""

import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from engine.catalog.catalog import Base, Catalog, Policy, Release, Revision, migrate
from engine.catalog.opening import whole_catalog
from engine.ledger.ledger import Ledger, Spool
from engine.settings.params import Paths
from engine.settings.releases import ReleaseConfig
from engine.training.service.train_step import TrainStep

BASE, GOOD, OLD = "b" * 64, "c" * 64, "a" * 64
NOW = time.time()


def emit_scores(spool):
    for digest, right in ((None, 3), (GOOD, 9)):
        for item in range(10):
            # A base's rows name no policy and no question.
            named = {"policy": "sums", "question": f"<b>{item}</b>?"} if digest else {}
            said = "after" if digest else "before"
            spool.emit("scores", digest=digest, base=BASE, suite="s", suite_version="1", item=f"{item:02d}",
                       score=float(item < right), answer=f"{said} <{item}>", run="r", **named)  # fmt: skip


def emit_users(spool, count=300):
    random = np.random.default_rng(3)
    for number in range(count):
        canary = bool(random.random() < 0.2)
        unit = f"user-{number // 2}" if number % 5 else None
        request = spool.emit(
            "observations", at=NOW + 1 + number / 10, policy="sums", digest=GOOD if canary else None,
            unit=unit, arm="canary" if canary else "base", key="k", status=200, purpose="user",
        )  # fmt: skip
        reward = float(random.random() < (0.9 if canary else 0.3))
        if number % 7:
            spool.emit("feedback", at=NOW + 1.05 + number / 10, request_id=request, reward=reward, key="k")


def step_row(step, policy="sums", session="new", **changes):
    """A training step as the loop writes it, with every metric."""
    made = TrainStep(
        policy=policy, session=session, step=step, digest=GOOD, loss_fn="dapo",
        reward=step / 400, reward_std=0.3 + step / 5000, zero_spread=0.25,
        importance_ratio=1.0 + step * 1e-6, ratio_min=0.99 - step * 1e-5,
        ratio_max=1.01 + step * 1e-5, clip_fraction=0.02, kl=0.001 * step,
        kl_old=3e-7, entropy=2.0 / step,
        masked={"outlier": 3, "router": 5}, capped=11, correction_weight=0.98, out_of_route=0.009,
        loss=-0.125, grad_norm=0.7,
        tokens=4096, learned_tokens=4088, tokens_per_s=812.5, length_mean=17.5, length_max=24,
        truncated=0.0625, repeated=0.125,
        staleness=1.0, groups_kept=6, kept=0.75, verifier_errors=3,
        verifier_faults={"raised KeyError": 2, "timeout": 1},
        rollout_s=1.5, wait_s=0.5, reward_s=0.0625, update_s=2.0, handoff_s=0.03,
        backpressure_s=0.4, peak_memory=3 << 30,
    )  # fmt: skip
    return asdict(made) | changes


def emit_steps(spool):
    """Two lines of training; the older one is from before steps had all their metrics."""
    for step in (1, 2, 3):
        spool.emit(
            "train_steps", at=NOW - 100 + step, policy="sums", session="old", step=step, digest=OLD,
            reward=step / 4, importance_ratio=1.0001, rollout_s=0.5, update_s=0.2, handoff_s=0.01,
        )  # fmt: skip
        spool.emit("train_steps", at=NOW + 1 + step, **step_row(step, reward=step / 4))


def revision(digest, state, created_at, parent=None):
    return Revision(
        "sums", digest, BASE, parent, 3, 8, 331776, "l", "seg", 0, 1, "f" * 64, state, "me", created_at
    )


def build(root: Path) -> tuple[Catalog, Ledger, Release]:
    """Make it under a state directory, with a snapshot of the ledger; the caller closes what is open."""
    paths = Paths(root)
    migrate(paths.catalog_url)
    catalog = whole_catalog(paths.catalog_url)
    catalog.bases.add(Base(BASE, "tiny-dense", "/bases/tiny", NOW))
    catalog.policies.add(Policy("sums", BASE, {"suite": "s"}, "me", NOW))
    catalog.revisions.add_many([revision(OLD, "exported", NOW - 90)])
    catalog.revisions.add_many([revision("d" * 64, "snapshot", NOW)])
    catalog.revisions.add_many([revision(GOOD, "exported", NOW, parent=OLD)])
    catalog.tombstones.add("sums", OLD, "it was bad", "ann")
    release = Release(
        "r1", "sums", GOOD, None, "canary", 0.2, "running", ReleaseConfig().model_dump(), NOW, NOW,
        canary_started_at=NOW, skip_gates={"score": {"by": "ann", "reason": "<b>in a hurry</b>"}},
    )  # fmt: skip
    catalog.releases.add(release)
    spool = Spool(paths.spool, "test")
    for emit in (emit_scores, emit_users, emit_steps):
        emit(spool)
    spool.close()
    ledger = Ledger(paths.ledger)
    ledger.ingest(paths.spool)
    ledger.snapshot(paths.ledger_snapshot)
    return catalog, ledger, release
