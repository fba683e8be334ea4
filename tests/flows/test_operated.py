"""People operate it: deployments through Prefect's API, aliases in MLflow, a person's own data and verifier.

One `graftwork up` on real services; the tests follow one policy from its data to its champion, in order.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import yaml
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from engine.adapters.revision import read_manifest
from engine.base.resident import ensure_base
from engine.security.credentials import NAMES, USER, known_credential
from engine.services import lifecycle
from engine.settings.params import load_params, served_name
from tests.helpers import command_line
from tests.helpers.document_blocks import PORTS, RUN, RUN_UP, marked, run, scratch
from tests.helpers.documents import reading_order
from tests.helpers.operated import ROOT, Operated, graftwork, skeleton, write_settings, write_sums
from tests.helpers.parity import Reference, ask, differences, prompts

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]
# The pages may create policies of their own, such as `sums`.
POLICY = "additions"
OVER = 'The "test" is over.'
DEPLOYMENTS = {
    "create_policy", "adapt", "release", "promote", "rollback", "hold", "restore", "nightly", "report",
}  # fmt: skip


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    state = tmp_path_factory.mktemp("operated")
    # Not while the tests run. And how good a few steps are is the CPU's rounding, so any score passes.
    far = f"0 {(time.gmtime().tm_hour + 12) % 24} * * *"
    settings = write_settings(state, nightly={"cron": far}, release={"score_margin": 1.0})
    shutil.copytree(ROOT / "eval_suites", state / "suites")
    started = graftwork("up", settings=settings)
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        yield Operated(settings, state)
    finally:
        stopped = graftwork("down", settings=settings)
    assert stopped.returncode == 0, stopped.stderr
    left = [
        one for one in psutil.process_iter(["cmdline"]) if str(state) in " ".join(one.info["cmdline"] or [])
    ]
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def dead(people: Operated) -> str:
    """A run whose process was killed after its first heartbeat; the last test looks what became of it."""
    at = f"/deployments/{people.deployment('report')['id']}/create_flow_run"
    body = {"parameters": {"form": {}}, "state": {"type": "SCHEDULED", "name": "Later"}}
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400))
    body["state"]["state_details"] = {"scheduled_time": later}
    run = people.prefect.post(at, json=body).raise_for_status().json()["id"]
    for kind in ("PENDING", "RUNNING"):
        moved = people.prefect.post(
            f"/flow_runs/{run}/set_state", json={"state": {"type": kind}, "force": True}
        )
        moved.raise_for_status()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    beat = {
        "id": str(uuid.uuid4()),
        "occurred": now,
        "event": "prefect.flow-run.heartbeat",
        "resource": resource,
    }
    people.prefect.post("/events", json=[beat | {"related": [], "payload": {}}]).raise_for_status()
    return run


@pytest.fixture(scope="module")
def rows(people: Operated) -> list[dict[str, str]]:
    return write_sums(people.state / "sums.jsonl", 2000)


@pytest.fixture(scope="module")
def created(people: Operated, rows: list[dict[str, str]]) -> str:
    """The person's policy, made from the form."""
    data = str(people.state / "sums.jsonl")
    return people.run("create_policy", name=POLICY, owner="ada", data=data, verifier="exact")


@pytest.fixture(scope="module")
def adapted(people: Operated, created: str) -> str:
    """The run that trained its first revision."""
    return people.run("adapt", policy=POLICY, steps=12)


@pytest.fixture(scope="module")
def promoted(people: Operated, adapted: str, rows: list[dict[str, str]]) -> str:
    """The run that released it to users, to its verdict."""
    with people.users(POLICY, rows):
        return people.run("release", policy=POLICY, by="ada", max_seconds=120)


@pytest.fixture(scope="module")
def own_policy(people: Operated) -> str:
    """What the example of a policy of one's own prints; others ask and schedule its policy."""
    return people.example("own_policy.sh")


