"""What a person needs to log in to the web pages of Prefect, MLflow and the controller."""

from dataclasses import dataclass

from engine.errors import NotRunning
from engine.security.credentials import USER, known_credential
from engine.settings.params import Params


@dataclass(frozen=True)
class Login:
    """A page's address, and what it asks for; Prefect asks for `user:password` in one field."""

    service: str
    address: str
    user: str
    password: str


def web_logins(params: Params) -> list[Login]:
    """Return the logins of the web pages; `NotRunning` before the first `graftwork up`."""
    found = []
    for service in ("prefect", "mlflow", "controller"):
        password = known_credential(params.paths, service)
        if not password:
            raise NotRunning(
                f"There is no credential of {service} in {params.paths.credentials} that you may read. "
                "`graftwork up` creates them, for the user who starts it."
            )
        is_prefect = service == "prefect"
        user, password = ("", f"{USER}:{password}") if is_prefect else (USER, password)
        found.append(Login(service, params.url(service), user, password))
    return found
