"""The report: shows what ledger and catalog hold, judges as the controller does, and opens offline."""

import itertools
import json
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from engine.catalog.catalog import Notice, Policy
from engine.controller.evidence import EvidenceReader
from engine.errors import NotFound
from engine.ledger.spool import Spool
from engine.quality.estimate import clopper_pearson
from engine.report.data import Curve, RevisionRow
from engine.report.lineage import Node, arrange, lineage
from engine.report.pages import ReportData, collect, write_report
from engine.report.training import MAX_POINTS, binned, spoken, training_curves
from engine.settings.params import Paths
from engine.training.service.train_step import TrainStep
from tests.helpers.history import BASE, GOOD, NOW, OLD, build, step_row


@pytest.fixture
def world(tmp_path):
    """A catalog and a ledger while a canary runs; yields (catalog, ledger, release, snapshot)."""
    catalog, ledger, release = build(tmp_path)
    yield catalog, ledger, release, Paths(tmp_path).ledger_snapshot
    ledger.close()
    catalog.close()


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


def test_a_task_is_shown_without_the_place_of_its_file(world, tmp_path):
    own = {"suite": "s", "task": "/srv/somewhere/sums/train.jsonl"}
    world[0].policies.add(Policy("sums", BASE, own, "me", NOW))
    page = write_report(gather(world), tmp_path / "report.html").read_text()
    assert "sums/train.jsonl" in page
    assert "/srv/somewhere" not in page


def test_scores_carry_exact_intervals_and_curves_start_at_since(world, tmp_path):
    # The manifest says which training made a revision; the other training exported nothing.
    manifest = tmp_path / "sums" / GOOD[:12] / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"config": {"session": "new"}}))
    data = gather(world, revisions_dir=tmp_path)
    release = data.releases[0]
    assert (release.base_score.mean, release.score.mean) == (0.3, 0.9)
    assert (release.score.ci_low, release.score.ci_high) == clopper_pearson(9, 10)
    assert [(curve.digest, [step.reward for step in curve.steps]) for curve in data.curves] == [
        (GOOD, [0.25, 0.5, 0.75])
    ]
    curves = gather(world, since=0.0, revisions_dir=tmp_path).curves
    assert [(curve.session, curve.digest) for curve in curves] == [("old", None), ("new", GOOD)]
    assert gather(world, since=NOW + 1).releases == ()


def test_a_step_on_the_page_is_the_row_that_was_written(world):
    _, ledger, _, snapshot = world
    rows = [step_row(step, session="newest") for step in range(1, 7)]
    spool = Spool(Paths(snapshot.parent).spool, "more")
    for row in rows:
        spool.emit("train_steps", at=NOW + 50 + row["step"], **row)
    spool.close()
    assert ledger.ingest(Paths(snapshot.parent).spool) == 6
    ledger.snapshot(snapshot)
    curves = gather(world, since=0.0).curves
    assert [curve.session for curve in curves] == ["old", "new", "newest"]
    names = [field.name for field in fields(TrainStep)]
    assert [vars(step) for step in curves[-1].steps] == [{name: row[name] for name in names} for row in rows]
    # Rows of before these metrics lack them, and only them.
    assert curves[0].steps[0] == TrainStep(
        policy="sums", session="old", digest=OLD,
        step=1, reward=0.25, importance_ratio=1.0001, rollout_s=0.5, update_s=0.2, handoff_s=0.01,
    )  # fmt: skip
    said = spoken(curves)
    assert "12 steps in 3 lines, mean reward 0% to 2% in the last" in said
    assert "72 of 36,864 tokens masked (outlier 27, router 45)" in said
    assert "staleness up to 1, " in said


def test_seconds_of_a_step_are_what_it_waited_not_what_rollouts_took():
    assert TrainStep(step=1, reward=0.5, rollout_s=2.0, update_s=1.0).phases == {
        "rollout wait": 2.0, "reward": 0.0, "update": 1.0, "handoff": 0.0,
    }  # fmt: skip
    assert (
        TrainStep(step=1, reward=0.5, rollout_s=2.0, wait_s=0.0, handoff_s=0.5).phases["rollout wait"] == 0.0
    )


def test_rollouts_that_ran_meanwhile_are_a_line_of_their_own():
    waited = made_curve("sums", 5, rollout_s=0.5, wait_s=0.5)
    meanwhile = made_curve("sums", 5, rollout_s=6.0, wait_s=0.5)
    assert ">rollout<" not in str(training_curves([waited]))
    drawn = str(training_curves([meanwhile]))
    assert ">rollout<" in drawn
    # The axis reaches what takes longest, the bars what training spent.
    assert re.search(r'class="tick end">6<', drawn)
    assert sum(meanwhile.steps[0].phases.values()) == 0.5 + 0.0625 + 2.0 + 0.03


