"""The report: shows what ledger and catalog hold, judges as the controller does, and opens offline."""

import itertools
import re
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from engine.adapters.catalog import Base, Catalog, Policy, Release, Revision, migrate
from engine.config import ReleaseConfig
from engine.errors import NotFound
from engine.quality.estimate import clopper_pearson
from engine.quality.evidence import EvidenceReader
from engine.quality.ledger import Ledger, Spool
from engine.quality.report import ReportData, collect, write_report

BASE, GOOD, OLD = "b" * 64, "c" * 64, "a" * 64
NOW = time.time()


def emit_scores(spool):
    for digest, right in ((None, 3), (GOOD, 9)):
        for item in range(10):
            policy = "sums" if digest else None
            spool.emit("scores", policy=policy, digest=digest, base=BASE, suite="s", suite_version="1",
                       item=f"{item:02d}", score=float(item < right), answer="", run="r")  # fmt: skip


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


def emit_steps(spool):
    for session, at, digest in (("old", NOW - 100, OLD), ("new", NOW + 1, GOOD)):
        for step in (1, 2, 3):
            spool.emit(
                "train_steps", at=at + step, policy="sums", session=session, step=step, digest=digest,
                reward=step / 4, importance_ratio=1.0001, rollout_s=0.5, update_s=0.2, handoff_s=0.01,
            )  # fmt: skip


def revision(digest, state, created_at, parent=None):
    return Revision(
        "sums", digest, BASE, parent, 3, 8, 331776, "l", "seg", 0, 1, "f" * 64, state, "me", created_at
    )


@pytest.fixture
def world(tmp_path):
    """A catalog and a ledger after one promoted canary; yields (catalog, ledger, release, snapshot)."""
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    catalog = Catalog(url)
    catalog.add_base(Base(BASE, "tiny-dense", "/bases/tiny", NOW))
    catalog.add_policy(Policy("sums", BASE, {"suite": "s"}, "me", NOW))
    catalog.add_revision(revision(OLD, "exported", NOW - 90))
    catalog.add_revision(revision("d" * 64, "snapshot", NOW))
    catalog.add_revision(revision(GOOD, "exported", NOW, parent=OLD))
    catalog.bury("sums", OLD, "it was bad", "ann")
    release = Release(
        "r1", "sums", GOOD, None, "canary", 0.2, "running", ReleaseConfig().model_dump(), NOW, NOW,
        canary_started_at=NOW, skip_gates={"score": {"by": "ann", "reason": "<b>in a hurry</b>"}},
    )  # fmt: skip
    catalog.add_release(release)
    spool = Spool(tmp_path / "spool", "test")
    for emit in (emit_scores, emit_users, emit_steps):
        emit(spool)
    spool.close()
    ledger = Ledger(tmp_path / "ledger.duckdb")
    ledger.ingest(tmp_path / "spool")
    ledger.snapshot(tmp_path / "snapshot.duckdb")
    yield catalog, ledger, release, tmp_path / "snapshot.duckdb"
    ledger.close()


def gather(world, **changes):
    catalog, _, _, snapshot = world
    settings = {
        "title": "A run",
        "created_at": NOW,
        "since": NOW,
        "stages": {"train": 30.0, "release": 12.5},
        **changes,
    }
    return collect(snapshot, catalog, ["sums"], **settings)


def test_the_timeline_ends_where_the_controller_stands(world):
    catalog, ledger, release, _ = world
    seen = EvidenceReader(catalog).read(release, ledger).canary
    timeline = gather(world).releases[0].timeline
    last = timeline[-1]
    assert (last.canary_units, last.baseline_units) == (seen.canary_units, seen.baseline_units)
    assert (last.canary_reward, last.baseline_reward) == (seen.canary_reward, seen.baseline_reward)
    assert (last.lower, last.upper) == (seen.lower, seen.upper)
    assert seen.lower > 0
    assert len(timeline) <= 200
    moments = [point.seconds for point in timeline]
    assert moments == sorted(moments)
    assert moments[0] >= 1
    assert moments[-1] <= 31.1
    assert all(
        one.lower <= other.lower and one.upper >= other.upper for one, other in itertools.pairwise(timeline)
    )


def test_scores_carry_exact_intervals_and_curves_start_at_since(world):
    data = gather(world)
    release = data.releases[0]
    assert (release.base_score.mean, release.score.mean) == (0.3, 0.9)
    assert (release.score.ci_low, release.score.ci_high) == clopper_pearson(9, 10)
    assert [(curve.digest, [step.reward for step in curve.steps]) for curve in data.curves] == [
        (GOOD, [0.25, 0.5, 0.75])
    ]
    assert len(gather(world, since=0.0).curves) == 2
    assert gather(world, since=NOW + 1).releases == ()


def test_revisions_are_the_exported_ones_with_parent_and_role(world):
    rows = gather(world).revisions
    assert [(row.digest, row.parent, row.role) for row in rows] == [(GOOD, OLD, ""), (OLD, None, "buried")]


class Page(HTMLParser):
    """Collects what a browser would load, and the texts that stand for figures."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.labels, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values["href"]] if tag == "a" else []
        names = ("src", "href", "xlink:href", "data", "srcset")
        self.loads += [values[name] for name in names if name in values and tag != "a"]
        self.loads += [tag] if tag in ("script", "link", "iframe", "object", "embed") else []
        self.labels += [values["aria-label"]] if values.get("role") == "img" else []


def test_the_page_loads_nothing_and_speaks_every_figure(world, tmp_path):
    path = write_report(
        gather(world, links={"MLflow": "http://127.0.0.1:8463"}), tmp_path / "out" / "report.html"
    )
    text = path.read_text()
    page = Page(text)
    assert page.loads == []
    assert page.links == ["http://127.0.0.1:8463"]
    assert not re.search(r"url\(|@import|@font-face", text)
    assert path.stat().st_size < 3_000_000
    assert len(page.labels) == 3
    assert "base: 30.0%, interval" in page.labels[0]
    assert "sums@cccccccccccc, running: 90.0%" in page.labels[0]
    assert [item.name for item in path.parent.iterdir()] == ["report.html"]
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_what_people_wrote_is_escaped(world, tmp_path):
    text = write_report(gather(world), tmp_path / "report.html").read_text()
    assert "&lt;b&gt;in a hurry&lt;/b&gt;" in text
    assert "<b>in a hurry</b>" not in text


def test_a_report_of_nothing_is_a_page(tmp_path):
    text = write_report(ReportData("Empty", NOW), tmp_path / "report.html").read_text()
    assert "<h1>Empty</h1>" in text
    assert "<table" not in text
    assert "<svg" not in text


def test_no_snapshot_is_a_sentence(world, tmp_path):
    with pytest.raises(NotFound, match="no ledger snapshot"):
        collect(tmp_path / "none.duckdb", world[0], ["sums"], title="A run", created_at=NOW)
