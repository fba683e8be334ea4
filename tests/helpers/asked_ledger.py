"""A small ledger in which each query of docs/queries.md finds something."""

from dataclasses import replace
from pathlib import Path

from engine.ledger.estimates import Estimate, emit_estimate
from engine.ledger.ledger import Ledger, Spool

BASE, REVISION = {"policy": None, "digest": None}, {"policy": "arithmetic", "digest": "aa" * 32}
SUITE = {"base": "bb" * 32, "suite": "sums", "suite_version": "2", "config_hash": "cc" * 32}


def asked_ledger(directory: Path) -> Ledger:
    """Return it, to be closed by the caller."""
    spool = Spool(directory / "spool", "test")
    for named, right in ((BASE, 3), (REVISION, 8)):
        for item in range(10):
            # The revision loses the base's first item.
            score = float(item < right and not (named is REVISION and item == 0))
            spool.emit("scores", item=str(item), score=score, segment="short", answer="7", **named, **SUITE)
        mean = Estimate(**named, **SUITE, target="task", mean=right / 10, low=0.0, high=1.0, items=10)
        for segment in (None, "short"):
            emit_estimate(spool, replace(mean, segment=segment))
    whole = replace(mean, target="suite", available=10, at=2.0)
    emit_estimate(spool, replace(whole, items=5, at=1.0))
    emit_estimate(spool, whole)
    emit_estimate(spool, replace(whole, against="dd" * 32, mean=-0.3, low=-0.5, high=-0.1))
    emit_estimate(spool, replace(whole, against="base", mean=0.5, low=0.5, high=0.5))
    spool.emit("revisions", tokens=100, seconds=1.0, **REVISION)
    spool.emit("route_changes", policy="arithmetic", champion=REVISION["digest"], version=1)
    for number in range(20):
        spool.emit("observations", id=f"a{number}", unit=f"u{number}", key="k", purpose="user", **REVISION)
        spool.emit("feedback", request_id=f"a{number}", key="k", reward=1.0)
    spool.emit("evaluations", request="a1", evaluator="polite", score=0.5, tokens=9, **REVISION)
    spool.close()
    ledger = Ledger(directory / "ledger.duckdb")
    ledger.ingest(spool.root)
    return ledger
