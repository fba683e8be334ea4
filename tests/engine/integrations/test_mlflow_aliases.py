"""Aliases and routes, both ways, against MLflow's own server code and a real registry, without a port."""

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.catalog.catalog import Catalog, migrate
from engine.controller.release_loop import Controller
from engine.integrations.mlflow_aliases import REFUSED, AliasMirror, AliasMove, find_moves, is_older
from engine.integrations.mlflow_registry import Model, Registry
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.rows import NEW, OLD, THIRD, fill

API = "/api/2.0/mlflow"


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    params = Params(state_dir=tmp_path / "state", release=ReleaseConfig(min_units=10))
    migrate(params.paths.catalog_url)
    fill(Catalog(params.paths.catalog_url))
    controller = Controller(params, "test")
    yield controller
    controller.close()


class Mlflow:
    """MLflow's registry with versions 1, 2, 3 for OLD, NEW, THIRD, as a person at its UI sees it."""

    def __init__(self, client: httpx.Client):
        self.client = client
        self.post("registered-models/create", name="sorting")
        self.post("registered-models/create", name="not-ours")
        for digest in (OLD, NEW, THIRD):
            self.register(digest)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        return self.client.post(f"{API}/{path}", json=body).raise_for_status().json()

    def register(self, digest: str | None) -> str:
        tags = [{"key": "graftwork.digest", "value": digest}] if digest else []
        made = self.post("model-versions/create", name="sorting", source="s3://bucket/x", tags=tags)
        return str(made["model_version"]["version"])

    def aliases(self) -> dict[str, str]:
        answer = self.client.get(f"{API}/registered-models/get", params={"name": "sorting"}).json()
        return {item["alias"]: str(item["version"]) for item in answer["registered_model"].get("aliases", [])}

    def move(self, alias: str, version: str | None) -> None:
        body = {"name": "sorting", "alias": alias}
        if version:
            self.post("registered-models/alias", **body, version=version)
        else:
            self.client.request("DELETE", f"{API}/registered-models/alias", json=body).raise_for_status()

    def refusal(self, version: str) -> str | None:
        found = self.client.get(
            f"{API}/model-versions/get", params={"name": "sorting", "version": version}
        ).json()
        tags = {tag["key"]: tag["value"] for tag in found["model_version"].get("tags", [])}
        return tags.get(REFUSED)


@pytest.fixture(scope="module")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables without rows: its migrations take half a second."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    SqlAlchemyStore(f"sqlite:///{path}").engine.dispose()
    return path


@pytest.fixture
def database(new_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path(shutil.copy(new_database, tmp_path / "mlflow.db"))
    for store in ("_MLFLOW_SERVER_FILE_STORE", "_MLFLOW_SERVER_REGISTRY_STORE"):
        monkeypatch.setenv(store, f"sqlite:///{path}")
    # The server keeps its stores for the life of a process; each test has a database of its own.
    import mlflow.server.handlers as handlers

    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(handlers, "_model_registry_store", None)
    return path


@pytest.fixture
def client(database: Path) -> httpx.Client:
    from mlflow.server import app

    return httpx.Client(transport=httpx.WSGITransport(app=app), base_url="http://127.0.0.1:5000")


@pytest.fixture
def mlflow(client: httpx.Client) -> Mlflow:
    return Mlflow(client)


@pytest.fixture
def mirror(controller: Controller, mlflow: Mlflow) -> AliasMirror:
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(mlflow.client))
    mirror.mirror()
    assert mlflow.aliases() == {"champion": "1"}
    return mirror


@pytest.mark.long
def test_aliases_follow_the_route(controller: Controller, mirror: AliasMirror, mlflow: Mlflow) -> None:
    route = controller.catalog.routes.get("sorting")
    route = controller.catalog.routes.update(replace(route, canary=NEW, weight=0.2), route.version)
    mirror.mirror()
    assert mlflow.aliases() == {"champion": "1", "canary": "2"}
    controller.catalog.routes.update(replace(route, champion=NEW, previous=OLD, canary=None), route.version)
    mirror.mirror()
    assert mlflow.aliases() == {"champion": "2", "previous": "1"}


def test_a_moved_champion_is_promoted(controller: Controller, mirror: AliasMirror, mlflow: Mlflow) -> None:
    mlflow.move("champion", "2")
    mirror.mirror()
    route = controller.catalog.routes.get("sorting")
    assert (route.champion, route.previous) == (NEW, OLD)
    assert mlflow.aliases() == {"champion": "2", "previous": "1"}
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").version == route.version


