"""The store: what was appended comes back, from any process, or is refused."""

import errno
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from engine.errors import AdapterError, DamagedBytes, MissingBytes, ServiceError
from engine.settings.params import Params
from engine.settings.services import StoreConfig
from engine.store import segments as store_module
from engine.store.open import open_store
from engine.store.segments import IOV_MAX, PAGE, PAGE_ALIGNED_FROM, Location, Store
from tests.helpers.children import children


def test_blobs_come_back_aligned(tmp_path):
    store = Store(tmp_path)
    blobs = [os.urandom(size) for size in (1, 63, 64, 7000, PAGE_ALIGNED_FROM)]
    locations = [store.append(blob) for blob in blobs]
    assert [store.read(location) for location in locations] == blobs
    assert all(location.offset % 64 == 0 for location in locations)
    assert locations[-1].offset % PAGE == 0
    assert [store.fetch(location) for location in locations] == [
        (tmp_path / location.segment, location.offset) for location in locations
    ]


def test_many_blobs_are_one_write_each_at_its_place(tmp_path, monkeypatch):
    """More of them than the system takes at once, and it takes only some bytes of those."""
    real, syncs = os.pwritev, []

    def some(file, views, at):
        return real(file, [views[0][:5000]] if len(views[0]) > 5000 else views[:9], at)

    monkeypatch.setattr(os, "pwritev", some)
    monkeypatch.setattr(os, "fdatasync", lambda file: syncs.append(file))
    store = Store(tmp_path)
    store.append(b"before")
    blobs = [os.urandom(1 + (i * 37) % 7000) for i in range(IOV_MAX + 10)] + [b"", os.urandom(2 << 20)]
    locations = store.append_many(blobs, [hashlib.sha256(blob).hexdigest() for blob in blobs])
    assert len(syncs) == 2
    assert [store.read(location) for location in locations] == blobs
    assert store.check(locations) == [None] * len(blobs)
    assert len({location.segment for location in locations}) == 1
    assert store.append_many([]) == []


def _append_many(root, seed, results):
    store = Store(root)
    results.put([(store.append(bytes([seed]) * (100 + i)), seed, 100 + i) for i in range(50)])


def test_two_writers_never_meet(tmp_path):
    results = children.Queue()
    writers = [children.Process(target=_append_many, args=(tmp_path, seed, results)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    written = [item for _ in writers for item in results.get(timeout=60)]
    for writer in writers:
        writer.join(60)
    store = Store(tmp_path)
    assert all(store.read(location) == bytes([seed]) * size for location, seed, size in written)


def test_damage_is_refused(tmp_path):
    store = Store(tmp_path)
    location = store.append(b"x" * 100)
    path = store.path(location.segment)
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(AdapterError, match="damaged"):
        store.read(location)
    path.write_bytes(data[:50])
    with pytest.raises(AdapterError, match="50 of 100"):
        store.read(location)
    gone = Location("gone.seg", 0, 1, "0" * 64)
    with pytest.raises(MissingBytes, match="No such file"):
        store.read(gone)
    cut, missing = store.check([location, gone])
    assert isinstance(cut, DamagedBytes)
    assert "50 of 100" in str(cut)
    assert isinstance(missing, MissingBytes)


def test_a_full_disk_publishes_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path)
    kept = store.append(b"kept")
    size = store.path(kept.segment).stat().st_size
    real = os.pwritev

    def full(fd, views, offset):
        if offset + sum(map(len, views)) > 264:
            real(fd, [views[-1][:100]], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(ServiceError, match="No space left"):
        store.append(b"lost" * 100)
    monkeypatch.undo()
    # What was acknowledged is there, and nothing else keeps the disk full.
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [size]
    after = store.append(b"after")
    assert store.read(kept) == b"kept"
    assert store.read(after) == b"after"


def test_after_a_failed_fsync_the_segment_is_not_written_again(tmp_path, monkeypatch):
    store = Store(tmp_path)
    kept = store.append(b"kept")

    def fail(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(ServiceError, match="Input/output error"):
        store.append(b"lost")
    monkeypatch.undo()
    assert store.append(b"after").segment != kept.segment
    assert store.read(kept) == b"kept"


def test_a_real_full_disk_and_a_read_only_one_lose_nothing(small_disk):
    store = Store(small_disk / "store")
    kept = store.append(b"kept" * 1000)
    with pytest.raises(ServiceError, match=r"No space left.*published"):
        store.append_many([os.urandom(5_000_000)] * 2)
    after = store.append(b"after" * 1000)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ServiceError, match="Read-only file system"):
        store.append(b"lost")
    assert store.read(kept) == b"kept" * 1000
    assert store.read(after) == b"after" * 1000
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert store.read(store.append(b"again")) == b"again"
    store.close()


def test_a_writer_holds_its_segments_until_its_rows_are_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", 100)
    writer, other = Store(tmp_path), Store(tmp_path)
    segments = [writer.append(b"x" * 200).segment for _ in range(3)]
    assert len(set(segments)) == 3
    assert [free(other, segment) for segment in segments] == [False] * 3
    writer.committed()
    assert [free(other, segment) for segment in segments] == [True] * 3
    writer.append(b"y")
    writer.close()
    assert all(free(other, segment) for segment, _ in other.segments())


def test_a_writer_leaves_a_segment_that_somebody_cleans_or_has_removed(tmp_path):
    writer, other = Store(tmp_path), Store(tmp_path)
    first = writer.append(b"first").segment
    assert writer.append(b"more").segment == first
    writer.committed()
    with other.claim(first) as is_free:
        assert is_free
        second = writer.append(b"second").segment
    assert second != first
    writer.committed()
    with other.claim(second) as is_free:
        assert is_free
        other.remove(second)
    third = writer.append(b"third")
    assert third.segment not in (first, second)
    assert other.read(third) == b"third"
    with other.claim("0" * 32 + ".seg") as is_free:
        assert not is_free


def free(store: Store, segment: str) -> bool:
    with store.claim(segment) as is_free:
        return is_free


def test_only_segments_are_listed(tmp_path):
    store = Store(tmp_path / "store")
    assert list(store.segments()) == []
    location = store.append(b"x" * 70)
    (tmp_path / "store" / "notes.txt").write_text("mine")
    (tmp_path / "store" / ("a" * 32 + ".seg")).symlink_to("/etc/passwd")
    assert list(store.segments()) == [(location.segment, 70)]


def test_settings_say_where_the_store_is(tmp_path):
    assert open_store(Params(state_dir=tmp_path)).root == tmp_path / "store"
    there = Params(state_dir=tmp_path, store=StoreConfig(url=f"file://{tmp_path}/there"))
    assert open_store(there).root == Path(f"{tmp_path}/there")
    with pytest.raises(ValueError, match="url"):
        StoreConfig(url="s3://bucket/prefix?X-Amz-Signature=1")
