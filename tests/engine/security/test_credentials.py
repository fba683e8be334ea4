"""Each service has a secret of its own that its user alone may read."""

import json
import os
import stat
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from engine.errors import NotRunning
from engine.security.credentials import (
    LOGIN_VARIABLES,
    NAMES,
    create_credentials,
    known_credential,
    logins,
    web_logins,
)
from engine.services.lifecycle import environment, every_service
from engine.services.own_environments import own_environments
from engine.services.supervisor import Supervisor
from engine.settings.params import Params
from flows.cli import app
from flows.entry import enter
from tests.helpers.own_ports import own_ports


@pytest.fixture
def params(tmp_path: Path) -> Params:
    return own_ports(state_dir=tmp_path / "state")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_service_gets_a_secret_of_its_own_once(params: Params) -> None:
    before = os.umask(0)
    try:
        create_credentials(params.paths)
    finally:
        os.umask(before)
    found = {name: known_credential(params.paths, name) for name in NAMES}
    assert len(set(found.values())) == len(NAMES)
    assert all(len(secret) == 48 for secret in found.values())
    assert mode(params.paths.credentials) == mode(params.state_dir) == 0o700
    assert {mode(path) for path in params.paths.credentials.iterdir()} == {0o600}
    create_credentials(params.paths)
    assert {name: known_credential(params.paths, name) for name in NAMES} == found


def test_a_state_directory_without_credentials_opens(params: Params) -> None:
    assert logins(params.paths) == {}
    assert not set(LOGIN_VARIABLES) & set(environment(params))
    with pytest.raises(NotRunning, match="`graftwork up`"):
        web_logins(params)
    assert not params.state_dir.exists()


def test_a_new_password_of_mlflow_drops_its_database_of_logins(params: Params) -> None:
    """It holds the password of its first start, which nobody would know any more."""
    create_credentials(params.paths)
    params.paths.mlflow_logins.touch()
    create_credentials(params.paths)
    assert params.paths.mlflow_logins.exists()
    (params.paths.credentials / "mlflow").unlink()
    create_credentials(params.paths)
    assert not params.paths.mlflow_logins.exists()


def test_each_service_gets_no_secret_but_those_that_it_needs(params: Params) -> None:
    own = own_environments(params, ("engine", "trainer", "mlflow", "prefect", "controller", "worker"))
    secrets = {name: known_credential(params.paths, name) for name in NAMES}
    text = {name: " ".join(values.values()) for name, values in own.items()}
    holders = {
        name: {one for one, given in text.items() if secret in given} for name, secret in secrets.items()
    }
    # The trainer and the controller read their own files.
    assert holders == {
        "mlflow": {"mlflow", "worker"}, "mlflow-session": {"mlflow"}, "prefect": {"prefect", "worker"},
        "trainer": set(), "controller": set(), "events": set(),
    }  # fmt: skip
    assert environment(params)["MLFLOW_TRACKING_PASSWORD"] == secrets["mlflow"]


def test_the_password_of_mlflows_database_is_in_no_command_line(tmp_path: Path) -> None:
    backend = "postgresql://mlflow:secret@db.example/mlflow"
    params = Params(state_dir=tmp_path / "state", mlflow={"backend": backend})
    assert own_environments(params, ["mlflow"])["mlflow"]["MLFLOW_BACKEND_STORE_URI"] == backend
    assert "secret" not in str([service.command for service in every_service(params)])


def test_the_supervisors_file_keeps_the_secrets(params: Params) -> None:
    params.state_dir.mkdir()
    supervisor = Supervisor(params.state_dir, params.state_dir)
    text = supervisor.config_text({"a": ("-c", "pass")}, {"a": {"WORD": "gw%x"}})
    assert 'environment=WORD="gw%%x"' in text


@pytest.fixture
def file(params: Params) -> Path:
    create_credentials(params.paths)
    path = params.state_dir / "settings.json"
    path.write_text(params.to_json())
    return path


def test_a_person_reads_what_each_page_asks_for(params: Params, file: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["login", "--json", "--params", str(file)]).output)
    secret = {name: known_credential(params.paths, name) for name in NAMES}
    assert [(one["service"], one["address"], one["user"], one["password"]) for one in found] == [
        ("prefect", params.url("prefect"), "", f"graftwork:{secret['prefect']}"),
        ("mlflow", params.url("mlflow"), "graftwork", secret["mlflow"]),
        ("controller", params.url("controller"), "graftwork", secret["controller"]),
    ]


def test_a_shell_gets_the_logins_as_variables(params: Params, file: Path) -> None:
    script = CliRunner().invoke(app, ["login", "--shell", "--params", str(file)]).output
    said = subprocess.run(["sh", "-c", f"{script}env"], capture_output=True, text=True, check=True).stdout
    wanted = logins(params.paths) | {"MLFLOW_TRACKING_URI": params.url("mlflow")}
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(said.splitlines())


@mock.patch.dict(os.environ, {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "mine"})
def test_another_registry_is_not_sent_our_password(params: Params, file: Path) -> None:
    enter(file, registry="https://mlflow.example.org")
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("me", "mine")
    enter(file, registry=f"{params.url('mlflow')}/")
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == known_credential(params.paths, "mlflow")