def test_a_moved_champion_ends_the_running_release(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    release = controller.decisions.start("sorting", NEW, {}, {}, "ada")
    mirror.mirror()
    assert mlflow.aliases() == {"champion": "1", "canary": "2"}
    mlflow.move("champion", "3")
    mirror.mirror()
    ended = controller.catalog.releases.get(release.id)
    assert ended.state == "held"
    assert "Superseded" in ended.reason
    assert mlflow.aliases() == {"champion": "3", "previous": "1"}


def test_a_canary_alias_starts_a_release_and_its_deletion_holds_it(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    mlflow.move("canary", "3")
    mirror.mirror()
    (release,) = controller.catalog.releases.all("sorting", open_only=True)
    assert release.revision == THIRD
    mirror.mirror()
    assert mlflow.aliases() == {"champion": "1", "canary": "3"}
    mlflow.move("canary", None)
    mirror.mirror()
    assert controller.catalog.releases.get(release.id).state == "held"
    assert mlflow.aliases() == {"champion": "1"}


def test_a_canary_alias_that_moves_on_replaces_the_release(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    release = controller.decisions.start("sorting", NEW, {}, {}, "ada")
    mirror.mirror()
    mlflow.move("canary", "3")
    mirror.mirror()
    ended = controller.catalog.releases.get(release.id)
    assert (ended.state, ended.approval) == ("held", "mlflow")
    assert "Superseded by mlflow" in ended.reason
    (running,) = controller.catalog.releases.all("sorting", open_only=True)
    assert running.revision == THIRD
    assert mlflow.aliases() == {"champion": "1", "canary": "3"}


def bury(controller: Controller) -> None:
    controller.decisions.rollback("sorting", NEW, "ada", "It told lies.")


def refuse_by_probe(controller: Controller) -> None:
    controller.catalog.revisions.set_probe("sorting", NEW, {"accepted": False, "reason": "Off by a nat."})


def freeze(controller: Controller) -> None:
    controller.decisions.freeze("ada", "The quarter ends")


@pytest.mark.parametrize(
    ("obstacle", "says"), [(bury, "lies"), (refuse_by_probe, "effect probe"), (freeze, "frozen")]
)
def test_a_refused_move_is_put_back_and_explained(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow, obstacle: Any, says: str
) -> None:
    obstacle(controller)
    mlflow.move("champion", "2")
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").champion == OLD
    assert mlflow.aliases()["champion"] == "1"
    assert says in (mlflow.refusal("2") or "")
    (notice,) = [one for one in controller.catalog.notices.page() if one.name == "graftwork.revision.refused"]
    assert (notice.revision, notice.reason) == (NEW, mlflow.refusal("2"))


def test_a_refusal_goes_when_the_move_succeeds(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    freeze(controller)
    mlflow.move("champion", "2")
    mirror.mirror()
    assert mlflow.refusal("2")
    controller.decisions.thaw("ada", "It is over")
    mlflow.move("champion", "2")
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").champion == NEW
    assert mlflow.refusal("2") is None


def test_a_version_that_is_no_revision_is_refused(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    foreign, unknown = mlflow.register(None), mlflow.register("dd" * 32)
    for version, says in ((foreign, "is not a revision"), (unknown, "no revision")):
        mlflow.move("champion", version)
        mirror.mirror()
        assert mlflow.aliases() == {"champion": "1"}
        assert says in (mlflow.refusal(version) or "")


@pytest.mark.parametrize(("alias", "version"), [("previous", "3"), ("champion", None)])
def test_what_nobody_may_move_is_put_back(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow, alias: str, version: str | None
) -> None:
    before = controller.catalog.routes.get("sorting")
    mlflow.move(alias, version)
    mirror.mirror()
    assert controller.catalog.routes.get("sorting") == before
    assert mlflow.aliases() == {"champion": "1"}
    assert mlflow.refusal(version or "1")


def test_a_deleted_champion_version_is_an_alarm_until_it_is_back(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    mlflow.client.request(
        "DELETE", f"{API}/model-versions/delete", json={"name": "sorting", "version": "1"}
    ).raise_for_status()
    mlflow.move("champion", "2")
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").champion == OLD
    assert OLD[:12] in str(mirror.fault)
    again = mlflow.register(OLD)
    mirror.mirror()
    assert mirror.fault is None
    assert mlflow.aliases() == {"champion": again}
    assert controller.catalog.routes.get("sorting").champion == OLD


def test_a_restored_registry_moves_nothing(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow, database: Path, client: httpx.Client
) -> None:
    import mlflow.server.handlers as handlers

    backup = shutil.copy(database, database.with_suffix(".backup"))
    fourth = "dd" * 32
    row = controller.catalog.revisions.get("sorting", NEW)
    controller.catalog.revisions.add_many([replace(row, digest=fourth)])
    mlflow.move("champion", mlflow.register(fourth))
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").champion == fourth
    handlers._get_model_registry_store().engine.dispose()
    shutil.copy(backup, database)
    handlers._model_registry_store = None
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").champion == fourth
    assert fourth[:12] in str(mirror.fault)
    assert mlflow.aliases() == {"champion": "1"}
    again = mlflow.register(fourth)
    mirror.mirror()
    assert mlflow.aliases() == {"champion": again, "previous": "1"}
    assert mirror.fault is None


def test_a_registered_model_that_is_gone_is_an_alarm(
    controller: Controller, mirror: AliasMirror, mlflow: Mlflow
) -> None:
    mlflow.client.request(
        "DELETE", f"{API}/registered-models/delete", json={"name": "sorting"}
    ).raise_for_status()
    mirror.mirror()
    assert "missing in MLflow" in str(mirror.fault)
    assert controller.catalog.routes.get("sorting").champion == OLD


class Memory(Registry):
    """A registry in memory whose calls can fail, for many random runs."""

    def __init__(self) -> None:
        self.named = {"1": OLD, "2": NEW, "3": THIRD}
        self.held: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.fail_at = -1
        self.calls = itertools.count()
        self.clock = 0

    def _call(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("This registry has no server.")

    def _count(self) -> None:
        if next(self.calls) == self.fail_at:
            raise httpx.ConnectError("injected")

    def models(self) -> list[Model]:
        self._count()
        return [Model("sorting", dict(self.held), 3, self.clock)]

    def digest(self, policy: str, version: str) -> str | None:
        self._count()
        return self.named.get(version)

    def version(self, policy: str, digest: str) -> str | None:
        self._count()
        return next((version for version, named in self.named.items() if named == digest), None)

    def set_alias(self, policy: str, alias: str, version: str | None) -> None:
        self._count()
        self.clock += 1
        self.held.pop(alias, None)
        if version:
            self.held[alias] = version
        # A fault after the write: the answer was lost.
        self._count()

    def tag(self, policy: str, version: str, key: str, value: str) -> None:
        self._count()
        self.tags[version] = value

    def untag(self, policy: str, version: str, key: str) -> None:
        self.tags.pop(version, None)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 6 else ()) for seed in range(30)]
)
def test_any_order_of_moves_and_faults_ends_in_one_state(controller: Controller, seed: int) -> None:
    chance, registry = random.Random(seed), Memory()
    mirror = AliasMirror(controller.catalog, controller.decisions, registry)
    controller.decisions.rollback("sorting", THIRD, "ada", "Never again.")

    def person() -> None:
        alias = chance.choice(["champion", "canary", "previous"])
        registry.held.pop(alias, None)
        if version := chance.choice(["1", "2", "3", "9", None]):
            registry.held[alias] = version
        registry.clock += 1

    def owner() -> None:
        route = controller.catalog.routes.get("sorting")
        wanted = chance.choice([OLD, NEW])
        controller.applier.changes.promote("sorting", wanted, f"verdict on {route.version}", "controller")

    for _ in range(25):
        chance.choice([person, person, owner, lambda: None])()
        registry.calls, registry.fail_at = itertools.count(), chance.choice([-1, -1, 1, 2, 3, 4, 5, 6])
        try:
            mirror.mirror()
        except httpx.ConnectError:
            continue
        assert controller.catalog.routes.get("sorting").champion in (OLD, NEW)
    registry.fail_at = -1
    for _ in range(3):
        mirror.mirror()
    settled = controller.catalog.routes.get("sorting")
    running = controller.catalog.releases.all("sorting", open_only=True)
    wanted = {"champion": settled.champion, "previous": settled.previous}
    wanted["canary"] = running[0].revision if running else settled.canary
    assert {alias: registry.named[version] for alias, version in registry.held.items()} == {
        alias: digest for alias, digest in wanted.items() if digest
    }
    mirror.mirror()
    assert controller.catalog.routes.get("sorting") == settled


def test_our_own_write_that_was_cut_off_is_nobodys_move(controller: Controller) -> None:
    registry = Memory()
    mirror = AliasMirror(controller.catalog, controller.decisions, registry)
    mirror.mirror()
    controller.applier.changes.promote("sorting", NEW, "better", "controller")
    registry.calls, registry.fail_at = itertools.count(), 3
    with pytest.raises(httpx.ConnectError):
        mirror.mirror()
    controller.applier.changes.promote("sorting", OLD, "no, this one", "controller")
    registry.fail_at = -1
    mirror.mirror()
    assert controller.catalog.routes.get("sorting").champion == OLD
    assert registry.held["champion"] == "1"


def test_find_moves_and_is_older(controller: Controller) -> None:
    catalog = controller.catalog
    catalog.aliases.note("p", "champion", "1", OLD)
    catalog.aliases.note("p", "canary", "1>2", NEW)
    catalog.aliases.note("p", "@seen", "5", "100")
    notes = {alias: note for (_, alias), note in catalog.aliases.all().items()}
    assert find_moves({"champion": "1", "canary": "2"}, notes) == []
    assert find_moves({"champion": "2", "canary": "1"}, notes) == [AliasMove("champion", "2")]
    assert find_moves({}, notes) == [AliasMove("champion", None), AliasMove("canary", None)]
    assert find_moves({"champion": "1", "canary": "1", "previous": "4"}, notes) == [
        AliasMove("previous", "4")
    ]
    for highest, updated, older in ((5, 100, False), (6, 101, False), (4, 100, True), (5, 99, True)):
        assert is_older(Model("p", {}, highest, updated), notes) is older
