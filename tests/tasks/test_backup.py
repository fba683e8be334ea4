"""`graftwork backup create` and `restore`: all of it elsewhere, under load, killed, damaged."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from engine.backup import manifest as manifests
from engine.backup import writer as writers
from engine.backup.manifest import find, read
from engine.backup.place import BackupPlace
from engine.catalog.audit import Audit
from engine.catalog.catalog import Policy
from engine.catalog.leases import BACKUP
from engine.catalog.opening import open_catalog, whole_catalog
from engine.catalog.records import AuditEntry
from engine.catalog.revision_rows import location
from engine.clients.controller import ControllerClient
from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.errors import ConfigError, Conflict, DamagedBytes, GraftworkError, MissingBytes, NotFound
from engine.integrations.mlflow_aliases import AliasMirror, find_moves
from engine.integrations.mlflow_registry import Registry
from engine.ledger import ledger as ledgers
from engine.ledger.ledger import Spool, open_snapshot
from engine.metering.dead_gateways import close_dead
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import Metered, connect
from engine.publishing.maintenance import compact, gc, pages
from engine.security.credentials import create_credentials
from engine.settings.params import Params, load_params
from engine.settings.services import StoreConfig
from engine.store.open import open_store
from engine.store.segments import Store
from tasks import backup as backing
from tasks import restore_backup as restoring
from tasks.backup import backup, newest
from tasks.doctor import examine
from tasks.restore_backup import restore_backup
from tests.engine.catalog.test_two_versions import migrate_as_a_newer_version
from tests.helpers.backup_children import CALLS, FAULT
from tests.helpers.command_line import graftwork
from tests.helpers.kept_adapters import BASE, SHAPES, add_policy, keep, settings
from tests.helpers.live import eventually, free_port
from tests.helpers.made_adapters import canonical
from tests.helpers.postgres import fresh_database
from tests.helpers.repository import ROOT
from tests.helpers.state_of_265b009 import leave_catalog_of_265b009, ledger_of_265b009
from tests.helpers.stored import Stored, opened

SECRET = os.urandom(20).hex()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody spools here meanwhile, except where a test says so."""
    monkeypatch.setattr(backing, "HANDED_OVER_S", 0.0)


@pytest.fixture
def params(tmp_path: Path) -> Params:
    """An installation with everything in it that a backup has to keep."""
    here = tmp_path / "here"
    here.mkdir()
    params = load_params(settings(here))
    fill(params)
    return params


def fill(params: Params) -> str:
    """Fill an installation; return a key to it."""
    paths = params.paths
    params.suites_dir.mkdir(exist_ok=True)
    (params.suites_dir / "north").mkdir()
    (params.suites_dir / "north" / "policy.yaml").write_text("task: train.jsonl\nsuite: north\n")
    (params.suites_dir / "north" / "items.jsonl").write_text('{"question": "1 + 1"}\n')
    with closing(add_policy(params, "north", "south")) as catalog:
        rows = {name: keep(params, catalog, name, seeds, True) for name, seeds in SEEDS.items()}
        route = catalog.routes.get("north")
        catalog.routes.update(replace(route, champion=rows["north"][0].digest), route.version)
        catalog.tombstones.add("south", rows["south"][0].digest, "worse", "ada")
        key = catalog.keys.create("acme", "user")
        catalog.keys.ensure_local(paths.local_key)
        with closing(open_store(params)) as store:
            assert store.belong_to(catalog.id) == catalog.id
    create_credentials(paths)
    (paths.credentials / "mlflow").write_text(SECRET)
    spool = Spool(paths.spool, "test")
    for name, made in rows.items():
        for row in made:
            spool.emit("scores", policy=name, digest=row.digest, item="1", score=0.1 + row.step / 7)
    spool.close()
    session = paths.sessions / f"north-{'0' * 12}"
    session.mkdir(parents=True)
    (session / "current.state").write_bytes(os.urandom(2000))
    (session / "journal.jsonl").write_text('{"id": 1}\n')
    (session / "current.draft").write_bytes(b"half")
    artifact = paths.mlartifacts / "1" / "adapter.bin"
    artifact.parent.mkdir(parents=True)
    artifact.write_bytes(b"artifact")
    usage = UsageLog(paths.usage)
    asked = Metered("r1", "acme", "k", "north", "", "user", time.time(), 10)
    usage.settle(usage.admit(asked), 200, (3, 4))
    usage.admit(asked._replace(id="r2"))
    usage.close()
    return key


SEEDS = {"north": range(1, 4), "south": range(11, 13)}


def elsewhere(params: Params, name: str = "there", **settings: Any) -> Params:
    """Return the settings of another machine, on which nothing is."""
    there = params.state_dir.parent.parent / name
    there.mkdir(exist_ok=True)
    return Params(
        state_dir=there / "state", suites_dir=there / "suites", trainer={"port": free_port()}, **settings
    )


