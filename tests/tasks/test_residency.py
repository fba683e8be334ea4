"""`graftwork status --residency`: what runs and what was, with and without an engine."""

import json
import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.catalog.opening import open_catalog
from engine.errors import ServiceError
from engine.ledger.ledger import Ledger, Spool
from engine.settings.params import Params
from engine.settings.services import EngineConfig
from flows.cli import app
from tasks import residency as tiers
from tests.helpers.history import GOOD, OLD, build
from tests.helpers.live import free_port

COMMAND = ("status", "--residency")
LIVE = {
    "tiers": {
        "slot": {"adapters": 1, "bytes": 10},
        "host": {"adapters": 2, "bytes": 30, "max_adapters": 4, "max_bytes": 40},
    },
    "queue": {
        "interactive": 1, "background": 0, "running": 0, "places": 256, "concurrency": 8, "estimate_s": 0.2,
        "loads": {"sums@dddddddddddd": {"state": "queued", "priority": "interactive", "waiters": 3,
                                        "waited_s": 0.1}},
    },
    "adapters": {
        "other@eeeeeeeeeeee": {"tier": "host", "bytes": 20, "users": 0, "idle_s": 3.0},
        f"sums@{GOOD[:12]}": {"tier": "slot", "bytes": 10, "users": 2, "idle_s": 0.0},
    },
    "loading": 1,
    "evictions": 5,
    "states": {"slot": 1, "host": 1, "queued": 1},
    "transitions": [{"before": "host", "event": "evict", "after": "leaving", "count": 5}],
}  # fmt: skip


@pytest.fixture
def params(tmp_path: Path) -> Params:
    """A catalog, and a ledger in which one revision was loaded twice and evicted, another refused."""
    catalog, ledger, _ = build(tmp_path)
    ledger.close()
    spool = Spool(tmp_path / "spool", "gateway")
    for wait_s in (0.25, 0.75):
        spool.emit(
            "loads", policy="sums", digest=GOOD, tier="host", bytes=10, seconds=0.5, wait_s=wait_s,
            priority="interactive", waiters=2, error=None, tier_adapters=1, tier_bytes=10,
        )  # fmt: skip
    spool.emit("loads", policy="sums", digest=GOOD, tier="stored", bytes=10, seconds=60.0)
    spool.emit("loads", policy="sums", digest=OLD, tier="host", bytes=10, seconds=0.1, error="It is damaged.")
    spool.emit(
        "loads", policy="sums", digest=OLD, tier="host", bytes=10, seconds=0.1, outcome="cancelled",
        error="Nobody waited for it any more.",
    )  # fmt: skip
    spool.close()
    again = Ledger(tmp_path / "ledger.duckdb")
    assert again.ingest(tmp_path / "spool") == 5
    again.snapshot(tmp_path / "ledger.snapshot.duckdb")
    again.close()
    catalog.close()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / f"{0:032x}.seg").write_bytes(b"x" * 100)
    return Params(state_dir=tmp_path, engine=EngineConfig(port=free_port()))


def test_without_an_engine_every_revision_is_stored(params):
    found = tiers.residency(params, 10)
    assert (found["engine"], found["tiers"]) == (False, {"stored": {"bytes": 100}})
    rows = {row["revision"]: row for row in found["revisions"]}
    assert {row["tier"] for row in rows.values()} == {"stored"}
    good, old = rows[f"sums@{GOOD[:12]}"], rows[f"sums@{OLD[:12]}"]
    assert (good["loads"], good["faults"], good["evictions"], good["waits"]) == (2, 0, 1, 4)
    assert (good["load_s"], good["wait_s"]) == (0.5, 0.5)
    assert (old["loads"], old["faults"], old["last_fault"]) == (0, 1, "It is damaged.")


def test_with_one_each_revision_is_where_it_is(params, monkeypatch):
    monkeypatch.setattr(tiers, "ask_engine", lambda params: LIVE)
    found = tiers.residency(params, 10)
    assert [(row["revision"][:8], row["tier"]) for row in found["revisions"]] == [
        (f"sums@{GOOD[:3]}", "slot"),
        ("other@ee", "host"),
        ("sums@ddd", "queued"),
        (f"sums@{OLD[:3]}", "stored"),
    ]
    assert found["revisions"][0]["loads"] == 2
    assert found["queue"]["interactive"] == 1
    assert len(tiers.residency(params, 2)["revisions"]) == 2


def test_the_command_prints_a_table_or_json(params, monkeypatch, tmp_path):
    monkeypatch.setattr(tiers, "ask_engine", lambda params: LIVE)
    file = tmp_path / "params.json"
    file.write_text(json.dumps({"state_dir": str(tmp_path), "engine": {"port": params.engine.port}}))
    told = CliRunner().invoke(app, [*COMMAND, "--json", "--params", str(file)])
    assert json.loads(told.output)["tiers"]["host"]["max_bytes"] == 40
    shown = CliRunner().invoke(app, [*COMMAND, "--params", str(file)], catch_exceptions=False)
    assert re.search(r"host\s+adapters 2, bytes 30", shown.output)
    assert re.search(r"states\s+slot 1, host 1, queued 1", shown.output)
    assert re.search(r"host -> leaving\s+evict 5", shown.output)
    # The console is the process's own.
    assert "stored" in shown.output


def test_revisions_in_quarantine_are_listed_newest_first(params, tmp_path):
    with open_catalog(params.paths) as catalog:
        for digest in (OLD, GOOD):
            catalog.quarantine.add("sums", digest, f"Segment {digest[:4]} fails its checksum.")
    names = [row["revision"] for row in tiers.quarantined(params, 10)]
    assert names == [f"sums@{GOOD[:12]}", f"sums@{OLD[:12]}"]
    assert len(tiers.quarantined(params, 1)) == 1
    file = tmp_path / "params.json"
    file.write_text(json.dumps({"state_dir": str(tmp_path), "engine": {"port": params.engine.port}}))
    told = CliRunner().invoke(app, [*COMMAND, "--params", str(file)], catch_exceptions=False)
    assert f"sums@{OLD[:12]} " in told.output
    assert f"Segment {OLD[:4]} fails its checksum." in told.output


def test_an_engine_that_is_busy_is_not_taken_for_none(params, monkeypatch):
    with socket.create_server(("127.0.0.1", params.engine.port)):
        monkeypatch.setattr(tiers, "TIMEOUT_S", 0.1)
        with pytest.raises(ServiceError, match="does not answer"):
            tiers.ask_engine(params)
    assert tiers.ask_engine(params) is None
