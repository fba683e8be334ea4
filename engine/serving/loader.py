"""Adapters inside the engine's worker: mapped on a thread, copied into a slot inside the step.

`prepare` maps a packed adapter from the store, verifies and validates it, and takes no slot.
`activate` is the only work inside vLLM's step loop: a copy for each block, once the mapping's pages are
known to be there. A mapping outlives its file's name. What can still fail is a disk, or a segment cut
short by somebody: then the slot stays free and clear, the adapter is never tried again under its
name (blocks of the prefix cache may carry it), and its requests fail alone (plugin.fail_requests).

Knows vLLM's LoRA managers (0.26 to 0.32). Does not know names' meaning, routes or the catalog.
"""

import errno
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from engine.adapters.packed import Layout
from engine.adapters.store import PAGE_ALIGNED_FROM
from engine.errors import AdapterError
from engine.serving.fill import Plan
from engine.serving.slots import ModuleSlots, slots_of

PREPARE_THREADS = 2
# Adapters of one shape share a layout and a plan; more shapes than this are parsed again.
LAYOUTS = 16
MADV_POPULATE_READ = 22
Buffers = Mapping[str, ModuleSlots]


@dataclass(frozen=True)
class Bytes:
    """An adapter's payload: a mapping of the store, or a copy when it is small (`mapped` is None)."""

    payload: Tensor
    mapped: mmap.mmap | None

    @staticmethod
    def open(address: Mapping[str, Any]) -> "Bytes":
        """Open `length` bytes at `offset` of `path`. Raises `OSError`, and `AdapterError` when cut short."""
        offset, length = address["offset"], address["length"]
        if length < PAGE_ALIGNED_FROM:
            with open(address["path"], "rb") as file:
                data = bytearray(os.pread(file.fileno(), length, offset))
            if len(data) < length:
                raise AdapterError(f"{address['path']} ends before its bytes; export the revision again.")
            return Bytes(torch.frombuffer(data, dtype=torch.uint8), None)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with open(address["path"], "rb") as file:
            # Private, so that torch may call the memory writable; nothing ever writes to it.
            mapped = mmap.mmap(file.fileno(), offset + length - start, offset=start, access=mmap.ACCESS_COPY)
        payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start, count=length)
        return Bytes(payload, mapped)

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
    sources: list[Tensor]


@dataclass
class Registered:
    """What vLLM's manager keeps for an adapter id; `adapter` is None for a warm-up dummy."""

    id: int
    adapter: PackedAdapter | None