def content(params: Params) -> dict[str, Any]:
    """Return all that must be the same in a restored installation."""
    found: dict[str, Any] = {}
    with closing(whole_catalog(params.paths.catalog_url)) as catalog, closing(open_store(params)) as store:
        rows = [row for page in pages(catalog) for row in page]
        found["rows"] = rows
        found["bytes"] = [store.read(location(row)) for row in rows]
        found["routes"] = [catalog.routes.get(name) for name in sorted({row.policy for row in rows})]
        found["keys"] = catalog.keys.all()
        found["id"] = catalog.id, catalog.secret, store.catalog_id()
        found["stones"] = [catalog.tombstones.find(row.policy, row.digest) for row in rows]
        found["audit"] = [
            entry for entry in Audit(catalog.access).page() if entry.action not in ("backup", "restore")
        ]
        Audit(catalog.access).verify()
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        found["scores"] = ledger.execute("SELECT * FROM scores ORDER BY id").fetchall()
    for folder in ("revisions", "mlartifacts", "sessions"):
        root = params.state_dir / folder
        found[folder] = {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and path.suffix != ".draft"
        }
    found["suites"] = {
        str(path.relative_to(params.suites_dir)): path.read_bytes()
        for path in params.suites_dir.rglob("*")
        if path.is_file()
    }
    with closing(connect(params.paths.usage / "usage.db")) as usage:
        found["usage"] = usage.execute("SELECT id, state, prompt, completion FROM requests").fetchall()
    return found


def test_all_of_it_is_there_on_another_machine(params: Params, tmp_path: Path) -> None:
    result = backup(params, str(tmp_path / "kept"))
    assert result.new_bytes <= result.bytes
    assert (result.kept, result.missing) == (1, [])
    wanted = content(params)
    assert len(wanted["scores"]) == len(wanted["rows"]) == 5
    # The old machine is gone, with every path on it.
    shutil.move(params.state_dir.parent, tmp_path / "gone")
    there = elsewhere(params)
    restore_backup(there, str(tmp_path / "kept"))
    assert content(there) == wanted
    with closing(whole_catalog(there.paths.catalog_url)) as catalog:
        assert not catalog.leases.is_held(BACKUP)
        assert Audit(catalog.access).newest(1)[0].action == "restore"
        # It is a catalog to work with: gc removes nothing that is named.
        with closing(open_store(there)) as store:
            gc(catalog, store)
    assert content(there) == wanted
    assert not list(there.state_dir.parent.glob("*.restoring*"))
    with closing(connect(there.paths.usage / "usage.db")) as usage:
        # The request that was under way is closed, as after a kill of its gateway.
        assert close_dead(there.paths.usage, usage) == 1


def test_requests_that_are_in_a_journal_alone_are_in_it(params: Params, tmp_path: Path) -> None:
    asked = Metered("open", "acme", "k", "north", "", "user", time.time(), 10)
    with closing(UsageLog(params.paths.usage)) as log:
        log.admit(asked)
        log.settle(log.admit(asked._replace(id="ended")), 200, (3, 4))
        backup(params, str(tmp_path / "kept"))
    there = elsewhere(params)
    restore_backup(there, str(tmp_path / "kept"))
    with closing(connect(there.paths.usage / "usage.db")) as usage:
        close_dead(there.paths.usage, usage)
        found = dict(usage.execute("SELECT id, state FROM requests"))
    assert found == {"r1": "settled", "r2": "unknown", "open": "unknown", "ended": "settled"}