def test_one_slow_step_does_not_flatten_the_others():
    curve = made_curve("sums", 9)
    slow = replace(curve, steps=(replace(curve.steps[0], wait_s=50.0), *curve.steps[1:]))
    usual = sum(curve.steps[1].phases.values())
    assert ", the longest 52 s" in spoken([slow])
    assert "the longest" not in spoken([curve])
    # Its bar is cut where the axis ends, at five times the median.
    ticks = re.findall(r'class="tick end">([\d.]+)<', str(training_curves([slow])))
    assert usual < max(map(float, ticks)) <= 5 * usual


def made_curve(policy, steps, session="s", **changes):
    rows = [step_row(step, policy, session, **changes) for step in range(1, steps + 1)]
    return Curve(policy, GOOD, tuple(TrainStep.of(row) for row in rows), session)


def test_the_dots_lie_where_the_rewards_are():
    curve = made_curve("sums", 40)
    drawn = str(training_curves([curve]))
    top, bottom = (
        float(re.search(rf'y="(\S+)" class="tick end">{tick}<', drawn)[1]) - 4 for tick in ("100%", "0%")
    )
    dots = re.search(r'<path d="((?:M\S+ \S+h0)+)"', drawn)[1]
    heights = [float(y) for y in re.findall(r"M\S+ (\S+)h0", dots)]
    # Places are rounded to a tenth of a pixel.
    expected = [step.reward for step in curve.steps]
    assert [(bottom - y) / (bottom - top) for y in heights] == pytest.approx(
        expected, abs=0.06 / (bottom - top)
    )


def test_lines_follow_each_other_and_many_steps_become_their_means():
    lines = [made_curve("sums", 300, "a"), made_curve("sums", 301, "b")]
    bins = binned(lines[1], 300, 5)
    assert [bin.x for bin in bins[:2]] == [303, 308]
    assert (bins[-1].x, len(bins[-1].steps)) == (601, 1)
    assert [len(bin.steps) for bin in bins[:-1]] == [5] * 60
    assert bins[0].values("reward") == [step / 400 for step in range(1, 6)]
    drawn = str(training_curves(lines))
    assert [
        words for words in ("importance ratio − 1", "KL to the base", "entropy") if words not in drawn
    ] == []
    assert 100 < drawn.count("h0") <= MAX_POINTS + 2
    ElementTree.fromstring(drawn)


@pytest.mark.long
def test_a_page_of_many_policies_and_lines_stays_small(tmp_path):
    curves = [made_curve(f"policy-{policy:02}", 40, f"{line}") for policy in range(50) for line in range(12)]
    path = write_report(ReportData("Many", NOW, curves=tuple(curves)), tmp_path / "report.html")
    assert len(Page(path.read_text()).labels) == 50
    assert path.stat().st_size < 3_000_000


def test_revisions_are_the_exported_ones_with_parent_and_role(world):
    rows = gather(world).revisions
    assert [(row.digest, row.parent, row.role) for row in rows] == [(GOOD, OLD, ""), (OLD, None, "buried")]
    assert rows[0].score.mean == 0.9
    assert rows[0].units > 0
    assert abs(rows[0].online - 0.9) < 0.1
    assert (rows[1].score, rows[1].online, rows[1].reason) == (None, None, "it was bad")


def test_a_policy_shows_what_its_name_means_now(world):
    catalog = world[0]
    before = catalog.routes.get("sums")
    catalog.routes.update(replace(before, champion=GOOD, canary="d" * 64, weight=0.2), before.version)
    (policy,) = gather(world).policies
    assert (policy.champion, policy.canary, policy.weight) == (GOOD, "d" * 64, 0.2)
    assert (policy.champion_score.mean, policy.base_score.mean) == (0.9, 0.3)
    assert (policy.revisions, policy.newest.digest, policy.running) == (2, GOOD, "canary")


