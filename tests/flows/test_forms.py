"""Deployments through Prefect's API, as its UI's Run form starts them."""

from typing import Any

import pytest

from tests.helpers.operated import Operated, graftwork, write_sums

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]


DEPLOYMENTS = {
    "create_policy", "adapt", "release", "promote", "rollback", "hold", "pause", "resume", "restore",
    "nightly", "report",
}  # fmt: skip


def test_deployments_show_their_forms(people: Operated, dead: str) -> None:
    for name in DEPLOYMENTS:
        deployment = people.deployment(name)
        schema = deployment["parameter_openapi_schema"]
        (form,) = [one for one in schema["definitions"].values() if "properties" in one][:1] or [None]
        assert deployment["enforce_parameter_schema"]
        assert form, name
        assert deployment["description"]
    adapt = people.deployment("adapt")["parameter_openapi_schema"]["definitions"]["AdaptForm"]["properties"]
    assert all(field["description"] for field in adapt.values())
    assert adapt["steps"]["anyOf"][0]["maximum"] == 100_000


@pytest.mark.parametrize(
    ("deployment", "form", "named"),
    [
        ("adapt", {"policy": "Not A Name"}, "form.policy"),
        ("adapt", {"policy": "arithmetic", "steps": -3}, "form.steps"),
        ("adapt", {"policy": "arithmetic", "stepz": 3}, "stepz"),
        ("release", {"policy": "arithmetic", "weight": 7}, "form.weight"),
        ("rollback", {"policy": "arithmetic", "digest": "zz", "reason": "why not"}, "form.digest"),
        ("create_policy", {"name": "a", "data": "x.jsonl", "verifier": "guess"}, "form.verifier"),
    ],
)
def test_nonsense_in_a_form_is_refused_before_a_run(
    people: Operated, deployment: str, form: dict[str, Any], named: str
) -> None:
    answer = people.start(deployment, **form)
    assert answer.status_code in (409, 422)
    assert named in answer.text


def test_a_fault_of_the_data_is_the_runs_message(people: Operated) -> None:
    bad = people.state / "bad.jsonl"
    bad.write_text('{"question": "1 + 1 =", "answer": "2"}\nnot json\n')
    run = people.start("create_policy", name="bad", data=str(bad), verifier="exact").json()["id"]
    state = people.wait(run)
    assert state["type"] == "FAILED"
    assert f"{bad}:2 " in state["message"]
    assert "valid JSON" in state["message"]
    assert not (people.state / "suites" / "bad").exists()


def test_a_policy_is_made_from_its_form(people: Operated) -> None:
    from engine.catalog.opening import open_catalog

    data = people.state / "sums.jsonl"
    write_sums(data, 1000)
    people.run("create_policy", name="of-ada", owner="ada", data=str(data), verifier="exact")
    with open_catalog(people.paths) as catalog:
        assert catalog.policies.get("of-ada").owner == "ada"
    assert (people.state / "suites" / "of-ada").is_dir()
    assert "policy-of-ada" in people.artifacts("table")


def test_a_caller_gives_a_run_no_command_environment_or_folder(people: Operated) -> None:
    """Prefect's own template of a work pool takes all three from whoever starts a run."""
    at = f"/deployments/{people.deployment('report')['id']}/create_flow_run"
    trace = people.state / "was-here"
    hostile = people.state / "hostile"
    hostile.mkdir()
    # Python imports this at its start.
    (hostile / "sitecustomize.py").write_text(f"open({str(trace)!r}, 'w')")
    variables = {
        "command": f"touch {trace}", "env": {"PYTHONPATH": str(hostile)}, "working_dir": str(hostile),
    }  # fmt: skip
    body = {"parameters": {"form": {}}, "state": {"type": "SCHEDULED"}, "job_variables": variables}
    answer = people.prefect.post(at, json=body)
    if answer.is_success:
        assert people.wait(answer.json()["id"])["type"] == "COMPLETED"
    assert not trace.exists()
    pool = people.prefect.get("/work_pools/graftwork").raise_for_status().json()
    assert "{{" not in str(pool["base_job_template"])


def test_what_an_earlier_version_installed_is_replaced(people: Operated) -> None:
    """Its work pool took variables, and its deployments gave one.

    What is the same stays: a new automation would never hear of a run that died just before.
    """
    from prefect.workers.process import ProcessWorker

    old = {"base_job_template": ProcessWorker.get_default_base_job_template()}
    people.prefect.patch("/work_pools/graftwork", json=old).raise_for_status()
    at = f"/deployments/{people.deployment('report')['id']}"
    people.prefect.patch(at, json={"job_variables": {"working_dir": str(people.state)}}).raise_for_status()
    assert people.deployment("report")["job_variables"]
    automations = people.prefect.post("/automations/filter", json={}).raise_for_status().json()
    again = graftwork("up", settings=people.settings)
    assert again.returncode == 0, again.stderr
    assert people.prefect.post("/automations/filter", json={}).raise_for_status().json() == automations != []
    pool = people.prefect.get("/work_pools/graftwork").raise_for_status().json()
    assert "{{" not in str(pool["base_job_template"])
    people.run("report")