def test_no_credential_is_in_it(params: Params, tmp_path: Path) -> None:
    local = params.paths.local_key.read_bytes().strip()
    backup(params, str(tmp_path / "kept"))
    whole = b"".join(path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert (SECRET.encode() in whole, local in whole) == (False, False)
    there = elsewhere(params)
    restore_backup(there, str(tmp_path / "kept"))
    assert not there.paths.credentials.exists()
    with closing(whole_catalog(there.paths.catalog_url)) as catalog:
        # A tenant's key opens it, and so does the old key of the installation, until it is revoked.
        assert catalog.keys.find(local.decode())
        assert catalog.keys.ensure_local(there.paths.local_key) != local.decode()


def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    plain, seen = BackupPlace.put_object, []

    def put(self: BackupPlace, checksum: str, data: bytes) -> None:
        seen.append(checksum)
        plain(self, checksum, data)

    monkeypatch.setattr(BackupPlace, "put_object", put)
    return seen


def test_a_second_backup_copies_what_is_new(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (manifests, writers, restoring):
        monkeypatch.setattr(module, "PART", 1 << 10)
    kept = str(tmp_path / "kept")
    backup(params, kept)
    seen, chunks, read_again = written(monkeypatch), Store.chunks, []

    def counted(self: Store, location: Any) -> Iterator[bytes]:
        read_again.append(location.length)
        return chunks(self, location)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "chunks", counted)
        backup(params, kept)
    place, name = find(kept)
    files = {file.name: file for file in read(place, name).files}
    # The catalog has the note of the first backup; nothing else has changed, and no segment was read.
    assert set(seen) <= set(files["state/catalog.db"].parts)
    assert set(read_again) == {0}
    seen.clear()
    with closing(whole_catalog(params.paths.catalog_url)) as catalog:
        keep(params, catalog, "north", [30])
    backup(params, kept)
    place, name = find(kept)
    new = [file for file in read(place, name).files if file.name not in files]
    assert [file.name.partition("/")[0] for file in new] == ["store"]
    fresh = {part for file in (*new, *read(place, name).files[:1]) for part in file.parts}
    assert set(seen) - fresh <= {
        part for file in read(place, name).files if file.name == "state/catalog.db" for part in file.parts
    }
    there = elsewhere(params)
    restore_backup(there, kept)
    assert content(there) == content(params)


def test_a_segment_that_has_grown_is_read_from_where_it_ended(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (manifests, writers, restoring):
        monkeypatch.setattr(module, "PART", 1 << 10)
    kept = str(tmp_path / "kept")
    with closing(whole_catalog(params.paths.catalog_url)) as catalog, closing(open_store(params)) as store:
        (first,) = keep(params, catalog, "north", [40], into=store)
        backup(params, kept)
        (second,) = keep(params, catalog, "north", [41], into=store)
        assert second.segment == first.segment
        chunks, lengths = Store.chunks, []

        def counted(self: Store, location: Any) -> Iterator[bytes]:
            if location.segment == first.segment:
                lengths.append(location.length)
            return chunks(self, location)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "chunks", counted)
            backup(params, kept)
    assert second.length <= sum(lengths) < second.length + 2048
    restore_backup(elsewhere(params), kept)
    assert content(elsewhere(params)) == content(params)


def test_older_backups_are_restored_by_name_and_removed_when_asked(params: Params, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = backup(params, str(kept))
    with closing(whole_catalog(params.paths.catalog_url)) as catalog:
        keep(params, catalog, "north", [30])
    backup(params, str(kept))
    older = elsewhere(params, "older")
    restore_backup(older, str(kept / "backups" / first.name))
    assert len(content(older)["rows"]) == 5
    (kept / "objects" / "ab").mkdir(exist_ok=True)
    (kept / "objects" / "ab" / f"{'ab' * 32}.{'0' * 32}").write_bytes(b"what a kill left")
    last = backup(params, str(kept), keep=1)
    assert (last.kept, last.removed > 0) == (1, True)
    assert [path.name for path in (kept / "backups").iterdir()] == [last.name]
    used = {part for file in read(BackupPlace(str(kept)), last.name).files for part in file.parts}
    assert {path.name for path in (kept / "objects").rglob("*") if path.is_file()} == used
    there = elsewhere(params)
    restore_backup(there, str(kept))
    assert content(there) == content(params)


def test_the_restored_routes_decide_and_not_mlflows_aliases(params: Params, tmp_path: Path) -> None:
    """Champion and alias were moved between the copy of the catalog and that of MLflow's database."""
    from mlflow.store.model_registry.dbmodels.models import SqlRegisteredModelAlias as Alias

    assert {"name", "alias", "version"} <= {column.name for column in Alias.__table__.columns}
    with closing(sqlite3.connect(params.paths.mlflow_db)) as mlflow, mlflow:
        mlflow.execute(f"CREATE TABLE {Alias.__tablename__} (workspace, name, alias, version INTEGER)")
        moved = [("north", "champion", 3), ("north", "theirs", 1), ("stranger", "champion", 1)]
        mlflow.executemany(f"INSERT INTO {Alias.__tablename__} VALUES ('default', ?, ?, ?)", moved)
    (params.paths.root / backing.MLFLOW_FINISHED).touch()
    with closing(whole_catalog(params.paths.catalog_url)) as catalog:
        champion = catalog.routes.get("north").champion
        catalog.aliases.note("north", "champion", "1", champion)
        catalog.aliases.note("north", "canary", "2", "cc" * 32)
        catalog.aliases.note("north", "@seen", "2", "1")
    result = backup(params, str(tmp_path / "kept"))
    assert result.mlflow == "in the backup"
    there = elsewhere(params)
    restore_backup(there, str(tmp_path / "kept"))
    assert (there.paths.root / backing.MLFLOW_FINISHED).is_file()
    with closing(sqlite3.connect(there.paths.mlflow_db)) as mlflow:
        assert mlflow.execute(f"SELECT count(*) FROM {Alias.__tablename__}").fetchone() == (3,)
    with closing(whole_catalog(there.paths.catalog_url)) as catalog:
        notes = {alias: note for (_, alias), note in catalog.aliases.all().items()}
        assert {policy for policy, _ in catalog.aliases.all()} == {"north"}
    assert set(notes) == {"champion", "@seen"}
    assert find_moves({"champion": "3"}, notes) == []
    # So the mirror writes what the route says.
    assert (notes["champion"].version, notes["champion"].digest != champion) == ("3", True)
    backend = params.model_copy(
        update={"mlflow": params.mlflow.model_copy(update={"backend": "postgresql://db/mlflow"})}
    )
    assert "`mlflow.backend`" in backup(backend, str(tmp_path / "other")).mlflow


@pytest.mark.parametrize(("source", "target"), [("sqlite", "postgres"), ("postgres", "sqlite")])
def test_it_moves_between_sqlite_and_postgres(
    source: str, target: str, postgres_server: str, tmp_path: Path
) -> None:
    def catalog_of(kind: str) -> dict[str, Any]:
        return {"catalog": {"url": fresh_database(postgres_server)}} if kind == "postgres" else {}

    here = tmp_path / "here"
    here.mkdir()
    params = load_params(settings(here), **catalog_of(source))
    fill(params)
    backup(params, str(tmp_path / "kept"))
    there = elsewhere(params, **catalog_of(target))
    restore_backup(there, str(tmp_path / "kept"))
    assert content(there) == content(params)
    assert there.paths.catalog.exists() == (target == "sqlite")
    again = elsewhere(params, "again", catalog=there.catalog)
    if target == "postgres":
        with pytest.raises(Conflict, match="is not empty"):
            restore_backup(again, str(tmp_path / "kept"))
        assert not again.state_dir.exists()


def test_it_moves_to_s3_and_back(s3: None, params: Params, tmp_path: Path) -> None:
    import s3fs

    s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket := f"b{os.urandom(6).hex()}")
    kept = f"s3://{bucket}/backups"
    backup(params, kept)
    there = elsewhere(params, store=StoreConfig(url=f"s3://{bucket}/adapters"))
    restore_backup(there, kept)
    assert content(there) == content(params) | {"id": content(there)["id"]}
    again = elsewhere(params, "again", store=there.store)
    with pytest.raises(Conflict, match="is not empty"):
        restore_backup(again, kept)
    # From a store in S3, by another place.
    second = backup(there, f"s3://{bucket}/second")
    assert second.new_bytes
    assert backup(there, f"s3://{bucket}/second", keep=1).kept == 1
    back = elsewhere(params, "back")
    restore_backup(back, f"s3://{bucket}/second")
    assert content(back) == content(params)


@contextmanager
def running(params: Params, patch: pytest.MonkeyPatch) -> Iterator[Controller]:
    """A controller in its turns, whom the backup asks as over HTTP."""
    controller = Controller(params, "test")
    turning = threading.Thread(target=controller.run)
    turning.start()
    mirror = AliasMirror(controller.catalog, controller.decisions, Registry(None))
    client = TestClient(whole_app(controller, mirror))

    def connected(url: str, key: str, **_: Any) -> ControllerClient:
        ours = ControllerClient(url, key)
        client.headers["authorization"] = ours.http.headers["authorization"]
        ours.http = client
        ours.close = lambda: None
        return ours

    def locked(path: Path) -> None:
        raise Conflict(f"{path} is held.")

    patch.setattr("tasks.release.ControllerClient", connected)
    # DuckDB's lock is the process's, and the controller's is this one.
    patch.setattr(ledgers, "Ledger", locked)
    try:
        yield controller
    finally:
        controller.stop()
        turning.join(30)
        controller.close()


@contextmanager
def under_load(params: Params) -> Iterator[Callable[[], tuple[set[str], set[str], int]]]:
    """Write to catalog, store and ledger from several threads, and collect garbage.

    Yields what says which digests and score ids were acknowledged by now, and the version of a route.
    """
    stop = threading.Event()
    digests: set[str] = set()
    scores: set[str] = set()
    versions, faults = [0], list[BaseException]()

    def publish(state: Stored, seed: int) -> None:
        # What expires at once is what gc and compact have to remove.
        state.publish("north", 2 * seed + 100, expires_at=1.0)
        digests.add(state.publish("north", 2 * seed + 101).digest)

    def route(state: Stored, turn: int) -> None:
        now = state.catalog.routes.get("south")
        versions[0] = state.catalog.routes.update(replace(now, weight=turn % 7 / 10), now.version).version

    def clean(state: Stored, turn: int) -> None:
        state.catalog.lifecycle.expire(time.time())
        gc(state.catalog, state.store)
        compact(state.catalog, state.store, everything=True)

    def repeat(work: Callable[[Stored, int], None]) -> None:
        try:
            with opened(params) as state:
                turn = 0
                while not stop.is_set():
                    work(state, turn)
                    turn += 1
        except BaseException as error:
            faults.append(error)

    def score() -> None:
        spool = Spool(params.paths.spool, "load")
        while not stop.wait(0.005):
            scores.add(spool.emit("scores", policy="north", digest="dd" * 32, item="1", score=0.5))
        spool.close()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in (publish, route, clean)]
    threads.append(threading.Thread(target=score))
    for thread in threads:
        thread.start()
    try:
        yield lambda: (set(digests), set(scores), versions[0])
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not faults, faults


