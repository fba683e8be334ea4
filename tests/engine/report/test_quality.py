"""One row for each revision and segment: what is compared, what is not, and what bad input is told."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.catalog.catalog import Catalog, migrate
from engine.ledger.estimates import Estimate, emit_estimate
from engine.ledger.ledger import Ledger, Spool
from engine.quality.estimate import clopper_pearson, paired_difference
from engine.report.pages import collect, render
from engine.report.why import gather
from engine.settings.params import Params
from tasks.version_page import page
from tests.helpers.command_line import graftwork
from tests.helpers.rows import NEW, OLD, THIRD, fill

ITEMS = 20
ENGINE = {"base": "base", "suite": "sorting-json", "suite_version": "2", "config_hash": "e"}
FULL = Estimate(
    "sorting",
    NEW,
    "base",
    "sorting-json",
    "2",
    "task",
    0.625,
    0.5,
    0.75,
    items=20,
    available=20,
    config_hash="e",
)


class Shown:
    """An installation where nothing runs and OLD is the champion; `told` asks the command."""

    def __init__(self, directory: Path):
        self.settings = directory / "settings.yaml"
        self.settings.write_text(yaml.safe_dump({"state_dir": str(directory / "state")}))
        self.params = Params(state_dir=directory / "state")
        migrate(self.params.paths.catalog_url)
        self.catalog = Catalog(self.params.paths.catalog_url)
        fill(self.catalog, champion=OLD)
        child = replace(
            self.catalog.revisions.get("sorting", NEW), digest="ee" * 32, parent=NEW, created_at=5.0
        )
        self.catalog.revisions.add_many([child])
        self.child = child.digest
        self.spool = Spool(self.params.paths.spool, "test")

    def score(self, digest: str | None, right: int, **changes: Any) -> None:
        for item in range(ITEMS):
            fields = {**ENGINE, "segment": "short" if item % 4 else "long", "item": f"{item:02d}", **changes}
            policy = "sorting" if digest else None
            self.spool.emit("scores", policy=policy, digest=digest, score=float(item < right), **fields)

    def take_in(self) -> None:
        self.spool.rotate()
        ledger = Ledger(self.params.paths.ledger)
        ledger.ingest(self.params.paths.spool)
        ledger.snapshot(self.params.paths.ledger_snapshot)
        ledger.close()

    def told(self, *words: str) -> dict[str, Any]:
        done = graftwork("quality", "sorting", *words, "--json", "--params", str(self.settings))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def row(self, digest: str | None, segment: str | None = None) -> dict[str, Any]:
        (row,) = [one for one in self.told()["rows"] if (one["digest"], one["segment"]) == (digest, segment)]
        return row


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    made = Shown(tmp_path)
    yield made
    made.spool.close()
    made.catalog.close()


def test_a_row_has_score_difference_users_evaluators_latency_and_cost(shown: Shown) -> None:
    for digest, right in ((None, 4), (OLD, 8), (NEW, 10), (shown.child, 15)):
        shown.score(digest, right)
    user = {"policy": "sorting", "key": "k", "status": 200, "purpose": "user", "digest": shown.child}
    for number, reward in enumerate((1.0, 0.5, 0.0)):
        segment = "short" if number else None
        shown.spool.emit("observations", id=f"a{number}", unit=f"u{number // 2}", latency_s=number + 1.0,
                         segment=segment, **user)  # fmt: skip
        shown.spool.emit("feedback", request_id=f"a{number}", reward=reward, key="k")
        shown.spool.emit("evaluations", request=f"a{number}", policy="sorting", digest=shown.child,
                         evaluator="polite", score=reward / 2)  # fmt: skip
    shown.spool.emit("revisions", policy="sorting", digest=shown.child, tokens=200, seconds=6.0)
    emit_estimate(shown.spool, replace(FULL, digest=shown.child, target="suite", mean=0.75, segment="other"))
    shown.take_in()
    row = shown.row(shown.child)
    assert (row["score"]["mean"], row["score"]["target"], row["score"]["items"]) == (0.75, "task", ITEMS)
    assert (row["score"]["low"], row["score"]["high"]) == pytest.approx(clopper_pearson(15, ITEMS))
    # Its parent is not the champion.
    paired = paired_difference([float(i < 15) for i in range(ITEMS)], [float(i < 10) for i in range(ITEMS)])
    assert row["against"] == NEW
    assert [row["difference"][name] for name in ("mean", "low", "high")] == pytest.approx(
        list(paired._asdict().values())
    )
    assert (row["reward"], row["units"], row["latency_s"], row["evaluators"]) == (
        0.5,
        2,
        2.0,
        {"polite": 0.25},
    )
    assert (row["tokens"], row["seconds"]) == (200, 6.0)
    short = shown.row(shown.child, "short")
    assert (short["reward"], short["units"], short["latency_s"]) == (0.25, 2, 2.5)
    assert (short["evaluators"], short["score"]["items"]) == ({"polite": 0.125}, 15)
    # NEW has no parent, so it is compared with the champion, and the champion with the base.
    assert (shown.row(NEW)["against"], shown.row(OLD)["against"], shown.row(None)["against"]) == (
        OLD,
        "base",
        None,
    )
    assert (shown.row(THIRD)["score"], shown.row(OLD)["role"]) == (None, "champion")
    assert [one["digest"] for one in shown.told("--segment", "other")["rows"]] == [shown.child]


def test_a_stored_estimate_comes_before_what_the_scores_say(shown: Shown) -> None:
    shown.score(OLD, 8)
    shown.score(NEW, 10)
    emit_estimate(shown.spool, replace(FULL, target="suite", mean=0.7))
    emit_estimate(shown.spool, FULL)
    emit_estimate(shown.spool, replace(FULL, against=OLD, mean=-0.25, low=-0.5, high=-0.125))
    part = replace(FULL, target="suite", items=5, at=1.0)
    emit_estimate(shown.spool, part)
    shown.take_in()
    row = shown.row(NEW)
    assert (row["score"]["mean"], row["score"]["available"], row["difference"]["mean"]) == (0.625, 20, -0.25)
    assert "Of 1 intervals from a part of the suite's items, 1 (100.0%)" in shown.told()["calibration"]


@pytest.mark.parametrize("change", [{"base": "b2"}, {"suite_version": "3"}, {"config_hash": "e2"}])
def test_scores_of_another_base_version_or_engine_are_not_compared(
    shown: Shown, change: dict[str, str]
) -> None:
    shown.score(OLD, 8)
    shown.score(NEW, 10, **change)
    shown.take_in()
    row = shown.row(NEW)
    assert row["difference"] is None
    assert (row["score"] is None) == ("base" in change)


def test_the_table_says_what_is_not_known(shown: Shown) -> None:
    done = graftwork("quality", "sorting", "--params", str(shown.settings))
    assert done.returncode == 0
    assert "No revision of 'sorting' has been scored on sorting-json yet. `graftwork score" in done.stdout
    assert "There is no ledger snapshot yet" in done.stdout
    shown.score(NEW, 10)
    shown.take_in()
    done = graftwork("quality", "sorting", "--params", str(shown.settings))
    assert "50.0% [27.2, 72.8]" in done.stdout
    assert "None of its intervals has been checked" in done.stdout


def test_users_who_rate_below_the_offline_score_are_told_of(shown: Shown) -> None:
    policy = {"task": "sorting", "suite": "sorting-json", "drift_after_s": 60.0}
    settings = {"state_dir": str(shown.params.state_dir), "policies": {"sorting": policy}}
    shown.settings.write_text(yaml.safe_dump(settings))
    shown.score(OLD, ITEMS)
    shown.spool.emit("route_changes", policy="sorting", champion=OLD, version=1, at=1.0)
    user = {"policy": "sorting", "key": "k", "status": 200, "purpose": "user", "digest": OLD}
    for number in range(20):
        shown.spool.emit("observations", id=f"a{number}", unit=f"u{number}", **user)
        shown.spool.emit("feedback", request_id=f"a{number}", reward=0.0, key="k")
    shown.take_in()
    (note,) = shown.told()["notes"]
    assert "users rate its champion" in note
    assert "(20 ratings)" in note


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "'nothing'"),
        (["sorting", "--segment", "shrot"], "has no segment 'shrot'. It has long, short."),
    ],
)
def test_bad_input_is_a_sentence(shown: Shown, words: list[str], said: str) -> None:
    shown.score(NEW, 10)
    shown.take_in()
    done = graftwork("quality", *words, "--params", str(shown.settings))
    assert (done.returncode, said in done.stderr) == (5, True), done.stderr


def test_the_report_has_the_same_rows(shown: Shown) -> None:
    for digest, right in ((OLD, 8), (NEW, 10)):
        shown.score(digest, right)
    shown.take_in()
    snapshot = shown.params.paths.ledger_snapshot
    text = render(collect(snapshot, shown.catalog, ["sorting"], title="A run", created_at=1.0))
    section = text.partition('<h2 id="quality">')[2].partition("</section>")[0]
    row = shown.row(NEW)["score"]
    assert f"{row['mean']:.1%} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" in section
    assert "+10.0%" in section
    assert "None of its intervals has been checked" in section


def test_a_versions_page_in_mlflow_has_its_rows(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.register.find_version", lambda *_: None)
    client: Any = None
    assert "### Quality" not in page(shown.params, client, gather(shown.params, "sorting", NEW))
    for digest, right in ((OLD, 8), (NEW, 10)):
        shown.score(digest, right)
    shown.take_in()
    text = page(shown.params, client, gather(shown.params, "sorting", NEW))
    (whole, long, short) = [line for line in text.splitlines() if line.startswith(f"| {NEW[:12]}")]
    assert "| all | 50.0% [27.2, 72.8] | task | 20 | +10.0% [" in whole
    assert ("| long |" in long, "| short |" in short) == (True, True)