@pytest.fixture(scope="module")
def second(people: Operated, promoted: str) -> str:
    """Train a second revision; return its version in MLflow."""
    people.run("adapt", policy=POLICY, steps=2, seed=9, scored=False)
    return str(max(int(one.version) for one in people.mlflow.search_model_versions(f"name = '{POLICY}'")))


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
    assert f"{bad}:2 is not valid JSON" in state["message"]
    assert not (people.state / "suites" / "bad").exists()


def test_a_jsonl_file_becomes_a_promoted_adapter(people: Operated, promoted: str) -> None:
    from engine.catalog.catalog import Catalog
    from engine.settings.params import Paths

    catalog = Catalog(Paths(people.state).catalog_url)
    champion, owner = catalog.routes.get(POLICY).champion, catalog.policies.get(POLICY).owner
    (released,) = catalog.releases.all(POLICY)
    catalog.close()
    assert owner == "ada"
    assert (released.state, released.revision) == ("promoted", champion)
    assert people.answered_by(POLICY) == served_name(POLICY, str(champion))


def test_runs_show_tags_and_artifacts(people: Operated, promoted: str, adapted: str) -> None:
    tags = people.prefect.get(f"/flow_runs/{adapted}").json()["tags"]
    revision = people.answered_by(POLICY)
    assert {f"policy:{POLICY}", f"revision:{revision}"} <= set(tags)
    tables = people.artifacts("table")
    assert {f"policy-{POLICY}", f"revision-{POLICY}", f"settings-{POLICY}", f"verdict-{POLICY}"} <= set(
        tables
    )
    assert people.artifacts("progress")[f"training-{POLICY}"] == 100
    assert revision in people.artifacts("markdown")[f"registry-{POLICY}"]


def test_version_page_says_what_a_person_wants_to_know(people: Operated, promoted: str) -> None:
    version = people.mlflow.get_model_version(POLICY, "1")
    for heading in ("Scores", "Verdicts", "Lineage", "Learning curve", "Effect probe", "Size", "Cost"):
        assert heading in version.description, version.description
    assert version.tags["graftwork.probe"] == "accepted"
    assert version.tags["graftwork.verdict"] == "promote"
    model = people.mlflow.get_logged_model(version.source.removeprefix("models:/"))
    metrics = {metric.key: metric.value for metric in model.metrics or []}
    assert metrics[f"{POLICY}.mean"] == pytest.approx(float(version.tags["graftwork.score"]), abs=1e-4)


def test_downloaded_version_in_plain_peft_gives_the_served_log_probabilities(
    people: Operated, promoted: str, tmp_path: Path
) -> None:
    import mlflow
    from peft import PeftModel

    # By arguments: other tests of this process leave MLflow's global settings behind.
    source, url = people.mlflow.get_model_version_download_uri(POLICY, "1"), people.url("mlflow")
    where = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(tmp_path), tracking_uri=url))
    (config,) = where.rglob("adapter_config.json")
    name = served_name(POLICY, read_manifest(config.parent).digest)
    params = load_params(people.settings)
    base = ensure_base(params.base, params.paths).path
    plain, opened = Reference(base, None), Reference(base, None)
    opened.model = PeftModel.from_pretrained(opened.model, config.parent)
    requests = [(name, prompt) for prompt in prompts(8)]
    engine = SimpleNamespace(url=people.url("engine"), key=people.key)
    answers = asyncio.run(ask(engine, requests))
    assert {answer["revision"] for answer in answers} == {name}
    assert differences(requests, answers, {name: opened}).max() < 1e-4
    # The adapter must matter, or this proves nothing.
    assert differences(requests, answers, {name: plain}).max() > 1e-2