def test_what_people_were_told_and_what_is_left_out_is_on_the_page(world, tmp_path):
    catalog = world[0]
    catalog.notices.add(Notice("n1", "graftwork.policy.drift", "sums", GOOD, "It <i>fell</i>.", "/", NOW + 5))
    catalog.notices.add(Notice("n0", "graftwork.engine.down", "", None, "It is away.", "/", NOW - 5))
    catalog.policies.add(Policy("poems", BASE, {"suite": "s"}, "me", NOW))
    data = gather(world)
    assert [(event.kind, event.reason) for event in data.notices] == [("policy.drift", "It <i>fell</i>.")]
    assert [(event.by, event.reason) for event in data.tombstones] == [("ann", "it was bad")]
    assert data.left_out == ("1 of the policies",)
    text = write_report(data, tmp_path / "report.html").read_text()
    assert "It &lt;i&gt;fell&lt;/i&gt;." in text
    assert "1 of the policies" in text


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
        held = [values[name] for name in names if name in values and tag != "a"]
        self.loads += [address for address in held if not address.startswith("data:")]
        self.loads += [tag] if tag in ("script", "iframe", "object", "embed") else []
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
    lineage, scores, canary, curve = page.labels
    assert "cccccccccccc from aaaaaaaaaaaa; aaaaaaaaaaaa from base, buried" in lineage
    assert "base: 30.0%, interval" in scores
    assert "sums@cccccccccccc, running: 90.0%" in scores
    assert canary.startswith("Canary of sums@cccccccccccc")
    assert "3 steps, mean reward 25% to 75%" in curve
    assert [item.name for item in path.parent.iterdir()] == ["report.html"]
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_a_warning_of_a_collapse_is_on_the_page_once_and_escaped(world, tmp_path):
    data = gather(world)
    steps = tuple(replace(step, collapse=None) for step in data.curves[0].steps)
    warned = (replace(steps[0], collapse="It says '<b>me me</b>'."), *steps[1:])
    found = replace(data, curves=(replace(data.curves[0], steps=warned),))
    page = write_report(found, tmp_path / "report.html").read_text()
    assert page.count("&lt;b&gt;me me&lt;/b&gt;") == 1
    assert f"sums, step {steps[0].step}: It says" in page


def test_what_people_wrote_is_escaped(world, tmp_path):
    text = write_report(gather(world), tmp_path / "report.html").read_text()
    assert "&lt;b&gt;in a hurry&lt;/b&gt;" in text
    assert "<b>in a hurry</b>" not in text


def test_answers_of_the_base_and_the_revision_are_side_by_side(world, tmp_path):
    (sample,) = gather(world).answers
    assert (sample.policy, sample.digest) == ("sums", GOOD)
    assert [pair.question for pair in sample.pairs] == [f"<b>{item}</b>?" for item in range(6)]
    fourth = sample.pairs[3]
    assert (fourth.before, fourth.before_score, fourth.after, fourth.after_score) == (
        "before <3>", 0.0, "after <3>", 1.0,
    )  # fmt: skip
    text = write_report(gather(world), tmp_path / "report.html").read_text()
    row = r"&lt;b&gt;3&lt;/b&gt;\?.*before &lt;3&gt;.*0\.00.*after &lt;3&gt;.*1\.00"
    assert re.search(row, text, re.DOTALL)
    assert "<b>3</b>" not in text


@pytest.mark.parametrize("change", ["UPDATE scores SET question = NULL", "ALTER TABLE scores DROP question"])
def test_scores_from_before_questions_were_kept_show_no_answers(world, change):
    catalog, ledger, release, snapshot = world
    ledger.connection.execute(change)
    older = snapshot.with_name("older.duckdb")
    ledger.snapshot(older)
    assert gather((catalog, ledger, release, older)).answers == ()


def test_a_report_of_nothing_is_a_page(tmp_path):
    text = write_report(ReportData("Empty", NOW), tmp_path / "report.html").read_text()
    assert "<h1>Empty</h1>" in text
    assert "<table" not in text
    assert "<svg" not in text


def test_no_snapshot_is_a_sentence(world, tmp_path):
    with pytest.raises(NotFound, match="no ledger snapshot"):
        collect(tmp_path / "none.duckdb", world[0], ["sums"], title="A run", created_at=NOW)


def test_no_line_of_the_lineage_runs_through_another_revision():
    # Newest first: the champion came a -> b -> e; c and d were tried and left; f began at the base again.
    parents = {"f": None, "e": "b", "d": "b", "c": "a", "b": "a", "a": None}
    rows = [RevisionRow("p", digest, parent, 1, 8, 1, 0.0) for digest, parent in parents.items()]
    nodes = {node.digest: node for node in arrange(rows, champion="e")}
    assert [nodes[digest].lane for digest in "eba"] == [0, 0, 0]
    assert all(nodes[digest].lane > 0 for digest in "fdc")
    for node in nodes.values():
        expected = parents[node.digest]
        assert node.parent == (nodes[expected].row if expected else len(rows))
        between = [other for other in nodes.values() if node.row < other.row < node.parent]
        assert all(other.lane != node.lane for other in between)


def test_a_parent_that_is_not_shown_leads_to_the_last_row():
    rows = [RevisionRow("p", "b", "gone", 1, 8, 1, 0.0)]
    assert arrange(rows, champion=None) == [Node("b", 0, 0, 1)]
    assert "older revisions" in lineage(rows, None)


def test_another_base_that_an_adapter_names_is_on_the_page_and_escaped(world, tmp_path):
    data = gather(world)
    first, *others = data.revisions
    named = replace(data, revisions=(replace(first, named_base="Qwen/<b>8B"), *others))
    page = write_report(named, tmp_path / "report.html").read_text()
    assert f"made for Qwen/&lt;b&gt;8B, served on {data.base}" in page
    assert "made for" not in write_report(data, tmp_path / "other.html").read_text()
