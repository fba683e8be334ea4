"""Routes shown as aliases in MLflow's registry, one way: route -> `champion`, `canary`, `previous`.

Knows MLflow's public REST interface and which model version is which revision (its tag
`graftwork.digest`). MLflow may be down: the serving truth is the catalog, and the mirror catches up.
It speaks REST rather than importing mlflow, which would cost the controller 150 MB and two seconds.
"""

import logging
import threading
from typing import Any

import httpx

from engine.adapters.catalog import Catalog, Route

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
API = "/api/2.0/mlflow"
ROLES = ("champion", "canary", "previous")
log = logging.getLogger(__name__)


class AliasMirror(threading.Thread):
    """Keeps aliases equal to routes, from a thread of its own; `fault` says what keeps it from it.

    `client` talks to MLflow's server, without a path.
    """

    def __init__(self, catalog: Catalog, client: httpx.Client):
        super().__init__(name="aliases", daemon=True)
        self.fault: str | None = None
        self._catalog = catalog
        self._client = client
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            try:
                self.mirror()
                self.fault = None
            except Exception as error:
                # The mirror must outlive whatever MLflow answers.
                self.fault = f"The aliases in MLflow are not up to date: {error}"
                log.debug("alias mirror", exc_info=True)

    def stop(self) -> None:
        self._stopped.set()

    def mirror(self) -> None:
        """Make the aliases of every registered policy those of its route; raises `httpx.HTTPError`."""
        routes = {route.policy: route for route in self._catalog.routes()}
        for model in self._pages("registered-models/search", "registered_models", {"max_results": 100}):
            if model["name"] in routes:
                self._mirror_model(model, routes[model["name"]])

    def _mirror_model(self, model: dict[str, Any], route: Route) -> None:
        aliases = {item["alias"]: str(item["version"]) for item in model.get("aliases", [])}
        for role in ROLES:
            digest = getattr(route, role)
            wanted = self._version(route.policy, digest) if digest else None
            named = {"name": route.policy, "alias": role}
            if wanted and aliases.get(role) != wanted:
                self._call("POST", "registered-models/alias", json=named | {"version": wanted})
            elif wanted is None and role in aliases:
                self._call("DELETE", "registered-models/alias", json=named)

    def _version(self, policy: str, digest: str) -> str | None:
        wanted = f"name = '{policy}' AND tags.`graftwork.digest` = '{digest}'"
        for version in self._pages("model-versions/search", "model_versions", {"filter": wanted}):
            return str(version["version"])
        return None

    def _pages(self, path: str, field: str, params: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            page = self._call("GET", path, params=params | ({"page_token": token} if token else {}))
            found += page.get(field, [])
            token = page.get("next_page_token", "")
            if not token:
                return found

    def _call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        response = self._client.request(method, f"{API}/{path}", timeout=TIMEOUT_S, **body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer
