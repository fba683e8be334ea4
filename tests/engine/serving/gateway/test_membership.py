"""An engine's row in the catalog, and what it tells load balancers."""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.catalog.catalog import Catalog, migrate
from engine.serving.gateway.membership import Membership
from engine.serving.gateway.routing import Router


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    with Catalog(url) as catalog:
        yield catalog


@pytest.fixture
def router(catalog: Catalog) -> Router:
    return Router(catalog, "tiny", "base")


def membership(catalog: Catalog) -> Membership:
    return Membership(catalog, "here:8460", "http://here:8460", "base", "1")


def test_an_engine_is_ready_once_it_has_joined_and_loaded(
    catalog: Catalog, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Mock()
    monkeypatch.setattr("engine.serving.gateway.membership.log", log)
    one = membership(catalog)
    assert one.why_not_ready(router, list) == "catalog"
    one.beat()
    # Anybody may ask, so the names are in the log alone.
    for _ in range(2):
        assert one.why_not_ready(router, lambda: ["sorting@aa"]) == "loading"
    assert ["sorting@aa" in str(call) for call in log.warning.mock_calls] == [False, True]
    assert one.why_not_ready(router, list) is None
    # A later release takes no engine from its users.
    assert one.why_not_ready(router, lambda: ["sorting@bb"]) is None
    one.drain()
    assert one.why_not_ready(router, list) == "draining"
    one.beat()
    found = catalog.replicas.find("here:8460")
    assert found is not None
    assert found.draining


def test_of_two_engines_with_one_id_the_older_is_not_ready(catalog: Catalog, router: Router) -> None:
    older, newer = membership(catalog), membership(catalog)
    older.beat()
    newer.beat()
    older.beat()
    assert older.why_not_ready(router, list) == "replaced"
    assert newer.why_not_ready(router, list) is None
    older.leave()
    assert catalog.replicas.find("here:8460") is not None
    newer.leave()
    assert catalog.replicas.find("here:8460") is None


def test_a_catalog_without_the_row_gets_it_again(catalog: Catalog, router: Router) -> None:
    one = membership(catalog)
    one.beat()
    catalog.replicas.leave(one.replica)
    one.tell({("sorting", "aa" * 32): None})
    one.beat()
    assert one.why_not_ready(router, list) is None
    assert catalog.replicas.loads("sorting", "aa" * 32) == {"here:8460": None}


def test_what_is_loaded_is_told_at_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.gateway.membership.BEAT_S", 600.0)
    one = membership(catalog)
    one.start()
    deadline = time.monotonic() + 60
    while catalog.replicas.find("here:8460") is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Long before the next beat.
    one.tell({("sorting", "aa" * 32): None})
    while not catalog.replicas.loads("sorting", "aa" * 32):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.leave()


def test_a_silent_catalog_takes_no_engine_that_was_ready_from_its_users(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    router = Router(catalog, "tiny", "base", clock=lambda: now[0])
    old, new = membership(catalog), membership(catalog)
    old.beat()
    assert old.why_not_ready(router, list) is None

    silent = Mock(commits=Mock(side_effect=sqlite3.OperationalError("disk I/O error")))
    monkeypatch.setattr(router.rows, "watch", silent)
    now[0] = 20.0
    assert old.why_not_ready(router, list) is None
    # One that starts now knows neither routes nor keys.
    assert new.why_not_ready(router, list) == "catalog"


def test_nobody_waits_for_ever_for_what_cannot_be_loaded(catalog: Catalog, router: Router) -> None:
    now = [0.0]
    one = Membership(catalog, "here:8460", "http://here:8460", "base", "1", clock=lambda: now[0])
    one.beat()
    now[0] = 119.0
    assert one.why_not_ready(router, lambda: ["sorting@aa"]) == "loading"
    now[0] = 121.0
    assert one.why_not_ready(router, lambda: ["sorting@aa"]) is None
