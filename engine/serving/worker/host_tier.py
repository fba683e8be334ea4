"""The host tier: adapters that are verified and laid out for this engine's slots, by served name.

The page cache holds the bytes, once for all workers of a machine: large ones are mapped, and small ones only
open, many in a file. Both outlive their file's name but on NFS; a disk can still fail, and a file can be cut
short by somebody, hence `Bytes.bring_in` before every copy. A small one alone in its file, as copies of what
is behind a URL are, is read whole: thousands of open files would be too many. Knows the store's files and the
packed layout, neither vLLM nor slots by number.
"""

import errno
import mmap
import os
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from engine.adapters.packed import PackedLayout
from engine.adapters.packed_check import check_layout
from engine.adapters.revision import is_finite
from engine.adapters.sizes import ALIGNMENT
from engine.errors import AdapterError, DamagedBytes, GraftworkError, MissingBytes, ServiceError
from engine.serving.worker.load_channel import Tell
from engine.serving.worker.slot_copy import Module, SlotCopyPlan
from engine.store.checksums import is_whole
from engine.store.segments import PAGE_ALIGNED_FROM

PREPARE_THREADS = 2
# Kimi-K2 with a rank of its own for every expert takes about 10 MB.
LAYOUT_LIMIT = 16 << 20
# Adapters of one shape share a layout and a plan; more shapes than this are parsed again.
LAYOUTS = 16
MADV_POPULATE_READ = 22
# Of errors at opening and reading, those by which a file is not there; any other is no word of its bytes.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
BYTE = torch.uint8
# Of each thread that verifies.
SCRATCH = threading.local()
READY = ("ready", "")
FORGOTTEN = ("refused", "The engine has forgotten it.")
# By kind; what fails otherwise says nothing of the adapter.
REFUSED: dict[str, type[GraftworkError]] = {
    "damaged": DamagedBytes,
    "missing": MissingBytes,
    "refused": AdapterError,
    "failed": ServiceError,
}


class Segment:
    """A file open for reading, closed when nobody holds it any more.

    By `finalize`, which ends weak references before it closes: of an object that closes itself, as Python's
    own files do, another thread can still get the closed one.
    """

    def __init__(self, path: str) -> None:
        """Open no link, and at once, whatever the path has become since somebody looked."""
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        finalize(self, os.close, self.fd).atexit = False


@dataclass(frozen=True)
class Bytes:
    """An adapter's payload: `length` bytes at `offset` of a segment that stays open, also without its name.

    `payload` is a mapping of them, or where they are few a copy, which needs no `file`.
    """

    file: Segment | None
    offset: int
    length: int
    is_alone: bool
    payload: Tensor | None = None
    mapped: mmap.mmap | None = None

    def kept(self, in_memory: bool) -> "Bytes":
        """Map what is large; copy what is small where it must be `in_memory`, or is alone in its file.

        Mappings are counted as open files are.
        """
        if self.length < PAGE_ALIGNED_FROM:
            if not (in_memory or self.is_alone):
                return self
            return replace(self, file=None, payload=self._copy(torch.empty(self.length, dtype=BYTE)))
        assert self.file is not None
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        size = self.offset + self.length - start
        # Private, so that torch may call the memory writable; nothing ever writes to it.
        mapped = mmap.mmap(self.file.fd, size, offset=start, access=mmap.ACCESS_COPY)
        payload = torch.frombuffer(mapped, dtype=BYTE, offset=self.offset - start, count=self.length)
        return replace(self, payload=payload, mapped=mapped)

    def look(self) -> Tensor:
        """Return the bytes for this thread, until it looks at others. Raises `OSError` or `MissingBytes`."""
        if self.payload is not None:
            self.bring_in()
            return self.payload
        # Memory that was touched before: fresh pages cost more than all the rest of a small load.
        if not hasattr(SCRATCH, "bytes"):
            SCRATCH.bytes = torch.empty(PAGE_ALIGNED_FROM, dtype=BYTE)
        return self._copy(SCRATCH.bytes[: self.length])

    def bring_in(self) -> None:
        """Have every page in memory, or raise `OSError`; reading a lost page otherwise ends the process."""
        if self.mapped is None:
            return
        try:
            self.mapped.madvise(MADV_POPULATE_READ)
        except OSError as error:
            # Linux before 5.14 does not know it.
            if error.errno != errno.EINVAL:
                raise

    def _copy(self, into: Tensor) -> Tensor:
        assert self.file is not None
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        done = 0
        while done < self.length:
            read = os.preadv(self.file.fd, [view[done:]], self.offset + done)
            if not read:
                raise MissingBytes(f"its bytes in {self.file.path} end early. Export the revision again.")
            done += read
        return into


