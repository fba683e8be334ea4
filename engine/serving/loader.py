"""Adapters inside the engine's worker: mapped on a thread, copied into a slot inside the step.

`prepare` maps a packed adapter from the store, verifies and validates it, and takes no slot.
`activate` is the only work inside vLLM's step loop: a copy for each block. Because everything that
can fail has failed in `prepare`, a bad adapter fails its own requests and never the engine.

Knows vLLM's LoRA managers (0.26 to 0.32). Does not know names' meaning, routes or the catalog.
"""

import hashlib
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from engine.adapters.packed import Block, Layout, view_block
from engine.adapters.packed_check import check_layout
from engine.adapters.store import ALIGNMENT
from engine.errors import AdapterError
from engine.serving.slots import ExpertSlots, SlotBuffers, StackedSlots

PREPARE_THREADS = 2
# Kimi-K2 with a rank of its own for every expert takes about 10 MB.
LAYOUT_LIMIT = 32 << 20
# By the name of the packed module.
Buffers = dict[str, SlotBuffers | ExpertSlots]


def slots_of(name: str, layer: Any) -> Buffers:
    """Return the slot buffers of one of vLLM's LoRA layers by the name of the packed module."""
    if isinstance(layer, BaseLinearLayerWithLoRA):
        on_gpu = layer.lora_a_stacked[0].is_cuda
        return {name: StackedSlots(name, layer) if on_gpu else SlotBuffers(name, layer)}
    return {f"{name}.gate_up_proj": layer.gate_up, f"{name}.down_proj": layer.down}


@dataclass(frozen=True)
class PackedAdapter:
    """A verified adapter in the host tier; its tensors are views on the mapped store."""

    name: str
    layout: Layout
    payload: Tensor

    def blocks(self) -> dict[str, list[tuple[Block, Tensor]]]:
        by_module: dict[str, list[tuple[Block, Tensor]]] = {}
        for block in self.layout.blocks:
            values = view_block(self.layout, self.payload, block)
            by_module.setdefault(block.module, []).append((block, values))
        return by_module


@dataclass
class Registered:
    """What vLLM's manager keeps for an adapter id; `blocks` is empty for a warm-up dummy."""

    id: int
    name: str
    blocks: dict[str, list[tuple[Block, Tensor]]]


class SlotManager(LRUCacheLoRAModelManager):
    """vLLM's adapter manager over our slot buffers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.buffers: Buffers = {}
        for name, module in self.modules.items():
            self.buffers |= slots_of(name, module)
        self.activate_seconds = 0.0

    def create_dummy_lora(self, lora_id: int, rank: int, embedding_modules: Any = None) -> LoRAModel:
        """Return the warm-up's adapter: it needs a slot and no factors."""
        return LoRAModel(lora_id, rank, {})

    def add_adapter(self, adapter: Any) -> bool:
        known = adapter.id in self._registered_adapters
        if not known:
            blocks = getattr(adapter, "blocks", {})
            registered: Any = Registered(adapter.id, getattr(adapter, "name", ""), blocks)
            self._registered_adapters[adapter.id] = registered
        return not known

    def activate_adapter(self, lora_id: int) -> bool:
        """Copy a registered adapter into a slot; the least recently used occupant leaves."""
        if lora_id in self._active_adapters:
            self._active_adapters.touch(lora_id)
            return False
        started = time.perf_counter()
        if len(self._active_adapters) >= self.lora_slots:
            self._active_adapters.remove_oldest()
        slot = self.lora_index_to_id.index(None)
        adapter: Any = self._registered_adapters[lora_id]
        for name, buffers in self.buffers.items():
            buffers.fill(slot, adapter.blocks.get(name, ()))
        # Last, so that no step ever sees a slot that is half filled under this id.
        self.lora_index_to_id[slot] = lora_id
        self._active_adapters[lora_id] = None
        self.activate_seconds = time.perf_counter() - started
        return True


