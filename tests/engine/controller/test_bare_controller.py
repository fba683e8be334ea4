"""A controller without any optional part: a release from its start to its verdict, and what it imports."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from engine.catalog.catalog import Catalog, migrate
from engine.controller import release_loop
from engine.controller.api import build_app
from engine.controller.release_loop import Controller
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.canary_users import Users
from tests.helpers.import_graph import OPTIONAL, is_in
from tests.helpers.rows import NEW, OLD, fill

LOADED = "import sys, engine.controller.api; print(*sys.modules, sep='\\n')"


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Controller]:
    params = Params(state_dir=tmp_path / "state", release=ReleaseConfig(min_units=10))
    migrate(params.paths.catalog_url)
    with Catalog(params.paths.catalog_url) as catalog:
        fill(catalog)
    controller = Controller(params, "test")
    yield controller
    controller.close()


@pytest.mark.parametrize(
    ("reward", "state", "verdict", "champion"),
    [(1.0, "promoted", "promote", NEW), (0.0, "rolled_back", "rollback", OLD)],
)
def test_a_release_reaches_its_verdict(
    bare: Controller,
    monkeypatch: pytest.MonkeyPatch,
    reward: float,
    state: str,
    verdict: str,
    champion: str,
) -> None:
    # Its loop turns by hand, so it would count as stalled after five seconds of any pause.
    monkeypatch.setattr(release_loop, "STALLED_S", 60.0)
    key = bare.catalog.keys.ensure_local(bare.params.paths.local_key)
    web = TestClient(build_app(bare), headers={"Authorization": f"Bearer {key}"})
    body = {"policy": "sorting", "digest": NEW, "skip_gates": {"score": "none here"}}
    release = web.post("/releases", json=body).json()["id"]
    bare.tick()
    assert web.get(f"/releases/{release}").json()["step"] == "canary"
    Users(bare.params).crowd(canary=reward, baseline=1.0, pairs=60)
    bare.tick()
    assert web.get(f"/releases/{release}").json()["state"] == state
    assert bare.catalog.routes.get("sorting").champion == champion
    bare.spool.rotate()
    bare.due.clear()
    bare.tick()
    (row,) = web.get("/ledger/verdicts").json()
    assert (row["verdict"], row["release"]) == (verdict, release)
    assert web.get("/status").json()["status"] == "ok"
    assert bare.catalog.notices.page() == []


@pytest.mark.long
def test_it_loads_none_of_them() -> None:
    answer = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert [name for name in answer.stdout.split() if is_in(name, OPTIONAL)] == []
