"""The commands that suspend and resume a tenant, and their entries of the audit log."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.opening import whole_catalog
from tests.helpers.command_line import graftwork

Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    migrate(f"sqlite:///{tmp_path}/catalog.db")
    catalog = whole_catalog(f"sqlite:///{tmp_path}/catalog.db")
    catalog.keys.create("acme", "user", ["acme-*"])
    return catalog


@pytest.fixture
def run(tmp_path: Path) -> Run:
    settings = tmp_path / "params.yaml"
    settings.write_text(f"state_dir: {tmp_path}")
    return lambda *words: graftwork(*words, "--params", str(settings))


def test_a_tenant_is_suspended_and_resumed(catalog: Catalog, run: Run) -> None:
    told = run("tenant", "suspend", "acme", "--reason", "It never sleeps.")
    assert told.returncode == 0, told.stderr
    assert "acme is suspended: It never sleeps.\n" in told.stdout
    (row,) = json.loads(run("tenant", "ls", "--json").stdout)
    assert (row["tenant"], row["reason"]) == ("acme", "It never sleeps.")
    assert run("tenant", "resume", "acme").returncode == 0
    (row,) = json.loads(run("tenant", "ls", "--json").stdout)
    assert row["suspended"] == row["reason"] == ""
    actions = [(one.action, one.subject) for one in Audit(catalog.access).page()[-2:]]
    assert actions == [("tenant.suspend", "acme"), ("tenant.resume", "acme")]


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        (("suspend", "nobody", "--reason", "r"), "nobody"),
        (("suspend", "local", "--reason", "r"), "installation"),
        (("suspend", "acme", "--reason", " "), "reason"),
        (("resume", "acme"), "not suspended"),
    ],
)
def test_who_is_nobody_is_not_suspended(
    catalog: Catalog, run: Run, words: tuple[str, ...], noun: str
) -> None:
    before = len(Audit(catalog.access).page())
    told = run("tenant", *words)
    assert told.returncode != 0
    assert noun in told.stderr
    assert len(Audit(catalog.access).page()) == before
