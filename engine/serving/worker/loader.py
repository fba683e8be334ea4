"""vLLM's LoRA managers over our host tier: adapters are prepared on a thread and copied inside the step.

The host tier's `prepare` maps, verifies and validates a packed adapter without taking a slot. Activation,
the only work inside vLLM's step loop, copies its blocks into a slot after checking that its pages can be
read. If they cannot (a failed disk, a truncated segment, a file removed on NFS), the slot stays clear, only
the running requests of that adapter fail (failed_adapters.py), and the next request reloads it. Every
change of the slots is reported to the gateway. Written for vLLM 0.26 to 0.32.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from engine.errors import AdapterError
from engine.serving.worker.host_tier_bytes import HostTierBytes, PackedAdapter
from engine.serving.worker.load_channel import LoadListener, SlotReport
from engine.serving.worker.slot_copy import SlotCopyPlan
from engine.serving.worker.slots import ModuleSlots, slots_of

# Threads that copy large adapters into slots: one alone does not saturate the memory bandwidth.
COPY_THREADS = 2
log = logging.getLogger("graftwork.loader")


@dataclass
class RegisteredAdapter:
    """An entry of vLLM's adapter table; `adapter` is None for a warm-up dummy."""

    id: int
    adapter: PackedAdapter | None


class SlotManager(LRUCacheLoRAModelManager):
    """vLLM's adapter manager over our slot buffers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.buffers: dict[str, ModuleSlots] = {}
        for name, module in self.modules.items():
            self.buffers |= slots_of(name, module)
        # The plan of each slot's last occupant, also after it left: what may need clearing.
        self._written: list[SlotCopyPlan | None] = [None] * self.lora_slots
        # Adapters whose bytes were lost: id to name.
        self.failed: dict[int, str] = {}
        self._copiers = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="graftwork-slot-copy")
        self._lock = Lock()
        self.activations = self.evictions = 0
        self.activated_bytes = 0
        self.activate_seconds = 0.0

    def create_dummy_lora(self, lora_id: int, rank: int, embedding_modules: Any = None) -> LoRAModel:
        """Return an adapter without factors for vLLM's warm-up, which only needs a slot."""
        return LoRAModel(lora_id, rank, {})

    def add_adapter(self, adapter: Any) -> bool:
        """Register an adapter without activating it; return False if its id is known."""
        known = adapter.id in self._registered_adapters
        if not known:
            registered: Any = RegisteredAdapter(adapter.id, getattr(adapter, "adapter", None))
            self._registered_adapters[adapter.id] = registered
        return not known

    def activate_adapter(self, lora_id: int) -> bool:
        """Copy a registered adapter into a slot, with LRU eviction; return False if it was in one.

        Raises `OSError` when its bytes are lost; it then has no slot.
        """
        if lora_id in self._active_adapters:
            self._active_adapters.touch(lora_id)
            return False
        if lost := self.activate_all([lora_id]):
            raise lost[lora_id]
        return True

    def activate_all(self, ids: Sequence[int]) -> dict[int, OSError]:
        """Copy registered adapters without a slot into slots, with LRU eviction.

        Returns the error of each adapter whose bytes are lost, by id; those have no slot.
        """
        started = time.perf_counter()
        # Evict first, so that every rank evicts the same adapters even when bytes are lost on one rank.
        for _ in range(len(self._active_adapters) + len(ids) - self.lora_slots):
            self._active_adapters.remove_oldest()
            self.evictions += 1
        slots, slot = [], -1
        for _ in ids:
            slot = self.lora_index_to_id.index(None, slot + 1)
            slots.append(slot)
        registered: list[Any] = [self._registered_adapters[lora_id] for lora_id in ids]
        lost = {}
        faults = self._copy_all(slots, [one.adapter for one in registered])
        for lora_id, slot, fault in zip(ids, slots, faults, strict=True):
            if fault is not None:
                lost[lora_id] = fault
                continue
            # Last, so that no step sees a half-filled slot under this id.
            self.lora_index_to_id[slot] = lora_id
            self._active_adapters[lora_id] = None
        self.activate_seconds = time.perf_counter() - started
        return lost

    def _copy_all(
        self, slots: Sequence[int], adapters: Sequence[PackedAdapter | None]
    ) -> Iterable[OSError | None]:
        """Fill distinct slots; return the error for each, or None.

        Every row of the step waits for this, so several large adapters are read by parallel threads.
        """
        if len(slots) > 1 and all(one is not None and one.is_read_at_length for one in adapters):
            return self._copiers.map(self._copy_to_slot, slots, adapters)
        return map(self._copy_to_slot, slots, adapters)

    def _copy_to_slot(self, slot: int, adapter: PackedAdapter | None) -> OSError | None:
        before = self._written[slot]
        if adapter is None:
            if before is not None:
                before.clear(slot)
                self._written[slot] = None
            return None
        try:
            adapter.bring_in()
            # If the copy fails, the slot is clear.
            self._written[slot] = None
            adapter.copy_to_slot(slot, before)
        except OSError as error:
            return error
        self._written[slot] = adapter.plan
        with self._lock:
            self.activations += 1
            self.activated_bytes += adapter.plan.bytes
        return None


