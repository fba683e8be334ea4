"""The catalog: identity, compare-and-swap between processes, expiry, keys, leases, schema."""

import asyncio
import hashlib
import os
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event, select, update

from engine.catalog import access as catalog_access
from engine.catalog import leases as catalog_leases
from engine.catalog.access import open_engine
from engine.catalog.catalog import Base, Catalog, Policy, Revision, Route, migrate
from engine.catalog.opening import open_catalog
from engine.catalog.places import Layout
from engine.catalog.postgres_timeouts import TimeoutConnection
from engine.catalog.tables import layouts, metadata
from engine.errors import AdapterError, ConfigError, Conflict, NotFound, ServiceError
from engine.settings.params import Paths
from tests.helpers.children import children
from tests.helpers.postgres import copied_catalog, fresh_database
from tests.helpers.rows import make_release, make_revision


def test_migrations_and_tables_agree(catalog_url: str) -> None:
    with closing_connection(catalog_url) as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_tables_of_sqlite_are_as_meant(sqlite_catalog_url: str) -> None:
    written = sqlite3.connect(sqlite_catalog_url.removeprefix("sqlite:///"))
    assert written.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    # A prefix of a digest is found by the key's index alone, and a page of the newest is not sorted.
    find = "SELECT * FROM revisions WHERE digest >= x'aa' AND digest <= x'ab' AND policy || '' = 'sorting'"
    newest = "SELECT * FROM revisions WHERE policy = 'sorting' ORDER BY created_at DESC, id DESC LIMIT 9"
    plans = [written.execute(f"EXPLAIN QUERY PLAN {query}").fetchall() for query in (find, newest)]
    assert [[row[3].split(" (")[0] for row in plan] for plan in plans] == [
        ["SEARCH revisions USING INDEX revisions_key"],
        ["SEARCH revisions USING INDEX revisions_newest"],
    ]


@contextmanager
def closing_connection(url: str, write: bool = False) -> Iterator[Connection]:
    engine = open_engine(url)
    with engine.execution_options(write=write).begin() as connection:
        yield connection
    engine.dispose()


