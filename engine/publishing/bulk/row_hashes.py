"""sha256 of each row of a table, thousands of rows in one call.

`hashlib` releases the GIL for every row over 2 KB and then waits to get it back, which takes longer than the
hash. A loop compiled by numba calls OpenSSL for a whole table and needs the GIL only at its ends. Compiling
takes a second, once in a process.

Shapes: N rows, B bytes of a row.
"""

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]
# Arguments: addresses of OpenSSL's state after the header, of a scratch state and of the rows; N; B; address
# of the digests.
Loop = Callable[[int, int, int, int, int, int], int]
DIGEST_BYTES = 32


def hash_rows(header: bytes, rows_NB: Rows, compiled: bool = False) -> list[str]:
    """Return the sha256 of `header` followed by each row of `rows_NB` (uint8), in hex.

    `compiled` is worth its second from some tens of thousands of rows on. Both ways give the same; `hashlib`
    is used where Python's own OpenSSL cannot be reached.
    """
    rows_NB = np.ascontiguousarray(rows_NB)
    # Once compiled, it is faster for any number of rows.
    if (compiled or openssl.cache_info().currsize) and (found := openssl()) is not None:
        return found.hash_rows(header, rows_NB)
    start, digests = hashlib.sha256(header), []
    for row in rows_NB:
        state = start.copy()
        state.update(row)
        digests.append(state.hexdigest())
    return digests


class OpenSsl:
    """OpenSSL's functions, and the compiled loop over them."""

    def __init__(self, library: ctypes.CDLL):
        # numba passes addresses as integers.
        address, status = ctypes.c_size_t, ctypes.c_int

        def function(name: str, result: type | None, arguments: int) -> Callable[..., int]:
            found = getattr(library, name)
            found.restype, found.argtypes = result, (address,) * arguments
            return found

        self._sha256 = function("EVP_sha256", address, 0)
        self._new = function("EVP_MD_CTX_new", address, 0)
        self._free = function("EVP_MD_CTX_free", None, 1)
        self._init = function("EVP_DigestInit_ex", status, 3)
        self._update = function("EVP_DigestUpdate", status, 3)
        copy = function("EVP_MD_CTX_copy_ex", status, 2)
        final = function("EVP_DigestFinal_ex", status, 3)
        self.loop = _compile(copy, self._update, final)

    def hash_rows(self, header: bytes, rows_NB: Rows) -> list[str]:
        """Do what the function `hash_rows` does; raises `RuntimeError` when OpenSSL reports a failure."""
        count, size = rows_NB.shape
        digests = np.empty((count, DIGEST_BYTES), np.uint8)
        prefix = np.frombuffer(header, np.uint8)
        start, state = self._new(), self._new()
        try:
            done = -1
            if (
                start and state
                and self._init(start, self._sha256(), 0)
                and self._update(start, prefix.ctypes.data, prefix.nbytes)
            ):  # fmt: skip
                done = self.loop(start, state, rows_NB.ctypes.data, count, size, digests.ctypes.data)
        finally:
            self._free(start)
            self._free(state)
        if done != count:
            raise RuntimeError("OpenSSL could not hash the rows. Free some memory.")
        text = digests.tobytes().hex()
        return [text[i : i + 2 * DIGEST_BYTES] for i in range(0, len(text), 2 * DIGEST_BYTES)]


def _compile(copy: Callable[..., int], update: Callable[..., int], final: Callable[..., int]) -> Loop:
    from numba import njit

    @njit("int64(uint64, uint64, uint64, int64, int64, uint64)", nogil=True)
    def loop(start, state, rows, count, size, digests):  # type: ignore[no-untyped-def]
        done = 0
        for i in range(count):
            good = copy(state, start) & update(state, rows + i * size, size)
            done += good & final(state, digests + i * DIGEST_BYTES, 0)
        return done

    return loop


@cache
def openssl() -> OpenSsl | None:
    """Return the OpenSSL that Python's own `hashlib` uses; None when it cannot be reached."""
    try:
        import _hashlib

        return OpenSsl(ctypes.CDLL(_hashlib.__file__))
    except (ImportError, AttributeError, OSError):
        # Linked into Python without its symbols, or missing.
        return None