class SlotManager(LRUCacheLoRAModelManager):
    """vLLM's adapter manager over our slot buffers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.buffers: dict[str, ModuleSlots] = {}
        for name, module in self.modules.items():
            self.buffers |= slots_of(name, module)
        # What each slot's last occupant wrote, also after it left.
        self._written: list[Plan | None] = [None] * self.lora_slots
        # Ids whose bytes were lost, and their names.
        self.lost: dict[int, str] = {}
        self.activations = 0
        self.activated_bytes = 0
        self.activate_seconds = 0.0

    def add_adapter(self, adapter: Any) -> bool:
        known = adapter.id in self._registered_adapters
        if not known:
            registered: Any = Registered(adapter.id, getattr(adapter, "adapter", None))
            self._registered_adapters[adapter.id] = registered
        return not known

    def activate_adapter(self, lora_id: int) -> bool:
        """Copy a registered adapter into a slot; the least recently used occupant leaves.

        Raises `OSError` when the adapter's bytes are lost; then it has no slot.
        """
        if lora_id in self._active_adapters:
            self._active_adapters.touch(lora_id)
            return False
        started = time.perf_counter()
        registered: Any = self._registered_adapters[lora_id]
        if registered.adapter is not None:
            registered.adapter.bytes.bring_in()
        if len(self._active_adapters) >= self.lora_slots:
            self._active_adapters.remove_oldest()
        slot = self.lora_index_to_id.index(None)
        self._fill(slot, registered.adapter)
        # Last, so that no step ever sees a slot that is half filled under this id.
        self.lora_index_to_id[slot] = lora_id
        self._active_adapters[lora_id] = None
        self.activations += 1
        self.activate_seconds = time.perf_counter() - started
        return True

    def _fill(self, slot: int, adapter: PackedAdapter | None) -> None:
        before = self._written[slot]
        if adapter is not None:
            adapter.plan.fill(slot, adapter.sources, before)
            self.activated_bytes += adapter.plan.bytes
            self._written[slot] = adapter.plan
        elif before is not None:
            before.clear(slot)
            self._written[slot] = None


class HostTier:
    """Adapters that are mapped and verified, by served name. Filled by threads, read by the step."""

    def __init__(self, buffers: Buffers, verifies: bool = True) -> None:
        """`verifies` is false on all but one rank of a machine: the others read their slices only."""
        self.adapters: dict[str, PackedAdapter] = {}
        self.validated_bytes = 0
        self.verified_bytes = 0
        self._verifies = verifies
        self._plan = lru_cache(LAYOUTS)(lambda layout: Plan(Layout.from_json(layout), buffers))
        self._states: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="graftwork-prepare")

    def prepare(self, name: str, address: dict[str, Any]) -> None:
        with self._lock:
            if name in self.adapters or name in self._lost or self._states.get(name) == "loading":
                return
            self._states[name] = "loading"
        self._pool.submit(self._prepare, name, address)

    def poll(self, name: str) -> str:
        """Return `ready`, `loading`, `unknown`, or the sentence why the adapter was refused."""
        if name in self._lost:
            return self._lost[name]
        return "ready" if name in self.adapters else self._states.get(name, "unknown")

    def forget(self, name: str) -> None:
        with self._lock:
            self.adapters.pop(name, None)
            self._states.pop(name, None)

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
        return PackedAdapter(name, held, plan, plan.sources(held.payload))

    def verify(self, adapter: PackedAdapter, address: Mapping[str, Any]) -> None:
        """Compare the checksum, on one rank, and refuse what is not finite; the error names the tensor."""
        adapter.bytes.bring_in()
        if self._verifies:
            payload: Any = adapter.bytes.payload.numpy()
            if hashlib.sha256(memoryview(payload)).hexdigest() != address["checksum"]:
                raise AdapterError(f"its bytes in {address['path']} are damaged; export the revision again.")
            self.verified_bytes += adapter.bytes.payload.numel()
        for region, values in zip(adapter.plan.regions, adapter.sources, strict=True):
            if not torch.isfinite(values).all():
                raise AdapterError(f"{region.block.module}.lora_{region.block.side} holds NaN or Inf.")
        self.validated_bytes += adapter.plan.bytes

    def _prepare(self, name: str, address: dict[str, Any]) -> None:
        try:
            adapter = self.open(name, address)
            self.verify(adapter, address)
        except (AdapterError, OSError, ValueError, KeyError) as error:
            self._states[name] = f"{name} cannot be loaded: {error}"
            return
        with self._lock:
            self.adapters[name] = adapter
            self._states.pop(name, None)


class PackedWorkerManager(LRUCacheWorkerLoRAManager):
    """vLLM's worker manager over the host tier: registering takes no slot, a step only copies."""

    _manager_cls = SlotManager
    host: HostTier

    def create_lora_manager(self, *args: Any, **kwargs: Any) -> Any:
        model = super().create_lora_manager(*args, **kwargs)
        self.host = HostTier(self.slots.buffers, verifies=is_first_of_machine())
        return model

    @property
    def slots(self) -> SlotManager:
        manager = self._adapter_manager
        assert isinstance(manager, SlotManager)
        return manager

    def add_adapter(self, lora_request: Any) -> bool:
        """Register a prepared adapter under vLLM's id. Raises `AdapterError` when it is not prepared."""
        if lora_request.lora_int_id in self.slots._registered_adapters:
            return False
        adapter = self.host.adapters.get(lora_request.lora_name)
        if adapter is None:
            raise AdapterError(
                f"{lora_request.lora_name} is not in the host tier; ask for it through the gateway."
            )
        return self.slots.add_adapter(Registered(lora_request.lora_int_id, adapter))

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Activate a step's adapters. Rows of one whose bytes are lost run as the base's, and then fail."""
        self._apply_adapters(requests)
        if mapping is not None:
            lost = self.slots.lost
            if not lost.keys().isdisjoint(mapping.prompt_mapping):
                rows = (mapping.index_mapping, mapping.prompt_mapping)
                kept = [tuple(0 if lora_id in lost else lora_id for lora_id in ids) for ids in rows]
                mapping = replace(mapping, index_mapping=kept[0], prompt_mapping=kept[1])
            self.slots.set_adapter_mapping(mapping)

    def _apply_adapters(self, lora_requests: set[Any]) -> None:
        names = {request.lora_int_id: request.lora_name for request in lora_requests if request}
        for request in lora_requests:
            if request and request.lora_int_id not in self.slots.lost:
                self.add_adapter(request)
        # Touch what is active first, so that no adapter of this batch is evicted for another.
        for lora_id in sorted(names, key=lambda lora_id: lora_id not in self.slots._active_adapters):
            if lora_id not in self.slots.lost:
                self._activate(lora_id, names[lora_id])

    def _activate(self, lora_id: int, name: str) -> None:
        try:
            self.slots.activate_adapter(lora_id)
        except OSError as error:
            self.slots.lost[lora_id] = name
            self.host.lose(name, f"{name} cannot be loaded: its bytes were lost ({error.strerror}).")


class LoaderExtension:
    """Mixed into vLLM's worker; what the API server asks of it by `collective_rpc`."""

    model_runner: Any

    def graftwork_marker(self) -> dict[str, Any]:
        """Return proof that our parts run in this worker."""
        manager = getattr(self.model_runner, "lora_manager", None)
        wrappers = (
            manager.slots.punica_wrapper_mapping.values() if isinstance(manager, PackedWorkerManager) else ()
        )
        return {
            "manager": type(manager).__name__,
            "operations": sorted({type(wrapper).__name__ for wrapper in wrappers}),
            "modules": len(manager.slots.buffers) if isinstance(manager, PackedWorkerManager) else 0,
        }

    def graftwork_prepare(self, name: str, address: dict[str, Any]) -> None:
        self.model_runner.lora_manager.host.prepare(name, address)

    def graftwork_poll(self, name: str) -> str:
        return self.model_runner.lora_manager.host.poll(name)

    def graftwork_forget(self, name: str) -> None:
        self.model_runner.lora_manager.host.forget(name)

    def graftwork_loads(self) -> dict[str, Any]:
        """Return what this worker has read and copied since it started; bytes and seconds."""
        manager = self.model_runner.lora_manager
        return {
            "activations": manager.slots.activations,
            "activated_bytes": manager.slots.activated_bytes,
            "activate_seconds": manager.slots.activate_seconds,
            "validated_bytes": manager.host.validated_bytes,
            "verified_bytes": manager.host.verified_bytes,
        }


def is_first_of_machine() -> bool:
    """Say whether this worker is the one of its machine that verifies checksums."""
    from vllm.distributed.parallel_state import get_world_group

    return get_world_group().local_rank == 0
