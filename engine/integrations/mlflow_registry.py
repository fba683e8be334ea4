"""A client of MLflow's model registry: the REST calls that the aliases need.

It does not import mlflow, which would cost the controller 150 MB and two seconds. The tag `graftwork.digest`
of a model version names its revision.
"""

from collections.abc import Set
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

from engine.clients.http_client import connect
from engine.errors import ServiceError
from engine.security.credentials import USER, known_credential
from engine.settings.params import Params

TIMEOUT_S = 5.0
API = "/api/2.0/mlflow"
DIGEST_TAG = "graftwork.digest"


@dataclass(frozen=True)
class Model:
    """A registered model: version by alias, the highest version, and when it last changed (ms)."""

    name: str
    aliases: dict[str, str]
    highest: int
    updated: int


class Registry:
    """Calls MLflow's server; `client` has its URL as base. Every call raises `httpx.HTTPError`."""

    def __init__(self, client: httpx.Client):
        self._client = client

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def models(self) -> list[Model]:
        """Return every registered model with its aliases; one request for a hundred models."""
        return [
            _model(entry)
            for entry in self._pages("registered-models/search", "registered_models", {"max_results": 100})
        ]

    def digest(self, policy: str, version: str) -> str | None:
        """Return the digest of a version's revision; None when the version or its tag is missing."""
        answer = self._call("GET", "model-versions/get", {404}, params={"name": policy, "version": version})
        tags = {tag["key"]: tag["value"] for tag in answer.get("model_version", {}).get("tags", [])}
        return tags.get(DIGEST_TAG)

    def version(self, policy: str, digest: str) -> str | None:
        """Return the first version of a revision; None when it is not registered."""
        condition = f"name = '{policy}' AND tags.`{DIGEST_TAG}` = '{digest}'"
        versions = self._pages("model-versions/search", "model_versions", {"filter": condition})
        return min((str(item["version"]) for item in versions), key=int, default=None)

    def set_alias(self, policy: str, alias: str, version: str | None) -> None:
        """Point an alias at a version, or delete it (None)."""
        named = {"name": policy, "alias": alias}
        if version:
            self._call("POST", "registered-models/alias", json=named | {"version": version})
        else:
            self._call("DELETE", "registered-models/alias", {404}, json=named)

    def tag(self, policy: str, version: str, key: str, value: str) -> None:
        """Set a version's tag; a missing version is ignored."""
        body = {"name": policy, "version": version, "key": key, "value": value}
        self._call("POST", "model-versions/set-tag", {404}, json=body)

    def untag(self, policy: str, version: str, key: str) -> None:
        """Delete a version's tag; a missing version or tag is ignored."""
        body = {"name": policy, "version": version, "key": key}
        self._call("DELETE", "model-versions/delete-tag", {404}, json=body)

    def _pages(self, path: str, field: str, params: dict[str, Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            page = self._call("GET", path, params=params | ({"page_token": token} if token else {}))
            items += page.get(field, [])
            token = page.get("next_page_token", "")
            if not token:
                return items

    def _call(self, method: str, path: str, harmless: Set[int] = frozenset(), **body: Any) -> dict[str, Any]:
        response = self._client.request(method, f"{API}/{path}", timeout=TIMEOUT_S, **body)
        if response.status_code in harmless:
            return {}
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def open_registry(params: Params) -> Registry:
    """Return the registry of the installation's MLflow server, logged in."""
    login = httpx.BasicAuth(USER, known_credential(params.paths, "mlflow"))
    return Registry(connect(params.url("mlflow"), login=login))


def registered(params: Params, policy: str, digest: str) -> str | None:
    """Return a revision's version in MLflow, None for none; `ServiceError` when the server is down."""
    url = params.url("mlflow")
    with closing(open_registry(params)) as registry:
        try:
            return registry.version(policy, digest)
        except httpx.HTTPError as error:
            raise ServiceError(
                f"MLflow does not answer at {url} ({error}). Check `graftwork status`."
            ) from None


def _model(entry: dict[str, Any]) -> Model:
    aliases = {item["alias"]: str(item["version"]) for item in entry.get("aliases", [])}
    newest = [int(item["version"]) for item in entry.get("latest_versions", [])]
    return Model(entry["name"], aliases, max(newest, default=0), int(entry.get("last_updated_timestamp", 0)))
