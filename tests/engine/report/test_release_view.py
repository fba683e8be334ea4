"""A release on the report: its intervals over time, weights, guards, verdict and reason."""

import math
import re
from dataclasses import asdict, replace

import pytest

from engine.catalog.catalog import Catalog, Release
from engine.controller.advance import Evidence
from engine.quality.guards import GuardResult
from engine.report.data import ReleaseResult
from engine.report.pages import collect, render
from engine.settings.params import Params
from tests.helpers.shown_release import released


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Params:
    return Params(state_dir=tmp_path_factory.mktemp("release") / "state")


@pytest.fixture(scope="module")
def release(params: Params) -> Release:
    return released(params, canary=0.95, baseline=0.9)


def page_of(params: Params) -> tuple[ReleaseResult, str]:
    with Catalog(params.paths.catalog_url) as catalog:
        data = collect(params.paths.ledger_snapshot, catalog, ["sorting"], title="A run", created_at=0.0)
    (shown,) = data.releases
    return shown, render(data)


@pytest.mark.long
def test_it_shows_weights_intervals_guards_and_the_reason(params: Params, release: Release) -> None:
    shown, page = page_of(params)
    assert release.state == shown.state == "promoted"
    assert [weight for _, weight in shown.weights] == [0.1, 0.25, 0.5, 0.95]
    moments = [at for at, _ in shown.weights]
    assert moments == sorted(moments)
    assert 0 == moments[0] < moments[-1] < shown.canary_s
    guards = {guard.guard: guard for guard in shown.guards}
    assert len(guards) == 9
    assert (guards["reward"].state, guards["reward"].required) == ("clear", True)
    lower = guards["reward"].lower
    assert shown.timeline[-1].lower >= lower >= -shown.margin
    assert f"{lower:+.3f} to" in page
    assert release.reason in re.sub(r"&[#\w]+;", "'", page)
    assert shown.feedback in page
    assert shown.fallbacks > 0
    assert f"{shown.fallbacks} of the canary's requests" in page.replace("&#39;", "'")
    assert "share of users 10%, 25%, 50%, 95%" in page


@pytest.mark.parametrize("evaluator", [None, "nothing", "both"])
def test_a_running_release_shows_what_the_guards_say_now(
    params: Params, release: Release, evaluator: str | None
) -> None:
    """Whether there is a shadow, which an evaluator that decides nothing does not make, or no evaluator."""
    one = {"kind": "python:examples.evaluator:sums", "decides": evaluator}
    settings = release.settings | ({"evaluators": {"sums": one}} if evaluator else {})
    with Catalog(params.paths.catalog_url) as catalog:
        changes = {"state": "running", "evidence": {}, "settings": settings}
        catalog.releases.update(release.id, catalog.releases.get(release.id).version, **changes)
        try:
            shown, _ = page_of(params)
        finally:
            back = {"state": release.state, "evidence": release.evidence, "settings": release.settings}
            catalog.releases.update(release.id, catalog.releases.get(release.id).version, **back)
    names = {guard.guard for guard in shown.guards} - {"score by sums"}
    assert {name for name in names if not name.startswith("shadow: ")} == {
        row["guard"] for row in release.evidence["canary"]["guards"]
    }
    assert ("shadow: score by sums" in names) == (evaluator == "both")
    assert "answers were rated" in shown.feedback


def test_the_live_page_shows_what_a_release_waits_for(params: Params, release: Release) -> None:
    pause = {"by": "ann", "reason": "<Lunch>", "at": 1.0}
    with Catalog(params.paths.catalog_url) as catalog:
        changes = {"state": "running", "step": "canary", "evidence": {}, "pauses": [pause]}
        running = catalog.releases.update(release.id, catalog.releases.get(release.id).version, **changes)
        as_then = {"champion": release.baseline, "canary": release.revision, "weight": release.weight}
        route = replace(catalog.routes.get("sorting"), **as_then)
        latest = {release.id: Evidence(61.0, route, weight_s=20.0)}
        snapshot, names = params.paths.ledger_snapshot, ["sorting"]
        try:
            data = collect(snapshot, catalog, names, title="A run", created_at=0.0, latest=latest)
        finally:
            back = {"state": release.state, "step": "done", "evidence": release.evidence, "pauses": []}
            catalog.releases.update(release.id, running.version, **back)
    table = re.sub(r"\s*<[^>]+>\s*", "|", render(data, live=True).split("What running releases wait for.")[1])
    for line in ("pause|paused by ann: &lt;Lunch&gt;", "60 s", "no harm in 20 s", "promotion in 40 s"):
        assert line in table.split("Releases, newest first")[0].replace("||", "|")
    assert "What running releases wait for." not in page_of(params)[1]


def test_a_bound_that_nothing_is_known_of_is_not_a_number(params: Params, release: Release) -> None:
    shown, page = page_of(params)
    unknown = [guard for guard in shown.guards if not math.isfinite(guard.upper)]
    assert page.count("not known yet") == len(unknown)
    assert "inf" not in re.findall(r'class="number">([^<]*)<', page)


def test_what_is_only_observed_is_shown_as_such(params: Params, release: Release) -> None:
    """The evidence of an earlier version has nothing that is only observed."""
    row = asdict(GuardResult("score by taste", "harm", -0.4, -0.1, 30, 120, "a rule", evaluator="taste"))
    canary = release.evidence["canary"]
    for observed, shown_as in (({"observed": [row]}, 1), ({}, 0)):
        with Catalog(params.paths.catalog_url) as catalog:
            old = catalog.releases.get(release.id)
            stored = {name: value for name, value in canary.items() if name != "observed"} | observed
            catalog.releases.update(old.id, old.version, evidence=release.evidence | {"canary": stored})
        shown, page = page_of(params)
        assert [one.guard for one in shown.observed] == ["score by taste"] * shown_as
        assert page.count("(observed only)") == shown_as
        assert len(shown.guards) == len(canary["guards"])