def wait_for_more(acknowledged: Callable[[], tuple[set[str], set[str], int]], turn: int) -> Any:
    deadline = time.monotonic() + 60
    while not ((found := acknowledged())[0] and found[1] and found[2] > turn):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.long
def test_what_was_there_when_it_began_is_in_it_under_load(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, waits, handed_over = BackupPlace.write, random.Random(1), []

    def until_handed_over(_: float) -> None:
        """Wait as long as it takes what is spooled by now to be handed over, also on a busy machine."""
        spooled = list(params.paths.spool.glob("load-*.open"))
        handed_over.append(spooled)
        assert eventually(lambda: not any(file.exists() for file in spooled))

    monkeypatch.setattr(backing, "time", SimpleNamespace(time=time.time, sleep=until_handed_over))

    def slowly(self: BackupPlace, name: str, data: bytes) -> None:
        # So that writers and gc get far while the files are copied.
        time.sleep(waits.uniform(0.0, 0.02))
        plain(self, name, data)

    monkeypatch.setattr(BackupPlace, "write", slowly)
    with whole_catalog(params.paths.catalog_url) as catalog:
        catalog.policies.add(Policy("load", BASE, {}, "me", 1.0))
    with running(params, monkeypatch), under_load(params) as acknowledged:
        for turn in range(3):
            digests, scores, version = wait_for_more(acknowledged, turn)
            assert backup(params, str(tmp_path / "kept")).missing == []
            there = elsewhere(params, f"there{turn}")
            restore_backup(there, str(tmp_path / "kept"))
            found = content(there)
            assert digests <= {row.digest for row in found["rows"]}
            assert scores <= {str(row[0]) for row in found["scores"]}
            assert found["routes"][-1].version >= version
            with opened(there) as state:
                assert all(state.is_whole(row) for row in found["rows"])
    assert len(handed_over) == 3


def test_gc_removes_nothing_while_a_backup_runs(params: Params, tmp_path: Path) -> None:
    with opened(params) as state:
        row = state.publish("north", 77, expires_at=1.0)

        def collect(writer: writers.BackupWriter) -> None:
            if writer.files[-1].name == "state/catalog.db":
                state.catalog.lifecycle.expire(time.time())
                reports.append(gc(state.catalog, state.store))

        reports: list[Any] = []
        assert backup(params, str(tmp_path / "kept"), on_file=collect).missing == []
        (report,) = reports
        assert (report.removed, report.held) == (0, 1)
        assert gc(state.catalog, state.store).removed == 1
    there = elsewhere(params)
    restore_backup(there, str(tmp_path / "kept"))
    with opened(there) as state:
        assert state.is_whole(row)


def test_missing_segments_are_named_and_the_rest_is_backed_up(params: Params, tmp_path: Path) -> None:
    file = params.state_dir.parent / "params.yaml"
    with opened(params) as state:
        row = next(iter(pages(state.catalog)))[0]
        whole = backup(params, str(tmp_path / "kept"))
        state.store.path(row.segment).unlink()
    said = graftwork("backup", "create", str(tmp_path / "kept"), "--keep", "1", "--params", str(file))
    assert said.returncode == MissingBytes.exit_code
    assert row.segment in said.stderr
    assert "No older backup was removed" in said.stderr
    # By this line the chart's loop knows a finished backup.
    assert said.stdout.startswith("Backup ")
    older = elsewhere(params, "older")
    restore_backup(older, str(tmp_path / "kept" / "backups" / whole.name))
    with opened(older) as state:
        assert state.is_whole(row)
    there = elsewhere(params)
    restore_backup(there, str(tmp_path / "kept"))
    with opened(there) as state:
        assert state.row(row)


def test_two_at_once_are_refused_and_a_place_has_one_installation(params: Params, tmp_path: Path) -> None:
    refused: list[GraftworkError] = []

    def again(writer: writers.BackupWriter) -> None:
        if not refused:
            with pytest.raises(Conflict, match="Another backup") as caught:
                backup(params, str(tmp_path / "second"))
            refused.append(caught.value)

    backup(params, str(tmp_path / "kept"), on_file=again)
    assert refused
    other = elsewhere(params, "other")
    other.suites_dir.mkdir()
    fill(other)
    with pytest.raises(Conflict, match="another installation"):
        backup(other, str(tmp_path / "kept"))
    for inside in (params.state_dir / "kept", params.suites_dir):
        with pytest.raises(ConfigError, match="lies inside"):
            backup(params, str(inside))
    with pytest.raises(NotFound, match="no catalog"):
        backup(elsewhere(params, "nowhere"), str(tmp_path / "kept"))


def test_a_backup_that_lost_its_lease_is_not_published(params: Params, tmp_path: Path) -> None:
    def take(writer: writers.BackupWriter) -> None:
        with whole_catalog(params.paths.catalog_url) as catalog:
            catalog.access.engine.raw_connection().execute("UPDATE leases SET holder = 'other'")

    with pytest.raises(GraftworkError, match="another one"):
        backup(params, str(tmp_path / "kept"), on_file=take)
    with pytest.raises(NotFound, match="no finished backup"):
        restore_backup(elsewhere(params), str(tmp_path / "kept"))


def largest(kept: Path) -> Path:
    return max((kept / "objects").rglob("*/*"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(kept: Path, **changes: Any) -> None:
    place, name = find(str(kept))
    found = replace(read(place, name), **changes)
    (kept / "backups" / name).unlink()
    manifests.publish(place, found)


HARMS: dict[str, tuple[Callable[[Path], object], type[GraftworkError], str]] = {
    "unfinished": (
        lambda kept: [path.unlink() for path in (kept / "backups").iterdir()],
        NotFound,
        "no finished backup",
    ),
    "nowhere": (shutil.rmtree, NotFound, "no finished backup"),
    "object missing": (lambda kept: largest(kept).unlink(), MissingBytes, "1 of.*objects"),
    "object cut": (lambda kept: os.truncate(largest(kept), 100), MissingBytes, "cut short"),
    "object damaged": (lambda kept: flip(largest(kept)), DamagedBytes, "holds other bytes"),
    "manifest damaged": (
        lambda kept: flip(next((kept / "backups").iterdir())),
        DamagedBytes,
        "The manifest",
    ),
    "newer catalog": (lambda kept: rewrite(kept, catalog_schema="9999"), ConfigError, "catalog.*newer"),
    "newer ledger": (lambda kept: rewrite(kept, ledger_schema=9999), ConfigError, "ledger.*newer"),
    "older catalog": (
        lambda kept: rewrite(kept, catalog_schema="0009"),
        ConfigError,
        "catalog.*older",
    ),
    "older ledger": (lambda kept: rewrite(kept, ledger_schema=9), ConfigError, "ledger.*older"),
    "newer format": (lambda kept: rewrite(kept, format=2), ConfigError, "has format 2"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_backup_that_cannot_be_restored_is_refused_in_a_sentence(
    params: Params, tmp_path: Path, harm: str
) -> None:
    kept = tmp_path / "kept"
    backup(params, str(kept))
    do, kind, sentence = HARMS[harm]
    do(kept)
    there = elsewhere(params)
    with pytest.raises(kind, match=sentence):
        restore_backup(there, str(kept))
    assert not there.state_dir.exists()


def test_a_backup_of_265b009_is_restored(params: Params, tmp_path: Path) -> None:
    old = tmp_path / "old"
    leave_catalog_of_265b009(f"sqlite:///{old}/catalog.db")
    ledger_of_265b009(old / "ledger.duckdb").close()
    place = BackupPlace(str(tmp_path / "kept"))
    writer = writers.BackupWriter(place, lambda writer: None)
    for name in ("catalog.db", "ledger.duckdb"):
        writer.add_file(f"state/{name}", old / name)
    manifests.publish(
        place,
        manifests.BackupManifest(
            manifests.FORMAT, "0.1.0+g265b009c2b1e", 1.0, "5e2b", "0010", 11, "none", tuple(writer.files)
        ),
    )
    there = elsewhere(params)
    restore_backup(there, place.address)
    with closing(whole_catalog(there.paths.catalog_url)) as catalog:
        assert [row.name for row in catalog.policies.page()] == ["sorting"]
    ledgers.Ledger(there.paths.ledger).close()


def test_a_backup_of_an_older_version_on_a_newer_catalog_is_restored_into_another_database(
    params: Params, tmp_path: Path
) -> None:
    migrate_as_a_newer_version(params.paths.catalog_url)
    backup(params, str(tmp_path / "kept"))
    there = elsewhere(params, catalog={"url": f"sqlite:///{tmp_path}/other/catalog.db"})
    restore_backup(there, str(tmp_path / "kept"))
    assert content(there) == content(params)


def test_suites_that_cannot_be_written_are_told_before_anything_is_restored(
    params: Params, tmp_path: Path
) -> None:
    kept = str(tmp_path / "kept")
    backup(params, kept)
    there = elsewhere(params, store={"url": f"file://{tmp_path}/other_store"})
    there.suites_dir.write_text("no directory")
    with pytest.raises(ConfigError, match=r"suites cannot be written.*Nothing was changed"):
        restore_backup(there, kept)
    assert (there.state_dir.exists(), (tmp_path / "other_store").exists()) == (False, False)
    there.suites_dir.unlink()
    # Suites that are there need no writing.
    shutil.copytree(params.suites_dir, there.suites_dir)
    restore_backup(there, kept)


def test_a_restore_writes_over_nothing(params: Params, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    backup(params, kept)
    with pytest.raises(Conflict, match="is not empty"):
        restore_backup(params, kept)
    there = elsewhere(params)
    (there.suites_dir / "north").mkdir(parents=True)
    mine = there.suites_dir / "north" / "items.jsonl"
    mine.write_text("mine")
    with pytest.raises(Conflict, match=r"items\.jsonl differs"):
        restore_backup(there, kept)
    assert (mine.read_text(), there.state_dir.exists()) == ("mine", False)
    mine.write_bytes((params.suites_dir / "north" / "items.jsonl").read_bytes())
    theirs = there.state_dir.with_name("state.restoring")
    shutil.rmtree(theirs)
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    with pytest.raises(Conflict, match=r"state\.restoring"):
        restore_backup(there, kept)
    shutil.rmtree(theirs)
    there.state_dir.mkdir()
    restore_backup(there, kept)
    assert content(there) == content(params)


def restore_until(params: Params, kept: str, moves: int) -> None:
    """Restore in a child that is killed when so much has been moved to its place."""
    rename, done = Path.rename, []

    def counted(self: Path, target: Path) -> Path:
        if self.parent == params.paths.restoring:
            done.append(self)
            if len(done) > moves:
                os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", counted)
        child = multiprocessing.get_context("fork").Process(target=restore_backup, args=(params, kept))
        child.start()
        child.join(60)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.long
def test_a_mount_point_is_restored_into_at_once_or_not_at_all(params: Params, tmp_path: Path) -> None:
    """It is neither replaced nor written beside; what a new disk and the suites have there may be there."""
    kept = str(tmp_path / "kept")
    backup(params, kept)
    for moves in (1, 4):
        volume = tmp_path / f"volume-{moves}"
        (volume / "lost+found").mkdir(parents=True)
        there = Params(state_dir=volume, suites_dir=volume / "suites", trainer={"port": free_port()})
        is_same, beside = volume.stat().st_ino, set(tmp_path.iterdir())
        restore_until(there, kept, moves)
        with pytest.raises(Conflict, match=r"restore.*again"):
            open_catalog(there.paths, migrated=True)
        restore_backup(there, kept)
        assert content(there) == content(params)
        open_catalog(there.paths).close()
        assert not there.paths.restoring.exists()
        assert (volume.stat().st_ino, set(tmp_path.iterdir())) == (is_same, beside)
        with pytest.raises(Conflict, match="is not empty"):
            restore_backup(there, kept)


def test_the_commands_say_what_they_did(params: Params, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    (tmp_path / "there").mkdir()
    other = settings(tmp_path / "there")
    said = graftwork("backup", "create", kept, "--params", str(params.state_dir.parent / "params.yaml"))
    assert (said.returncode, "Backups there: 1." in said.stdout) == (0, True), said.stderr
    said = graftwork("backup", "restore", kept, "--params", str(other))
    assert (said.returncode, "is restored to" in said.stdout) == (0, True), said.stderr
    assert content(load_params(other)) == content(params)
    said = graftwork("backup", "restore", str(tmp_path), "--params", str(other))
    assert (said.returncode, "no finished backup" in said.stderr) == (5, True)


def test_doctor_warns_of_an_old_backup(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finding() -> tuple[str, bool]:
        (found,) = [one for one in examine(params) if one.check == "backup"]
        return found.seen, bool(found.advice)

    assert finding() == ("none was made yet", False)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    assert finding() == ("none was made yet", True)
    backup(params, str(tmp_path / "kept"))
    with whole_catalog(params.paths.catalog_url) as catalog:
        assert newest(catalog) == (time.time(), str(tmp_path / "kept"))
        assert isinstance(Audit(catalog.access).newest_of("backup"), AuditEntry)
    assert finding() == (f"the last one, to {tmp_path / 'kept'}, is 0.0 days old", False)
    monkeypatch.setattr(time, "time", lambda: now + 16 * 86_400)
    assert finding()[1]


class Children:
    """The process whose children back up and restore."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "tests/helpers/backup_children.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=pipe, stdout=pipe, text=True
        )
        assert self._line() == "ready"

    def run(self, operation: str, file: Path, place: Path, calls: int) -> None:
        """Run a child to its end, which is a kill unless it finishes first."""
        assert self.process.stdin
        self.process.stdin.write(f"{operation} {file} {place} {calls}\n")
        self.process.stdin.flush()
        pid = int(self._line())
        deadline = time.monotonic() + 120
        while not is_gone(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        fault = file.parent / FAULT
        assert not fault.exists(), fault.read_text()

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def survives_kills(params: Params, tmp_path: Path, count: int) -> tuple[int, int]:
    """Kill backups, then restores, spread over all that they do; return how many were killed of each.

    After each kill a restore gives a whole backup or none, and a state directory is whole or not there.
    """
    draw, kept, file = random.Random(5), tmp_path / "kept", params.state_dir.parent / "params.yaml"
    wanted = content_after_ingest(params)
    killed = {"backup": 0, "restore": 0}
    children = Children()
    try:
        children.run("backup", file, tmp_path / "counted", 0)
        calls = int((file.parent / CALLS).read_text())
        for turn in range(count):
            before = names(kept)
            children.run("backup", file, kept, int(calls * (turn + draw.random()) / count))
            killed["backup"] += names(kept) == before
            if names(kept):
                there = elsewhere(params, f"b{turn}")
                restore_backup(there, str(kept))
                assert content(there) == wanted
        backup(params, str(kept), keep=1)
        used = {part for one in read(*find(str(kept))).files for part in one.parts}
        assert {path.name for path in (kept / "objects").rglob("*") if path.is_file()} == used
        (tmp_path / "counted-too").mkdir()
        counted = settings(tmp_path / "counted-too")
        children.run("restore", counted, kept, 0)
        calls = int((counted.parent / CALLS).read_text())
        for turn in range(count):
            (tmp_path / f"r{turn}").mkdir()
            other = settings(tmp_path / f"r{turn}")
            there = load_params(other)
            children.run("restore", other, kept, int(calls * (turn + draw.random()) / count))
            if there.state_dir.exists():
                assert content(there) == wanted
                continue
            killed["restore"] += 1
            restore_backup(there, str(kept))
            assert content(there) == wanted
            assert not list(there.state_dir.parent.glob("*.restoring"))
            assert not list(there.suites_dir.glob(".*"))
    finally:
        children.close()
    return killed["backup"], killed["restore"]


def content_after_ingest(params: Params) -> dict[str, Any]:
    backup(params, str(params.state_dir.parent.parent / "first"))
    return content(params)


def names(kept: Path) -> set[str]:
    return {path.name for path in (kept / "backups").glob("*.json")} if kept.exists() else set()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_some_kills_leave_nothing_half_visible(params: Params, tmp_path: Path) -> None:
    backups, restores = survives_kills(params, tmp_path, 3)
    assert backups
    assert restores


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_of_each(params: Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backups, restores = survives_kills(params, tmp_path, 24)
    with capsys.disabled():
        print(f"\n  {backups} backups and {restores} restores were killed; nothing half visible")
    assert min(backups, restores) >= 20


def test_a_kill_between_the_rows_in_postgres_and_the_end_goes_on(
    params: Params, postgres_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup(params, str(tmp_path / "kept"))
    there = elsewhere(params, catalog={"url": fresh_database(postgres_server)})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, target: os.kill(os.getpid(), signal.SIGKILL))
        child = multiprocessing.get_context("fork").Process(
            target=restore_backup, args=(there, str(tmp_path / "kept"))
        )
        child.start()
        child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not there.state_dir.exists()
    restore_backup(there, str(tmp_path / "kept"))
    assert content(there) == content(params)


def test_the_adapters_differ() -> None:
    """Otherwise equal bytes would say nothing."""
    one, other = (canonical(SHAPES, seed=seed) for seed in (1, 2))
    assert any(bool((one[name] != other[name]).any()) for name in one)


def test_the_report_of_a_backup_is_json(params: Params, tmp_path: Path) -> None:
    file = params.state_dir.parent / "params.yaml"
    said = graftwork("backup", "create", str(tmp_path / "kept"), "--json", "--params", str(file))
    found = json.loads(said.stdout)
    assert (found["files"] > 10, found["kept"], found["missing"]) == (True, 1, [])
