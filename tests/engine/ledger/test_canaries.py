"""A canary's evidence as read from the ledger: segments, sizes, and rows of before these were recorded."""

from pathlib import Path

import pytest

from engine.catalog.records import Release
from engine.ledger.canaries import CanaryReader
from engine.ledger.ledger import Ledger, Spool
from engine.quality.canary import CanaryResult
from engine.settings.releases import ReleaseConfig
from tests.helpers.rows import NEW, OLD

RELEASE = Release(
    "r", "sorting", NEW, OLD, "canary", 0.2, "running", ReleaseConfig().model_dump(mode="json"), 0.0, 0.0,
    canary_started_at=0.0, canary_version=1, ramp=[[1, 0.2]],
)  # fmt: skip


def answer(spool: Spool, number: int, **more: object) -> None:
    """Spool one user's answer and rating; every fifth user is the canary's."""
    is_canary = number % 5 == 0
    fields = {"digest": NEW, "arm": "canary"} if is_canary else {"digest": OLD, "arm": "champion"}
    spool.emit(
        "observations", id=f"q{number}", at=float(number), policy="sorting", unit=f"u{number}", key="k",
        purpose="user", route_version=1, status=200, latency_s=1.0, **fields, **more,
    )  # fmt: skip
    spool.emit("feedback", request_id=f"q{number}", reward=1.0, key="k", at=float(number))


def judged(ledger: Ledger, spool: Spool) -> CanaryResult:
    spool.rotate()
    ledger.ingest(spool.root)
    return CanaryReader(RELEASE).read(ledger.connection, RELEASE)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "gateway")


def test_segments_lengths_and_costs_reach_the_guards(tmp_path: Path, spool: Spool) -> None:
    for number in range(200):
        of_stream = {"pieces": 30 if number % 5 == 0 else 10} if number % 2 else {"completion_tokens": 10}
        answer(spool, number, segment="de" if number % 4 == 0 else None, **of_stream)
    result = judged(Ledger(tmp_path / "ledger.duckdb"), spool)
    (segment,) = result.segments
    assert (segment.guard, segment.canary_units, segment.baseline_units) == ("reward in de", 10, 40)
    units = {guard.guard: (guard.canary_units, guard.baseline_units) for guard in result.guards}
    assert units["length"] == units["cost"] == units["reward"] == (40, 160)


def test_a_refused_request_has_no_rating_and_only_streams_have_a_first_token(
    tmp_path: Path, spool: Spool
) -> None:
    """A client gets 400 for nothing, and the id of such an answer, too."""
    for number in range(200):
        answer(spool, number, completion_tokens=10, ttft_s=1.0, pieces=10 if number % 2 else None)
    for number in range(200, 400):
        answer(spool, number)
    ledger = Ledger(tmp_path / "ledger.duckdb")
    spool.rotate()
    ledger.ingest(spool.root)
    ledger.connection.execute('UPDATE observations SET status = 400 WHERE "at" >= 200')
    result = CanaryReader(RELEASE).read(ledger.connection, RELEASE)
    assert (result.canary_units, result.baseline_units) == (40, 160)
    units = {guard.guard: (guard.canary_units, guard.baseline_units) for guard in result.guards}
    assert units["ttft"] == (20, 80)
