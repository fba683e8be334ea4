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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from engine.adapters.packed import Block, Layout, view_block
from engine.errors import AdapterError

PREPARE_THREADS = 2


class SlotViews(tuple[Tensor, ...]):
    """The views of a module's slots in vLLM's own shapes, with the storage behind them."""

    storage: "SlotBuffers"


class SlotBuffers:
    """Every slot of one engine module: A (slots, slices, R, I), B rank-major (slots, R, O)."""

    def __init__(self, name: str, layer: BaseLinearLayerWithLoRA):
        first = layer.lora_a_stacked[0]
        slots, _, rank, inputs = first.shape
        self.name, self.rank, self.inputs, self.dtype = name, rank, inputs, first.dtype
        self.widths = tuple(b.shape[2] for b in layer.lora_b_stacked)
        self.a_SMRI = first.new_zeros(slots, len(self.widths), rank, inputs)
        self.b_SRO = first.new_zeros(slots, rank, sum(self.widths))
        # The rank that a slot's last occupant used: only that much is ever cleared.
        self.used = [0] * slots
        starts = [sum(self.widths[:i]) for i in range(len(self.widths))]
        layer.lora_a_stacked = self._views(self.a_SMRI[:, i : i + 1] for i in range(len(self.widths)))
        layer.lora_b_stacked = self._views(
            self.b_SRO[:, None, :, start : start + width].transpose(-1, -2)
            for start, width in zip(starts, self.widths, strict=True)
        )

    def _views(self, tensors: Any) -> SlotViews:
        views = SlotViews(tensors)
        views.storage = self
        return views

    def unsupported_reason(self, block: Block, dtype: torch.dtype) -> str | None:
        """Say why a block does not fit this module, or None."""
        end = block.first_slice + block.slices
        widths = self.widths[block.first_slice : end]
        if end > len(self.widths) or block.widths != widths:
            return f"expected outputs {widths}, found {block.widths}"
        if block.side == "A" and block.shape[2] != self.inputs:
            return f"expected {self.inputs} inputs, found {block.shape[2]}"
        if block.rank > self.rank:
            return f"rank {block.rank} is over the engine's maximum of {self.rank}"
        if dtype != self.dtype:
            return f"expected {self.dtype}, found {dtype}"
        return None

    def fill(self, slot: int, blocks: Sequence[tuple[Block, Tensor]]) -> None:
        """Put an adapter's blocks into a slot; what the last occupant left is cleared."""
        rank = max((block.rank for block, _ in blocks), default=0)
        whole = len(blocks) == 2 and blocks[0][0].slices == len(self.widths)
        stale = slice(rank if whole else 0, self.used[slot])
        self.a_SMRI[slot, :, stale].zero_()
        self.b_SRO[slot, stale].zero_()
        for block, values in blocks:
            first, end = block.first_slice, block.first_slice + block.slices
            if block.side == "A":
                self.a_SMRI[slot, first:end, : block.rank].copy_(values)
            else:
                start = sum(self.widths[:first])
                self.b_SRO[slot, : block.rank, start : start + sum(block.widths)].copy_(values)
        self.used[slot] = rank


class StackedSlots(SlotBuffers):
    """vLLM's own tensors of one module, for its Triton operations: they refuse views (`_get_lora_a_ptr`)."""

    def __init__(self, name: str, layer: BaseLinearLayerWithLoRA):
        self.a_stacked, self.b_stacked = layer.lora_a_stacked, layer.lora_b_stacked
        slots, _, rank, inputs = self.a_stacked[0].shape
        self.name, self.rank, self.inputs, self.dtype = name, rank, inputs, self.a_stacked[0].dtype
        self.widths = tuple(b.shape[2] for b in self.b_stacked)
        self.used = [0] * slots

    def fill(self, slot: int, blocks: Sequence[tuple[Block, Tensor]]) -> None:
        """Put an adapter's blocks into a slot, slice by slice; what the last occupant left is cleared."""
        for a_S1RI, b_S1OR in zip(self.a_stacked, self.b_stacked, strict=True):
            a_S1RI[slot, 0, : self.used[slot]].zero_()
            b_S1OR[slot, 0, :, : self.used[slot]].zero_()
        for block, values in blocks:
            whole = values.to(self.a_stacked[0].device)
            parts = whole if block.side == "A" else whole.split(block.widths, dim=1)
            for i, part in enumerate(parts, start=block.first_slice):
                if block.side == "A":
                    self.a_stacked[i][slot, 0, : block.rank].copy_(part)
                else:
                    self.b_stacked[i][slot, 0, :, : block.rank].copy_(part.T)
        self.used[slot] = max((block.rank for block, _ in blocks), default=0)


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
        self.buffers: dict[str, SlotBuffers] = {}
        for name, module in self.modules.items():
            assert isinstance(module, BaseLinearLayerWithLoRA), f"{name}: no slot layout for {type(module)}"
            on_gpu = module.lora_a_stacked[0].is_cuda
            self.buffers[name] = StackedSlots(name, module) if on_gpu else SlotBuffers(name, module)
        self.activate_seconds = 0.0

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

    def prepare(self, name: str, buffers: dict[str, SlotBuffers], address: dict[str, Any]) -> None:
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

    def _prepare(self, name: str, buffers: dict[str, SlotBuffers], address: dict[str, Any]) -> None:
        try:
            adapter = open_adapter(name, address)
            validate(adapter, buffers)
        except (AdapterError, OSError, ValueError, KeyError) as error:
            self._states[name] = f"{name} cannot be loaded: {error}"
            return
        with self._lock:
            self.adapters[name] = adapter
            self._states.pop(name, None)


def open_adapter(name: str, address: dict[str, Any]) -> PackedAdapter:
    """Map a packed adapter and verify its checksum, which also brings its pages in.

    `address` holds `path`, `offset`, `length` (bytes), `checksum` (sha256 hex) and `layout` (JSON).
    """
    offset, length = address["offset"], address["length"]
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with open(address["path"], "rb") as file:
        # Private, so that torch may call the memory writable; nothing ever writes to it.
        mapped = mmap.mmap(file.fileno(), offset + length - start, offset=start, access=mmap.ACCESS_COPY)
    payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start, count=length)
    found = hashlib.sha256(memoryview(payload.numpy())).hexdigest()  # type: ignore[arg-type]
    if found != address["checksum"]:
        raise AdapterError(f"its bytes in {address['path']} are damaged; export the revision again.")
    return PackedAdapter(name, Layout.from_json(address["layout"]), payload)


def validate(adapter: PackedAdapter, buffers: dict[str, SlotBuffers]) -> None:
    """Refuse an adapter that does not fit this engine; the error names the tensor."""
    if adapter.payload.numel() != adapter.layout.nbytes:
        raise AdapterError(f"expected {adapter.layout.nbytes} bytes, found {adapter.payload.numel()}.")
    for name, blocks in adapter.blocks().items():
        if name not in buffers:
            raise AdapterError(f"the base has no module {name} that can carry LoRA.")
        for block, values in blocks:
            where = f"{name}.lora_{block.side}"
            reason = buffers[name].unsupported_reason(block, adapter.layout.dtype)
            if reason is not None:
                raise AdapterError(f"{where}: {reason}.")
            if not torch.isfinite(values).all():
                raise AdapterError(f"{where} holds NaN or Inf.")


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
