"""`graftwork doctor`: each fault of an installation is found, and comes with what to do."""

import json
import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.catalog.catalog import Replica, migrate
from engine.catalog.opening import whole_catalog
from engine.security.credentials import create_credentials
from engine.settings.params import Params
from flows.cli import app
from tasks import doctor
from tasks.doctor import Finding, examine
from tasks.exposure import PATHS, reached
from tests.helpers.live import free_port
from tests.helpers.own_ports import own_ports


@pytest.fixture
def params(tmp_path: Path) -> Params:
    params = own_ports(state_dir=tmp_path / "state")
    create_credentials(params.paths)
    migrate(params.paths.catalog_url)
    return params


def wrong(params: Params) -> dict[str, Finding]:
    return {one.check: one for one in examine(params) if one.advice}


def test_a_sound_installation_has_no_fault(params: Params) -> None:
    assert wrong(params) == {}
    checks = {one.check for one in examine(params)}
    assert checks == {
        "versions", "disk", "rights", "ports", "listening", "credentials", "clocks", "audit",
        "backup", "engines", "runs",
    }  # fmt: skip


def test_versions_outside_a_checkout_are_not_called_in_order(
    params: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "CONSTRAINTS", tmp_path / "constraints.txt")
    (found,) = (one for one in examine(params) if one.check == "versions")
    assert (found.seen[:12], found.advice) == ("not compared", "")


def test_each_fault_is_found(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    (params.paths.credentials / "mlflow").chmod(0o640)
    (params.paths.credentials / "trainer").unlink()
    monkeypatch.setattr(doctor, "DISK_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1")
    with whole_catalog(params.paths.catalog_url) as catalog, monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)
        catalog.switches.set("freeze", True)
    with socket.create_server(("127.0.0.1", params.prefect.port)):
        found = wrong(params)
    assert set(found) == {"versions", "disk", "rights", "ports", "credentials", "clocks"}
    assert found["rights"].advice.startswith("Run `chmod go=")
    assert str(params.prefect.port) in found["ports"].seen
    assert "trainer" in found["credentials"].seen


def test_engines_that_are_silent_or_unlike_the_others_are_named(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = doctor.version("graftwork")
    with whole_catalog(params.paths.catalog_url) as catalog:
        for id, base, version in (("a", "base", ours), ("b", "base", "0.0.1"), ("c", "other", ours)):
            catalog.replicas.join(Replica(id, f"http://{id}:1", base, version, id, 0, 0.0, draining=False))
        found = {one.seen: one.advice for one in examine(params) if one.check == "engines"}
        assert any(seen.startswith("b runs version 0.0.1") for seen in found)
        assert any(seen.startswith("c ") and "base other" in seen for seen in found)
        monkeypatch.setattr(doctor, "SILENT_S", -1.0)
        silent = [one for one in examine(params) if one.check == "engines"]
        assert len(silent) == 3
        assert all("silent" in one.seen and one.advice for one in silent)


def test_a_changed_audit_log_is_a_fault(params: Params) -> None:
    with whole_catalog(params.paths.catalog_url) as catalog:
        for on in (True, False):
            catalog.switches.set("freeze", on)
        connection = catalog.access.engine.raw_connection()
        connection.execute("DROP TRIGGER audit_no_update")
        connection.execute("UPDATE audit SET actor = 'nobody' WHERE id = 1")
        connection.commit()
        connection.close()
    assert "Entry 1" in wrong(params)["audit"].seen


def test_the_command_says_it_and_fails(tmp_path: Path) -> None:
    ports = "".join(f"{name}: {{port: {free_port()}}}\n" for name in PATHS)
    file = tmp_path / "params.yaml"
    file.write_text(f"state_dir: state\n{ports}")
    said = CliRunner().invoke(app, ["doctor", "--json", "--params", str(file)])
    assert said.exit_code == 1
    (fault,) = [one for one in json.loads(said.output) if one["advice"]]
    assert fault["check"] == "credentials"


def test_services_that_do_not_run_are_named(params: Params) -> None:
    tinker = params.tinker.model_copy(update={"enabled": True})
    assert reached(params.model_copy(update={"tinker": tinker})) == ([], list(PATHS))
    # Tinker's API is off by default: that it does not answer is no news.
    assert reached(params) == ([], [name for name in PATHS if name != "tinker"])