def test_version_serves_from_another_state_directory(people: Operated, promoted: str, tmp_path: Path) -> None:
    """As on another machine: its own catalog, store and key; MLflow is asked once, for the download."""
    name, question = people.answered_by(POLICY), "What is 31 + 46?"
    other = Operated(write_settings(tmp_path), tmp_path)
    digest = name.partition("@")[2]
    command = [sys.executable, "-m", "flows.cli", "serve", "--params", str(other.settings)]
    command += ["--revision", digest, "--registry", people.url("mlflow")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serving:
        try:
            said = []
            for line in serving.stdout or ():
                said.append(line)
                if " is served at " in line:
                    break
            assert serving.poll() is None, said
            with people.client() as here, other.client() as there:
                texts = [people.ask(client, name, question).json()["choices"] for client in (here, there)]
            assert texts[0] == texts[1]
        finally:
            serving.send_signal(signal.SIGINT)
    assert any("Effect probe: Reproduced" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "code", "fault"),
    [
        (("--revision", "abcdef"), 5, "There is no revision 'abcdef'"),
        (("--revision", "oh no"), 2, "names no revision"),
        (("--revision", "abcdef", "--from", "/nowhere"), 5, "/nowhere contains 0 revisions"),
        (("--revision", "abcdef", "--registry", "{mlflow}"), 5, "has no version whose digest starts"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    people: Operated, tmp_path: Path, arguments: tuple[str, ...], code: int, fault: str
) -> None:
    given = [argument.format(mlflow=people.url("mlflow")) for argument in arguments]
    refused = command_line.graftwork("serve", *given, "--params", str(write_settings(tmp_path)))
    assert refused.returncode == code
    assert fault in refused.stderr
    assert "Traceback" not in refused.stderr


def test_alias_moved_in_mlflow_changes_answers_within_five_seconds(people: Operated, second: str) -> None:
    first = people.answered_by(POLICY)
    for version in (second, "1"):
        before, began = people.answered_by(POLICY), time.monotonic()
        people.mlflow.set_registered_model_alias(POLICY, "champion", version)
        while people.answered_by(POLICY) == before:
            assert time.monotonic() - began < 5
    assert people.answered_by(POLICY) == first


def test_release_waits_for_approval_in_the_resume_form(people: Operated, second: str) -> None:
    why = "The test needs no users."
    run = people.start("release", policy=POLICY, approval_hours=24, skip_score=why, skip_canary=why).json()[
        "id"
    ]
    assert people.wait(run, "Suspended")["name"] == "Suspended"
    champion = people.answered_by(POLICY)
    answer = {"approve": "perhaps", "by": "ada", "reason": "It looks right."}
    refused = people.prefect.post(f"/flow_runs/{run}/resume", json={"run_input": answer}).json()
    assert refused["status"] == "REJECT"
    answer["approve"] = True
    people.prefect.post(f"/flow_runs/{run}/resume", json={"run_input": answer}).raise_for_status()
    state = people.wait(run)
    assert state["type"] == "COMPLETED", state["message"]
    assert people.answered_by(POLICY) != champion
    releases = people.controller.get(f"/releases?policy={POLICY}").json()
    assert [one["state"] for one in releases].count("promoted") == 2


# What a caller without a login reached before there were logins.
STRANGERS = [
    # For the lack of a CSRF token, before the login is looked at.
    ("prefect", "POST", "/api/flow_runs/filter", 403),
    ("prefect", "GET", "/api/admin/settings", 401),
    ("mlflow", "GET", "/api/2.0/mlflow/registered-models/search", 401),
    ("mlflow", "POST", "/api/2.0/mlflow/registered-models/alias", 401),
    ("mlflow", "GET", "/", 401),
    ("trainer", "GET", "/sessions", 401),
    ("trainer", "POST", "/forget_policy", 401),
    ("controller", "GET", "/ledger/observations", 401),
    ("controller", "POST", "/notices/inbox", 401),
    ("controller", "GET", "/", 401),
]


@pytest.mark.parametrize(("service", "method", "path", "status"), STRANGERS)
def test_a_stranger_reaches_no_service(
    people: Operated, service: str, method: str, path: str, status: int
) -> None:
    body = {"json": {}} if method == "POST" else {}
    answer = httpx.request(method, people.url(service) + path, timeout=20, **body)
    assert answer.status_code == status


@pytest.mark.parametrize("service", ["engine", "trainer", "controller", "mlflow", "prefect"])
def test_a_rebound_name_reaches_no_service(people: Operated, service: str) -> None:
    path = {"prefect": "/api/version", "mlflow": "/"}.get(service, "/health")
    answer = httpx.get(people.url(service) + path, headers={"host": "evil.example.org"}, timeout=20)
    assert answer.status_code in (400, 403)
    assert "host" in answer.text.lower()


def test_prefect_answers_its_own_pages_alone(people: Operated) -> None:
    asked = {"origin": "https://evil.example.org", "access-control-request-method": "POST"}
    at = f"{people.url('prefect')}/api/flow_runs/filter"
    assert "access-control-allow-origin" not in httpx.options(at, headers=asked, timeout=20).headers
    own = httpx.options(at, headers=asked | {"origin": people.url("prefect")}, timeout=20)
    assert own.headers["access-control-allow-origin"] == people.url("prefect")
    # A login alone changes nothing: the browser of who is logged in would send it along.
    login = httpx.BasicAuth(USER, known_credential(people.paths, "prefect"))
    assert httpx.post(at, json={}, auth=login, timeout=20).status_code == 403


def test_engine_and_trainer_start_without_logins(people: Operated) -> None:
    secrets = [known_credential(people.paths, name) for name in NAMES]
    for service in lifecycle.status(load_params(people.settings)):
        tree = psutil.Process(service.pid)
        for process in (tree, *tree.children(recursive=True)):
            # A child may end meanwhile.
            with suppress(psutil.NoSuchProcess):
                text = str(process.environ())
                assert service.name in ("mlflow", "prefect", "worker") or not any(
                    secret in text for secret in secrets
                ), service.name
        assert tree.is_running()


def test_what_the_services_write_is_their_users_alone(people: Operated) -> None:
    paths = people.paths
    written = [paths.mlflow_logins, paths.ledger, people.state / "supervisor.conf", *paths.logs.glob("*.log")]
    assert {path.name: path.stat().st_mode & 0o077 for path in written if path.stat().st_mode & 0o077} == {}


def test_people_log_in_to_the_pages(people: Operated, chromium: str) -> None:
    """With what `graftwork login` prints: Prefect's form, and the browser's own for the other two."""
    printed = people.command("login", "--json")
    logins = {one["service"]: one for one in json.loads(printed.stdout)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(logins["prefect"]["address"])
        page.get_by_label("Password").or_(page.locator("input[type=password]")).first.fill(
            logins["prefect"]["password"]
        )
        page.keyboard.press("Enter")
        page.goto(f"{logins['prefect']['address']}/deployments")
        page.get_by_text("create_policy").first.wait_for(timeout=30_000)
        for service, shown in (("mlflow", "Model"), ("controller", "Policies")):
            login = logins[service]
            known = {"username": login["user"], "password": login["password"]}
            page = browser.new_context(http_credentials=known).new_page()
            page.goto(login["address"])
            page.get_by_text(shown).first.wait_for(timeout=30_000)
            with pytest.raises(PlaywrightError, match="INVALID_AUTH_CREDENTIALS"):
                browser.new_context().new_page().goto(login["address"])
        browser.close()


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
    """Its work pool took variables, and its deployments gave one."""
    from prefect.workers.process import ProcessWorker

    old = {"base_job_template": ProcessWorker.get_default_base_job_template()}
    people.prefect.patch("/work_pools/graftwork", json=old).raise_for_status()
    at = f"/deployments/{people.deployment('report')['id']}"
    people.prefect.patch(at, json={"job_variables": {"working_dir": str(people.state)}}).raise_for_status()
    assert people.deployment("report")["job_variables"]
    again = graftwork("up", settings=people.settings)
    assert again.returncode == 0, again.stderr
    pool = people.prefect.get("/work_pools/graftwork").raise_for_status().json()
    assert "{{" not in str(pool["base_job_template"])
    people.run("report")


def test_release_that_is_started_twice_is_one_release(people: Operated, second: str) -> None:
    champion = people.answered_by(POLICY).partition("@")[2]
    versions = people.mlflow.search_model_versions(f"name = '{POLICY}'")
    digests = [version.tags["graftwork.digest"] for version in versions]
    (other,) = [digest for digest in digests if not digest.startswith(champion)]
    form = {"policy": POLICY, "digest": other, "approval_hours": 1, "skip_score": "The test needs no score."}
    runs = [people.start("release", **form).json()["id"] for _ in range(2)]
    assert [people.wait(run, "Suspended")["name"] for run in runs] == ["Suspended"] * 2
    releases = people.controller.get(f"/releases?policy={POLICY}").json()
    assert [one["revision"] for one in releases if one["state"] == "running"] == [other]
    people.run("hold", policy=POLICY, reason=OVER)


def test_cancel_of_a_sleeping_run_holds_its_release_within_five_seconds(
    people: Operated, second: str
) -> None:
    """No process hears of it: the run is suspended."""
    champion = people.answered_by(POLICY).partition("@")[2]
    versions = people.mlflow.search_model_versions(f"name = '{POLICY}'")
    digests = [version.tags["graftwork.digest"] for version in versions]
    (other,) = [digest for digest in digests if not digest.startswith(champion)]
    form = {"policy": POLICY, "digest": other, "approval_hours": 1, "skip_score": "The test needs no score."}
    run = people.start("release", **form).json()["id"]
    assert people.wait(run, "Suspended")["name"] == "Suspended"

    def releases() -> list[dict[str, Any]]:
        return people.controller.get(f"/releases?policy={POLICY}").json()

    assert [one["revision"] for one in releases() if one["state"] == "running"] == [other]
    began = time.monotonic()
    # As the button of Prefect's UI does.
    cancel = {"state": {"type": "CANCELLING"}}
    people.prefect.post(f"/flow_runs/{run}/set_state", json=cancel).raise_for_status()
    while any(one["state"] == "running" for one in releases()):
        assert time.monotonic() - began < 5
        time.sleep(0.1)
    held = next(one for one in releases() if one["revision"] == other)
    assert (held["state"], held["approval"]) == ("held", "prefect")
    assert "cancelled in Prefect" in held["reason"]


def test_approval_by_command_wakes_the_sleeping_run(people: Operated, second: str) -> None:
    champion = people.answered_by(POLICY).partition("@")[2]
    versions = people.mlflow.search_model_versions(f"name = '{POLICY}'")
    digests = [version.tags["graftwork.digest"] for version in versions]
    (other,) = [digest for digest in digests if not digest.startswith(champion)]
    why = "The test needs no users."
    form = {"policy": POLICY, "digest": other, "approval_hours": 1, "skip_score": why, "skip_canary": why}
    run = people.start("release", **form).json()["id"]
    assert people.wait(run, "Suspended")["name"] == "Suspended"
    said = people.command("approve", POLICY, "--reason", "It is right.", "--by", "ada")
    assert said.returncode == 0, said.stderr
    state = people.wait(run)
    assert state["type"] == "COMPLETED", state["message"]
    assert people.answered_by(POLICY).endswith(other[:12])


def test_what_happened_is_an_event_and_a_notification(people: Operated, second: str) -> None:
    """The hold of the test before: an event in Prefect, and what its automation posts to the controller."""
    promoted, held = "graftwork.release.promoted", "graftwork.release.held"

    def posted() -> bool:
        notices = people.controller.get("/notices").json()
        texts = [one["reason"] for one in notices if one["name"] == "graftwork.notice.delivered"]
        return any(held in text and f"{POLICY}@" in text and OVER in text for text in texts)

    def events() -> dict[str, dict[str, Any]]:
        names = {"filter": {"event": {"name": [promoted, held]}}}
        found = people.prefect.post("/events/filter", json=names).raise_for_status().json()["events"]
        return {event["event"]: event["payload"] for event in found}

    # Prefect's server writes events down in batches.
    deadline = time.monotonic() + 60
    while not posted() or set(events()) != {promoted, held}:
        assert time.monotonic() < deadline, (posted(), events())
        time.sleep(0.5)
    assert all(payload["link"] and payload["reason"] for payload in events().values())


def test_restore_puts_the_previous_champion_back(people: Operated, second: str) -> None:
    before = people.answered_by(POLICY)
    people.run("restore", policy=POLICY, reason="Users liked it better.")
    assert people.answered_by(POLICY) != before


def test_frozen_pointers_move_only_for_rollbacks(people: Operated, second: str) -> None:
    champion = people.answered_by(POLICY)
    assert people.command("freeze", "--reason", "A holiday.").returncode == 0
    try:
        run = people.start("restore", policy=POLICY, reason="It must not work.").json()["id"]
        state = people.wait(run)
        assert state["type"] == "FAILED"
        assert "frozen" in state["message"].lower()
        digest = champion.partition("@")[2]
        people.run("rollback", policy=POLICY, digest=digest, reason="It is bad.")
        assert people.answered_by(POLICY) != champion
    finally:
        assert people.command("thaw", "--reason", "It is over.").returncode == 0
    bad = people.command("lift", champion, "--by", "ada", "--reason", "A test.")
    assert bad.returncode == 0, bad.stderr


def test_nightly_fires_by_itself_and_says_why_it_skips(people: Operated, created: str) -> None:
    deployment = people.deployment("nightly")
    (schedule,) = deployment["schedules"]
    assert schedule["active"]
    assert schedule["schedule"]["cron"] == people.data["nightly"]["cron"]

    def fired() -> list[dict[str, Any]]:
        body = {
            "deployments": {"id": {"any_": [deployment["id"]]}},
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}, "tags": {"all_": ["auto-scheduled"]}},
        }
        return people.prefect.post("/flow_runs/filter", json=body).raise_for_status().json()

    # A second schedule, as a person adds one in Prefect's UI: once a minute, soon for the first time.
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 15))
    often = {"active": True, "schedule": {"interval": 60, "anchor_date": soon, "timezone": "UTC"}}
    at = f"/deployments/{deployment['id']}/schedules"
    (added,) = people.prefect.post(at, json=[often]).raise_for_status().json()
    try:
        deadline = time.monotonic() + 300
        while not fired():
            assert time.monotonic() < deadline, "No nightly run completed."
            time.sleep(1)
    finally:
        people.prefect.delete(f"{at}/{added['id']}").raise_for_status()
    (table,) = [data for key, data in people.artifacts("table").items() if key == "nightly"]
    assert '"skipped"' in table
    assert "reason" in table


