"""A store has one catalog: with another one, or without its disk, nothing is removed or taken for damaged."""

import json
from contextlib import closing

import pytest

from engine.catalog.catalog import Catalog, migrate
from engine.errors import AdapterError, Conflict, MissingBytes, NotFound
from engine.publishing.bulk import Entry, register_many
from engine.publishing.maintenance import compact, gc, verify
from engine.publishing.ownership import claim, require
from engine.publishing.publish import put
from engine.publishing.repacking import repack
from engine.settings.params import Params
from engine.settings.services import StoreConfig
from engine.store.open import open_store
from engine.store.segments import CATALOG_ID, Store
from flows.entry import on_base
from tests.helpers.command_line import graftwork
from tests.helpers.stored import Stored, opened, placing, prepare


@pytest.fixture
def state(tmp_path):
    params = Params(state_dir=tmp_path / "state")
    prepare(params, "here")
    with opened(params) as stored:
        yield stored


@pytest.fixture
def other(state, tmp_path):
    """Another catalog beside the same store."""
    params = Params(
        state_dir=state.params.state_dir, catalog={"url": f"sqlite:///{tmp_path / 'other' / 'catalog.db'}"}
    )
    prepare(params, "here")
    with opened(params) as stored:
        yield stored


def segments(state: Stored) -> dict[str, int]:
    return dict(state.store.segments())


@pytest.mark.parametrize("operation", [verify, gc, compact, repack], ids=lambda one: one.__name__)
def test_another_catalog_removes_and_judges_nothing(state, other, operation):
    rows = [state.publish("here", seed) for seed in range(3)]
    state.store.close()
    before = segments(state)
    with pytest.raises(Conflict, match="another catalog"):
        operation(other.catalog, other.store)
    assert segments(state) == before
    assert all(state.is_whole(row) for row in rows)


def test_another_catalog_adds_nothing(state, other):
    state.publish("here", 1)
    with pytest.raises(Conflict, match="another catalog"):
        put(*placing(other, "here", 2))
    _, _, tensors, _, dtype, shapes, owner, now = placing(other, "here", 2)
    entries = [Entry("here", tensors)]
    with pytest.raises(Conflict, match="another catalog"):
        list(register_many(other.catalog, other.store, shapes, "b" * 64, entries, owner, now, dtype))
    # A restored catalog is the one that it was.
    state.publish("here", 2)


def test_a_lost_catalog_costs_no_bytes(state, tmp_path):
    rows = [state.publish("here", seed) for seed in range(3)]
    state.store.close()
    before, paths = segments(state), state.params.paths
    kept = tmp_path / "backup"
    kept.mkdir()
    for file in paths.root.glob("catalog.db*"):
        file.rename(kept / file.name)
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"state_dir": str(paths.root)}))
    assert command(params, "gc") == NotFound.exit_code
    # As `graftwork up` does.
    migrate(paths.catalog_url)
    for name in ("gc", "compact", "repack", "verify"):
        assert command(params, name) == Conflict.exit_code
    assert segments(state) == before
    for file in kept.iterdir():
        file.rename(paths.root / file.name)
    assert command(params, "verify") == 0
    with opened(state.params) as back:
        assert all(back.is_whole(row) for row in rows)


def test_a_store_that_is_not_mounted_is_not_damaged(state, tmp_path):
    rows = [state.publish("here", seed) for seed in range(3)]
    state.store.close()
    state.store.root.rename(tmp_path / "elsewhere")
    for operation in (verify, gc, compact, repack):
        with pytest.raises(Conflict, match="is mounted"):
            operation(state.catalog, state.store)
    # Neither does a revision that comes again go to what is there instead.
    with closing(open_store(state.params)) as store, pytest.raises(Conflict, match="is mounted"):
        put(state.catalog, store, *placing(state, "here", 1)[2:])
    assert not state.store.root.exists()
    assert [state.catalog.quarantine.reason("here", row.digest) for row in rows] == [None] * 3
    (tmp_path / "elsewhere").rename(state.store.root)
    assert verify(state.catalog, state.store).examples == []


