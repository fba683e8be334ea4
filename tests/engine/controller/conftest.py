"""The controller's API over the controller of a test file."""

from collections.abc import Iterator

import httpx
import pytest
from fastapi.testclient import TestClient

from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry


@pytest.fixture
def web(controller: Controller) -> Iterator[TestClient]:
    """A client with an administrator's key; `controller` is the file's own fixture."""
    key = controller.catalog.keys.ensure_local(controller.params.paths.local_key)
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(httpx.Client()))
    with TestClient(whole_app(controller, mirror), headers={"Authorization": f"Bearer {key}"}) as client:
        yield client