class PackedWorkerManager(LRUCacheWorkerLoRAManager):
    """vLLM's worker manager over the host tier: registering takes no slot, the step only copies."""

    _manager_cls = SlotManager
    host: HostTierBytes

    def create_lora_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model's layers as stock does, and create the host tier for their slots."""
        model = super().create_lora_manager(*args, **kwargs)
        self.host = HostTierBytes(self.slots.buffers, verifies=is_first_of_machine())
        return model

    @cached_property
    def listener(self) -> LoadListener:
        """The socket on which this worker is asked to prepare adapters; opened at first use."""
        return LoadListener(self.host)

    def report(self) -> None:
        """Send the state of the slots to the gateway."""
        slots = self.slots
        in_slots, lost = tuple(slots._active_adapters), tuple(slots.failed)
        self.listener.report(SlotReport(in_slots, lost, slots.activations, slots.evictions))

    @property
    def slots(self) -> SlotManager:
        """The manager of this worker's slots."""
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
                f"{lora_request.lora_name} is not in the host tier. Send the request through the gateway."
            )
        return self.slots.add_adapter(RegisteredAdapter(lora_request.lora_int_id, adapter))

    def forget(self, name: str, lora_id: int | None) -> bool:
        """Forget an adapter that no request uses; return whether its bytes were lost."""
        self.host.forget(name)
        if lora_id is None:
            return False
        self.slots.remove_adapter(lora_id)
        return self.slots.failed.pop(lora_id, None) is not None

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Activate a step's adapters. Rows of an adapter with lost bytes run on the base and then fail."""
        self._apply_adapters(requests)
        if mapping is not None:
            lost = self.slots.failed
            if not lost.keys().isdisjoint(mapping.prompt_mapping):
                rows = (mapping.index_mapping, mapping.prompt_mapping)
                kept = [tuple(0 if lora_id in lost else lora_id for lora_id in ids) for ids in rows]
                mapping = replace(mapping, index_mapping=kept[0], prompt_mapping=kept[1])
            self.slots.set_adapter_mapping(mapping)

    def _apply_adapters(self, lora_requests: set[Any]) -> None:
        known = len(self.slots.failed)
        names = {request.lora_int_id: request.lora_name for request in lora_requests if request}
        for request in lora_requests:
            if request and request.lora_int_id not in self.slots.failed:
                self._register(request.lora_int_id, request.lora_name)
        # Sorted by id, so that all ranks activate in the same order; a set's order differs by process.
        ids = sorted(lora_id for lora_id in names if lora_id not in self.slots.failed)
        cold = []
        for lora_id in ids:
            if lora_id in self.slots._active_adapters:
                # Touched first, so that no adapter of this batch is evicted for another one of it.
                self.slots.activate_adapter(lora_id)
            else:
                cold.append(lora_id)
        faults = self.slots.activate_all(cold) if cold else {}
        for lora_id in cold:
            # A loss on one rank counts on every rank.
            fault = faults.get(lora_id)
            if is_lost_on_any_rank(fault is not None):
                self.slots.deactivate_adapter(lora_id)
                reason = (fault.strerror or str(fault)) if fault else "on another rank"
                self._lose(lora_id, names[lora_id], reason)
        if cold or len(self.slots.failed) > known:
            self.report()

    def _register(self, lora_id: int, name: str) -> None:
        """Register an adapter of the host tier; one that is missing there counts as lost."""
        if lora_id in self.slots._registered_adapters:
            return
        adapter = self.host.adapters.get(name)
        if adapter is not None:
            self.slots.add_adapter(RegisteredAdapter(lora_id, adapter))
            return
        # Forgotten while in use, which the gateway never does; an error here would end the engine.
        self._lose(lora_id, name, "it was removed from the host tier during a request")

    def _lose(self, lora_id: int, name: str, reason: str) -> None:
        """Fail requests of this id until it is forgotten; the name may then return under another id."""
        log.warning("The bytes of %s were lost: %s. The next request for it reloads it.", name, reason)
        self.slots.failed[lora_id] = name
        self.host.forget(name)


class LoaderExtension:
    """Mixed into vLLM's worker; the API server calls these methods by `collective_rpc`."""

    model_runner: Any

    def graftwork_marker(self) -> dict[str, Any]:
        """Return the classes that this worker runs, and how many modules have our slots."""
        manager = getattr(self.model_runner, "lora_manager", None)
        wrappers = (
            manager.slots.punica_wrapper_mapping.values() if isinstance(manager, PackedWorkerManager) else ()
        )
        return {
            "manager": type(manager).__name__,
            "operations": sorted({type(wrapper).__name__ for wrapper in wrappers}),
            "modules": len(manager.slots.buffers) if isinstance(manager, PackedWorkerManager) else 0,
        }

    def graftwork_listen(self) -> tuple[str, str]:
        """Return address and token of this worker's `LoadListener`."""
        listener = self.model_runner.lora_manager.listener
        return listener.address, listener.token

    def graftwork_forget(self, leaving: dict[str, int | None]) -> list[str]:
        """Forget adapters (name: id) between two steps; return the names whose bytes were lost."""
        manager = self.model_runner.lora_manager
        return [name for name, lora_id in leaving.items() if manager.forget(name, lora_id)]

    def graftwork_loads(self) -> dict[str, Any]:
        """Return counts and bytes since the start, and the duration of the last activation in seconds."""
        manager = self.model_runner.lora_manager
        return {
            "activations": manager.slots.activations,
            "slot_evictions": manager.slots.evictions,
            "activated_bytes": manager.slots.activated_bytes,
            "activate_seconds": manager.slots.activate_seconds,
            "validated_bytes": manager.host.validated_bytes,
            "verified_bytes": manager.host.verified_bytes,
        }


def is_lost_on_any_rank(lost: bool) -> bool:
    """Return whether any tensor-parallel rank `lost` an adapter's bytes; a collective call of all ranks.

    vLLM returns one rank's output: an unnoticed loss on another would mix adapter and base in the answer.
    """
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return lost
    flag = torch.tensor([int(lost)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag)


def is_first_of_machine() -> bool:
    """Return whether this worker is the one of its machine that verifies checksums."""
    from vllm.distributed.parallel_state import get_world_group

    return get_world_group().local_rank == 0
