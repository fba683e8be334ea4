"""A place for the backups of one installation: a directory, or a URL of fsspec (S3, GCS).

    catalog.id          the catalog whose backups lie here
    objects/AB/ABCD...  a part of a file, named by its checksum (`engine/store/segments.py`)
    backups/NAME.json   a manifest: once it is there, its backup is finished

Each file is there whole or not at all.
"""

from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from engine.errors import DamagedBytes, MissingBytes
from engine.files import write_whole
from engine.store.remote import client_faults, client_of
from engine.store.segments import checksum_of

OBJECTS, MANIFESTS, OWNER = "objects", "backups", "catalog.id"
DIGITS = 64
# A backup's action in the audit log.
BACKED_UP = "backup"


class BackupPlace:
    """Read and write the files of backups; raises `ServiceError` where the place does not answer.

    `name` is what messages call the place.
    """

    def __init__(self, address: str, name: str = "The backup's place"):
        remote = "://" in address and not address.startswith("file://")
        path = Path(address.removeprefix("file://")).expanduser().absolute()
        self.address = address.rstrip("/") if remote else str(path)
        self._name = name
        self.directory = None if remote else path
        url = self.address if remote else f"file://{path}"
        self._client, self._root = client_of(url, name)

    def objects(self) -> dict[str, int]:
        """Return the size of each object by its checksum."""
        return {name: size for name, size in self._sizes(OBJECTS).items() if len(name) == DIGITS}

    def manifests(self) -> list[str]:
        """Return the names of the finished backups, oldest first."""
        return sorted(name for name in self._sizes(MANIFESTS) if name.endswith(".json"))

    def owner(self) -> str | None:
        """Return the id of the catalog whose backups lie here; None for a new place."""
        try:
            return self.read(OWNER).decode().strip()
        except MissingBytes:
            return None

    def put_object(self, checksum: str, data: bytes) -> None:
        """Write an object durably; `checksum` is that of its bytes."""
        self.write(f"{OBJECTS}/{checksum[:2]}/{checksum}", data)

    def object(self, checksum: str) -> bytes:
        """Return an object's bytes. Raises `MissingBytes`, or `DamagedBytes` when its name says others."""
        data = self.read(f"{OBJECTS}/{checksum[:2]}/{checksum}")
        if checksum_of(data) != checksum:
            raise DamagedBytes(
                f"The backup at {self.address} is damaged: {OBJECTS}/{checksum[:2]}/{checksum} holds other "
                "bytes than its name says. Restore an older backup, or one of another place."
            )
        return data

    def drop_objects(self, kept: set[str]) -> int:
        """Remove the objects that are not `kept`, and what kills left; return how many."""
        gone = [name for name in self._sizes(OBJECTS) if name not in kept]
        for name in gone:
            self.remove(f"{OBJECTS}/{name[:2]}/{name}")
        return len(gone)

    def write(self, name: str, data: bytes) -> None:
        """Write a file durably, whole or not at all."""
        with self._faults(f"take {len(data):,} bytes"):
            if self.directory is None:
                self._client.pipe_file(f"{self._root}/{name}", data)
                return
            path = self.directory / name
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data, durable=True, mode=0o600)

    def read(self, name: str) -> bytes:
        """Return a file's bytes; `MissingBytes` when there is none."""
        with self._faults(f"return {name}"):
            try:
                content: bytes = self._client.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                raise MissingBytes(
                    f"The backup at {self.address} has no {name}. Restore an older backup, or one of another "
                    "place."
                ) from None
        return content

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._faults(f"remove {name}"), suppress(FileNotFoundError):
            self._client.rm_file(f"{self._root}/{name}")

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of all files in a folder, by their last name."""
        with self._faults("list its files"):
            try:
                entries: dict[str, Any] = self._client.find(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
        return {path.rpartition("/")[2]: entry["size"] for path, entry in entries.items()}

    def _faults(self, wish: str) -> AbstractContextManager[None]:
        """Translate any error of the place's client into one `ServiceError`."""
        what = f"{self._name} {self.address} did not {wish}"
        return client_faults(what, "Mend it, then run this again: it goes on from what is there.")
