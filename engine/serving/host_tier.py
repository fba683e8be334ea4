"""The host tier: adapters that are mapped, verified and laid out for this engine's slots, by served name.

The page cache holds the bytes, once for all workers of a machine. A mapping outlives its file's name; a
disk can still fail, and a file can be cut short by somebody, hence `Bytes.bring_in` before every copy.
Knows the store's files and the packed layout. Knows neither vLLM nor slots by number.
"""

import errno
import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import FileIO
from typing import Any

import torch
from torch import Tensor

from engine.adapters.packed import Layout
from engine.adapters.packed_check import check_layout
from engine.adapters.revision import is_finite
from engine.adapters.store import ALIGNMENT, PAGE_ALIGNED_FROM
from engine.errors import AdapterError, DamagedBytes, MissingBytes
from engine.serving.fill import Module, Plan
from engine.serving.load_channel import State, Tell

PREPARE_THREADS = 2
# Kimi-K2 with a rank of its own for every expert takes about 10 MB.
LAYOUT_LIMIT = 16 << 20
# Adapters of one shape share a layout and a plan; more shapes than this are parsed again.
LAYOUTS = 16
MADV_POPULATE_READ = 22
# Adapters whose disk failed, by which nothing more is loaded.
MOST_LOST = 1000
READY = ("ready", "")
FORGOTTEN = ("refused", "The engine has forgotten it.")
REFUSED: dict[str, type[AdapterError]] = {
    "damaged": DamagedBytes,
    "missing": MissingBytes,
    "refused": AdapterError,
}


