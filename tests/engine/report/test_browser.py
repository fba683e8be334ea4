"""The pages in a real browser: they render, read well in light and dark, and ask nobody else for anything."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from engine.catalog.catalog import Catalog
from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry
from engine.report import live_page as controller_page
from engine.settings.params import Params
from engine.settings.services import ControllerConfig
from tasks.publish import write_report
from tests.helpers.history import GOOD, build
from tests.helpers.live import free_port
from tests.helpers.shown_release import released

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-pings", "--no-first-run",
]  # fmt: skip
SECTIONS = [
    "Policies",
    "Releases",
    "Lineage",
    "Offline scores",
    "Quality",
    "Answers before and after",
    "Canaries",
    "Training",
    "Revisions",
    "Tombstones",
]


@dataclass
class Trap:
    """A proxy that answers nobody: the browser sends it whatever would leave the machine."""

    port: int
    caught: list[bytes] = field(default_factory=list)


@pytest.fixture
def trap() -> Iterator[Trap]:
    server = socket.create_server(("127.0.0.1", 0))
    trap = Trap(server.getsockname()[1])

    def listen() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                trap.caught.append(connection.recv(200))

    thread = threading.Thread(target=listen)
    thread.start()
    yield trap
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # What Chromium wants for itself gets nowhere: nothing listens there.
        nowhere = {"server": f"http://127.0.0.1:{free_port()}"}
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS, proxy=nowhere)
        yield browser
        browser.close()


@dataclass
class Seen:
    """What a page asked for and complained of."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def watch(page: Page) -> Seen:
    seen = Seen()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    return seen


# As a person logs in, with what `graftwork login` prints.
LOGIN = {"username": "graftwork", "password": "of-the-controller"}


@pytest.fixture
def page(browser: Browser, trap: Trap) -> Iterator[Page]:
    """A page whose every request that is not to this machine goes into the trap."""
    caught = {"server": f"http://127.0.0.1:{trap.port}", "bypass": "127.0.0.1"}
    page = browser.new_page(viewport={"width": 1280, "height": 900}, proxy=caught, http_credentials=LOGIN)
    # In milliseconds; a browser that shares two cores may need more than its thirty seconds.
    page.set_default_timeout(120_000)
    yield page
    page.close()


