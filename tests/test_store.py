"""The store: what was appended comes back, from any process, or is refused."""

import multiprocessing
import os

import pytest

from engine.adapters.store import PAGE, PAGE_ALIGNED_FROM, Location, Store
from engine.errors import AdapterError, ServiceError


def test_blobs_come_back_aligned(tmp_path):
    store = Store(tmp_path)
    blobs = [os.urandom(size) for size in (1, 63, 64, 7000, PAGE_ALIGNED_FROM)]
    locations = [store.append(blob) for blob in blobs]
    assert [store.read(location) for location in locations] == blobs
    assert all(location.offset % 64 == 0 for location in locations)
    assert locations[-1].offset % PAGE == 0


def _append_many(root, seed, results):
    store = Store(root)
    results.put([(store.append(bytes([seed]) * (100 + i)), seed, 100 + i) for i in range(50)])


def test_two_writers_never_meet(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    writers = [context.Process(target=_append_many, args=(tmp_path, seed, results)) for seed in (1, 2)]
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
    with pytest.raises(AdapterError, match="50 of 100 bytes"):
        store.read(location)
    with pytest.raises(AdapterError, match="missing"):
        store.read(Location("gone.seg", 0, 1, "0" * 64))


def test_a_full_disk_publishes_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path)
    kept = store.append(b"kept")
    real = os.pwrite

    def full(fd, data, offset):
        if offset >= 64:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ServiceError, match="No space left on device"):
        store.append(b"lost" * 100)
    monkeypatch.undo()
    after = store.append(b"after")
    assert store.read(kept) == b"kept"
    assert store.read(after) == b"after"