@dataclass(frozen=True)
class Bytes:
    """An adapter's payload: a mapping of the store with its file, or a copy when it is small (both None)."""

    payload: Tensor
    mapped: mmap.mmap | None = None
    file: FileIO | None = None
    offset: int = 0

    @staticmethod
    def open(address: Mapping[str, Any]) -> "Bytes":
        """Open `length` bytes at `offset` of `path`. Raises `AdapterError` when they are not there."""
        path, offset, length = address["path"], address["offset"], address["length"]
        file = _open_regular(path)
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or offset % ALIGNMENT or size < offset + length:
            raise MissingBytes(
                f"its {length} bytes at {offset} are not in {path}, which has {size}. "
                "Export the revision again."
            )
        if length < PAGE_ALIGNED_FROM:
            with file:
                return Bytes(_read(file, offset, length))
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        # The file stays open for `Plan.read`, also when the name is gone. The mapping is private, so that
        # torch may call the memory writable; nothing ever writes to it.
        mapped = mmap.mmap(file.fileno(), offset + length - start, offset=start, access=mmap.ACCESS_COPY)
        payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start, count=length)
        return Bytes(payload, mapped, file, offset)

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


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter of the host tier: its bytes, and how they get into a slot of this rank."""

    name: str
    bytes: Bytes
    plan: Plan

    @cached_property
    def sources(self) -> list[Tensor]:
        return self.plan.sources(self.bytes.payload)

    def bring_in(self) -> None:
        """Have every page that `fill` will map in memory, or raise `OSError`."""
        if not self.is_read:
            self.bytes.bring_in()

    @property
    def is_read(self) -> bool:
        """Say whether slots are filled from the file, without a look at the mapping."""
        return self.plan.can_read and self.bytes.file is not None

    def fill(self, slot: int, before: Plan | None) -> None:
        """Put the adapter into a slot. Raises `OSError` when its bytes are lost; then the slot is clear."""
        if self.is_read:
            assert self.bytes.file is not None
            self.plan.read(slot, self.bytes.file.fileno(), self.bytes.offset, before)
        else:
            self.plan.fill(slot, self.sources, before)


class HostTier:
    """Adapters that are mapped and verified, by served name. Filled by threads, read by the step."""

    def __init__(self, modules: Mapping[str, Module], verifies: bool = True) -> None:
        """`verifies` is false on all but one rank of a machine: the others read their slices only."""
        self.adapters: dict[str, PackedAdapter] = {}
        self.validated_bytes = 0
        self.verified_bytes = 0
        self._verifies = verifies
        self._plan = lru_cache(LAYOUTS)(lambda layout: Plan(read_layout(layout), modules))
        # Who is to be told of what is on its way.
        self._loading: dict[str, list[Tell]] = {}
        # Never emptied: blocks of the prefix cache may carry the name until the engine ends. Sentences only.
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="graftwork-prepare")

    def prepare(self, name: str, address: dict[str, Any], tell: Tell) -> None:
        """Begin to map and verify an adapter; `tell` hears `READY`, or a kind of `REFUSED` and why."""
        with self._lock:
            state = self._known(name)
            if state is None:
                waiting = self._loading.setdefault(name, [])
                waiting.append(tell)
                if len(waiting) == 1:
                    self._pool.submit(self._prepare, name, address, waiting)
        if state is not None:
            tell(state)

    def _known(self, name: str) -> State | None:
        if name in self.adapters:
            return READY
        if name in self._lost:
            return "refused", self._lost[name]
        if len(self._lost) >= MOST_LOST:
            return "refused", (
                f"{name} cannot be loaded: {MOST_LOST} adapters have lost their bytes since the "
                "engine started. Restart it once the disk is whole."
            )
        return None

    def forget(self, name: str) -> None:
        """Drop an adapter, also one that is on its way."""
        with self._lock:
            self.adapters.pop(name, None)
            waiting = self._loading.pop(name, [])
        for tell in waiting:
            tell(FORGOTTEN)

    def lose(self, name: str, reason: str) -> None:
        """Never serve a name again: its bytes were lost after it was ready."""
        self._lost[name] = reason
        self.forget(name)

    def open(self, name: str, address: Mapping[str, Any]) -> PackedAdapter:
        """Map a packed adapter and lay out its copies; its bytes are neither read nor verified.

        `address` holds `path`, `offset`, `length` (bytes), `checksum` (sha256 hex) and `layout` (JSON).
        """
        plan = self._plan(address["layout"])
        if address["length"] != plan.layout.nbytes:
            raise AdapterError(f"expected {plan.layout.nbytes} bytes, found {address['length']}.")
        held = Bytes.open(address)
        return PackedAdapter(name, held, plan)

    def verify(self, adapter: PackedAdapter, address: Mapping[str, Any]) -> None:
        """Compare the checksum, on one rank, and refuse what is not finite; the error names the tensor."""
        adapter.bytes.bring_in()
        if self._verifies:
            payload: Any = adapter.bytes.payload.numpy()
            if hashlib.sha256(memoryview(payload)).hexdigest() != address["checksum"]:
                raise DamagedBytes(f"its bytes in {address['path']} are damaged; export the revision again.")
            self.verified_bytes += adapter.bytes.payload.numel()
        if not adapter.is_read:
            # Laid out here rather than by the step that first uses them.
            _ = adapter.sources
        # Where every byte is needed, one look at all of them is much less work than one at each region.
        plan, payload = adapter.plan, adapter.bytes.payload
        if not (plan.can_read and is_finite(payload.view(plan.layout.dtype))):
            self._name_what_is_not_finite(adapter)
        self.validated_bytes += adapter.plan.bytes

    def _name_what_is_not_finite(self, adapter: PackedAdapter) -> None:
        for region, values in zip(adapter.plan.regions, adapter.sources, strict=True):
            if not is_finite(values):
                raise AdapterError(f"{region.block.module}.lora_{region.block.side} holds NaN or Inf.")

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
            kind = next((kind for kind, of in REFUSED.items() if isinstance(error, of)), "refused")
            state = kind, f"{name} cannot be loaded: {error}"
        with self._lock:
            if self._loading.get(name) is not waiting:
                return
            del self._loading[name]
            if adapter is not None and state == READY:
                self.adapters[name] = adapter
        for tell in waiting:
            tell(state)


def _open_regular(path: str) -> FileIO:
    """Open a file that is no link, by few system calls: each gives the step Python's lock and waits for it."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = FileIO(path, opener=lambda name, given: os.open(name, given | flags))
    except OSError:
        file = None
    if file is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise MissingBytes(f"its segment {path} is missing or not a regular file. Restore it.")
    return file


def _read(file: FileIO, offset: int, length: int) -> Tensor:
    """Return bytes of a file, copied once."""
    held = torch.empty(length, dtype=torch.uint8)
    view = memoryview(held.numpy())  # type: ignore[arg-type]
    done = 0
    while done < length:
        read = os.preadv(file.fileno(), [view[done:]], offset + done)
        if not read:
            raise MissingBytes(f"its bytes in {file.name} were cut off. Export the revision again.")
        done += read
    return held


def read_layout(text: str) -> Layout:
    """Return a layout that is proven against itself."""
    if len(text) > LAYOUT_LIMIT:
        raise AdapterError(f"its layout has {len(text)} characters; the limit is {LAYOUT_LIMIT}.")
    layout = Layout.from_json(text)
    check_layout(layout)
    return layout
