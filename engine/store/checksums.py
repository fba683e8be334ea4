"""The checksum of a blob, by which the store knows that its bytes are whole: 32 bytes, in hex.

Of a small blob it is sha256, of a large one BLAKE3, in half of the time: a cold load computes it on the cores
that the steps of others need. Large blobs of before BLAKE3 have sha256, so either is taken for those.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from blake3 import blake3

# A part of the format: another value would damage every blob between the two.
BLAKE3_FROM = 1 << 20
Payload = bytes | bytearray | memoryview


def checksum_of(data: Payload) -> str:
    """Return the checksum of a whole blob."""
    return blake3(data).hexdigest() if len(data) >= BLAKE3_FROM else hashlib.sha256(data).hexdigest()


def is_whole(data: Payload, expected: str) -> bool:
    """Say whether a blob is the one that has this checksum."""
    return checksum_of(data) == expected or (
        len(data) >= BLAKE3_FROM and hashlib.sha256(data).hexdigest() == expected
    )


class Checked:
    """What flows by of a blob of `length` bytes, whose checksum is to be compared at its end."""

    def __init__(self, length: int):
        self.size = 0
        self._states: list[Any] = [hashlib.sha256(), *([blake3()] if length >= BLAKE3_FROM else [])]

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield every chunk, once it is counted."""
        for chunk in chunks:
            for state in self._states:
                state.update(chunk)
            self.size += len(chunk)
            yield chunk

    def is_whole(self, expected: str) -> bool:
        """Say whether what flowed by is the blob that has this checksum."""
        return any(state.hexdigest() == expected for state in self._states)
