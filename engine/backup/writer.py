"""Writes files into a backup part by part; a part that the place has is not written again."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from engine.backup.manifest import PART, StoredFile
from engine.backup.place import BackupPlace
from engine.errors import MissingBytes
from engine.store.segments import Location, Store, checksum_of

OnFile = Callable[["BackupWriter"], object]


class BackupWriter:
    """Collects the files of one backup. `size` bytes are in it, `new` of them were written now.

    `missing` are segments that the catalog names and the store does not have.
    """

    def __init__(self, place: BackupPlace, on_file: OnFile):
        self.place = place
        self.files: list[StoredFile] = []
        self.missing: list[str] = []
        self.size = self.new = 0
        self._there = place.objects()
        self._on_file = on_file

    def add_file(self, name: str, path: Path) -> None:
        """Add a file; one that is gone by now is left out."""
        try:
            with path.open("rb") as file:
                self.add_parts(name, _parts_of(file))
        except FileNotFoundError:
            return

    def add_again(self, name: str, other: str) -> None:
        """Add the file `other` of this backup under a second name."""
        (file,) = [file for file in self.files if file.name == other]
        self.add_parts(name, [], file.parts, file.size)

    def add_segment(self, store: Store, segment: str, end: int, before: StoredFile | None) -> None:
        """Add the first `end` bytes of a segment, all of them committed.

        Such bytes never change, so what the backup `before` has of them is not read again. A segment that is
        gone is left out, and is in `missing`.
        """
        parts = before.parts[: min(before.size, end) // PART] if before else ()
        if before and before.size == end:
            parts = before.parts
        parts = parts if all(part in self._there for part in parts) else ()
        at = min(len(parts) * PART, end)
        rest = store.chunks(Location(segment, at, end - at, ""))
        try:
            self.add_parts(f"store/{segment}", _regrouped(rest), parts, at)
        except MissingBytes:
            self.missing.append(segment)

    def add_parts(
        self, name: str, parts: Iterable[bytes], stored_parts: tuple[str, ...] = (), size: int = 0
    ) -> None:
        """Add a file from its bytes; its first `size` bytes are the `stored_parts`, which the place has."""
        checksums = list(stored_parts)
        for part in parts:
            checksum = checksum_of(part)
            if self._there.get(checksum) != len(part):
                self.place.put_object(checksum, part)
                self._there[checksum] = len(part)
                self.new += len(part)
            checksums.append(checksum)
            size += len(part)
        self.files.append(StoredFile(name, size, tuple(checksums)))
        self.size += size
        self._on_file(self)


def _parts_of(file: BinaryIO) -> Iterator[bytes]:
    while part := file.read(PART):
        yield part


def _regrouped(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in parts of `PART`."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= PART:
            yield bytes(held[:PART])
            del held[:PART]
    if held:
        yield bytes(held)