class OpenSegments:
    """Open segments by path, each for as long as an adapter of it is held. For several threads."""

    def __init__(self) -> None:
        self._files: WeakValueDictionary[str, Segment] = WeakValueDictionary()

    def at(self, address: Mapping[str, Any]) -> Bytes:
        """Return where an address points. Raises `MissingBytes` when the bytes are not there."""
        path, offset, length = address["path"], address["offset"], address["length"]
        file, size = self._open(path)
        if offset < 0 or offset % ALIGNMENT or size < offset + length:
            raise MissingBytes(
                f"its {length} bytes at {offset} are not in {path}, which has {size}. "
                "Export the revision again."
            )
        return Bytes(file, offset, length, is_alone=size == length)

    def _open(self, path: str) -> tuple[Segment, int]:
        """Return a regular file and its size, by few system calls: for each, the step gets Python's lock."""
        known = self._files.get(path)
        try:
            now = os.lstat(path)
            if known is not None and os.path.samestat(now, os.fstat(known.fd)):
                return known, now.st_size
            file = Segment(path) if stat.S_ISREG(now.st_mode) else None
        except OSError as error:
            if error.errno not in GONE:
                raise
            file = None
        if file is None:
            raise MissingBytes(f"its segment {path} is missing or not a regular file. Restore it.")
        self._files[path] = file
        return file, now.st_size


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter of the host tier: its bytes, and how they get into a slot of this rank.

    Where the plan can read, slots are filled from the file if it is open, without a look at a mapping.
    """

    name: str
    bytes: Bytes
    plan: SlotCopyPlan

    @cached_property
    def sources(self) -> list[Tensor]:
        assert self.bytes.payload is not None
        return self.plan.sources(self.bytes.payload)

    @property
    def is_read_at_length(self) -> bool:
        """Say whether `copy_to_slot` leaves Python's lock to others for most of its time: a large read."""
        return self._file is not None and self.bytes.length >= PAGE_ALIGNED_FROM

    def bring_in(self) -> None:
        """Have every page that `copy_to_slot` will map in memory, or raise `OSError`."""
        if self._file is None:
            self.bytes.bring_in()

    def copy_to_slot(self, slot: int, before: SlotCopyPlan | None) -> None:
        """Put the adapter into a slot. Raises `OSError` when its bytes are lost; then the slot is clear."""
        if self._file is not None:
            self.plan.read(slot, self._file.fd, self.bytes.offset, before)
        else:
            self.plan.copy_to_slot(slot, self.sources, before)

    def lay_out(self) -> None:
        """Have ready what `copy_to_slot` copies from, rather than in the step that first uses it."""
        if self._file is None:
            _ = self.sources

    @property
    def _file(self) -> Segment | None:
        """Return the file that slots are filled from; None where it is memory."""
        return self.bytes.file if self.plan.can_read else None


