"""Checksums of blobs, 32 bytes in hex: sha256 for small blobs, BLAKE3 for large ones.

BLAKE3 takes half the time, on cores that a cold load shares with inference. Large blobs written before BLAKE3
carry sha256, so both are accepted for them.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from blake3 import blake3

# Part of the format: with another value, blobs of sizes between the two would fail verification.
BLAKE3_FROM = 1 << 20
Payload = bytes | bytearray | memoryview


def checksum_of(data: Payload) -> str:
    """Return a blob's checksum."""
    return blake3(data).hexdigest() if len(data) >= BLAKE3_FROM else hashlib.sha256(data).hexdigest()


def is_whole(data: Payload, expected: str) -> bool:
    """Say whether a blob has this checksum."""
    return checksum_of(data) == expected or (
        len(data) >= BLAKE3_FROM and hashlib.sha256(data).hexdigest() == expected
    )


class Checked:
    """Size and checksum of a blob of `length` bytes, computed while it streams."""

    def __init__(self, length: int):
        self.size = 0
        self._states: list[Any] = [hashlib.sha256(), *([blake3()] if length >= BLAKE3_FROM else [])]

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield every chunk after hashing it."""
        for chunk in chunks:
            for state in self._states:
                state.update(chunk)
            self.size += len(chunk)
            yield chunk

    def is_whole(self, expected: str) -> bool:
        """Say whether the streamed bytes have this checksum."""
        return any(state.hexdigest() == expected for state in self._states)
