"""What came of an effect probe changes routes alike: in the controller's process, or here where none runs."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from engine.catalog import leases
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.opening import whole_catalog
from engine.catalog.records import Lease
from engine.clients.controller import ControllerClient
from engine.controller import release_loop as loop
from engine.controller import route_changes
from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.controller.route_changes import GATE, LEASE, alone, controller_serves, take_lease
from engine.errors import Conflict, ServiceError
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry
from engine.ledger.ledger import Ledger
from engine.quality.probe import ProbeResult
from engine.settings.params import Params
from engine.settings.services import ControllerConfig
from tasks.verify import record
from tests.helpers.live import eventually, free_port
from tests.helpers.rows import NEW, OLD, THIRD, fill

RIGHT = ProbeResult(True, "Reproduced within 1e-06 nats.", 1e-6, 1e-6, 0.5, 0.5, 1e-3, 1e-6)
WRONG = replace(
    RIGHT,
    accepted=False,
    reason="It differs by 0.7 nats.",
    error=0.7,
    module="q_proj",
    errors={"q_proj": 0.7},
)
BASE = replace(RIGHT, accepted=False, reason="The revision is the base.", effect=0.0, claimed=0.0)


@pytest.fixture
def params(tmp_path: Path) -> Params:
    params = Params(state_dir=tmp_path / "state", controller=ControllerConfig(port=free_port()))
    migrate(params.paths.catalog_url)
    return params


@pytest.fixture
def catalog(params: Params) -> Iterator[Catalog]:
    with closing(whole_catalog(params.paths.catalog_url)) as catalog:
        fill(catalog)
        yield catalog


@pytest.fixture(params=["a controller serves it", "alone"])
def controller(
    params: Params, catalog: Catalog, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Controller | None]:
    """A controller that answers over HTTP, or none."""
    if request.param == "alone":
        yield None
        return
    # Its loop does not turn, so nobody renews the lease.
    monkeypatch.setattr(loop, "LEASE_S", 60.0)
    controller = Controller(params, "test")
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(httpx.Client()))
    server = uvicorn.Server(
        uvicorn.Config(whole_app(controller, mirror), log_level="warning", lifespan="off")
    )
    listener = socket.create_server(("127.0.0.1", params.controller.port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield controller
    server.should_exit = True
    thread.join()
    controller.close()


def found(params: Params, catalog: Catalog, digest: str, result: ProbeResult) -> None:
    key = catalog.keys.ensure_local(params.paths.local_key)
    record(params, catalog, catalog.revisions.get("sorting", digest), result, key)


def test_a_probe_is_acted_upon_by_whoever_writes_routes(
    params: Params, catalog: Catalog, controller: Controller | None
) -> None:
    found(params, catalog, OLD, WRONG)
    assert catalog.revisions.get("sorting", OLD).probe == WRONG.to_json()
    stone = catalog.tombstones.find("sorting", OLD)
    assert stone
    assert (stone.by, stone.reason) == (GATE, WRONG.reason)
    assert catalog.routes.get("sorting").champion is None
    found(params, catalog, OLD, RIGHT)
    assert catalog.tombstones.find("sorting", OLD) is None
    catalog.tombstones.add("sorting", NEW, "It is rude.", "ada")
    found(params, catalog, NEW, RIGHT)
    assert catalog.tombstones.find("sorting", NEW)
    found(params, catalog, THIRD, BASE)
    assert catalog.tombstones.find("sorting", THIRD) is None

    # Who it was: the lease, and whose spool the ledger heard of it by.
    lease = catalog.leases.find(LEASE)
    assert lease
    assert (lease.holder == "test") == (lease.until > time.time()) == (controller is not None)
    writers = {path.name.partition("-")[0] for path in params.paths.spool.iterdir()}
    assert writers == {"controller" if controller else "route"}
    if controller:
        controller.spool.rotate()
    ledger = controller.ledger if controller else Ledger(params.paths.ledger)
    assert ledger
    ledger.ingest(params.paths.spool)
    rows = ledger.connection.execute(
        'SELECT verdict, digest, "by", reason, evidence FROM verdicts ORDER BY "at"'
    ).fetchall()
    assert [row[:4] for row in rows] == [
        ("rollback", OLD, GATE, WRONG.reason),
        ("hold", THIRD, GATE, BASE.reason),
    ]
    assert json.loads(rows[0][4]) == {"probe": WRONG.to_json()}
    changes = ledger.connection.execute('SELECT champion, version, "by" FROM route_changes').fetchall()
    assert changes == [(None, 2, GATE)]
    if controller is None:
        ledger.close()


def lease_of(catalog: Catalog) -> Lease:
    lease = catalog.leases.find(LEASE)
    assert lease
    return lease


@pytest.mark.long
def test_nobody_else_changes_routes_while_one_does_alone(
    params: Params, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The leases' clock is the test's: a pause of the machine, in which nobody renews, lets none expire.
    now = [time.time()]
    monkeypatch.setattr(leases, "time", SimpleNamespace(time=lambda: now[0]))
    with alone(params, catalog, lease_s=1.5):
        taken_until = lease_of(catalog).until
        now[0] += 1.0
        assert eventually(lambda: lease_of(catalog).until > taken_until)
        # Later than the end of the lease that was taken; that it was renewed meanwhile keeps the other out.
        now[0] = taken_until + 0.5
        with pytest.raises(Conflict, match=r"lease.*1\.5 s"), alone(params, catalog, lease_s=1.5):
            raise AssertionError("unreachable")
    with pytest.raises(ValueError, match="a fault"), alone(params, catalog):
        raise ValueError("a fault")
    assert take_lease(catalog, "a controller", 60) == 3


def test_two_that_change_routes_alone_take_turns(
    params: Params, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is taken for a controller, which would be asked in vain."""
    # The second waits for as long as a lease takes: longer than the machine may stand still.
    patient = partial(alone, lease_s=60.0)
    monkeypatch.setattr(route_changes, "alone", patient)
    with patient(params, catalog):
        second = threading.Thread(target=found, args=(params, catalog, OLD, WRONG))
        second.start()
        second.join(0.3)
        assert (second.is_alive(), controller_serves(catalog)) == (True, False)
    second.join(60)
    stone = catalog.tombstones.find("sorting", OLD)
    assert stone
    assert stone.by == GATE


def test_a_controller_that_is_away_is_said_and_nothing_changes(
    params: Params, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = partial(ControllerClient, patience_s=0.3)
    monkeypatch.setattr("engine.clients.controller.ControllerClient", soon)
    take_lease(catalog, "a controller", 60)
    before = catalog.revisions.get("sorting", OLD), catalog.routes.get("sorting")
    with pytest.raises(ServiceError, match=r"controller.*graftwork up"):
        found(params, catalog, OLD, WRONG)
    assert (catalog.revisions.get("sorting", OLD), catalog.routes.get("sorting")) == before
    assert catalog.tombstones.in_force() == []
