"""`graftwork purge`: nothing of the policy is left, everything of the others is; killed, it goes on."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from engine.base.resident import BaseInfo
from engine.catalog.catalog import Catalog, Policy, Release
from engine.catalog.opening import whole_catalog
from engine.catalog.revision_rows import location
from engine.clients.controller import ControllerClient
from engine.controller.__main__ import whole_app
from engine.controller.release_loop import Controller
from engine.errors import ConfigError, Conflict, NotFound, ServiceError
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import Registry
from engine.ledger.ledger import Spool, open_snapshot
from engine.settings.params import Params, load_params
from engine.store.open import open_store
from engine.training.service import session_deletion
from engine.training.service import state as session_state
from engine.training.service.session import state_file
from engine.training.service.session_deletion import LEASE_S
from flows.cli import app
from tasks import purge as purging
from tasks.purge_record import reuse_purged_name
from tests.helpers.kept_adapters import BASE, add_policy, keep, settings
from tests.helpers.live import eventually
from tests.helpers.state_of_265b009 import leave_catalog_of_265b009

# What must be in no file afterwards; random, so that no compression hides it.
SECRET = os.urandom(600).hex()
PLACES = ("name", "sessions", "segments", "catalog", "store", "cache", "files", "mlflow", "ledger")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings(tmp_path)


@pytest.fixture
def params(file: Path) -> Params:
    return load_params(file)


@pytest.fixture
def catalog(params: Params) -> Catalog:
    """Two policies, `gone` and `kept`, with rows, bytes, sessions, scores and progress files."""
    catalog = add_policy(params, "gone", "kept")
    with closing(open_store(params)) as store:
        # In one segment: what is to go lies beside what stays.
        rows = {name: keep(params, catalog, name, seeds, True, store) for name, seeds in SEEDS.items()}
    spool = Spool(params.paths.spool, "test")
    for name in rows:
        secret = SECRET if name == "gone" else "fine"
        spool.emit("scores", policy=name, digest=rows[name][0].digest, item="1", score=1.0, answer=secret)
        id = spool.emit("observations", policy=name, arm="champion", unit=secret, key="k")
        spool.emit("feedback", request_id=id, reward=1.0, key="k")
        write_session(params.paths.sessions / f"{name}-{'0' * 12}", name, secret)
        params.paths.runs.mkdir(exist_ok=True)
        (params.paths.runs / f"{name}-{'1' * 12}.json").write_text(json.dumps({"answer": secret}))
    spool.close()
    (params.paths.runs / "report.html").write_text(SECRET)
    (params.paths.root / "warm").mkdir()
    (params.paths.root / "warm" / "8460.json").write_text(json.dumps([{"policy": "gone", "digest": SECRET}]))
    return catalog


SEEDS = {"gone": range(1, 4), "kept": range(11, 13)}


def write_session(folder: Path, policy: str, secret: str, age_s: float = LEASE_S) -> None:
    tree = {"version": session_state.VERSION, "policy": policy, "said": secret, "factor": torch.ones(3)}
    session_state.write(tree, [state_file(folder, "step"), state_file(folder)])
    then = time.time() - age_s
    os.utime(state_file(folder), (then, then))


def purge(params: Params, policy: str = "gone") -> purging.Record:
    return purging.purge(params, policy, "ann", "asked for it", lambda place, counts: None)


def is_anywhere(params: Params, secret: bytes) -> list[Path]:
    found = []
    for path in params.state_dir.rglob("*"):
        # A running controller renames and removes files of its own between any two of these looks.
        with suppress(FileNotFoundError):
            if path.is_file() and secret in path.read_bytes():
                found.append(path)
    return found


def check_kept(params: Params) -> None:
    """Everything of the other policy is as it was."""
    with closing(whole_catalog(params.paths.catalog_url)) as catalog, closing(open_store(params)) as store:
        rows = catalog.revisions.page("kept")
        assert len(rows) == len(SEEDS["kept"])
        assert store.check([location(row) for row in rows]) == [None] * len(rows)
        assert all(params.paths.revision("kept", row.digest).is_dir() for row in rows)
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        for table in ("scores", "observations", "feedback"):
            assert ledger.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,), table
    assert state_file(params.paths.sessions / f"kept-{'0' * 12}").is_file()
    assert (params.paths.runs / f"kept-{'1' * 12}.json").is_file()


def payloads(params: Params, catalog: Catalog, policy: str) -> list[bytes]:
    with closing(open_store(params)) as store:
        return [bytes(store.read(location(row)))[:256] for row in catalog.revisions.page(policy)]


@pytest.mark.long
def test_nothing_of_it_is_left_and_each_place_is_reported(file, params, catalog):
    secrets = [*payloads(params, catalog, "gone"), SECRET.encode(), b"gone-0000"]
    assert all(is_anywhere(params, secret) for secret in secrets[:-1])
    given = ["--by", "ann", "--reason", "asked for it", "--yes", "--json", "--params", str(file)]
    said = CliRunner().invoke(app, ["purge", "gone", *given])
    assert said.exit_code == 0, said.exception
    record = json.loads(said.output)
    assert tuple(record["places"]) == PLACES
    places = record["places"]
    assert places["sessions"]["sessions"] == 1
    assert places["segments"]["revisions"] == places["catalog"]["revisions"] == 3
    assert (places["store"]["segments"], places["store"]["moved"]) == (1, 2)
    assert places["files"] == {"revision_directories": 3, "progress": 1, "reports": 1}
    assert (places["ledger"]["scores"], places["ledger"]["observations"]) == (1, 1)
    for secret in secrets:
        assert is_anywhere(params, secret) == [], secret[:20]
    check_kept(params)
    mark = catalog.purges.find("gone")
    assert mark is not None
    assert mark["by"] == "ann"


def test_a_second_time_changes_nothing_and_says_who_did_it(params, catalog):
    first = purge(params)
    again = purging.purge(params, "gone", "bob", "again", lambda place, counts: None)
    assert again == first
    check_kept(params)


class Killed(BaseException):
    pass


@pytest.mark.long
@pytest.mark.parametrize(
    "after", [pytest.param(False, id="before", marks=pytest.mark.slow), pytest.param(True, id="after")]
)
@pytest.mark.parametrize("place", PLACES)
def test_killed_at_any_place_it_goes_on_from_there(params, catalog, monkeypatch, place, after):
    """Before its work, and when the work is done but not noted."""
    secrets = payloads(params, catalog, "gone")
    with killed_at(monkeypatch, place, after), pytest.raises(Killed):
        purge(params)
    record = purge(params)
    assert tuple(record.places) == PLACES
    assert record.finished_at
    for secret in (*secrets, SECRET.encode()):
        assert is_anywhere(params, secret) == []
    check_kept(params)


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, place: str, after: bool = False) -> Iterator[None]:
    """Kill a purge before its work at a place, or `after` that and before it is noted."""
    write, before = purging.Record.write, list(PLACES[: PLACES.index(place)])

    def dies(record: purging.Record, file: Path) -> None:
        if after and list(record.places) == [*before, place]:
            raise Killed
        write(record, file)
        if not after and list(record.places) == before:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(purging.Record, "write", dies)
        yield


def test_it_is_refused_while_a_release_runs(params, catalog):
    digest = catalog.revisions.page("gone")[0].digest
    catalog.releases.add(Release("r", "gone", digest, None, "canary", 0.2, "running", {}, 1.0, 1.0))
    with pytest.raises(Conflict, match=r"'canary'.*graftwork decide hold gone"):
        purge(params)
    nothing_happened(params, catalog)
    catalog.releases.update("r", 0, state="held")
    purge(params)
    check_kept(params)


def nothing_happened(params: Params, catalog: Catalog) -> None:
    assert len(catalog.revisions.page("gone")) == 3
    assert catalog.purges.find("gone") is None
    assert state_file(params.paths.sessions / f"gone-{'0' * 12}").is_file()
    assert not (params.paths.root / "purges" / "gone.json").is_file()


def test_it_is_refused_while_a_session_is_open(params, catalog):
    """No trainer runs here: by when its state was touched last."""
    write_session(params.paths.sessions / "another", "gone", "x", age_s=1)
    with pytest.raises(Conflict, match=r"'another'.*'gone'"):
        purge(params)
    nothing_happened(params, catalog)


def test_what_never_was_is_not_found_and_nothing_is_done_without_a_yes(file, params, catalog):
    with pytest.raises(NotFound, match="no policy 'gome'"):
        purge(params, "gome")
    with pytest.raises(ConfigError, match=r"'\.\./gone'"):
        purge(params, "../gone")
    with pytest.raises(ConfigError, match="--by"):
        purging.purge(params, "gone", " ", "x", lambda place, counts: None)
    said = CliRunner().invoke(app, ["purge", "gone", "--by", "a", "--reason", "r", "--params", str(file)])
    assert isinstance(said.exception, ConfigError)
    assert "--yes" in str(said.exception)
    nothing_happened(params, catalog)


def test_two_at_once_do_not_meet(params, catalog):
    there, go_on = threading.Event(), threading.Event()

    def waits(*_):
        there.set()
        assert go_on.wait(30)

    first = threading.Thread(target=purging.purge, args=(params, "gone", "ann", "asked for it", waits))
    first.start()
    assert there.wait(30)
    with pytest.raises(Conflict, match="Another purge"):
        purge(params)
    go_on.set()
    first.join(60)
    assert catalog.purges.find("gone")


@pytest.mark.long
@pytest.mark.parametrize("place", ["sessions", "segments", "store", "ledger"])
def test_a_name_that_came_back_after_a_kill_is_purged_from_the_start(params, catalog, monkeypatch, place):
    """What the record says was done then is done anew, and what was not done yet is not forgotten."""
    secrets = payloads(params, catalog, "gone")

    with killed_at(monkeypatch, place), pytest.raises(Killed):
        purge(params)
    assert catalog.purges.find("gone")
    with pytest.raises(NotFound):
        catalog.policies.get("gone")
    for again in (False, True):
        with pytest.raises(Conflict, match="graftwork purge gone"):
            reuse_purged_name(params, "gone", "me", again)
    # As if the record had been lost from sight, by another installation of the same catalog.
    catalog.policies.add(Policy("gone", BASE, {}, "me", 1.0), again=True)
    (row,) = keep(params, catalog, "gone", [99], exported=True)
    secrets += payloads(params, catalog, "gone")
    record = purge(params)
    assert record.places["name"]["policies"] == 1
    assert row.segment in record.segments
    with pytest.raises(NotFound):
        catalog.revisions.get("gone", row.digest)
    for secret in secrets:
        assert is_anywhere(params, secret) == []
    check_kept(params)


def test_nothing_is_published_under_a_name_whose_sessions_are_gone(params, catalog, monkeypatch):
    seen = []

    def looked(name, inner):
        def look(*arguments):
            seen.append((name, catalog.purges.find("gone") is not None))
            return inner(*arguments)

        return look

    for name in ("refuse_open", "remove_sessions"):
        monkeypatch.setattr(session_deletion, name, looked(name, getattr(session_deletion, name)))
    purge(params)
    assert seen[:2] == [("refuse_open", False), ("remove_sessions", True)]
    assert all(is_marked for _, is_marked in seen[1:])


def test_it_does_not_end_while_a_segment_with_its_bytes_is_left(params, catalog):
    """Another policy's damaged revision keeps it; so does a writer."""
    (kept, other), segment = catalog.revisions.page("kept"), catalog.revisions.page("gone")[0].segment
    assert {kept.segment, other.segment} == {segment}
    file = params.paths.store / segment
    whole = file.read_bytes()
    file.write_bytes(whole[: kept.offset] + bytes(16) + whole[kept.offset + 16 :])
    with pytest.raises(ServiceError, match=f"1 segments.*kept@{kept.digest[:12]}"):
        purge(params)
    assert file.is_file()
    with closing(open_store(params)) as store, store.claim(segment) as is_ours:
        assert is_ours
        with pytest.raises(ServiceError, match=r"1 segments.*'gone'"):
            purge(params)
    # Restored; the row of a damaged revision is moved like any other then.
    file.write_bytes(whole)
    purge(params)
    assert not file.is_file()
    check_kept(params)