def test_new_data_is_adapted_at_night_and_passes_the_score_gate(
    people: Operated, second: str, rows: list[dict[str, str]]
) -> None:
    """New data is a new version of the suite: the champion is scored on it too, to be compared."""
    from engine.catalog.catalog import Catalog
    from engine.settings.params import Paths

    champion = people.answered_by(POLICY)
    data = write_sums(people.state / "more.jsonl", 2600)
    assert len(data) > len(rows)
    create = {"name": POLICY, "owner": "ada", "data": str(people.state / "more.jsonl"), "verifier": "exact"}
    people.run("create_policy", **create, scheduled=True, steps=3)
    people.run("nightly", policies=[POLICY])
    catalog = Catalog(Paths(people.state).catalog_url)
    deadline = time.monotonic() + 240
    while (
        not (open_releases := catalog.releases.all(POLICY, open_only=True))
        or open_releases[0].step != "canary"
    ):
        assert time.monotonic() < deadline, (open_releases, people.all_artifacts("nightly"))
        time.sleep(0.5)
    catalog.close()
    assert champion.endswith(str(open_releases[0].baseline)[:12])
    assert any("Its data has changed" in table for table in people.all_artifacts("nightly"))
    people.run("hold", policy=POLICY, reason=OVER)


def test_a_schedule_never_overlaps_itself(people: Operated, created: str) -> None:
    """Of two nightly runs at once one is cancelled."""
    runs = [people.start("nightly").raise_for_status().json()["id"] for _ in range(2)]
    states = [people.wait(run) for run in runs]
    assert "CANCELLED" in [state["type"] for state in states], states
    assert {state["type"] for state in states} <= {"CANCELLED", "COMPLETED"}, states