@pytest.mark.long
def test_several_processes_may_migrate_at_once(empty_catalog_url: str) -> None:
    url = empty_catalog_url
    workers = [children.Process(target=migrate, args=(url,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert Catalog(url).policies.page() == []


def test_a_file_that_is_no_catalog_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="graftwork up"):
        Catalog(f"sqlite:///{tmp_path}/none.db")
    (tmp_path / "text.db").write_text("this is not a database, but long enough to look at" * 10)
    with pytest.raises(ConfigError, match="not a catalog"):
        Catalog(f"sqlite:///{tmp_path}/text.db")
    with pytest.raises(ConfigError, match="sqlite:///FILE or postgresql"):
        Catalog("mysql://somewhere/db")


def test_an_installations_catalog_is_opened_and_made_only_where_that_is_wanted(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state")
    with pytest.raises(NotFound, match="graftwork up"):
        open_catalog(paths)
    with open_catalog(paths, migrated=True) as made:
        key = made.keys.create("ann", "user")
    assert paths.has_catalog
    with open_catalog(paths) as catalog:
        assert catalog.keys.find(key) is not None


def test_a_table_that_is_gone_is_a_fault_of_the_catalog(catalog: Catalog, catalog_url: str) -> None:
    """As while a backup is restored: whoever keeps rows goes on with them."""
    with closing_connection(catalog_url, write=True) as connection:
        connection.exec_driver_sql("DROP TABLE tombstones")
    for look in (lambda: catalog.tombstones.in_force(), lambda: catalog.tombstones.find("sums", "ab")):
        with pytest.raises(ServiceError, match="cannot be read"):
            look()


def test_another_schema_version_is_refused(catalog_url: str) -> None:
    with closing_connection(catalog_url, write=True) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999', usable_since = '9999'")
    with pytest.raises(ConfigError, match="schema 9999"):
        Catalog(catalog_url)


def test_a_database_that_is_empty_or_gone_is_a_sentence(empty_catalog_url: str) -> None:
    with pytest.raises((ConfigError, NotFound), match=r"no catalog|not a catalog"):
        Catalog(empty_catalog_url)
    with pytest.raises(ServiceError, match="cannot be read"):
        Catalog("postgresql://postgres@127.0.0.1:9/none")


def test_a_full_disk_is_a_sentence(sqlite_catalog_url: str) -> None:
    catalog = Catalog(sqlite_catalog_url)
    with catalog.access.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    with pytest.raises(ServiceError, match="cannot be written"):
        _write_too_much(catalog, pages)
    with pytest.raises(NotFound):
        catalog.layouts.get("x")


def _write_too_much(catalog: Catalog, pages: int) -> None:
    with catalog.access.write() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.exec_driver_sql("INSERT INTO layouts VALUES ('x', hex(zeroblob(1000000)))")


def test_policies_belong_to_an_owner_and_a_base(catalog: Catalog) -> None:
    catalog.policies.add(Policy("sorting", "base", {"rank": 1}, "me", 2.0))
    assert catalog.policies.get("sorting").config == {"rank": 1}
    assert catalog.policies.get("sorting").created_at == 1.0
    with pytest.raises(Conflict, match="belongs to 'me'"):
        catalog.policies.add(Policy("sorting", "base", {}, "you", 2.0))
    with pytest.raises(Conflict, match="base"):
        catalog.policies.add(Policy("sorting", "other", {}, "me", 2.0))
    with pytest.raises(NotFound, match="Known policies: sorting"):
        catalog.policies.get("sortin")


def test_bases_and_layouts_are_added_once_and_a_base_may_move(catalog: Catalog) -> None:
    catalog.bases.add(Base("b1", "tiny", "/somewhere", 1.0))
    catalog.bases.add(Base("b1", "renamed", "/elsewhere", 2.0))
    assert catalog.bases.get("b1") == Base("b1", "tiny", "/elsewhere", 1.0)
    digest = hashlib.sha256(b"{}").hexdigest()
    catalog.layouts.add(digest, "{}")
    catalog.layouts.add(digest, "{}")
    assert catalog.layouts.get(digest) == "{}"
    with pytest.raises(NotFound):
        catalog.bases.get("b2")


def test_a_revision_is_added_once_and_upgraded_by_its_export(catalog: Catalog) -> None:
    assert catalog.revisions.add_many([make_revision("aa11")])[0]
    assert not catalog.revisions.add_many([make_revision("aa11", segment="s2", expires_at=20.0)])[0]
    assert catalog.revisions.get("sorting", "aa11") == make_revision("aa11", expires_at=20.0)
    assert not catalog.revisions.add_many([make_revision("aa11", state="exported", expires_at=None)])[0]
    assert not catalog.revisions.add_many([make_revision("aa11", expires_at=99.0)])[0]
    assert catalog.revisions.get("sorting", "aa11") == make_revision(
        "aa11", state="exported", expires_at=None
    )


def test_the_copies_of_a_revision_begin_with_its_policys_own(catalog: Catalog) -> None:
    catalog.policies.add(Policy("arithmetic", "base", {}, "me", 1.0))
    theirs, ours = make_revision("aa11", policy="arithmetic"), make_revision("aa11", segment="s2")
    body = "{}"
    layout = Layout(hashlib.sha256(body.encode()).hexdigest(), body)
    catalog.revisions.add_many([theirs, ours, make_revision("aa22")], layouts=[layout])
    catalog.quarantine.add("arithmetic", "aa11", "The checksum differs.")
    assert catalog.revisions.copies("sorting", "aa11") == [(ours, False), (theirs, True)]
    assert catalog.revisions.copies("nobody", "aa33") == []
    assert catalog.layouts.get(layout.digest) == body


def test_a_revision_moves_to_other_bytes_and_stays_what_it_is(catalog: Catalog) -> None:
    catalog.revisions.add_many([make_revision("aa11", state="exported", expires_at=None)])
    catalog.revisions.set_probe("sorting", "aa11", {"accepted": True})
    catalog.revisions.add_many([make_revision("aa22")])
    place = {"layout": "l2", "segment": "s2", "offset": 64, "length": 128, "checksum": "dd"}
    moved = catalog.places.replace(make_revision("aa11", owner="you", created_at=9.0, **place))
    assert moved == catalog.revisions.get("sorting", "aa11")
    assert moved == make_revision(
        "aa11", state="exported", expires_at=None, probe={"accepted": True}, **place
    )
    assert catalog.revisions.get("sorting", "aa22") == make_revision("aa22")
    assert catalog.places.replace(make_revision("bb")) == make_revision("bb")


def test_a_digest_prefix_names_one_revision(catalog: Catalog) -> None:
    for digest in ("aa11", "aa22", "ff99"):
        catalog.revisions.add_many([make_revision(digest)])
    assert catalog.revisions.get("sorting", "ff").digest == "ff99"
    assert catalog.revisions.get("sorting", "aa2").digest == "aa22"
    with pytest.raises(Conflict, match="more digits"):
        catalog.revisions.get("sorting", "aa")
    with pytest.raises(NotFound):
        catalog.revisions.get("sorting", "b")
    with pytest.raises(NotFound):
        catalog.revisions.get("other", "ff")


def test_pages_hold_every_revision_once_newest_first(catalog: Catalog) -> None:
    # Several share a time: what came last is the newest.
    rows = [make_revision(f"{99 - i:04x}", created_at=float(i // 3)) for i in range(25)]
    for row in rows:
        catalog.revisions.add_many([row])
    pages: list[Revision] = []
    while page := catalog.revisions.page("sorting", after=pages[-1] if pages else None, limit=7):
        pages += page
    assert pages == rows[::-1]


def test_a_page_after_a_row_that_is_gone_leaves_none_out(catalog: Catalog) -> None:
    rows = [make_revision(f"{i:04x}", state="snapshot", expires_at=9.0, created_at=1.0) for i in range(5)]
    catalog.revisions.add_many(rows)
    catalog.lifecycle.set_expiry("sorting", rows[3].digest, 1.0)
    last = catalog.revisions.page("sorting", limit=2)[-1]
    assert [row.digest for row in catalog.lifecycle.expire(2.0)] == [last.digest]
    assert set(catalog.revisions.page("sorting", after=last)) >= set(rows[:3])


def test_expiry_spares_what_routes_and_releases_name(catalog: Catalog) -> None:
    for digest in ("a1", "a2", "a3", "a4", "a5", "a6"):
        catalog.revisions.add_many([make_revision(digest)])
    catalog.revisions.add_many([make_revision("a7", expires_at=99.0)])
    catalog.revisions.add_many([make_revision("a8", state="exported", expires_at=None)])
    catalog.routes.update(Route("sorting", champion="a1", previous="a2", canary="a3"), 0)
    catalog.releases.add(replace(make_release("r1", "a4"), baseline="a5"))
    assert [row.digest for row in catalog.lifecycle.expire(now=50.0)] == ["a6"]
    assert {row.digest for row in catalog.revisions.page("sorting")} == {
        "a1",
        "a2",
        "a3",
        "a4",
        "a5",
        "a7",
        "a8",
    }


def test_probe_results_are_kept(catalog: Catalog) -> None:
    catalog.revisions.add_many([make_revision("aa")])
    assert catalog.revisions.get("sorting", "aa").probe is None
    catalog.revisions.set_probe("sorting", "aa", {"accepted": True, "max_error": 1e-4})
    assert catalog.revisions.get("sorting", "aa").probe == {"accepted": True, "max_error": 1e-4}
    with pytest.raises(NotFound):
        catalog.revisions.set_probe("sorting", "bb", {})


def test_a_route_changes_by_compare_and_swap(catalog: Catalog) -> None:
    catalog.revisions.add_many([make_revision("aa"), make_revision("bb")])
    route = catalog.routes.get("sorting")
    assert (route.champion, route.version) == (None, 0)
    assert len(route.salt) == 16
    changed = catalog.routes.update(replace(route, canary="aa", weight=0.2), route.version)
    assert changed.version == 1
    assert changed.salt == route.salt
    assert catalog.routes.get("sorting") == changed
    with pytest.raises(Conflict, match="version 0"):
        catalog.routes.update(replace(route, champion="bb"), route.version)
    assert catalog.routes.page() == [changed]


def raise_weight(url: str, times: int) -> None:
    catalog = Catalog(url)
    for _ in range(times):
        while True:
            route = catalog.routes.get("sorting")
            try:
                catalog.routes.update(replace(route, weight=route.weight + 1), route.version)
                break
            except Conflict:
                continue


@pytest.mark.long
def test_no_change_of_several_processes_is_lost(catalog_url: str, catalog: Catalog) -> None:
    workers = [children.Process(target=raise_weight, args=(catalog_url, 25)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    route = catalog.routes.get("sorting")
    assert (route.weight, route.version) == (75.0, 75)


def test_a_tombstone_is_stronger_than_a_route(catalog: Catalog) -> None:
    catalog.revisions.add_many([make_revision("aa")])
    stone = catalog.tombstones.add("sorting", "aa", "It answered nonsense.", "controller")
    assert catalog.tombstones.add("sorting", "aa", "Another reason.", "me") == stone
    for route in (Route("sorting", champion="aa"), Route("sorting", canary="aa")):
        with pytest.raises(Conflict, match="nonsense"):
            catalog.routes.update(route, 0)
    assert catalog.tombstones.find("sorting", "aa") == stone
    assert [stone.reason for stone in catalog.tombstones.in_force()] == ["It answered nonsense."]
    lifted = catalog.tombstones.lift("sorting", "aa", "me", "It was the data.")
    assert (lifted.lifted_by, lifted.lifted_reason) == ("me", "It was the data.")
    assert catalog.tombstones.find("sorting", "aa") is None
    assert catalog.tombstones.in_force() == []
    catalog.routes.update(Route("sorting", champion="aa"), 0)
    with pytest.raises(NotFound, match="no tombstone"):
        catalog.tombstones.lift("sorting", "aa", "me", "again")
    assert catalog.tombstones.add("sorting", "aa", "Worse than before.", "me").reason == "Worse than before."


def test_one_release_of_a_policy_runs(catalog: Catalog) -> None:
    catalog.revisions.add_many([make_revision("aa"), make_revision("bb")])
    catalog.releases.add(make_release("r1"))
    with pytest.raises(Conflict, match="running"):
        catalog.releases.add(make_release("r2", "bb"))
    ended = catalog.releases.update("r1", 0, state="held", reason="why", evidence={"n": 1})
    assert (ended.version, ended.state, ended.evidence) == (1, "held", {"n": 1})
    with pytest.raises(Conflict, match="changed since"):
        catalog.releases.update("r1", 0, state="promoted")
    catalog.releases.add(make_release("r2", "bb"))
    assert [release.id for release in catalog.releases.all(open_only=True)] == ["r2"]
    assert {release.id for release in catalog.releases.all("sorting")} == {"r1", "r2"}
    assert catalog.releases.get("r1") == ended
    with pytest.raises(NotFound):
        catalog.releases.get("r9")


def test_a_lease_has_one_holder_and_a_growing_fence(catalog: Catalog) -> None:
    assert catalog.leases.acquire("controller", "a", ttl_s=60) == 1
    assert catalog.leases.acquire("controller", "b", ttl_s=60) is None
    assert catalog.leases.renew("controller", "a", 1, ttl_s=0)
    assert catalog.leases.acquire("controller", "b", ttl_s=60) == 2
    assert not catalog.leases.renew("controller", "a", 1, ttl_s=60)
    catalog.leases.release("controller", "a")
    assert catalog.leases.acquire("controller", "a", ttl_s=60) is None
    catalog.leases.release("controller", "b")
    assert catalog.leases.acquire("controller", "a", ttl_s=60) == 3


def test_a_clock_that_was_put_back_leaves_no_lease_for_ever(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr(catalog_leases, "time", SimpleNamespace(time=lambda: now))
    day = 86_400.0
    now += day
    assert catalog.leases.acquire("controller", "a pod that is gone", ttl_s=60) == 1
    now -= day
    assert catalog.leases.acquire("controller", "b", ttl_s=60) == 2
    assert not catalog.leases.renew("controller", "a pod that is gone", 1, ttl_s=60)
    # Another machine's clock may be somewhat behind.
    now -= 30
    assert catalog.leases.acquire("controller", "c", ttl_s=60) is None


def test_keys_are_stored_as_hashes(catalog: Catalog, catalog_url: str) -> None:
    plaintext = catalog.keys.create("me", "user")
    assert len(plaintext) == 43
    key = catalog.keys.find(plaintext)
    assert key is not None
    assert (key.owner, key.roles) == ("me", ["infer", "feedback"])
    with closing_connection(catalog_url) as connection:
        assert plaintext not in str(connection.execute(select(metadata.tables["keys"])).all())
    catalog.keys.revoke(key.hash[:8])
    assert catalog.keys.find(plaintext) is None
    assert catalog.keys.all()[0].revoked_at is not None
    with pytest.raises(NotFound):
        catalog.keys.revoke(key.hash[:8])
    with pytest.raises(ConfigError, match="scope"):
        catalog.keys.create("me", "root")


def test_the_local_key_is_made_once_and_replaced_when_revoked(catalog: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "local.key"
    plaintext = catalog.keys.ensure_local(path)
    assert catalog.keys.ensure_local(path) == plaintext
    assert path.stat().st_mode & 0o777 == 0o600
    catalog.keys.revoke(plaintext)
    assert catalog.keys.ensure_local(path) != plaintext


def test_switches(catalog: Catalog) -> None:
    assert not catalog.switches.is_on("freeze")
    catalog.switches.set("freeze", True)
    assert catalog.switches.is_on("freeze")
    catalog.switches.set("freeze", False)
    assert not catalog.switches.is_on("freeze")


def test_a_revision_is_found_fast_among_many(catalog: Catalog) -> None:
    catalog.revisions.add_many([make_revision(f"{i:08x}") for i in range(20_000)])
    seconds = []
    for i in range(0, 20_000, 100):
        each = []
        for _ in range(5):
            started = time.perf_counter()
            assert catalog.revisions.get("sorting", f"{i:08x}").digest == f"{i:08x}"
            each.append(time.perf_counter() - started)
        # A scan takes its time each time; a busy machine delays most of them, but hardly all five.
        seconds.append(min(each))
    # Measured 0.02 ms, and 0.3 ms on Postgres. A scan of a policy's index takes SQLite 1.2 ms.
    assert statistics.median(seconds) < (0.0005 if catalog.access.is_sqlite else 0.003)


def test_a_damaged_layout_is_refused_until_it_is_whole_again(catalog: Catalog) -> None:
    body = '{"blocks": "ab"}'
    digest = hashlib.sha256(body.encode()).hexdigest()
    catalog.layouts.add(digest, body)
    assert catalog.layouts.get(digest) == body
    with catalog.access.write() as connection:
        # Of the same form: nothing but its digest says that it is another.
        connection.execute(update(layouts).values(body='{"blocks": "ba"}'))
    with pytest.raises(AdapterError, match="is damaged"):
        catalog.layouts.get(digest)
    catalog.layouts.add(digest, body)
    assert catalog.layouts.get(digest) == body


def test_importing_the_catalog_is_light() -> None:
    code = "import engine.catalog.catalog, sys; sys.exit('torch' in sys.modules or 'alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nobody_waits_again_for_a_server_that_says_nothing(
    postgres_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packets are dropped, or it hangs: each request would wait 2 s, on the loop of all streams."""
    url = fresh_database(postgres_server)
    migrate(url)
    silent = socket.create_server(("127.0.0.1", 0))
    # Only a wait for the server takes time, so that no pause of the machine ends the back-off.
    now, waited = 0.0, list[float]()
    with silent, closing(Catalog(url)) as catalog, monkeypatch.context() as patch:
        catalog.access.engine.dispose()
        patch.setattr(catalog_access, "time", SimpleNamespace(monotonic=lambda: now))

        def elsewhere(*args: Any, **options: Any) -> object:
            nonlocal now
            options |= {"host": "127.0.0.1", "port": silent.getsockname()[1]}
            began = time.monotonic()
            try:
                return psycopg.Connection.connect(*args, **options)
            finally:
                waited.append(time.monotonic() - began)
                now += waited[-1]

        patch.setattr(TimeoutConnection, "connect", elsewhere)
        asks = [
            # As a gateway that has followed the changes looks for more of them.
            partial(catalog.changes.since, 1),
            partial(catalog.routes.get, "sorting"),
            partial(catalog.tombstones.find, "sorting", "ab" * 32),
        ]
        for ask in asks * 3:
            with pytest.raises(ServiceError):
                ask()
        # Each but the first is told at once: it does not even connect.
        assert len(waited) == 1
        assert waited[0] > 1.0
        patch.undo()
        patch.setattr(catalog_access, "time", SimpleNamespace(monotonic=lambda: now))
        # As long as the first one waited, at most.
        now += waited[0]
        with pytest.raises(NotFound):
            catalog.routes.get("sorting")


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_loop_does_not_wait_for_a_server_that_stands_still(
    postgres_server: str, is_asked_first: bool
) -> None:
    """Its kernel acknowledges all that is sent, so that only the client's own patience ends the wait."""
    url = fresh_database(postgres_server)
    migrate(url)
    with closing(Catalog(url)) as catalog:
        with catalog.access.read() as connection:
            (pid,) = connection.exec_driver_sql("SELECT pg_backend_pid()").one()

        def stop(*_: object) -> None:
            os.kill(pid, signal.SIGSTOP)

        async def ask() -> float:
            began = time.monotonic()
            # Whether a connection is alive is asked before its use; instead of a dead one there is a new one.
            expected = nullcontext() if is_asked_first else pytest.raises(ServiceError, match=r"nothing.*2 s")
            with expected:
                catalog.policies.page()
            return time.monotonic() - began

        try:
            if is_asked_first:
                stop()
            else:
                event.listen(catalog.access.engine, "before_cursor_execute", stop, once=True)
            assert 1.9 < asyncio.run(ask()) < 6
            assert catalog.policies.page() == []
        finally:
            os.kill(pid, signal.SIGCONT)


FROZEN = """
import sys, time
from engine.catalog import access
from engine.catalog.catalog import Catalog

access.IDLE_TIMEOUT_MS = 1000
with Catalog(sys.argv[1]).access.write() as connection:
    connection.exec_driver_sql("SELECT 1")
    print("holds the lock", flush=True)
    time.sleep(600)
"""


def test_a_frozen_machine_does_not_hold_the_writers_lock(postgres_catalog: str) -> None:
    url = copied_catalog(postgres_catalog)
    holder = subprocess.Popen([sys.executable, "-c", FROZEN, url], stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        assert holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        with closing(Catalog(url)) as catalog:
            catalog.policies.add(Policy("sorting", "base", {}, "me", 1.0))
            assert catalog.policies.get("sorting").owner == "me"
    finally:
        holder.kill()
        holder.communicate()


def test_a_demoted_server_is_a_sentence_and_its_connections_go(postgres_catalog: str) -> None:
    """Postgres says `InternalError` to a write, and goes on answering reads."""
    url = copied_catalog(postgres_catalog)
    add = Policy("sorting", "base", {}, "me", 1.0)
    with closing(Catalog(url)) as catalog, psycopg.connect(url, autocommit=True) as server:
        (name,) = server.execute("SELECT quote_ident(current_database())").fetchone() or ()
        with catalog.access.read() as connection:
            connection.exec_driver_sql("SET default_transaction_read_only = on")
            connection.commit()
        with pytest.raises(ServiceError, match="read-only"):
            catalog.policies.add(add)
        # The pool is empty now, and the next connection is to a server that takes writes.
        catalog.policies.add(add)
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        catalog.access.engine.dispose()
        with pytest.raises(ServiceError, match="read-only"):
            catalog.policies.get("sorting")
        server.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        assert catalog.policies.get("sorting").owner == "me"


@pytest.mark.parametrize("kind", ["quick", "read", "write"])
def test_a_restart_of_the_server_fails_nobody(postgres_server: str, kind: str) -> None:
    """Afterwards every connection of the pool is dead: one for each thread that used the catalog."""
    url = fresh_database(postgres_server)
    migrate(url)
    with closing(Catalog(url)) as catalog:
        add = partial(catalog.policies.add, Policy("sorting", "base", {}, "me", 1.0))
        add()
        work = {
            "quick": partial(catalog.tombstones.find, "sorting", "aa" * 32),
            "read": partial(catalog.policies.get, "sorting"),
            "write": add,
        }[kind]
        threads = [catalog.access.engine.raw_connection() for _ in range(3)]
        for connection in threads:
            connection.close()
        with psycopg.connect(url) as other:
            ended = other.execute(
                # Without a worker of autovacuum, which comes to each database from time to time.
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = "
                "current_database() AND pid != pg_backend_pid() AND backend_type = 'client backend'"
            ).fetchall()
        assert ended == [(True,)] * 3
        for _ in threads:
            work()


def test_what_has_expired_is_neither_routed_nor_released(catalog: Catalog) -> None:
    catalog.policies.add(Policy("sorting", "base", {}, "me", 1.0))
    catalog.revisions.add_many([make_revision("aa" * 32)])
    route = catalog.routes.update(replace(catalog.routes.get("sorting"), champion="aa" * 32), 0)
    for digest in ("bb" * 32, "no digest"):
        with pytest.raises(NotFound, match="has no revision"):
            catalog.routes.update(replace(route, canary=digest), 1)
        with pytest.raises(NotFound, match="has no revision"):
            catalog.releases.add(make_release("one", digest))
    assert catalog.routes.get("sorting") == route
    assert catalog.releases.all() == []
