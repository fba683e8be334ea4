"""The store behind a URL: real S3 calls to moto's server, read through a cache that several may share."""

import hashlib
import multiprocessing
import os
import socket
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
from fsspec import AbstractFileSystem
from moto.s3.responses import S3Response

from engine.catalog.revision_rows import location
from engine.errors import AdapterError, ConfigError, Conflict, MissingBytes, ServiceError
from engine.publishing.maintenance import compact, gc, verify
from engine.publishing.repacking import repack
from engine.settings.params import Params
from engine.settings.services import StoreConfig
from engine.store import cache as cache_module
from engine.store import remote
from engine.store.cache import DRAFT, Cache
from engine.store.open import open_store
from engine.store.remote import RemoteStore
from engine.store.segments import CATALOG_ID
from engine.threads import in_parallel
from tests.helpers.store_users import blob, die_after_append, fill_cache
from tests.helpers.stored import opened, prepare

MIB = 1 << 20


@pytest.fixture
def params(s3, tmp_path) -> Params:
    import s3fs

    bucket = f"graftwork-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"
    s3fs.S3FileSystem(**remote.OPTIONS["s3"], use_listings_cache=False).mkdir(bucket)
    return Params(state_dir=tmp_path, store=StoreConfig(url=f"s3://{bucket}/adapters"))


@pytest.fixture
def store(params):
    with closing(open_store(params)) as opened:
        yield opened


def objects(store: RemoteStore) -> list[str]:
    return sorted(name for name in store.client.find(store.place) if name.endswith(".seg"))


def test_a_batch_is_one_object_and_comes_back_through_the_cache(store, params):
    blobs = [os.urandom(size) for size in (1, 64, 7000, 9 * MIB)]
    locations = store.append_many(blobs)
    store.committed()
    assert len(objects(store)) == 1
    assert [location.offset % 64 for location in locations] == [0] * 4
    assert [store.read(location) for location in locations] == blobs
    path, offset = store.fetch(locations[3])
    assert (offset, path.read_bytes()) == (0, blobs[3])
    assert path == params.paths.cache / locations[3].checksum[:2] / locations[3].checksum
    # From now on the service is not needed for it.
    for name in objects(store):
        store.client.rm(name)
    assert store.read(locations[3]) == blobs[3]
    assert [fault is None for fault in store.check(locations)] == [False] * 4


def test_damaged_bytes_are_refused_and_never_cached(store, params):
    whole, cut = store.append(b"w" * 7000), store.append(b"x" * 7000)
    (name,) = (name for name in objects(store) if cut.segment in name)
    store.client.pipe_file(name, b"x" * 50)
    faults = store.check([whole, cut])
    assert faults[0] is None
    assert "50 of 7000" in str(faults[1])
    with pytest.raises(AdapterError, match="damaged"):
        store.fetch(cut)
    store.client.rm(name)
    with pytest.raises(MissingBytes, match="missing"):
        store.fetch(cut)
    assert not list(params.paths.cache.glob("??/*"))


def test_a_copy_that_the_disk_damaged_is_fetched_anew(store):
    location = store.append(b"y" * 100)
    path, _ = store.fetch(location)
    path.write_bytes(b"z" * 100)
    assert store.read(location) == b"y" * 100
    path.write_bytes(b"z" * 100)
    assert store.drop_cached(location)
    assert store.fetch(location)[0].read_bytes() == b"y" * 100


def test_one_blob_behind_many_addresses_is_one_copy(params):
    """Signed addresses change with every request: as keys of a cache they would fill the disk."""
    copies = set()
    for number in range(4):
        elsewhere = StoreConfig(url=f"{params.store.url}-signature-{number}")
        with closing(open_store(params.model_copy(update={"store": elsewhere}))) as opened_store:
            copies.add(opened_store.fetch(opened_store.append(b"s" * 5000)))
            assert opened_store.cache.bytes() == 5000
    assert len(copies) == len(list(params.paths.cache.glob("??/*"))) == 1


