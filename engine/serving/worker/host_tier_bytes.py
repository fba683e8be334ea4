"""The worker's half of the host tier: bytes of adapters, verified and laid out for this engine's slots.

Names, sizes and the choice of who is evicted are the gateway's: `HostTierIndex`, in
serving/residency/host_tier_index.py. It has each adapter prepared here and, once it has left, forgotten.

The bytes live in the page cache, one copy for all workers of a machine. Large adapters are mapped; small
ones, many in a file, are read from the open file. Both survive an unlink of the file (except on NFS), but not
a failed disk or a truncated file, so `Bytes.bring_in` runs before every copy. A small adapter alone in its
file (a local copy from a remote store) is read into memory: thousands of open files would be too many.
"""

import errno
import mmap
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from engine.adapters.packed import PackedLayout
from engine.adapters.packed_check import check_layout
from engine.errors import AdapterError, DamagedBytes, GraftworkError, MissingBytes, ServiceError
from engine.files import ALIGNMENT
from engine.serving.worker.load_channel import Tell
from engine.serving.worker.slot_copy import Module, SlotCopyPlan
from engine.store.segments import PAGE_ALIGNED_FROM, is_whole

PREPARE_THREADS = 2
# Kimi-K2 with a rank of its own for every expert takes about 10 MB.
LAYOUT_LIMIT = 16 << 20
# Cached layouts with their plans; adapters of one shape share one.
LAYOUTS = 16
MADV_POPULATE_READ = 22
# Errors which mean that a file is missing; others (such as EMFILE) say nothing about its bytes.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
BYTE = torch.uint8
# A buffer for each verifying thread.
SCRATCH = threading.local()
READY = ("ready", "")
FORGOTTEN = ("refused", "The engine was told to forget this adapter while it was loading. Try again.")
# Kinds of refusal; `failed` is a fault of the machine, not of the adapter.
REFUSED: dict[str, type[GraftworkError]] = {
    "damaged": DamagedBytes,
    "missing": MissingBytes,
    "refused": AdapterError,
    "failed": ServiceError,
}


class Segment:
    """A file open for reading, closed when it is garbage-collected.

    `finalize` clears weak references before it closes the descriptor. With an object that closes itself, as
    Python's own files do, another thread could still get the closed object from the weak dictionary.
    """

    def __init__(self, path: str) -> None:
        """Open the path; never follow a symbolic link, never block (it may have become a pipe)."""
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        finalize(self, os.close, self.fd).atexit = False


@dataclass(frozen=True)
class Bytes:
    """An adapter's payload: `length` bytes at `offset` of a segment that stays open.

    `payload` (uint8) is a mapping of the bytes, a copy of them (then `file` is None), or None.
    """

    file: Segment | None
    offset: int
    length: int
    is_alone: bool
    payload: Tensor | None = None
    mapped: mmap.mmap | None = None

    def kept(self, in_memory: bool) -> "Bytes":
        """Return these bytes mapped if large; copied if small and either `in_memory` or alone in the file.

        Small ones are not mapped because the number of mappings is limited, like that of open files.
        """
        if self.length < PAGE_ALIGNED_FROM:
            if not (in_memory or self.is_alone):
                return self
            return replace(self, file=None, payload=self._copy(torch.empty(self.length, dtype=BYTE)))
        assert self.file is not None
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        size = self.offset + self.length - start
        # A private mapping, because torch wants writable memory; nothing writes to it.
        mapped = mmap.mmap(self.file.fd, size, offset=start, access=mmap.ACCESS_COPY)
        payload = torch.frombuffer(mapped, dtype=BYTE, offset=self.offset - start, count=self.length)
        return replace(self, payload=payload, mapped=mapped)

    def look(self) -> Tensor:
        """Return the bytes (uint8); valid until this thread's next call. Raises `OSError`, `MissingBytes`."""
        if self.payload is not None:
            self.bring_in()
            return self.payload
        # A reused buffer: faulting in fresh pages costs more than the rest of a small load.
        if not hasattr(SCRATCH, "bytes"):
            SCRATCH.bytes = torch.empty(PAGE_ALIGNED_FROM, dtype=BYTE)
        return self._copy(SCRATCH.bytes[: self.length])

    def bring_in(self) -> None:
        """Load every mapped page, or raise `OSError`: touching a lost page would end the process (SIGBUS)."""
        if self.mapped is None:
            return
        try:
            self.mapped.madvise(MADV_POPULATE_READ)
        except OSError as error:
            # Linux before 5.14 does not have this advice.
            if error.errno != errno.EINVAL:
                raise

    def _copy(self, into: Tensor) -> Tensor:
        assert self.file is not None
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        done = 0
        while done < self.length:
            read = os.preadv(self.file.fd, [view[done:]], self.offset + done)
            if not read:
                raise MissingBytes(
                    f"its segment {self.file.path} ends after {done} of {self.length} bytes. "
                    "Export the revision again."
                )
            done += read
        return into


