"""A store behind a URL (S3, GCS and other protocols of fsspec), read through a local cache.

Each appended batch is one object, which exists whole or not at all and is never appended to. A writer locks a
local file until its rows are committed, as for a local segment. An object of another installation counts as
abandoned only when it is a day old by the store's own clock.
"""

import errno
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, DamagedBytes, GraftworkError, MissingBytes, ServiceError
from engine.file_lock import lock
from engine.files import write_once
from engine.store.cache import Cache
from engine.store.segments import (
    CATALOG_ID,
    CHUNK,
    SEGMENT_NAME,
    Fault,
    Location,
    Payload,
    Store,
    checked,
    checksum_of,
    damaged,
    is_whole,
    lay_out,
)

INSTALLATION = "installation"
# How long another installation may take from an upload to its commit.
ABANDONED_S = 86_400
# Bytes of small blobs fetched in one request.
BATCH_BYTES = 64 << 20
# Timeouts, where a client library's own are longer.
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}},
    "gcs": {"timeout": 60},
}
OPTIONS |= {"s3a": OPTIONS["s3"], "gs": OPTIONS["gcs"]}


class RemoteStore(Store):
    """Objects under a URL, to append to and read from. One instance per writing thread."""

    is_remote = True

    def __init__(self, url: str, holds: Path, cache: Cache):
        super().__init__(holds)
        self.cache = cache
        self.client, self._prefix = client_of(url, "`store.url`")
        self._held: dict[str, int] = {}

    @property
    def place(self) -> str:
        """Return the URL's prefix, for messages."""
        return self._prefix

    def append_many(
        self, payloads: Sequence[Payload], checksums: Sequence[str] | None = None, cached: bool = True
    ) -> list[Location]:
        """Upload blobs as one object; `checksums` are theirs where known.

        Raises `ServiceError` when the store refuses them; then none of them is stored.
        """
        views = [memoryview(payload).cast("B") for payload in payloads]
        if not views:
            return []
        offsets, buffers, _ = lay_out(views, 0)
        segment = self._hold_new()
        with self._faults(f"take {sum(map(len, views))} bytes; nothing was published"):
            self.client.pipe_file(self._object(segment), b"".join(buffers))
        return [
            Location(segment, offset, len(view), checksum)
            for offset, view, checksum in zip(
                offsets, views, checksums or map(checksum_of, views), strict=True
            )
        ]

    def committed(self) -> None:
        """Release the segments: the rows of everything appended are committed, or never will be."""
        for segment, handle in self._held.items():
            (self.root / segment).unlink(missing_ok=True)
            os.close(handle)
        self._held.clear()

    def read(self, location: Location) -> bytes:
        """Read a blob through the cache. Raises `DamagedBytes` or `MissingBytes`."""
        path, _ = self.fetch(location)
        with suppress(DamagedBytes, OSError):
            return checked(location, path.read_bytes())
        # The copy was evicted meanwhile, or the disk damaged it.
        self.drop_cached(location)
        return checked(location, self.fetch(location)[0].read_bytes())

    def fetch(self, location: Location) -> tuple[Path, int]:
        """Return the cached file of the blob, downloaded and verified if needed, and the offset 0."""
        return self.cache.find(location) or self.cache.add(location, self.chunks(location)), 0

    def drop_cached(self, location: Location) -> bool:
        """Remove the cached copy of the blob, so that it is downloaded again; return True."""
        self.cache.drop(location.checksum)
        return True

    def check(self, locations: Sequence[Location]) -> list[Fault | None]:
        """Verify blobs in the store itself, not in the cache; many small ones in one request."""
        faults: dict[Location, Fault | None] = {}
        small: list[Location] = []
        for location in dict.fromkeys(locations):
            if location.length > CHUNK:
                faults[location] = self._fault(location)
                continue
            small.append(location)
            if sum(one.length for one in small) > BATCH_BYTES:
                faults |= self._check_small(small)
                small = []
        faults |= self._check_small(small)
        return [faults[location] for location in locations]

    def segments(self) -> Iterator[tuple[str, int]]:
        """Yield each segment's name and size in bytes; skip other names under the prefix."""
        with self._faults("list its objects"):
            try:
                entries = self.client.ls(self._prefix, detail=True, refresh=True)
            except FileNotFoundError:
                return
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            if SEGMENT_NAME.fullmatch(name):
                yield name, entry["size"]

    def bring(self, segment: str, chunks: Iterable[bytes]) -> None:
        """Write a whole segment of another store: the object appears once all its bytes are there."""
        try:
            with self._faults(f"take {segment}"), self.client.open(self._object(segment), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
        except BaseException:
            # Closing the file has published what was written before the fault.
            with suppress(ServiceError):
                self.remove(segment)
            raise

    @contextmanager
    def claim(self, segment: str) -> Iterator[bool]:
        """Yield whether no living writer of any installation may still commit rows of this segment."""
        try:
            handle = os.open(self.root / segment, os.O_RDWR)
        except FileNotFoundError:
            yield segment.startswith(f"{self._installation}-") or self._is_abandoned(segment)
            return
        try:
            yield lock(handle)
        finally:
            os.close(handle)

    def remove(self, segment: str) -> None:
        """Delete a segment's object, if it is there."""
        with self._faults(f"remove {segment}"), suppress(FileNotFoundError):
            self.client.rm_file(self._object(segment))

    def clean(self) -> int:
        """Remove drafts of the cache and lock files of dead writers; return how many."""
        removed = self.cache.clean()
        with suppress(FileNotFoundError):
            for name in [entry.name for entry in os.scandir(self.root) if SEGMENT_NAME.fullmatch(entry.name)]:
                with self.claim(name) as is_free:
                    if is_free:
                        (self.root / name).unlink(missing_ok=True)
                        removed += 1
        return removed

    def catalog_id(self) -> str | None:
        """Return the id of the catalog that owns the store; None when none has claimed it."""
        with self._faults("say which catalog owns it"):
            try:
                content: bytes = self.client.cat_file(self._object(CATALOG_ID))
            except FileNotFoundError:
                return None
        return content.decode().strip()

    def belong_to(self, catalog_id: str) -> str:
        """Claim the store for a catalog unless it has an owner; return the owner's id.

        Of two concurrent claims one wins, by a conditional write. Raises `ConfigError` where there are none.
        """
        if (owner := self.catalog_id()) is not None:
            return owner
        if not self._is_conditional():
            raise ConfigError(
                f"The store {self._prefix} has no conditional writes: two catalogs could claim it at once. "
                f"Nothing was changed. If no other catalog uses it, write {catalog_id} into {CATALOG_ID} "
                "there, and run this again."
            )
        return catalog_id if self._create(CATALOG_ID, catalog_id) else self.catalog_id() or ""

    def path(self, segment: str) -> Path:
        """Raise `NotImplementedError`: an object has no local path."""
        raise NotImplementedError("A remote segment has no local path; use `fetch`.")

    def close(self) -> None:
        """Release all segments and close the cache."""
        self.committed()
        self.cache.close()

    @cached_property
    def _installation(self) -> str:
        """Return the id in the names of this state directory's segments: only its own writers lock those."""
        file = self.root / INSTALLATION
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            return write_once(file, uuid.uuid4().hex[:8])
        except OSError as error:
            raise ServiceError(f"Could not write {file}: {error.strerror}. Make it writable.") from None

    def _hold_new(self) -> str:
        """Name a new object and lock its local file before the upload."""
        segment = f"{self._installation}-{uuid.uuid4().hex}.seg"
        try:
            while True:
                handle = os.open(self.root / segment, os.O_RDWR | os.O_CREAT, 0o644)
                if lock(handle):
                    self._held[segment] = handle
                    return segment
                os.close(handle)
        except OSError as error:
            raise ServiceError(
                f"Could not write {self.root / segment}: {error.strerror}; nothing was published."
            ) from None

    def _object(self, segment: str) -> str:
        return f"{self._prefix}/{segment}"

    def _create(self, name: str, text: str) -> bool:
        """Write an object unless it exists (S3: If-None-Match: *); return whether it is new."""
        with self._faults(f"create {name}"):
            try:
                self.client.pipe_file(self._object(name), text.encode(), mode="create")
            except OSError as error:
                # Not every S3-compatible store says which condition failed, as s3fs wants it.
                if isinstance(error, FileExistsError) or error.errno == errno.EINVAL:
                    return False
                raise
        return True

    def _is_conditional(self) -> bool:
        """Say whether `_create` is atomic: some S3-compatible stores ignore the condition."""
        from fsspec import AbstractFileSystem

        # fsspec's own only looks before it writes.
        if getattr(self.client.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            return False
        probe = f".claim-{uuid.uuid4().hex}"
        with self._faults("take a probe object"):
            self.client.pipe_file(self._object(probe), b"first")
        try:
            return not self._create(probe, "second")
        finally:
            with self._faults("remove a probe object"):
                self.client.rm_file(self._object(probe))

    def chunks(self, location: Location) -> Iterator[bytes]:
        """Yield a blob's bytes from the store itself, as far as they exist; raises as `Store.chunks`."""
        at, end = location.offset, location.offset + location.length
        while at < end:
            with self._faults(f"read {location.segment}"):
                try:
                    chunk = self.client.cat_file(
                        self._object(location.segment), start=at, end=min(at + CHUNK, end)
                    )
                except FileNotFoundError:
                    raise _missing(location) from None
                except OSError as error:
                    # S3's answer to a range past the object's end.
                    if error.errno != errno.EINVAL:
                        raise
                    return
            if not chunk:
                return
            yield chunk
            at += len(chunk)

    def _check_small(self, locations: Sequence[Location]) -> dict[Location, Fault | None]:
        if not locations:
            return {}
        paths = [self._object(one.segment) for one in locations]
        starts = [one.offset for one in locations]
        ends = [one.offset + one.length for one in locations]
        with self._faults("return the blobs asked for"):
            bodies = self.client.cat_ranges(paths, starts, ends, on_error="return")
        return {one: self._fault_in(one, body) for one, body in zip(locations, bodies, strict=True)}

    def _fault_in(self, location: Location, body: bytes | Exception) -> Fault | None:
        if isinstance(body, FileNotFoundError):
            return _missing(location)
        if isinstance(body, Exception):
            # Some stores report a range past the object's end as an error of its own.
            return self._fault(location)
        return None if is_whole(body, location.checksum) else damaged(location, len(body))

    def _is_abandoned(self, segment: str) -> bool:
        with self._faults(f"say when {segment} was written"):
            try:
                age = self.now - self.client.modified(self._object(segment))
            except FileNotFoundError:
                return False
        return age.total_seconds() > ABANDONED_S

    @cached_property
    def now(self) -> datetime:
        """Return the store's own time at first use: the modification time of an object written then."""
        probe = self._object(f".clock-{self._installation}-{os.getpid()}")
        self.client.pipe_file(probe, b"now")
        try:
            written: datetime = self.client.modified(probe)
            return written
        finally:
            self.client.rm_file(probe)

    def _faults(self, wish: str) -> AbstractContextManager[None]:
        """Translate any error of the service's client into one `ServiceError`."""
        return client_faults(f"The store {self._prefix} did not {wish}", "Try again when it answers.")


def _missing(location: Location) -> MissingBytes:
    return MissingBytes(f"The segment {location.segment} is missing from the store. Restore it.")


def client_of(url: str, name: str) -> tuple[Any, str]:
    """Return the file system of a URL and the prefix in it; `name` is what gave the URL.

    Raises `ConfigError` when its library is missing.
    """
    import fsspec

    protocol = url.partition("://")[0]
    options = OPTIONS.get(protocol, {})
    try:
        client, prefix = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{name} begins with {protocol}://, which cannot be opened: {error}. "
            "For S3: pip install 'graftwork[s3]'."
        ) from None
    return client, prefix.rstrip("/")


@contextmanager
def client_faults(what: str, advice: str) -> Iterator[None]:
    """Translate any error of a storage client into a `ServiceError`: what failed, why, what to do."""
    try:
        yield
    except GraftworkError:
        raise
    except Exception as error:
        # Each client library raises its own error classes.
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ServiceError(f"{what} ({reason}). {advice}") from error