class HostTier:
    """Adapters that are mapped and verified, by served name. Filled by threads, read by the step."""

    def __init__(self, modules: Mapping[str, Module], verifies: bool = True) -> None:
        """`verifies` is false on all but one rank of a machine: the others read their slices only."""
        self.adapters: dict[str, PackedAdapter] = {}
        self.validated_bytes = 0
        self.verified_bytes = 0
        self._verifies = verifies
        self._segments = OpenSegments()
        self._plan = lru_cache(LAYOUTS)(lambda layout: SlotCopyPlan(read_layout(layout), modules))
        # Who is to be told of what is on its way.
        self._loading: dict[str, list[Tell]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="graftwork-prepare")

    def prepare(self, name: str, address: dict[str, Any], tell: Tell) -> None:
        """Begin to map and verify an adapter; `tell` hears `READY`, or a kind of `REFUSED` and why."""
        with self._lock:
            is_here = name in self.adapters
            if not is_here:
                waiting = self._loading.setdefault(name, [])
                waiting.append(tell)
                if len(waiting) == 1:
                    self._pool.submit(self._prepare, name, address, waiting)
        if is_here:
            tell(READY)

    def forget(self, name: str) -> None:
        """Drop an adapter, also one that is on its way."""
        with self._lock:
            self.adapters.pop(name, None)
            waiting = self._loading.pop(name, [])
        for tell in waiting:
            tell(FORGOTTEN)

    def open(self, name: str, address: Mapping[str, Any]) -> PackedAdapter:
        """Map a packed adapter and lay out its copies; its bytes are neither read nor verified.

        `address` holds `path`, `offset`, `length` (bytes), `checksum` (hex) and `layout` (JSON).
        """
        plan = self._plan(address["layout"])
        if address["length"] != plan.layout.nbytes:
            raise AdapterError(f"expected {plan.layout.nbytes} bytes, found {address['length']}.")
        return PackedAdapter(name, self._segments.at(address).kept(in_memory=not plan.can_read), plan)

    def verify(self, adapter: PackedAdapter, address: Mapping[str, Any]) -> None:
        """Compare the checksum, on one rank, and refuse what is not finite; the error names the tensor."""
        plan, payload = adapter.plan, adapter.bytes.look()
        if self._verifies:
            if not is_whole(memoryview(payload.numpy()), address["checksum"]):  # type: ignore[arg-type]
                raise DamagedBytes(f"its bytes in {address['path']} are damaged; export the revision again.")
            with self._lock:
                self.verified_bytes += payload.numel()
        adapter.lay_out()
        # Where every byte is needed, one look at all of them is much less work than one at each region.
        if not (plan.can_read and is_finite(payload.view(plan.layout.dtype))):
            for region, values in zip(plan.regions, plan.sources(payload), strict=True):
                if not is_finite(values):
                    raise AdapterError(f"{region.block.module}.lora_{region.block.side} holds NaN or Inf.")
        with self._lock:
            self.validated_bytes += plan.bytes

    def _prepare(self, name: str, address: dict[str, Any], waiting: list[Tell]) -> None:
        adapter, state = None, READY
        # Forgotten meanwhile, and perhaps asked for again: then another list waits.
        if self._loading.get(name) is not waiting:
            return
        try:
            adapter = self.open(name, address)
            self.verify(adapter, address)
        except Exception as error:
            # Whatever it is: a name that nothing is told of would let its requests wait for nothing.
            state = _kind(error), f"{name} cannot be loaded: {error}"
        with self._lock:
            if self._loading.get(name) is not waiting:
                return
            del self._loading[name]
            if adapter is not None and state == READY:
                self.adapters[name] = adapter
        for tell in waiting:
            tell(state)


def _kind(error: Exception) -> str:
    if isinstance(error, OSError):
        # On NFS another host may remove a segment between the look at it and the read.
        return "missing" if error.errno in GONE else "failed"
    return next((kind for kind, of in REFUSED.items() if isinstance(error, of)), "refused")


def read_layout(text: str) -> PackedLayout:
    """Return a layout that is proven against itself."""
    if len(text) > LAYOUT_LIMIT:
        raise AdapterError(f"its layout has {len(text)} characters; the limit is {LAYOUT_LIMIT}.")
    layout = PackedLayout.from_json(text)
    check_layout(layout)
    return layout
