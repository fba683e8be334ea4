"""What people decide about a policy with two revisions: aliases, approvals, holds, restores, freezes."""

import json
import time
from typing import Any

import httpx
import pytest

from engine.catalog.records import served_name
from tests.flows.conftest import Second
from tests.helpers.operated import POLICY, Operated

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]
NO_SCORE, NO_CANARY = "The test needs no score.", "The test needs no users."
# What docs/benchmarks/integrations.md has the figures of.
PROMISED_S = 5
OVER = 'The "test" is over.'


@pytest.fixture
def other(people: Operated, second: Second) -> str:
    """The second revision's digest; the champion is the first one, whatever a test before has decided."""
    version = people.mlflow.get_model_version(POLICY, "1")
    first = served_name(POLICY, version.tags["graftwork.digest"])
    if people.answered_by(POLICY) != first:
        promoted = people.command("decide", "promote", first, "--reason", "The next test.")
        assert promoted.returncode == 0, promoted.stderr
    return str(people.mlflow.get_model_version(POLICY, second.version).tags["graftwork.digest"])


def start_release(people: Operated, digest: str, **form: Any) -> str:
    """Start a release that waits for an approval; return its run once it sleeps."""
    body = {"policy": POLICY, "digest": digest, "approval_s": 86400, "skip_score": NO_SCORE} | form
    run = people.start("release", **body).raise_for_status().json()["id"]
    assert people.wait(run, "Suspended")["name"] == "Suspended"
    return run


def releases(people: Operated) -> list[dict[str, Any]]:
    return people.controller.get(f"/releases?policy={POLICY}").raise_for_status().json()


def running(people: Operated) -> list[str]:
    return [one["revision"] for one in releases(people) if one["state"] == "running"]


def test_alias_moved_in_mlflow_changes_answers_within_five_seconds(
    people: Operated, other: str, second: Second
) -> None:
    first = people.answered_by(POLICY)
    for version in (second.version, "1"):
        before, began = people.answered_by(POLICY), time.monotonic()
        people.mlflow.set_registered_model_alias(POLICY, "champion", version)
        while people.answered_by(POLICY) == before:
            assert time.monotonic() - began < 10 * PROMISED_S
    assert people.answered_by(POLICY) == first


def test_release_waits_for_approval_in_the_resume_form(people: Operated, other: str) -> None:
    promoted = [one["state"] for one in releases(people)].count("promoted")
    run = start_release(people, other, skip_canary=NO_CANARY)

    def resume(approve: object) -> httpx.Response:
        answer = {"approve": approve, "by": "ada", "reason": "It looks right."}
        return people.prefect.post(f"/flow_runs/{run}/resume", json={"run_input": answer}).raise_for_status()

    assert resume("perhaps").json()["status"] == "REJECT"
    assert people.answered_by(POLICY) != served_name(POLICY, other)
    resume(True)
    state = people.wait(run)
    assert state["type"] == "COMPLETED", state["message"]
    assert people.answered_by(POLICY) == served_name(POLICY, other)
    assert [one["state"] for one in releases(people)].count("promoted") == promoted + 1


def test_approval_by_command_wakes_the_sleeping_run(people: Operated, other: str) -> None:
    run = start_release(people, other, skip_canary=NO_CANARY)
    said = people.command("decide", "approve", POLICY, "--reason", "It is right.", "--by", "ada")
    assert said.returncode == 0, said.stderr
    state = people.wait(run)
    assert state["type"] == "COMPLETED", state["message"]
    assert people.answered_by(POLICY) == served_name(POLICY, other)