def test_a_store_from_before_is_taken_over_by_its_catalog_alone(state, other):
    for seed in range(3):
        state.publish("here", seed)
        state.store.close()
    mark = state.store.root / CATALOG_ID
    mark.unlink()
    # It has written there in the meantime, which does not make it the owner of the rest.
    other.publish("here", 9)
    other.store.close()
    assert not mark.exists()
    with pytest.raises(Conflict, match=r"4 segments.*0 others"):
        gc(other.catalog, other.store)
    assert len(segments(state)) == 4
    require(state.catalog, state.store)
    assert mark.read_text() == state.catalog.id
    mark.write_text(other.catalog.id + "\n")
    require(other.catalog, other.store)


def test_bytes_that_are_not_there_are_no_damage(state, tmp_path, monkeypatch):
    rows = [state.publish("here", seed) for seed in range(3)]
    state.store.close()
    rows += [state.publish("here", seed) for seed in range(3, 5)]
    state.store.close()
    gone = state.store.path(rows[0].segment)
    gone.rename(tmp_path / "gone.seg")
    # Opened like a file, and read like none.
    for fault in (None, gone.mkdir):
        if fault:
            fault()
        report = verify(state.catalog, state.store)
        assert (report.damaged, report.unreadable) == (0, 3)
    assert state.catalog.quarantine.reason("here", rows[0].digest) is None
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"state_dir": str(state.params.state_dir)}))
    assert command(params, "verify") == AdapterError.exit_code
    gone.rmdir()
    (tmp_path / "gone.seg").rename(gone)
    chunks = Store.chunks

    def faulty(self, location):
        if self.path(location.segment) == gone:
            raise MissingBytes("Its disk does not answer.")
        return chunks(self, location)

    older = state.publish_older("here", 20)
    monkeypatch.setattr(Store, "chunks", faulty)
    report = compact(state.catalog, state.store, everything=True)
    assert (report.damaged, report.unreadable, report.named) == (0, 3, 1)
    assert gone.exists()
    gone = state.store.path(state.row(older).segment)
    report = repack(state.catalog, state.store)
    assert (report.damaged, report.unreadable, report.moved) == (0, 1, 0)
    monkeypatch.undo()
    assert repack(state.catalog, state.store).moved == 1
    assert verify(state.catalog, state.store).examples == []
    assert all(state.is_whole(row) for row in [*rows, older])


def test_a_store_behind_a_url_says_whose_it_is_too(tmp_path):
    params = Params(state_dir=tmp_path, store=StoreConfig(url=f"memory://{tmp_path.name}"))
    prepare(params, "here")
    with opened(params) as state:
        assert state.store.catalog_id() is None
        claim(state.catalog, state.store)
        assert state.store.catalog_id() == state.catalog.id
        assert state.store.belong_to("another") == state.catalog.id
        assert segments(state) == {}
        migrate(f"sqlite:///{tmp_path / 'other.db'}")
        with (
            closing(Catalog(f"sqlite:///{tmp_path / 'other.db'}")) as other,
            closing(open_store(params)) as store,
            pytest.raises(Conflict, match="another catalog"),
        ):
            gc(other, store)


def test_another_base_has_a_store_of_its_own_where_it_has_a_catalog_of_its_own():
    plain = Params()
    behind = Params(store=StoreConfig(url="s3://bucket/adapters/"))
    shared = Params(store=StoreConfig(url="s3://bucket/x"), catalog={"url": "postgresql://me@host/name"})
    assert on_base(plain, "tiny-moe").store == plain.store
    assert on_base(behind, "tiny-moe").store.url == "s3://bucket/adapters/tiny-moe"
    assert on_base(shared, "tiny-moe").store.url == "s3://bucket/x"


def command(params, *arguments: str) -> int:
    run = graftwork("store", *arguments, "--json", "--params", str(params))
    assert "Traceback" not in run.stderr
    return run.returncode
