"""Tables in a terminal of 80 columns: no line is longer, no name or digest is cut."""

import json
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from rich.console import Console

from engine.catalog.catalog import Base, Policy, migrate
from engine.catalog.opening import whole_catalog
from engine.ledger.ledger import Ledger, Spool
from engine.services.lifecycle import State
from engine.settings.params import Params
from flows import display
from tasks import look
from tasks.outcome import Outcome
from tests.helpers import command_line
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT
from tests.helpers.rows import NEW, OLD, fill

WIDTH = 80
LONG = "customer-support-tone-of-voice-for-german-speaking-countries"
OWNER = "ada.lovelace@the-analytical-engine.example.com"
RUNNING = 3 * 86_400.0


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, for Rich's consoles and for the process's one."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(display, "console", Console(width=WIDTH, highlight=False))


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A catalog with a long name and a long owner, a champion and a canary, scores, rewards and a fault."""
    params = Params(state_dir=tmp_path / "state")
    migrate(params.paths.catalog_url)
    catalog = whole_catalog(params.paths.catalog_url)
    catalog.bases.add(Base("base", "tiny-dense", "/bases/tiny", 1.0))
    fill(catalog)
    catalog.policies.add(Policy(LONG, "base", {"suite": "tone"}, OWNER, 1.0))
    row = replace(catalog.revisions.get("sorting", NEW), policy=LONG, owner=OWNER, length=105_500_000)
    catalog.revisions.add_many([row])
    for policy, champion in (("sorting", OLD), (LONG, None)):
        route = catalog.routes.get(policy)
        catalog.routes.update(replace(route, champion=champion, canary=NEW, weight=0.2), route.version)
    catalog.keys.create(OWNER, "user")
    catalog.close()
    spool = Spool(params.paths.spool, "test")
    for policy, digest, item in (
        (p, d, i) for p in ("sorting", LONG) for d in (None, OLD, NEW) for i in "ab"
    ):
        suite = {"suite": "tone" if policy == LONG else "sorting-json", "suite_version": "1", "item": item}
        spool.emit("scores", policy=policy, digest=digest, base="base", score=1.0, **suite)
    spool.emit("verdicts", policy="sorting", digest=NEW, verdict="rollback", reason="It is worse.", by="ada")
    spool.emit(
        "loads", policy=LONG, digest=NEW, tier="host", bytes=105_500_000, seconds=0.1, wait_s=0.2,
        error="The bytes of segment 3 are damaged: their checksum is not the catalog's.",
    )  # fmt: skip
    spool.close()
    ledger = Ledger(params.paths.ledger)
    ledger.ingest(params.paths.spool)
    ledger.snapshot(params.paths.ledger_snapshot)
    ledger.close()
    ports = {name: {"port": free_port()} for name in ("engine", "trainer", "controller", "mlflow", "prefect")}
    policies = {
        "sorting": {"task": "sorting", "suite": "sorting-json", "system": "Answer [in JSON] alone. " * 9}
    }
    file = tmp_path / "params.json"
    file.write_text(json.dumps({"state_dir": str(params.state_dir), "policies": policies} | ports))
    return file


def graftwork(settings: Path, *arguments: str) -> CompletedProcess[str]:
    done = command_line.graftwork(*arguments, "--params", str(settings))
    assert done.returncode == 0, done.stderr
    return done


def refuse_wide(text: str) -> None:
    """Fail on a cut cell, and on a line that is too long, unless it ends with one long word, as a digest."""
    wide = [line for line in text.splitlines() if len(line.rstrip()) > WIDTH and len(line.split()[-1]) < 40]
    assert not wide, "\n".join(wide)
    assert "…" not in text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("ls",), (OLD[:12], "100.0% [15.8, 100.0]", "20%")),
        (("ls", "sorting"), (NEW[:12], "champion", "rollback", "100.0% [15.8, 100.0]")),
        (("ls", LONG), (NEW[:12], "canary")),
        (("status",), ("prefect", "stopped")),
        (("key", "ls"), ("active",)),
        (("ls", "--trainable"), ("contract",)),
        (("policy", "show", "sorting"), ("[in JSON]", "loss_config")),
        (("adapters", "ls"), (f"sorting@{NEW[:12]}", "105,500,000", "exported")),
        (("adapters", "show", f"sorting@{NEW}"), (NEW, f"sorting@{NEW[:12]}")),
        (("status", "--residency"), ("stored", "0.200", "segment 3 are damaged")),
        (("plan", "adapters", str(ROOT / "tests" / "helpers" / "kimi_k2.json")), ("an adapter, packed",)),
    ],
    ids=lambda value: "-".join(value)[:20] if isinstance(value, tuple) else None,
)
def test_tables_of_commands_fit(
    narrow: None, settings: Path, command: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    text = graftwork(settings, *command).stdout
    refuse_wide(text)
    joined = " ".join(text.split())
    assert [one for one in shown if one not in joined] == []


def test_a_pipe_gets_whole_names(settings: Path) -> None:
    lines = graftwork(settings, "adapters", "ls").stdout.splitlines()
    (line,) = [line for line in lines if line.startswith(LONG)]
    assert line.split() == [f"{LONG}@{NEW[:12]}", "exported", "1", "8", "105,500,000", OWNER]


def test_the_tables_of_services_and_of_the_main_job_fit(narrow: None, capsys: pytest.CaptureFixture) -> None:
    session: dict[str, Any] = {
        "session": f"{LONG}-0123456789ab", "policy": LONG, "step": 100_000, "resident": True,
        "bytes": 105_500_000, "heard_s": 7.5, "holder": "a-machine-with-a-long-name.example.com:123456",
        "queued": 1,
    }  # fmt: skip
    display.print_rows([look.shown_session(session)], fold=("session", "writer"))
    service = State("controller", "http://127.0.0.1:8462", "running", 1234567, RUNNING)
    display.print_rows([look.shown_service(service)])
    seconds = {
        f"{name} (s)": "12.3" for name in ("train", "export", "register", "verify", "score", "release")
    }
    row = {
        "base score": "29.0% [22.8, 35.8]",
        "revision score": "100.0% [98.2, 100.0]",
        "verdict": "rollback",
    }
    rows = [{"revision": f"{name}@{NEW[:12]}", **row, **seconds} for name in ("arithmetic", "sorting")]
    stages = dict.fromkeys(("services", "base", "train", "score", "canary", "bad revision", "report"), 1.0)
    bad = {"verdict": "rollback", "seconds_to_rollback": 1.7, "requests_after": 0}
    summary = {"stages": stages, "seconds": 75.2, "bad_revision": bad}
    display.print_outcome(Params(state_dir=Path("/x")), Outcome(summary, rows, Path("/x/report.html")))
    text = capsys.readouterr().out
    refuse_wide(text)
    assert "3d" in text
    assert f"arithmetic@{NEW[:12]}" in text
    assert "verify 12.3 s, score 12.3 s" in " ".join(text.split())


def test_a_column_that_is_empty_is_left_out(narrow: None, capsys: pytest.CaptureFixture) -> None:
    display.print_rows([{"policy": "sums", "canary": "", "left": None, "steps": 0}])
    assert capsys.readouterr().out.split() == ["policy", "steps", "sums", "0"]
