"""Any request to the controller's API: an answer with a reason, no unhandled error, memory flat."""

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient

from engine.catalog.catalog import Catalog, migrate
from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry
from engine.settings.params import Params
from tests.helpers.access_matrix import CONTROLLER
from tests.helpers.random_requests import body
from tests.helpers.rows import NEW, OLD, fill

CASES, WARM, MANY = 300, 2_000, 50_000
# What the bodies of all calls are made of.
GOOD = {
    "policy": "sorting", "digest": NEW, "reason": "because", "by": "me", "settings": {}, "skip_gates": {},
    "replaces": False, "place": "ledger", "tenant": "acme", "result": {}, "name": "sorting", "limit": 3,
    "rows": [], "old": OLD,
}  # fmt: skip


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    params = Params(state_dir=tmp_path / "state")
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = Controller(params, "test")
    key = controller.catalog.keys.ensure_local(params.paths.local_key)
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(httpx.Client()))
    with TestClient(whole_app(controller, mirror), headers={"Authorization": f"Bearer {key}"}) as client:
        yield client
    controller.close()


def ask(web: TestClient, rng: random.Random) -> None:
    """Make one call; the client raises what the app does not handle."""
    method, path = rng.choice(CONTROLLER)
    path += rng.choice(("", "", f"?limit={rng.randint(-9, 10**9)}", "?limit=x", "?since=é"))
    answer = web.request(method, path, content=body(rng, GOOD) if method == "POST" else None)
    if answer.status_code >= 400:
        told = json.loads(answer.content)
        assert isinstance(told.get("error", told.get("detail")), str), (method, path, told)
    assert answer.status_code < 500 or answer.status_code == 503, (method, path, answer.text)


@pytest.mark.long
def test_any_request_is_answered(web: TestClient) -> None:
    rng = random.Random(0)
    for _ in range(CASES):
        ask(web, rng)
    assert web.get("/policies").status_code == 200


@pytest.mark.slow
def test_fifty_thousand_requests_leave_memory_flat(web: TestClient) -> None:
    rng = random.Random(1)

    def memory_after(cases: int) -> int:
        for _ in range(cases):
            ask(web, rng)
        gc.collect()
        return psutil.Process().memory_info().rss

    before = memory_after(WARM)
    assert memory_after(MANY) - before < 100 << 20
