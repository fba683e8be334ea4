"""The services' own credentials: a random secret for each, in a file of mode 0600 of the state directory.

A credential is created when its service first needs it, so a state directory without them opens too. Tenants
have API keys instead (`engine/catalog/keys.py`).
"""

import os

from engine.errors import NotRunning
from engine.files import write_once
from engine.settings.params import Params, Paths

# `mlflow-session` signs the sessions of MLflow's pages, with `events` a process elsewhere delivers events to
# the controller; every other one is a service's key or password.
NAMES = ("trainer", "controller", "events", "mlflow", "mlflow-session", "prefect")
# Whom MLflow and Prefect log in, and a browser that opens the controller's page.
USER = "graftwork"
# With these a process logs in to MLflow and Prefect. Engine, trainer and verifiers start without them.
LOGIN_VARIABLES = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING")


def credential(paths: Paths, name: str) -> str:
    """Return a service's credential, created if it is missing."""
    assert name in NAMES, name
    paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.credentials.mkdir(mode=0o700, exist_ok=True)
    return write_once(paths.credentials / name, os.urandom(24).hex() + "\n", mode=0o600)


def create_credentials(paths: Paths) -> None:
    """Create every credential that is missing."""
    if not (paths.credentials / "mlflow").is_file():
        # MLflow's database of logins keeps the password of its first start.
        for file in paths.root.glob(f"{paths.mlflow_logins.name}*"):
            file.unlink()
    for name in NAMES:
        credential(paths, name)


def known_credential(paths: Paths, name: str) -> str:
    """Return a service's credential for a client; empty when there is none, or this user may not read it."""
    try:
        return (paths.credentials / name).read_text().strip()
    except (FileNotFoundError, PermissionError):
        return ""


def logins(paths: Paths) -> dict[str, str]:
    """Return the environment variables that log a process in to MLflow and Prefect; none without files."""
    variables: dict[str, str] = {}
    if password := known_credential(paths, "mlflow"):
        variables |= {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password}
    if password := known_credential(paths, "prefect"):
        variables["PREFECT_API_AUTH_STRING"] = f"{USER}:{password}"
    return variables


def web_logins(params: Params) -> list[dict[str, str]]:
    """Return each page's service, address, user and password; `NotRunning` before the first `graftwork up`.

    Prefect asks for `user:password` in one field.
    """
    logins = []
    for service in ("prefect", "mlflow", "controller"):
        password = known_credential(params.paths, service)
        if not password:
            raise NotRunning(
                f"There is no credential of {service} in {params.paths.credentials} that you may read. "
                "`graftwork up` creates them, for the user who starts it."
            )
        user, secret = ("", f"{USER}:{password}") if service == "prefect" else (USER, password)
        logins.append({"service": service, "address": params.url(service), "user": user, "password": secret})
    return logins
