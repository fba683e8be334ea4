"""The environment variables that one service gets alone: its password, and the logins that it needs."""

import base64
import hashlib
from collections.abc import Collection

from engine.files import write_whole
from engine.security.credentials import USER, create_credentials, credential, logins
from engine.settings.params import Params, Paths
from engine.settings.services import Listener

# MLflow checks a password by scrypt, 0.13 s of a core, and the controller reads its aliases every second.
MLFLOW_LOGINS = """\
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{database}
auth_cache_ttl_seconds = 60
"""


def own_environments(params: Params, names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the variables of each service in `names`; creates every credential that is missing."""
    paths = params.paths
    create_credentials(paths)
    environments = {}
    if "mlflow" in names:
        environments["mlflow"] = _mlflow(params)
    if "prefect" in names:
        environments["prefect"] = _prefect(paths, params.listener("prefect"))
    if "worker" in names:
        environments["worker"] = logins(paths)
    return environments


def _mlflow(params: Params) -> dict[str, str]:
    paths, listener = params.paths, params.listener("mlflow")
    session = credential(paths, "mlflow-session")
    settings = paths.root / "mlflow-logins.ini"
    write_whole(settings, MLFLOW_LOGINS.format(database=paths.mlflow_logins), mode=0o600)
    return {
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(
            pattern for name in listener.names for pattern in (name, f"{name}:{listener.port}")
        ),
        "MLFLOW_BACKEND_STORE_URI": params.mlflow.backend or f"sqlite:///{paths.mlflow_db}",
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": credential(paths, "mlflow"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": session,
        # It keeps the secrets of webhooks; its own default is a new key at every start.
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": base64.urlsafe_b64encode(
            hashlib.sha256(session.encode()).digest()
        ).decode(),
    }


def _prefect(paths: Paths, listener: Listener) -> dict[str, str]:
    login = f"{USER}:{credential(paths, 'prefect')}"
    scheme = listener.url.partition(":")[0]
    return {
        "PREFECT_SERVER_API_AUTH_STRING": login,
        # Its background services call its own API.
        "PREFECT_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(
            f"{scheme}://{name}:{listener.port}" for name in listener.names
        ),
    }