class OpenSegments:
    """Open segments by path, each open as long as an adapter in it is held. Thread-safe."""

    def __init__(self) -> None:
        self._files: WeakValueDictionary[str, Segment] = WeakValueDictionary()

    def at(self, address: Mapping[str, Any]) -> Bytes:
        """Return the bytes at an address. Raises `MissingBytes` when they are not there."""
        path, offset, length = address["path"], address["offset"], address["length"]
        file, size = self._open(path)
        if offset < 0 or offset % ALIGNMENT or size < offset + length:
            raise MissingBytes(
                f"its {length} bytes at offset {offset} are not in {path}, which has {size} bytes. "
                "Export the revision again."
            )
        return Bytes(file, offset, length, is_alone=size == length)

    def _open(self, path: str) -> tuple[Segment, int]:
        """Return a regular file and its size, with few system calls: each releases the GIL to the step."""
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
            raise MissingBytes(f"its segment {path} is missing or not a regular file. Restore the file.")
        self._files[path] = file
        return file, now.st_size


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter of the host tier: its bytes, and the plan that copies them into a slot of this rank.

    Slots are filled straight from the open file if the plan can read, otherwise from memory.
    """

    name: str
    bytes: Bytes
    plan: SlotCopyPlan

    @cached_property
    def sources(self) -> list[Tensor]:
        """The plan's regions as views of the payload, in the layout's dtype."""
        assert self.bytes.payload is not None
        return self.plan.sources(self.bytes.payload)

    @property
    def is_read_at_length(self) -> bool:
        """Whether `copy_to_slot` is a large read, which releases the GIL for most of its time."""
        return self._file is not None and self.bytes.length >= PAGE_ALIGNED_FROM

    def bring_in(self) -> None:
        """Load every page that `copy_to_slot` will touch, or raise `OSError`."""
        if self._file is None:
            self.bytes.bring_in()

    def copy_to_slot(self, slot: int, before: SlotCopyPlan | None) -> None:
        """Copy the adapter into a slot whose last occupant had the plan `before`.

        Raises `OSError` when its bytes are lost; the slot is then clear.
        """
        if self._file is not None:
            self.plan.read(slot, self._file.fd, self.bytes.offset, before)
        else:
            self.plan.copy_to_slot(slot, self.sources, before)

    def lay_out(self) -> None:
        """Prepare the sources of `copy_to_slot` now instead of in the first step that uses them."""
        if self._file is None:
            _ = self.sources

    @property
    def _file(self) -> Segment | None:
        """The file from which slots are filled; None if they are filled from memory."""
        return self.bytes.file if self.plan.can_read else None


class HostTierBytes:
    """Verified adapters by served name; threads make them ready, the step reads them.

    The gateway's `HostTierIndex` has a name only while its bytes are here, or are lost and not yet forgotten.
    """

    def __init__(self, modules: Mapping[str, Module], verifies: bool = True) -> None:
        """Create an empty tier; `verifies` is set on one rank of a machine, the others skip checksums."""
        self.adapters: dict[str, PackedAdapter] = {}
        self.validated_bytes = 0
        self.verified_bytes = 0
        self._verifies = verifies
        self._segments = OpenSegments()
        self._plan = lru_cache(LAYOUTS)(lambda layout: SlotCopyPlan(read_layout(layout), modules))
        # Callbacks of each adapter that is being prepared.
        self.loading: dict[str, list[Tell]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="graftwork-prepare")

    def prepare(self, name: str, address: dict[str, Any], tell: Tell) -> None:
        """Start to map and verify an adapter; `tell` gets `READY`, or a key of `REFUSED` and a message."""
        with self._lock:
            is_here = name in self.adapters
            if not is_here:
                waiting = self.loading.setdefault(name, [])
                waiting.append(tell)
                if len(waiting) == 1:
                    self._pool.submit(self._prepare, name, address, waiting)
        if is_here:
            tell(READY)

    def forget(self, name: str) -> None:
        """Forget an adapter, also one that is being prepared."""
        with self._lock:
            self.adapters.pop(name, None)
            waiting = self.loading.pop(name, [])
        for tell in waiting:
            tell(FORGOTTEN)

    def open(self, name: str, address: Mapping[str, Any]) -> PackedAdapter:
        """Open a packed adapter and plan its copies; its bytes are not verified.

        `address` holds `path`, `offset` and `length` (bytes), `checksum` (hex) and `layout` (JSON). Raises
        `AdapterError` when the layout does not fit, `MissingBytes` when the bytes are not there.
        """
        plan = self._plan(address["layout"])
        if address["length"] != plan.layout.nbytes:
            raise AdapterError(f"expected {plan.layout.nbytes} bytes, found {address['length']}.")
        return PackedAdapter(name, self._segments.at(address).kept(in_memory=not plan.can_read), plan)

    def verify(self, adapter: PackedAdapter, address: Mapping[str, Any]) -> None:
        """Check the checksum (on one rank of a machine) and that every value is finite.

        Raises `DamagedBytes`, or `AdapterError` with the tensor that holds NaN or Inf.
        """
        plan, payload = adapter.plan, adapter.bytes.look()
        if self._verifies:
            if not is_whole(memoryview(payload.numpy()), address["checksum"]):  # type: ignore[arg-type]
                raise DamagedBytes(
                    f"its bytes in {address['path']} are damaged: their checksum differs from the catalog's. "
                    "Export the revision again."
                )
            with self._lock:
                self.verified_bytes += payload.numel()
        adapter.lay_out()
        # If every byte is used, checking the whole payload is much cheaper than each region.
        if not (plan.can_read and are_finite([payload.view(plan.layout.dtype)]).all()):
            finite = are_finite(plan.sources(payload))
            if not finite.all():
                block = plan.regions[finite.tolist().index(False)].block
                raise AdapterError(f"{block.module}.lora_{block.side} holds NaN or Inf.")
        with self._lock:
            self.validated_bytes += plan.bytes

    def _prepare(self, name: str, address: dict[str, Any], waiting: list[Tell]) -> None:
        adapter, state = None, READY
        # Forgotten meanwhile; if it was requested again, another list waits.
        if self.loading.get(name) is not waiting:
            return
        try:
            adapter = self.open(name, address)
            self.verify(adapter, address)
        except Exception as error:
            # Any error must be reported, or the adapter's requests would wait until their timeout.
            state = _kind(error), f"{name} cannot be loaded: {error}"
        with self._lock:
            if self.loading.get(name) is not waiting:
                return
            del self.loading[name]
            if adapter is not None and state == READY:
                self.adapters[name] = adapter
        for tell in waiting:
            tell(state)


def _kind(error: Exception) -> str:
    if isinstance(error, OSError):
        # On NFS another host may remove a segment between lstat and read.
        return "missing" if error.errno in GONE else "failed"
    return next((kind for kind, of in REFUSED.items() if isinstance(error, of)), "refused")


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return of each tensor (N,), none of them empty, whether no value is NaN or infinite.

    The extremes show it in a fortieth of `isfinite`'s time.
    """
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in tensors]
    return torch.stack(extremes).isfinite().all(dim=1)


def read_layout(text: str) -> PackedLayout:
    """Parse a packed layout (JSON) and check its consistency. Raises `AdapterError`."""
    if len(text) > LAYOUT_LIMIT:
        raise AdapterError(f"its layout has {len(text)} characters; the limit is {LAYOUT_LIMIT}.")
    layout = PackedLayout.from_json(text)
    check_layout(layout)
    return layout