def test_release_that_is_started_twice_is_one_release_and_its_hold_is_told(
    people: Operated, other: str
) -> None:
    """Of the hold there is an event in Prefect, and what its automation posts to the controller."""
    form = {"policy": POLICY, "digest": other, "approval_s": 86400, "skip_score": NO_SCORE}
    runs = [people.start("release", **form).raise_for_status().json()["id"] for _ in range(2)]
    assert [people.wait(run, "Suspended")["name"] for run in runs] == ["Suspended"] * 2
    assert running(people) == [other]
    people.run("hold", policy=POLICY, reason=OVER)
    assert running(people) == []

    def is_posted() -> bool:
        notices = people.controller.get("/notices").raise_for_status().json()
        texts = [one["reason"] for one in notices if one["name"] == "graftwork.notice.delivered"]
        told = ("graftwork.release.held", f"{POLICY}@", OVER)
        return any(all(part in text for part in told) for text in texts)

    def events() -> dict[str, dict[str, Any]]:
        names = {"filter": {"event": {"name": ["graftwork.release.promoted", "graftwork.release.held"]}}}
        found = people.prefect.post("/events/filter", json=names).raise_for_status().json()["events"]
        return {event["event"]: event["payload"] for event in found}

    # Prefect's server writes events down in batches. The quickstart's release was promoted.
    deadline = time.monotonic() + 60
    while not is_posted() or len(events()) < 2:
        assert time.monotonic() < deadline, (is_posted(), events())
        time.sleep(0.5)
    assert all(payload["link"] and payload["reason"] for payload in events().values())


def test_cancel_of_a_sleeping_run_holds_its_release_within_five_seconds(people: Operated, other: str) -> None:
    """No process hears of it: the run is suspended."""
    run = start_release(people, other)
    assert running(people) == [other]
    began = time.monotonic()
    # As the button of Prefect's UI does.
    cancel = {"state": {"type": "CANCELLING"}}
    people.prefect.post(f"/flow_runs/{run}/set_state", json=cancel).raise_for_status()
    while running(people):
        assert time.monotonic() - began < 10 * PROMISED_S
        time.sleep(0.1)
    held = next(one for one in releases(people) if one["revision"] == other)
    assert (held["state"], held["approval"]) == ("held", "prefect")
    assert "cancelled in Prefect" in held["reason"]


def promote_other(people: Operated, other: str) -> None:
    promoted = people.command(
        "decide", "promote", served_name(POLICY, other), "--reason", "The test wants it."
    )
    assert promoted.returncode == 0, promoted.stderr
    assert people.answered_by(POLICY) == served_name(POLICY, other)


def test_restore_puts_the_previous_champion_back(people: Operated, other: str) -> None:
    before = people.answered_by(POLICY)
    promote_other(people, other)
    # Both answer the whole suite beside each other.
    looked = people.command("recheck", POLICY, "--json")
    assert looked.returncode == 0, looked.stderr
    assert json.loads(looked.stdout)["state"] in ("kept", "lost"), looked.stdout
    people.run("restore", policy=POLICY, reason="Users liked it better.")
    assert people.answered_by(POLICY) == before


def test_a_part_of_the_suite_is_read_beside_the_champion(people: Operated, other: str) -> None:
    champion = people.answered_by(POLICY)
    read = people.command("score", served_name(POLICY, other), "--reads", "suite", "--json")
    assert read.returncode == 0, read.stderr
    part = json.loads(read.stdout)
    assert served_name(POLICY, part["difference"]["against"]) == champion
    # Nothing is read where the champion is right so seldom that nobody can fall below it by the margin.
    assert part["own"]["items"] <= part["own"]["available"]
    assert part["own"]["items"] or not part["has_fallen"]
    assert part["own"]["low"] <= part["own"]["mean"] <= part["own"]["high"]
    alone = people.command("score", POLICY, "--reads", "suite")
    assert alone.returncode == 2
    assert "POLICY@DIGEST" in alone.stderr


def test_frozen_pointers_move_only_for_rollbacks(people: Operated, other: str) -> None:
    first = people.answered_by(POLICY)
    promote_other(people, other)
    assert people.command("decide", "freeze", "--reason", "A holiday.").returncode == 0
    try:
        run = people.start("restore", policy=POLICY, reason="It must not work.").json()["id"]
        state = people.wait(run)
        assert state["type"] == "FAILED"
        assert "frozen" in state["message"].lower()
        people.run("rollback", policy=POLICY, digest=other[:12], reason="It is bad.")
        assert people.answered_by(POLICY) == first
    finally:
        assert people.command("decide", "thaw", "--reason", "It is over.").returncode == 0
    lifted = people.command(
        "rollback", "--lift", served_name(POLICY, other), "--by", "ada", "--reason", "A test."
    )
    assert lifted.returncode == 0, lifted.stderr
