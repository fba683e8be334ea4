"""What a person needs to log in to the web pages of Prefect, MLflow and the controller."""

from engine.errors import NotRunning
from engine.security.credentials import USER, known_credential
from engine.settings.params import Params


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