def test_sessions_that_cannot_be_removed_are_named(tmp_path, monkeypatch):
    folder = tmp_path / f"gone-{'0' * 12}"
    write_session(folder, "gone", SECRET)
    # A kill between two purges has left one of the same name.
    write_session(tmp_path / f".purged-gone-{'0' * 12}", "gone", SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(session_deletion.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(ServiceError, match=rf"\.purged-gone-{'0' * 12}"):
            session_deletion.remove_sessions(tmp_path, "gone")
    session_deletion.remove_sessions(tmp_path, "gone")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_purged_name_is_taken_again_only_on_purpose(params, catalog, monkeypatch):
    purge(params)
    monkeypatch.setattr("tasks.purge_record.ensure_base", lambda *_: BaseInfo("b", Path("b"), BASE))
    with pytest.raises(Conflict, match="purged by 'ann'"):
        catalog.policies.add(Policy("gone", BASE, {}, "me", 1.0))
    with pytest.raises(Conflict, match=r"purged by 'ann'.*--reuse-name"):
        reuse_purged_name(params, "gone", "me", False)
    reuse_purged_name(params, "kept", "me", False)
    reuse_purged_name(params, "gone", "me", True)
    reuse_purged_name(params, "gone", "me", False)
    (row,) = keep(params, catalog, "gone", [99])
    # And purged again: a record of its own.
    again = purging.purge(params, "gone", "bob", "once more", lambda place, counts: None)
    assert (again.by, again.places["catalog"]["revisions"]) == ("bob", 1)
    assert catalog.purges.find("gone")["by"] == "bob"
    with pytest.raises(NotFound):
        catalog.revisions.get("gone", row.digest)


def test_a_catalog_of_an_older_version_is_brought_to_the_newest_schema_first(params):
    params.state_dir.mkdir()
    leave_catalog_of_265b009(params.paths.catalog_url)
    reuse_purged_name(params, "sums", "me", False)
    with closing(whole_catalog(params.paths.catalog_url)) as catalog:
        assert catalog.purges.find("sums") is None


def test_what_was_its_own_before_goes_too(params, catalog):
    """A snapshot that has expired: no row says any more whose bytes these are."""
    with closing(open_store(params)) as store:
        (snapshot,), (beside,) = (
            keep(params, catalog, name, [seed], into=store) for name, seed in (("gone", 7), ("kept", 8))
        )
        payload = bytes(store.read(location(snapshot)))[:256]
    others = {row.segment for row in catalog.revisions.page("gone") if row.digest != snapshot.digest}
    assert snapshot.segment not in others
    catalog.lifecycle.set_expiry("gone", snapshot.digest, 1.0)
    assert [row.digest for row in catalog.lifecycle.expire(2.0)] == [snapshot.digest]
    assert is_anywhere(params, payload)
    purge(params)
    assert not is_anywhere(params, payload)
    with closing(open_store(params)) as store:
        assert store.check([location(catalog.revisions.get("kept", beside.digest))]) == [None]


def test_bytes_that_another_policy_shares_stay(params, catalog):
    """One adapter under two names: identical bytes lie in the store once."""
    from dataclasses import replace

    shared = catalog.revisions.page("gone")[0]
    catalog.revisions.add_many([replace(shared, policy="kept")], [shared.digest])
    purge(params)
    with closing(open_store(params)) as store:
        row = catalog.revisions.get("kept", shared.digest)
        assert store.check([location(row)]) == [None]
    assert row.segment != shared.segment


@contextmanager
def running(params: Params) -> Iterator[Controller]:
    controller = Controller(params, "test")
    turning = threading.Thread(target=controller.run)
    turning.start()
    try:
        yield controller
    finally:
        controller.stop()
        turning.join(30)
        controller.close()


@pytest.mark.long
def test_a_running_controller_purges_its_own_ledger(params, catalog, monkeypatch):
    """The ledger and the routes have one writer; in the controller's own thread, between two turns."""
    asked = []
    key = catalog.keys.ensure_local(params.paths.local_key)
    with running(params) as controller:
        built = controller.last_tick
        assert eventually(lambda: controller.last_tick > built)
        mirror = AliasMirror(catalog, controller.decisions, Registry(None))
        client = TestClient(whole_app(controller, mirror))
        refused = client.post("/purge", json={"policy": "gone"})
        assert refused.status_code == 401

        def connected(url, key, *_, **__):
            assert url == params.url("controller")
            ours = ControllerClient(url, key)
            client.headers["authorization"] = ours.http.headers["authorization"]
            ours.http, plain = client, ours.purge
            ours.close = lambda: None
            ours.purge = lambda policy, place, by: asked.append(place) or plain(policy, place, by)
            return ours

        monkeypatch.setattr("tasks.release.ControllerClient", connected)
        record = purge(params)
        assert asked == ["name", "catalog", "ledger"]
        assert catalog.purges.find("gone")["by"] == "ann"
        assert catalog.leases.find("controller").holder == "test"
        assert key in params.paths.local_key.read_text()
        assert record.places["ledger"]["scores"] == 1
        assert is_anywhere(params, SECRET.encode()) == []
        deadline = time.monotonic() + 60
        # It goes on as ever, and what an answer that was under way tells of afterwards does not come back.
        spool = Spool(params.paths.spool, "later")
        late = spool.emit("observations", policy="gone", arm="champion", unit=SECRET, key="k")
        spool.emit("feedback", request_id=late, reward=1.0, key=SECRET)
        spool.emit("scores", policy="gone", unknown=SECRET)
        spool.emit("scores", policy="kept", item="2", score=0.5)
        spool.close()
        while time.monotonic() < deadline:
            with open_snapshot(params.paths.ledger_snapshot) as ledger:
                if ledger.execute("SELECT count(*) FROM scores").fetchone() == (2,):
                    break
            time.sleep(0.1)
        assert controller.faults == {}
        with open_snapshot(params.paths.ledger_snapshot) as ledger:
            assert ledger.execute("SELECT count(*) FROM scores").fetchone() == (2,)
    assert is_anywhere(params, SECRET.encode()) == []


@pytest.mark.long
def test_a_controller_that_does_not_answer_is_said_and_the_rest_is_not_repeated(params, catalog):
    catalog.leases.acquire("controller", "somebody", 60)
    catalog.keys.ensure_local(params.paths.local_key)
    with pytest.raises(ServiceError, match="purge the name"):
        purge(params)
    assert len(catalog.revisions.page("gone")) == 3
    catalog.leases.release("controller", "somebody")

    def starts(place, counts):
        if place == "mlflow":
            catalog.leases.acquire("controller", "somebody", 60)

    with pytest.raises(ServiceError, match="purge the ledger"):
        purging.purge(params, "gone", "ann", "asked for it", starts)
    catalog.leases.release("controller", "somebody")
    record = purge(params)
    assert record.places["catalog"]["revisions"] == 3
    assert is_anywhere(params, SECRET.encode()) == []
    check_kept(params)


@pytest.mark.long
def test_mlflow_forgets_the_policy_for_good(params, catalog, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    url = f"sqlite:///{params.paths.mlflow_db}"
    # Creating a version asks the global tracking server for its logged model.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    # As `mlflow server --serve-artifacts` has it.
    SqlAlchemyStore(url, "mlflow-artifacts:/")
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    experiment = client.create_experiment("graftwork", artifact_location="mlflow-artifacts:/7")
    other = client.create_experiment("somebody's own")
    client.delete_experiment(other)
    runs = {}
    for policy in ("gone", "kept"):
        tags = {"graftwork.policy": policy, "graftwork.digest": policy}
        run = client.create_run(experiment, tags=tags)
        model = client.create_logged_model(experiment, "m", run.info.run_id, tags)
        for uri in (run.info.artifact_uri, model.artifact_location):
            folder = params.paths.mlartifacts / uri.removeprefix("mlflow-artifacts:/")
            folder.mkdir(parents=True)
            (folder / "weights").write_text(SECRET if policy == "gone" else "fine")
        client.create_registered_model(policy)
        client.create_model_version(policy, f"models:/{model.model_id}", run.info.run_id, tags)
        runs[policy] = run.info.run_id
    bucket = client.create_experiment("elsewhere", artifact_location="s3://bucket/7")
    client.create_run(bucket, tags={"graftwork.policy": "gone"})
    record = purge(params)
    (address,) = record.elsewhere
    assert address.startswith("s3://bucket/7/")
    found = record.places["mlflow"]
    assert {name: found[name] for name in ("versions", "models", "logged_models", "runs")} == {
        "versions": 1, "models": 1, "logged_models": 1, "runs": 2
    }  # fmt: skip
    assert is_anywhere(params, SECRET.encode()) == []
    assert [one.name for one in client.search_registered_models()] == ["kept"]
    assert client.get_run(runs["kept"]).info.run_id == runs["kept"]
    with pytest.raises(Exception, match=runs["gone"]):
        client.get_run(runs["gone"])
    assert len(list(params.paths.mlartifacts.rglob("weights"))) == 2
    assert client.get_experiment(other).lifecycle_stage == "deleted"


def test_a_read_through_cache_drops_its_copies(tmp_path, catalog, params, monkeypatch):
    """Only a store behind a URL has one; here it is the local store with a fake of that one call."""
    dropped = []

    def opened(_):
        store = open_store(params)
        store.drop_cached = lambda location: dropped.append(location.checksum) or True
        return store

    wanted = sorted(row.checksum for row in catalog.revisions.page("gone"))
    remote = params.model_copy(update={"store": params.store.model_copy(update={"url": "memory://x"})})
    monkeypatch.setattr(purging, "open_store", opened)
    assert purge(remote).places["cache"] == {"copies": 3}
    assert sorted(dropped) == wanted


def test_what_is_asked_of_a_loop_is_done_there_or_called_off():
    from engine.threads import LoopRequests

    asked, done = LoopRequests(), []
    with pytest.raises(ServiceError, match="within 0 s"):
        asked.call(lambda: done.append("late"), 0.05)
    asked.run_waiting()
    assert done == []
    ended = threading.Event()

    def turn() -> None:
        while not ended.wait(0.01):
            asked.run_waiting()

    # It goes on turning, since a call may come later than any one turn.
    loop = threading.Thread(target=turn)
    loop.start()
    try:
        assert asked.call(threading.get_ident, 60) == loop.ident
        with pytest.raises(NotFound, match="nothing here"):
            asked.call(nothing_here, 60)
    finally:
        ended.set()
        loop.join()


def nothing_here() -> None:
    raise NotFound("There is nothing here.")
