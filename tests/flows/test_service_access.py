"""Who reaches the services, what they show to whom, and what they leave readable."""

import json
from contextlib import suppress

import httpx
import psutil
import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from engine.security.credentials import NAMES, USER, known_credential
from engine.services import lifecycle
from engine.settings.params import load_params
from tests.helpers.live import eventually
from tests.helpers.operated import Operated

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]


# For how long a page may load beside other tests, which is also the limit of each step on it.
PAGE_MS = 120_000
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


def test_people_log_in_to_the_pages(people: Operated, quickstart: str, chromium: str) -> None:
    """With what `graftwork login` prints: Prefect's form, and the browser's own for the other two."""
    printed = people.command("login", "--json")
    logins = {one["service"]: one for one in json.loads(printed.stdout)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(PAGE_MS)
        page.goto(logins["prefect"]["address"])
        page.get_by_label("Password").or_(page.locator("input[type=password]")).first.fill(
            logins["prefect"]["password"]
        )
        page.keyboard.press("Enter")
        # The form goes once the login is kept; before, another page would ask for it again.
        page.locator("input[type=password]").wait_for(state="detached")
        page.goto(f"{logins['prefect']['address']}/deployments")
        page.get_by_text("create_policy").first.wait_for()
        for service, shown in (("mlflow", "Model"), ("controller", "Policies")):
            login = logins[service]
            known = {"username": login["user"], "password": login["password"]}
            page = browser.new_context(http_credentials=known).new_page()
            page.set_default_timeout(PAGE_MS)
            page.goto(login["address"])
            page.get_by_text(shown).first.wait_for()
            with pytest.raises(PlaywrightError, match="INVALID_AUTH_CREDENTIALS"):
                browser.new_context().new_page().goto(login["address"])
        browser.close()


def test_a_run_whose_heartbeats_stopped_is_marked_as_crashed(people: Operated, dead: str) -> None:
    state = people.wait(dead, seconds=400)
    assert state["type"] == "CRASHED"
    assert "process is gone" in state["message"]


def test_what_runs_beside_the_controller_works(people: Operated) -> None:
    """On the real services: the sender of notifications, the count of missed runs, and the rest."""
    headers = {"authorization": f"Bearer {people.paths.local_key.read_text().strip()}"}

    def told() -> dict[str, float]:
        text = httpx.get(f"{people.url('controller')}/metrics", headers=headers, timeout=20).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    ages = [name for name in told() if name.startswith("graftwork_background_age_seconds")]
    assert {'graftwork_background_age_seconds{work="missed-runs"}'} < set(ages)
    # Each has succeeded within a few of its turns.
    assert eventually(lambda: all(told()[name] < 180 for name in ages), 60)
    assert told()["graftwork_nightly_missed"] >= 0
