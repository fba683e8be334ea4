"""Small blobs by sha256, large ones by BLAKE3; large ones of before BLAKE3 stay whole."""

import hashlib
import random

import pytest
from blake3 import blake3

from engine.errors import DamagedBytes
from engine.store.segments import BLAKE3_FROM, Checked, Location, Store, checksum_of, is_whole


def blob(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@pytest.mark.parametrize("length", [0, 1, 7680, BLAKE3_FROM - 1])
def test_a_small_blob_has_sha256_and_nothing_else(length):
    data = blob(length)
    assert checksum_of(data) == hashlib.sha256(data).hexdigest()
    assert is_whole(data, checksum_of(data))
    assert not is_whole(data, blake3(data).hexdigest())


@pytest.mark.parametrize("length", [BLAKE3_FROM, 3_000_001])
def test_a_large_blob_has_blake3_and_an_older_one_sha256(length):
    data = blob(length)
    assert checksum_of(data) == blake3(data).hexdigest() == checksum_of(memoryview(bytearray(data)))
    changed = bytearray(data)
    changed[length // 2] ^= 1
    for expected in (blake3(data).hexdigest(), hashlib.sha256(data).hexdigest()):
        assert is_whole(data, expected)
        assert not is_whole(bytes(changed), expected)
        for seen, good in ((data, True), (changed, False), (data[:-1], False)):
            passing = Checked(length)
            parts = [bytes(seen[i : i + 65_537]) for i in range(0, len(seen), 65_537)]
            assert list(passing.through(parts)) == parts
            assert (passing.size, passing.is_whole(expected)) == (len(seen), good)


def test_large_blobs_that_an_older_store_wrote_are_read_and_checked(tmp_path):
    data = blob(BLAKE3_FROM)
    store = Store(tmp_path)
    (at,) = store.append_many([data], [hashlib.sha256(data).hexdigest()])
    assert store.read(at) == data
    assert store.check([at]) == [None]
    with store.path(at.segment).open("r+b") as file:
        file.seek(at.offset)
        file.write(bytes([data[0] ^ 1]))
    with pytest.raises(DamagedBytes):
        store.read(at)
    assert "checksum differs" in str(store.check([Location(*at)])[0])
    store.close()