def check_it_reads_well(page: Page) -> None:
    """Headings in order, every plot drawn, nothing cut off sideways, contrast and structure as axe wants."""
    levels = page.locator("h1, h2, h3").evaluate_all("all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.locator("h2").all_text_contents() == SECTIONS
    for drawing in page.locator("figure svg").all():
        box = drawing.bounding_box()
        assert box is not None
        assert box["width"] > 100
        assert box["height"] > 50
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        result = Axe().run(page)
        assert result.violations_count == 0, result.generate_report()
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def luminance(page: Page, selector: str, attribute: str) -> float:
    colour = page.locator(selector).first.evaluate(f"it => getComputedStyle(it).{attribute}")
    return sum(float(part) for part in colour.strip("rgb()").split(",")[:3]) / 3


def test_the_report_stands_alone(page: Page, trap: Trap, tmp_path: Path) -> None:
    catalog, ledger, _ = build(tmp_path / "state")
    ledger.close()
    catalog.close()
    path = write_report(Params(state_dir=tmp_path / "state"), tmp_path / "report.html", 0.0, 1.0, {})
    seen = watch(page)
    page.goto(path.as_uri())
    check_it_reads_well(page)
    assert seen.requests == [path.as_uri()]
    assert seen.complaints == []
    assert trap.caught == []
    assert page.locator("script").count() == 0


def test_a_release_shows_its_course_and_why_it_ended(page: Page, tmp_path: Path) -> None:
    params = Params(state_dir=tmp_path / "state")
    ended = released(params, canary=0.5, baseline=0.95)
    path = write_report(params, tmp_path / "report.html", 0.0, 1.0, {})
    page.goto(path.as_uri())
    card = page.locator("[data-part=canaries] .card")
    assert card.count() == 1
    assert card.locator(".why").text_content() == f"rolled back: {ended.reason}"
    said = {
        row.locator("th").text_content().rstrip(" *"): row.locator("td").first.text_content()
        for row in card.locator("tbody tr").all()
    }
    assert said["reward"] == "harm"
    assert len(said) == 9
    # Means, interval, share of users.
    assert [text for text in card.locator("svg .title").all_text_contents() if text] == [
        "mean reward", "canary − baseline", "seconds since the canary's start", "share of users",
    ]  # fmt: skip
    result = Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_it_follows_the_theme(page: Page, tmp_path: Path) -> None:
    catalog, ledger, _ = build(tmp_path / "state")
    ledger.close()
    catalog.close()
    path = write_report(Params(state_dir=tmp_path / "state"), tmp_path / "report.html", 0.0, 1.0, {})
    page.goto(path.as_uri())
    paper, ink, tick = ("body", "backgroundColor"), ("h1", "color"), (".plot .tick", "fill")
    for scheme, light in (("light", True), ("dark", False)):
        page.emulate_media(color_scheme=scheme)
        assert (luminance(page, *paper) > 128) == light
        assert (luminance(page, *ink) < 128) == light
        assert (luminance(page, *tick) < 128) == light


def test_the_watchers_would_notice(page: Page, trap: Trap, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://example.com/x.png"><script>missing()</script>')
    seen = watch(page)
    page.goto(bad.as_uri())
    assert seen.requests == [bad.as_uri(), "http://example.com/x.png"]
    assert any("missing" in complaint for complaint in seen.complaints)
    assert any(b"example.com" in caught for caught in trap.caught)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    params = Params(state_dir=tmp_path / "state", controller=ControllerConfig(port=free_port()))
    catalog, ledger, _ = build(params.state_dir)
    ledger.close()
    catalog.close()
    params.paths.credentials.mkdir(parents=True, exist_ok=True)
    (params.paths.credentials / "controller").write_text(LOGIN["password"] + "\n")
    controller = Controller(params, "test")
    yield controller
    controller.close()


@pytest.fixture
def site(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The controller's own site, served; the page is made anew each time."""
    monkeypatch.setattr(controller_page, "FRESH_S", 0.0)
    monkeypatch.setattr(controller_page, "IDLE_SHARE", 0)
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(httpx.Client()))
    port = controller.params.controller.port
    server = uvicorn.Server(
        uvicorn.Config(whole_app(controller, mirror), port=port, log_level="warning", lifespan="off")
    )
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


def test_the_controllers_page_is_the_report_live(
    page: Page, site: str, controller: Controller, trap: Trap
) -> None:
    seen = watch(page)
    page.clock.install()
    page.goto(site)
    check_it_reads_well(page)
    release = page.locator("[data-part=releases] .verdict")
    assert release.text_content() == "running"
    # What somebody has marked stays, what has changed is replaced.
    page.evaluate("document.querySelector('[data-part=training]').marked = true")
    controller.tick()
    page.clock.fast_forward(5_000)
    page.wait_for_function(
        "document.querySelector('[data-part=releases] .verdict').textContent === 'promoted'"
    )
    assert page.locator("[data-part=policies] td code").first.text_content() == GOOD[:12]
    assert page.evaluate("document.querySelector('[data-part=training]').marked")
    assert {httpx.URL(url).copy_with(path="/") for url in seen.requests} == {httpx.URL(site)}
    assert seen.complaints == []
    assert trap.caught == []


def test_the_page_says_when_the_controller_is_gone(page: Page, site: str) -> None:
    page.clock.install()
    page.goto(site)
    assert page.locator("#pulse").text_content() == "live"
    page.context.set_offline(True)
    page.clock.fast_forward(5_000)
    page.wait_for_function("document.getElementById('pulse').textContent !== 'live'")
    assert page.locator("#pulse").text_content() == "the controller does not answer"
    assert page.locator("[data-part=revisions] tbody tr").count() == 2


def test_alarms_and_a_freeze_are_on_top(page: Page, site: str, controller: Controller) -> None:
    controller.faults["ingest"] = "The disk is <full>."
    Catalog(controller.params.paths.catalog_url).switches.set("freeze", True)
    page.goto(site)
    alarms = page.get_by_role("alert").all_text_contents()
    assert alarms[0] == "ingest: The disk is <full>."
    assert alarms[1].startswith("Releases are frozen")


def test_the_page_is_there_before_the_first_snapshot(page: Page, site: str, controller: Controller) -> None:
    controller.params.paths.ledger_snapshot.unlink()
    assert page.goto(site).status == 200
    assert "no ledger snapshot" in str(page.get_by_role("alert").text_content())


@pytest.mark.services
def test_without_a_browser_the_last_line_says_so() -> None:
    """A worker's process tells the first one, which says it."""
    files = [__file__, str(Path(__file__).with_name("test_why.py"))]
    # Beside a test that loads torch, after which native libraries have something to say at the end.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "theme or leads_back"]
    done = subprocess.run(
        [*command, "-n", "1", *files],
        env={**os.environ, "PATH": "/nowhere"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("The pages were NOT tested in a browser")
