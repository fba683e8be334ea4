"""Each service has a secret of its own that its user alone may read."""

import os
import stat
from pathlib import Path

import pytest
from own_ports import own_ports

from engine.errors import NotRunning
from engine.security.credentials import LOGIN_VARIABLES, NAMES, create_credentials, known_credential, logins
from engine.services.lifecycle import environment
from engine.services.own_environments import own_environments
from engine.services.supervisor import Supervisor
from engine.settings.params import Params
from tasks.logins import web_logins


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
    assert mode(params.paths.credentials) == 0o700
    assert {mode(path) for path in params.paths.credentials.iterdir()} == {0o600}
    create_credentials(params.paths)
    assert {name: known_credential(params.paths, name) for name in NAMES} == found


def test_a_state_directory_without_credentials_opens(params: Params) -> None:
    assert logins(params.paths) == {}
    assert not set(LOGIN_VARIABLES) & set(environment(params))
    with pytest.raises(NotRunning, match="`graftwork up` creates them"):
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
        "trainer": set(), "controller": set(),
    }  # fmt: skip
    assert environment(params)["MLFLOW_TRACKING_PASSWORD"] == secrets["mlflow"]


def test_the_supervisors_file_keeps_the_secrets(params: Params) -> None:
    params.state_dir.mkdir()
    supervisor = Supervisor(params.state_dir, params.state_dir)
    text = supervisor._config_text({"a": ("-c", "pass")}, {"a": {"WORD": "gw%x"}})
    assert 'environment=WORD="gw%%x"' in text
    assert "umask=077" in text