class HostTier:
    """Adapters that are mapped and verified, by served name. Filled by threads, read by the step."""

    def __init__(self) -> None:
        self.adapters: dict[str, PackedAdapter] = {}
        self._states: dict[str, str] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="graftwork-prepare")

    def prepare(self, name: str, buffers: Buffers, address: dict[str, Any]) -> None:
        with self._lock:
            if name in self.adapters or self._states.get(name) == "loading":
                return
            self._states[name] = "loading"
        self._pool.submit(self._prepare, name, buffers, address)

    def poll(self, name: str) -> str:
        """Return `ready`, `loading`, `unknown`, or the sentence why the adapter was refused."""
        return "ready" if name in self.adapters else self._states.get(name, "unknown")

    def forget(self, name: str) -> None:
        with self._lock:
            self.adapters.pop(name, None)
            self._states.pop(name, None)

    def _prepare(self, name: str, buffers: Buffers, address: dict[str, Any]) -> None:
        try:
            layout = read_layout(address)
            # Before a byte is touched: what fits the base cannot be larger than the base allows.
            fit(layout, buffers)
            adapter = open_adapter(name, address, layout)
            validate(adapter)
        except Exception as error:
            # Whatever it is: a name that stayed `loading` would let its requests wait for nothing.
            self._states[name] = f"{name} cannot be loaded: {error}"
            return
        with self._lock:
            self.adapters[name] = adapter
            self._states.pop(name, None)


def read_layout(address: dict[str, Any]) -> Layout:
    """Return the layout of an address, proven against itself and against the length of its bytes."""
    if len(address["layout"]) > LAYOUT_LIMIT:
        raise AdapterError(
            f"its layout has {len(address['layout'])} characters; the limit is {LAYOUT_LIMIT}."
        )
    layout = Layout.from_json(address["layout"])
    check_layout(layout)
    if address["length"] != layout.nbytes:
        raise AdapterError(f"expected {layout.nbytes} bytes, found {address['length']}.")
    return layout


def fit(layout: Layout, buffers: Buffers) -> None:
    """Refuse a layout that does not fit this engine; the error names the module and the side."""
    for block in layout.blocks:
        if block.module not in buffers:
            raise AdapterError(f"the base has no module {block.module} that can carry LoRA.")
        slots = buffers[block.module]
        reason = slots.unsupported_reason(block, layout.dtype)
        if (block.experts > 0) != isinstance(slots, ExpertSlots):
            reason = f"expected a block {'with' if block.experts == 0 else 'without'} experts"
        if reason is not None:
            raise AdapterError(f"{block.module}.lora_{block.side}: {reason}.")


def open_adapter(name: str, address: dict[str, Any], layout: Layout) -> PackedAdapter:
    """Map a packed adapter and verify its checksum, which also brings its pages in.

    `address` holds `path`, `offset`, `length` (bytes), `checksum` (sha256 hex) and `layout` (JSON).
    """
    path, offset, length = Path(address["path"]), address["offset"], address["length"]
    if path.is_symlink() or not path.is_file():
        raise AdapterError(f"its segment {path} is missing or not a regular file. Restore it.")
    size = path.stat().st_size
    if offset < 0 or offset % ALIGNMENT or size < offset + length:
        raise AdapterError(
            f"its {length} bytes at {offset} are not in {path}, which has {size}. Export the revision again."
        )
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        # Private, so that torch may call the memory writable; nothing ever writes to it.
        mapped = mmap.mmap(file.fileno(), offset + length - start, offset=start, access=mmap.ACCESS_COPY)
    payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start, count=length)
    checksum = hashlib.sha256(memoryview(payload.numpy())).hexdigest()  # type: ignore[arg-type]
    if checksum != address["checksum"]:
        raise AdapterError(f"its bytes in {path} are damaged; export the revision again.")
    return PackedAdapter(name, layout, payload)


def validate(adapter: PackedAdapter) -> None:
    """Refuse values that no step could compute with; the error names the tensor."""
    for name, blocks in adapter.blocks().items():
        for block, values in blocks:
            if not torch.isfinite(values).all():
                raise AdapterError(f"{name}.lora_{block.side} holds NaN or Inf.")


class PackedWorkerManager(LRUCacheWorkerLoRAManager):
    """vLLM's worker manager over the host tier: registering takes no slot, a step only copies."""

    _manager_cls = SlotManager

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.host = HostTier()

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
        return self.slots.add_adapter(Registered(lora_request.lora_int_id, adapter.name, adapter.blocks()))

    def _apply_adapters(self, lora_requests: set[Any]) -> None:
        ids = [request.lora_int_id for request in lora_requests if request]
        for request in lora_requests:
            if request:
                self.add_adapter(request)
        # Touch what is active first, so that no adapter of this batch is evicted for another.
        for lora_id in sorted(ids, key=lambda lora_id: lora_id not in self.slots._active_adapters):
            self.slots.activate_adapter(lora_id)


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
        manager = self.model_runner.lora_manager
        manager.host.prepare(name, manager.slots.buffers, address)

    def graftwork_poll(self, name: str) -> str:
        return self.model_runner.lora_manager.host.poll(name)

    def graftwork_forget(self, name: str) -> None:
        self.model_runner.lora_manager.host.forget(name)
