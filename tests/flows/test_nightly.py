"""The nightly run: by its schedule, with what is new since the night before, and never two at once."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.catalog.opening import open_catalog
from engine.settings.params import load_params
from tasks.stuck_runs import free_stuck, kept_out_runs, open_prefect
from tests.helpers.live import eventually
from tests.helpers.operated import POLICY, Operated, write_sums

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]
SOON_S, WAIT_S = 15, 240


@pytest.fixture(scope="module")
def night(people: Operated, quickstart: str) -> Iterator[str]:
    """The champion before a night that found new data; its release stays in its canary meanwhile.

    The night is a second schedule, as a person adds one in Prefect's UI: once a minute, and soon.
    """
    champion = people.answered_by(POLICY)
    data = people.state / "more.jsonl"
    write_sums(data, 2600)
    create = {"name": POLICY, "owner": "local", "data": str(data), "verifier": "exact"}
    people.run("create_policy", **create, scheduled=True, steps=3)
    deployment = people.deployment("nightly")["id"]
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + SOON_S))
    often = {"active": True, "schedule": {"interval": 60, "anchor_date": soon, "timezone": "UTC"}}
    at = f"/deployments/{deployment}/schedules"
    (added,) = people.prefect.post(at, json=[often]).raise_for_status().json()
    # Prefect looks at changed deployments every five seconds, at all every minute.
    people.prefect.patch(f"/deployments/{deployment}", json={"paused": False}).raise_for_status()

    def fired(*states: str) -> list[dict[str, Any]]:
        body = {
            "deployments": {"id": {"any_": [deployment]}},
            "flow_runs": {"state": {"type": {"any_": states}}, "tags": {"all_": ["auto-scheduled"]}},
        }
        return people.prefect.post("/flow_runs/filter", json=body).raise_for_status().json()

    try:
        assert eventually(lambda: fired("RUNNING", "COMPLETED"), WAIT_S), "No nightly run has started."
    finally:
        people.prefect.delete(f"{at}/{added['id']}").raise_for_status()
    assert eventually(lambda: fired("COMPLETED"), WAIT_S), "No nightly run has completed."
    yield champion
    held = people.command("decide", "hold", POLICY, "--reason", "The test is over.")
    assert held.returncode == 0, held.stderr


def test_nightly_has_the_schedule_of_the_settings(people: Operated) -> None:
    (schedule,) = people.deployment("nightly")["schedules"]
    assert schedule["active"]
    assert schedule["schedule"]["cron"] == people.data["nightly"]["cron"]


def test_nightly_fires_by_itself_and_says_why_it_adapts_or_skips(people: Operated, night: str) -> None:
    table = people.artifacts("table")["nightly"]
    assert "data has changed" in table
    assert '"skipped"' in table
    assert "reason" in table


def test_new_data_is_adapted_at_night_and_passes_the_score_gate(people: Operated, night: str) -> None:
    """New data is a new version of the suite: the champion is scored on it too, to be compared."""

    def in_canary() -> Any:
        with open_catalog(people.paths) as catalog:
            found = catalog.releases.all(POLICY, open_only=True)
        return [release for release in found if release.step == "canary"]

    assert eventually(in_canary, WAIT_S), "No release of the night has reached its canary."
    (release,) = in_canary()
    assert night.endswith(str(release.baseline)[:12])


def test_a_schedule_never_overlaps_itself(people: Operated) -> None:
    """Of two nightly runs at once one is cancelled."""
    runs = [people.start("nightly").raise_for_status().json()["id"] for _ in range(2)]
    states = [people.wait(run) for run in runs]
    assert "CANCELLED" in [state["type"] for state in states], states
    assert {state["type"] for state in states} <= {"CANCELLED", "COMPLETED"}, states


def test_a_run_that_was_claimed_and_never_began_keeps_the_slot_until_it_is_ended(people: Operated) -> None:
    """Moved by hand in a far future, since no worker may take it."""
    deployment = people.deployment("nightly")
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400))
    far = {"type": "SCHEDULED", "state_details": {"scheduled_time": later}}

    def claim() -> tuple[str, str]:
        at = f"/deployments/{deployment['id']}/create_flow_run"
        made = people.prefect.post(at, json={"parameters": {"form": {}}, "state": far}).raise_for_status()
        run = made.json()["id"]
        claimed = {"state": {"type": "PENDING", "name": "Pending"}}
        moved = people.prefect.post(f"/flow_runs/{run}/set_state", json=claimed).raise_for_status()
        return run, moved.json()["state"]["type"]

    params = load_params(people.settings)
    dead, first = claim()
    assert (first, claim()[1]) == ("PENDING", "CANCELLED")
    with open_prefect(params) as client:
        told = kept_out_runs(client, time.time())
    assert [(one.deployment, time.time() - one.last_at < 60) for one in told] == [("nightly", True)]
    now = time.time()
    assert [run.id for run in free_stuck(params, now, started=now)] == [dead]
    assert people.state_of(dead)["type"] == "CRASHED"
    last, state = claim()
    assert state == "PENDING"
    ended = {"state": {"type": "CANCELLED", "name": "Cancelled"}}
    people.prefect.post(f"/flow_runs/{last}/set_state", json=ended).raise_for_status()
