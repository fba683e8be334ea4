"""The whole loop on the real engine: `graftwork run`, shortened, on services that run already.

That it starts and ends services of its own is in test_interrupts.py; `serve` and `dvc repro` do it each time.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from engine.services import lifecycle
from engine.settings.params import Paths, load_params
from tasks.register import numbers
from tests.helpers.history import step_row
from tests.helpers.main_job import STEPS
from tests.helpers.operated import SERVICES, Operated

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(1600)]


NAMES = ["arithmetic", "sorting"]


@pytest.fixture(scope="module")
def state(people: Operated) -> Path:
    return people.state


def test_summary_has_the_form_that_is_promised(finished: dict[str, Any]) -> None:
    assert set(finished) == {"seconds", "policies", "bad_revision", "shadow", "stages"}
    assert [policy["name"] for policy in finished["policies"]] == NAMES
    for policy in finished["policies"]:
        assert set(policy) == {
            "name", "base_score", "base_ci_low", "base_ci_high", "revision_score", "ci_low", "ci_high",
            "gain", "gain_ci_low", "gain_ci_high", "verdict", "digest",
        }  # fmt: skip
        assert 0 <= policy["base_ci_low"] <= policy["base_score"] <= policy["base_ci_high"] <= 1
        assert 0 <= policy["ci_low"] <= policy["revision_score"] <= policy["ci_high"] <= 1
        assert len(policy["digest"]) == 64
    assert set(finished["bad_revision"]) == {"verdict", "seconds_to_rollback", "requests_after"}
    assert sum(finished["stages"].values()) <= finished["seconds"]


def test_good_revisions_are_better_and_promoted(finished: dict[str, Any]) -> None:
    for policy in finished["policies"]:
        assert policy["verdict"] == "promote"
        assert policy["ci_low"] > policy["base_ci_high"]
        assert policy["revision_score"] >= policy["base_score"] + 0.30


def test_an_evaluator_ends_the_bad_revision_in_its_shadow_before_a_user_meets_it(
    finished: dict[str, Any],
) -> None:
    assert finished["shadow"] == {"verdict": "rollback", "exposed": 0}


def test_bad_revision_is_rolled_back_and_answers_nobody_afterwards(finished: dict[str, Any]) -> None:
    assert finished["bad_revision"]["verdict"] == "rollback"
    assert finished["bad_revision"]["requests_after"] == 0
    assert 0 < finished["bad_revision"]["seconds_to_rollback"] < 120


def test_ledger_and_catalog_agree_with_the_summary(finished: dict[str, Any], state: Path) -> None:
    from engine.catalog.opening import whole_catalog
    from engine.ledger.ledger import open_snapshot

    catalog = whole_catalog(Paths(state).catalog_url)
    champions = {name: catalog.routes.get(name).champion for name in NAMES}
    stones = [stone for stone in catalog.tombstones.in_force() if stone.policy in NAMES]
    catalog.close()
    assert champions == {policy["name"]: policy["digest"] for policy in finished["policies"]}
    assert [stone.policy for stone in stones] == ["arithmetic"]
    with open_snapshot(Paths(state).ledger_snapshot) as ledger:
        for policy in finished["policies"]:
            query = "SELECT avg(score) FROM scores WHERE digest = ?"
            assert ledger.execute(query, [policy["digest"]]).fetchall()[0][0] == pytest.approx(
                policy["revision_score"]
            )
        ratios = ledger.execute(
            "SELECT importance_ratio FROM train_steps WHERE list_contains(?, policy)", [NAMES]
        ).fetchall()
        assert len(ratios) >= 2 * STEPS
        assert all(abs(ratio - 1) <= 1e-3 for (ratio,) in ratios)
        # Base, champion and canary have all answered users, each under its own name.
        arms = {
            arm
            for (arm,) in ledger.execute(
                "SELECT DISTINCT arm FROM observations WHERE purpose = 'user'"
            ).fetchall()
        }
        assert {"base", "champion", "canary"} <= arms
        last = ledger.execute(
            "SELECT max(\"at\") FROM observations WHERE purpose = 'user' AND digest = ?", [stones[0].digest]
        ).fetchall()[0][0]
    assert last < stones[0].at + 1


def test_mlflow_and_the_ledger_hold_the_same_numbers_of_every_step(
    finished: dict[str, Any], state: Path
) -> None:
    from engine.adapters.manifests import stored_manifest

    assert not (Paths(state).spool / "rejected").exists()
    client = MlflowClient(f"sqlite:///{Paths(state).mlflow_db}")
    for policy in finished["policies"]:
        directory = Paths(state).revision(policy["name"], policy["digest"])
        steps = ledger_steps(Paths(state), stored_manifest(directory)["config"]["session"])
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
        (run,) = client.search_runs(
            [client.get_experiment_by_name("graftwork").experiment_id],
            f"tags.`graftwork.digest` = '{policy['digest']}'",
        )
        names = set(steps[0]) & set(run.data.metrics)
        # Known where a loss asks for the divergence, and where a base has routes to stray from.
        unknown = {"kl", "out_of_route"}
        assert {name for name in numbers(step_row(1)) if "/" not in name} - unknown <= names
        for name in names:
            history = client.get_metric_history(run.info.run_id, name)
            assert {point.step: point.value for point in history} == {
                step["step"]: step[name] for step in steps if step[name] is not None
            }, name


def ledger_steps(paths: Any, session: str) -> list[dict[str, Any]]:
    from engine.ledger.ledger import open_snapshot

    with open_snapshot(paths.ledger_snapshot) as ledger:
        found = ledger.execute("FROM train_steps WHERE session = ? ORDER BY step", [session])
        names = [column[0] for column in found.description or []]
        return [dict(zip(names, values, strict=True)) for values in found.fetchall()]


def test_no_merged_checkpoint_is_written(finished: dict[str, Any], state: Path) -> None:
    weights = [path.stat().st_size for path in (state / "bases").rglob("*.safetensors")]
    adapters = [path.stat().st_size for path in (state / "revisions").rglob("*.safetensors")]
    assert adapters
    assert max(adapters) < min(weights)


def test_report_opens_offline(finished: dict[str, Any], state: Path) -> None:
    pages = list((state / "runs").glob("report-*.html"))
    assert pages
    for page in pages:
        text = page.read_text()
        assert "<svg" in text
        assert 'src="http' not in text
        assert "@import" not in text


def test_services_that_ran_before_run_on(finished: dict[str, Any], people: Operated) -> None:
    states = {service.name: service.state for service in lifecycle.status(load_params(people.settings))}
    assert states == dict.fromkeys((*SERVICES, "worker"), "running")


def test_prefect_shows_what_the_job_did(finished: dict[str, Any], state: Path) -> None:
    with closing(sqlite3.connect(f"file:{Paths(state).prefect}/prefect.db?mode=ro", uri=True)) as database:
        flows = {name for (name,) in database.execute("SELECT name FROM flow")}
        kinds = {kind for (kind,) in database.execute("SELECT type FROM artifact")}
    assert {"demo", "adapt", "release"} <= flows
    # Prefect stores a link as markdown.
    assert {"table", "markdown"} <= kinds