@pytest.fixture(scope="module")
def adapted_at_once(people: Operated) -> tuple[str, str]:
    """Two policies that two runs of the worker's have adapted at the same time."""
    names = "arithmetic", "sorting"
    runs = [people.start("adapt", policy=name, steps=2, scored=False).json()["id"] for name in names]
    assert [people.wait(run)["type"] for run in runs] == ["COMPLETED"] * 2
    return names


@pytest.fixture(scope="module")
def champion_of_the_pages(people: Operated, adapted_at_once: tuple[str, str]) -> None:
    """A champion of `arithmetic`, which README.md asks, as `make run` leaves one."""
    version = people.mlflow.search_model_versions("name = 'arithmetic'")[-1]
    name = served_name("arithmetic", version.tags["graftwork.digest"])
    done = people.command("promote", name, "--reason", "The pages ask it.")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", [path for path in reading_order() if marked(path, RUN_UP)], ids=lambda page: page.stem
)
def test_blocks_of_a_page_run_on_the_services(
    people: Operated, champion_of_the_pages: None, page: Path, tmp_path: Path
) -> None:
    """In reading order: pages use what those before them made."""
    checkout = scratch(tmp_path / "checkout", people.settings, people.state, people.state / "suites")
    ports = {name: people.data[name]["port"] for name in PORTS}
    run(marked(page, RUN, RUN_UP), checkout, ports, timeout_s=1000)