def test_a_writer_holds_its_object_and_gc_takes_a_dead_writers(store, params, tmp_path):
    location = store.append(b"mine")
    with closing(open_store(params)) as other:
        with other.claim(location.segment) as is_free:
            assert not is_free
        store.committed()
        with other.claim(location.segment) as is_free:
            assert is_free
        context = multiprocessing.get_context("spawn")
        died = context.Process(target=die_after_append, args=(params,))
        died.start()
        died.join(60)
        (left,) = {segment for segment, _ in other.segments()} - {location.segment}
        with other.claim(left) as is_free:
            assert is_free
            other.remove(left)
        assert other.clean() == 1
        assert [segment for segment, _ in other.segments()] == [location.segment]
    elsewhere = Params(state_dir=tmp_path / "elsewhere", store=params.store)
    with closing(open_store(elsewhere)) as foreign:
        with foreign.claim(location.segment) as is_free:
            assert not is_free
        # A clock of this machine that jumps changes nothing; a day of the service's own clock does.
        foreign.now += timedelta(seconds=remote.ABANDONED_S + 60)
        with foreign.claim(location.segment) as is_free:
            assert is_free


def while_looking(store, action):
    """Have `action` happen once, right after the store's look at its owner."""
    look = store.catalog_id

    def interrupted():
        found = look()
        del store.catalog_id
        action()
        return found

    store.catalog_id = interrupted


def test_of_two_claims_in_one_moment_one_wins(store, params):
    with closing(open_store(params)) as other:
        while_looking(store, lambda: other.belong_to("b" * 32))
        assert store.belong_to("a" * 32) == "b" * 32
        assert store.catalog_id() == other.catalog_id() == "b" * 32
        # No probe object stays.
        assert [name.rpartition("/")[2] for name in store.client.find(store.place)] == [CATALOG_ID]


def test_of_many_claims_at_once_all_see_one_winner(store, params, monkeypatch):
    put, turn = S3Response.put_object, threading.Lock()

    def one_by_one(self):
        # S3 checks the condition and writes in one step; moto does not.
        with turn:
            return put(self)

    monkeypatch.setattr(S3Response, "put_object", one_by_one)
    stores = [open_store(params) for _ in range(8)]
    together = threading.Barrier(len(stores), timeout=60)
    for one in stores:
        while_looking(one, together.wait)
    claims = [partial(one.belong_to, str(number)) for number, one in enumerate(stores)]
    assert set(in_parallel(*claims)) == {store.catalog_id()}
    for one in stores:
        one.close()


def test_the_loser_of_a_claim_publishes_nothing_and_removes_nothing(params, tmp_path):
    """Two catalogs, each with a state directory of its own, on one empty prefix."""
    theirs = Params(state_dir=tmp_path / "theirs", store=params.store)
    prepare(params, "here")
    prepare(theirs, "here")
    with opened(params) as loser, opened(theirs) as winner:
        while_looking(loser.store, lambda: winner.publish("here", 1))
        for action in (partial(loser.publish, "here", 2), partial(gc, loser.catalog, loser.store)):
            with pytest.raises(Conflict, match="another catalog"):
                action()
        assert len(objects(winner.store)) == 1
        winner.publish("here", 3)


@pytest.mark.parametrize("kind", ["ignored", "looked up"])
def test_a_store_without_conditional_writes_is_claimed_by_hand(store, kind, monkeypatch):
    client = store.client
    if kind == "ignored":
        write = client.pipe_file
        monkeypatch.setattr(client, "pipe_file", lambda path, data, mode="overwrite": write(path, data))
    else:
        monkeypatch.setattr(client, "pipe_file", MethodType(AbstractFileSystem.pipe_file, client))
    with pytest.raises(ConfigError, match=f"{'a' * 32}.*{CATALOG_ID}"):
        store.belong_to("a" * 32)
    assert store.catalog_id() is None
    client.pipe_file(f"{store.place}/{CATALOG_ID}", b"a" * 32)
    assert store.belong_to("a" * 32) == "a" * 32


@pytest.mark.long
def test_a_service_that_is_away_is_one_sentence(tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        began = time.monotonic()
        with closing(RemoteStore("s3://away/x", tmp_path / "holds", Cache(tmp_path / "cache", MIB))) as store:
            with pytest.raises(ServiceError, match=r"\b4 bytes"):
                store.append(b"lost")
        assert time.monotonic() - began < 60


def test_a_scheme_without_its_library_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"begins with nothing://"):
        open_store(Params(state_dir=tmp_path, store=StoreConfig(url="nothing://there")))


