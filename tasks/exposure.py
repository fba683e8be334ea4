"""What a caller without a key reaches, found by asking the running services."""

from dataclasses import dataclass
from itertools import product

import httpx

from engine.clients.http_client import connect
from engine.settings.params import Params

REFUSED = (401, 403, 404, 405, 421)
TIMEOUT_S = 10.0
METHODS = ("GET", "POST")
# Pages, and one path of each kind of call. The last two of each server are its generated documentation.
PATHS = {
    "engine": (
        "/", "/health", "/ping", "/version", "/metrics", "/load", "/v1/models", "/v1/chat/completions",
        "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/feedback", "/v1/prewarm",
        "/v1/load_lora_adapter", "/tokenize", "/detokenize", "/invocations", "/pause", "/sleep",
        "/server_info", "/graftwork/marker", "/graftwork/residency", "/graftwork/loads",
        "/graftwork/samples", "/docs", "/openapi.json",
    ),
    "trainer": (
        "/", "/health", "/status", "/sessions", "/metrics", "/forward", "/forward_backward", "/optim_step",
        "/export", "/probe", "/forget_policy", "/operations/x", "/docs", "/openapi.json",
    ),
    "controller": (
        "/", "/health", "/status", "/metrics", "/policies", "/releases", "/ledger/observations", "/notices",
        "/notices/inbox", "/promote", "/rollback", "/purge", "/freeze", "/docs",
        "/openapi.json",
    ),
    "mlflow": (
        "/", "/health", "/version", "/api/2.0/mlflow/registered-models/search",
        "/api/2.0/mlflow/experiments/search", "/api/2.0/mlflow/registered-models/alias",
        "/api/2.0/mlflow-artifacts/artifacts", "/api/2.0/mlflow/users/create", "/signup", "/graphql",
        "/ajax-api/3.0/mlflow/server-info", "/metrics", "/docs", "/openapi.json",
    ),
    "prefect": (
        "/", "/api/health", "/api/ready", "/api/version", "/api/hello", "/api/flow_runs/filter",
        "/api/deployments/filter", "/api/work_pools/filter", "/api/block_documents/filter",
        "/api/admin/settings", "/api/csrf-token?client=x", "/ui-settings", "/docs", "/api/docs",
        "/openapi.json", "/api/openapi.json",
    ),
    "tinker": (
        "/", "/health", "/api/v1/healthz", "/api/v1/client/config", "/api/v1/get_server_capabilities",
        "/api/v1/create_session", "/api/v1/telemetry", "/api/v1/retrieve_future", "/api/v1/training_runs",
        "/api/v1/checkpoints", "/api/v1/asample", "/docs", "/openapi.json",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reached:
    """A call without a key that was not refused."""

    service: str
    method: str
    path: str
    status: int


def reached(params: Params) -> tuple[list[Reached], list[str]]:
    """Ask every service without a key; return what answered, and the services that do not run."""
    reached, down = [], []
    for service, paths in PATHS.items():
        if service == "tinker" and not params.tinker.enabled:
            continue
        with connect(params.url(service), TIMEOUT_S) as client:
            try:
                for method, path in product(METHODS, paths):
                    status = client.request(method, path).status_code
                    if status not in REFUSED:
                        reached.append(Reached(service, method, path, status))
            except httpx.TransportError:
                down.append(service)
    return reached, down
