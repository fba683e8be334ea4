"""How a gateway notices what others commit to the catalog, in a file and on a server."""

import time
from contextlib import closing

import pytest

from engine.catalog.catalog import Catalog, migrate
from engine.errors import ServiceError
from engine.serving.gateway import catalog_rows
from engine.serving.gateway.catalog_rows import CatalogRows
from engine.serving.gateway.routing import STALE_S
from tests.helpers.postgres import fresh_database


@pytest.fixture
def server(postgres_server: str) -> str:
    """The address of a catalog without rows on a server."""
    url = fresh_database(postgres_server)
    migrate(url)
    return url


def test_a_look_notices_what_another_connection_commits(catalog: Catalog, catalog_url: str) -> None:
    rows = CatalogRows(catalog)
    rows.take_changed()
    assert rows.take_changed() == set()
    with closing(Catalog(catalog_url)) as other:
        other.tombstones.add("sorting", "aa", "Bad.", "me")
    # A server is asked five times a second.
    deadline = time.monotonic() + 60
    while not (changed := rows.take_changed()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert changed == {"sorting"}


def test_a_server_that_is_down_is_asked_once_in_a_while(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request looks; not each of them may wait for a connection."""
    now = [100.0]
    with closing(Catalog(server)) as catalog:
        rows, since, asked = CatalogRows(catalog, clock=lambda: now[0]), catalog.changes.since, []

        def down(seen: int) -> None:
            asked.append(seen)
            raise ServiceError("The catalog cannot be read.")

        monkeypatch.setattr(catalog.changes, "since", down)
        for _ in range(5):
            with pytest.raises(ServiceError, match="cannot be read"):
                rows.look()
        assert len(asked) == 1
        now[0] += catalog_rows.POLL_S
        monkeypatch.setattr(catalog.changes, "since", since)
        rows.look()
        assert rows.unread_s() == 0.0
        monkeypatch.setattr(catalog.changes, "since", down)
        rows.look()
        now[0] += catalog_rows.POLL_S
        for _ in range(5):
            rows.look()
        assert len(asked) == 2
        # Those that did not ask know as well that it cannot be read.
        now[0] += catalog_rows.POLL_S / 2
        rows.look()
        assert len(asked) == 2
        assert rows.unread_s() == pytest.approx(1.5 * catalog_rows.POLL_S)


def test_what_a_slow_server_answers_is_as_old_as_the_question(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    with closing(Catalog(server)) as catalog:
        rows, since = CatalogRows(catalog, clock=lambda: now[0]), catalog.changes.since

        def slow(seen: int) -> object:
            now[0] += 1.01 * STALE_S
            return since(seen)

        monkeypatch.setattr(catalog.changes, "since", slow)
        rows.look()
        assert rows.as_of == 100.0
        assert rows.unread_s() > STALE_S