def test_the_store_behind_a_url_is_kept_whole_and_small(params):
    prepare(params, "here", "there")
    with opened(params) as state:
        rows = [state.publish("here", seed, expires_at=1.0 if seed else None) for seed in range(3)]
        older = [state.publish_older(policy, 9) for policy in ("here", "there")]
        assert location(state.publish("there", 0)) == location(rows[0])
        assert verify(state.catalog, state.store).damaged == 0
        state.catalog.lifecycle.expire(time.time())
        assert gc(state.catalog, state.store).removed == 2
        assert repack(state.catalog, state.store).moved == 2
        report = compact(state.catalog, state.store, everything=True)
        assert (report.damaged, report.moved) == (0, 2)
        assert len(objects(state.store)) == 1
        assert all(state.is_whole(row) for row in [rows[0], *older])
        assert verify(state.catalog, state.store).damaged == 0
        state.store.client.pipe_file(objects(state.store)[0], b"")
        assert verify(state.catalog, state.store).damaged == 4
        assert state.catalog.quarantine.reason("here", rows[0].digest) is not None
    assert not list((params.paths.holds).glob("*.seg"))


# The cache by itself


def keep(cache: Cache, number: int, size: int = 100) -> Path:
    location, data = blob(number, size)
    return cache.add(location, [data[:30], data[30:]])


def test_the_cache_keeps_to_its_budget_and_lets_the_least_recently_used_go(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 300)
    for number in range(3):
        keep(cache, number)
    # A clock that jumps back and forth decides nothing.
    for jump in (0.0, 1e12):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        assert cache.find(blob(0)[0])
        keep(cache, 3 + (jump > 0))
    found = [number for number in range(5) if cache.find(blob(number)[0])]
    assert found == [0, 3, 4]
    assert cache.bytes() == 300
    # What is larger than the budget is served all the same, until the next one comes.
    assert keep(cache, 9, 1000).is_file()
    assert cache.bytes() == 1000
    keep(cache, 1)
    assert cache.bytes() == 100
    assert len(list((tmp_path / "cache").glob("??/*"))) == 1
    cache.close()


def test_a_crash_leaves_drafts_that_are_cleaned_and_files_that_are_counted(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 1000)
    path = keep(cache, 1)
    draft = path.with_name(f"{DRAFT}dead")
    draft.write_bytes(b"half")
    living, handle = cache_module.open_draft(path.parent)
    uncounted, data = blob(2)
    cache.path(uncounted.checksum).parent.mkdir(exist_ok=True)
    cache.path(uncounted.checksum).write_bytes(data)
    assert cache.clean() == 1
    assert not draft.exists()
    assert living.exists()
    os.close(handle)
    assert cache.bytes() == 200
    cache.close()


def test_a_full_disk_keeps_no_half_copy(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 1000)
    keep(cache, 1)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ServiceError, match="No space left"):
        keep(cache, 2)
    monkeypatch.undo()
    assert cache.find(blob(2)[0]) is None
    assert [path.name for path in cache.root.glob("??/*")] == [blob(1)[0].checksum]
    cache.close()


def test_processes_share_a_cache(tmp_path):
    context = multiprocessing.get_context("spawn")
    users = [context.Process(target=fill_cache, args=(tmp_path / "cache", seed)) for seed in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
        assert user.exitcode == 0
    cache = Cache(tmp_path / "cache", 2_000)
    files = list((tmp_path / "cache").glob("??/*"))
    cache.clean()
    assert cache.bytes() <= 2_000
    assert {path.stat().st_size for path in files} == {100}
    cache.close()


@pytest.mark.parametrize("part", [slice(0, 16), slice(4096, None)])
def test_a_damaged_index_is_made_anew_and_counts_what_is_there(tmp_path, part):
    cache = Cache(tmp_path / "cache", 1000)
    for number in range(3):
        keep(cache, number)
    cache.close()
    index = tmp_path / "cache" / "index.db"
    data = bytearray(index.read_bytes())
    data[part] = b"x" * len(data[part])
    index.write_bytes(data)
    cache = Cache(tmp_path / "cache", 1000)
    assert cache.find(blob(1)[0])
    with suppress(ServiceError):
        keep(cache, 3)
    keep(cache, 4)
    assert cache.bytes() == 100 * len(list((tmp_path / "cache").glob("??/*")))
    cache.close()