def test_mlflow_and_prefect_may_die_in_the_middle_of_an_adapt(people: Operated, created: str) -> None:
    """Their process reaper and supervisor start them again; the run goes on and registers its version."""
    from engine.services.lifecycle import status

    before = len(people.mlflow.search_model_versions(f"name = '{POLICY}'"))
    run = people.start("adapt", policy=POLICY, steps=8, seed=11, scored=False).json()["id"]
    assert people.wait(run, "Running")["name"] == "Running"
    pids = {service.name: service.pid for service in status(load_params(people.settings))}
    for name in ("mlflow", "prefect"):
        os.kill(int(pids[name] or 0), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while True:
        try:
            state = people.wait(run)
            break
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "Prefect did not come back."
            time.sleep(0.5)
    assert state["type"] == "COMPLETED", state["message"]
    assert len(people.mlflow.search_model_versions(f"name = '{POLICY}'")) == before + 1


def test_several_policies_are_adapted_at_once(people: Operated, adapted_at_once: tuple[str, str]) -> None:
    """Two runs of the worker's, and one command with both names: each policy ends with a new revision."""

    def versions(name: str) -> int:
        return len(people.mlflow.search_model_versions(f"name = '{name}'"))

    names = adapted_at_once
    before = [versions(name) for name in names]
    assert all(before)
    data = yaml.safe_load(people.settings.read_text())
    for name in names:
        data["policies"][name] |= {"steps": 1, "seed": 5}
    settings = people.state / "two.yaml"
    settings.write_text(yaml.safe_dump(data))
    done = graftwork("adapt", "--policy", names[0], "--policy", names[1], settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [versions(name) for name in names] == [count + 1 for count in before]


@pytest.mark.parametrize(
    "name",
    ["own_policy.sh", "verifier.py", "custom_loss.py", "import_peft.py", "openai_client.py", "nightly.py"],
)
def test_an_example_prints_what_is_beside_it(people: Operated, own_policy: str, name: str) -> None:
    said = own_policy if name == "own_policy.sh" else people.example(name)
    beside = (ROOT / "examples" / name).with_suffix(".txt").read_text()
    if name == "openai_client.py":
        # What the model answers is the CPU's rounding too.
        said, beside = ("\n".join(line.split()[0] for line in text.splitlines()) for text in (said, beside))
    assert skeleton(said) == skeleton(beside)
    assert name in (ROOT / "examples" / "README.md").read_text()


def test_a_run_whose_heartbeats_stopped_is_marked_as_crashed(people: Operated, dead: str) -> None:
    state = people.wait(dead, seconds=180)
    assert state["type"] == "CRASHED"
    assert "process is gone" in state["message"]
