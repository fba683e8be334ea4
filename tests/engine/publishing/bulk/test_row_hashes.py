"""Hashes of many rows at once are those of hashlib, also where OpenSSL cannot be reached."""

import hashlib
from functools import cache

import numpy as np
import pytest

from engine.publishing.bulk import row_hashes
from engine.publishing.bulk.row_hashes import hash_rows


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 55), (7, 64), (2, 5000), (300, 7680)])
@pytest.mark.parametrize("header", [b"", b"x" * 200])
def test_each_row_is_hashed_behind_the_header(compiled: bool, shape: tuple[int, int], header: bytes):
    row_hashes.openssl.cache_clear()
    rows = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    want = [hashlib.sha256(header + row.tobytes()).hexdigest() for row in rows]
    assert hash_rows(header, rows, compiled) == want


def test_rows_that_do_not_lie_together_are_hashed_too():
    rows = np.arange(4000, dtype=np.uint8).reshape(20, 200)[:, ::2]
    want = [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]
    assert hash_rows(b"", rows, compiled=True) == want
    assert hash_rows(b"", rows) == want


def test_this_python_has_an_openssl_that_can_be_reached():
    """Else the compiled way was not tested at all."""
    assert row_hashes.openssl() is not None


def test_without_openssl_hashlib_hashes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_hashes, "openssl", cache(lambda: None))
    rows = np.zeros((2, 3000), np.uint8)
    assert hash_rows(b"a", rows, compiled=True) == [hashlib.sha256(b"a" + bytes(3000)).hexdigest()] * 2


def test_what_openssl_cannot_hash_is_no_digest(monkeypatch: pytest.MonkeyPatch):
    openssl = row_hashes.openssl()
    assert openssl is not None
    monkeypatch.setattr(openssl, "loop", lambda *_: 1)
    with pytest.raises(RuntimeError, match="OpenSSL"):
        hash_rows(b"", np.zeros((2, 8), np.uint8), compiled=True)
