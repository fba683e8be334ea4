"""The live engine as residency sees it: vLLM's client, its server's table of adapters, and our workers.

Every call into the engine waits for the step that runs and takes time from the next one, so adapters are
prepared by a channel to each worker beside it. Only what leaves goes through the steps, all of it in one
call: a step may take any slot. Knows vLLM 0.32.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from engine.errors import AdapterError, ServiceError
from engine.serving.worker.host_tier import READY, REFUSED
from engine.serving.worker.load_channel import LoadChannel, SlotReport

RPC_TIMEOUT_S = 60.0
# Between two looks at whether the last request of an adapter that leaves is out of the engine: an abort takes
# a step.
POLL_S = 0.001
POLL_MAX_S = 0.05
# Hears the names of adapters in a slot, and those whose bytes were lost, with what the worker has counted.
OnReport = Callable[[Collection[str], Collection[str], SlotReport], None]


class VllmEngine:
    """The two calls of `residency.Engine` on vLLM's client, and what the workers say of themselves."""

    def __init__(self, client: Any, models: OpenAIServingModels, channels: list[LoadChannel]):
        self._client = client
        self._models = models
        # vLLM then never takes a name for an adapter that we did not tell it of, and keeps no lock for it.
        models.lora_resolvers = []
        self._channels = channels
        # By the ids that workers know adapters by.
        self._names: dict[int, str] = {}
        # What the next call is to forget, and who waits for it.
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._forgetting: asyncio.Task[None] | None = None
        self._losses = 0

    @staticmethod
    async def markers(client: Any) -> list[dict[str, Any]]:
        """Return each worker's proof that our parts run in it."""
        return await _call(client, "graftwork_marker")

    @staticmethod
    async def connect(client: Any, models: OpenAIServingModels) -> "VllmEngine":
        """Connect to every worker. Raises `OSError` when one does not listen."""
        listeners = await _call(client, "graftwork_listen")
        return VllmEngine(client, models, [await LoadChannel.connect(*listener) for listener in listeners])

    def watch(self, on_report: OnReport) -> None:
        """Have each of the first worker's reports told; every rank's slots are the same."""

        def tell(report: SlotReport) -> None:
            # A report may be older than the last call that forgot.
            in_slots, lost = (
                [self._names[lora_id] for lora_id in ids if lora_id in self._names]
                for ids in (report.in_slots, report.lost)
            )
            on_report(in_slots, lost, report)

        self._channels[0].watch(tell)

    async def loads(self) -> list[dict[str, Any]]:
        """Return what each worker has read and copied."""
        return await _call(self._client, "graftwork_loads")

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        """Return when every worker has the adapter and the server takes requests for it.

        Not for a name that is being forgotten. Raises the `AdapterError` of a worker that refuses it,
        `ServiceError` where its machine fails.
        """
        states = await asyncio.gather(*(channel.prepare(name, address) for channel in self._channels))
        # A refusal by any worker counts for all.
        for kind, sentence in states:
            if (kind, sentence) != READY:
                raise REFUSED.get(kind, AdapterError)(sentence)
        # As vLLM's server does for a resolver, without its call into the engine: our worker registers what a
        # step asks for. The prefix cache is keyed by name and path, so that a name finds its blocks when it
        # comes back; not those that were computed without its bytes.
        lora_id = self._models.lora_id_counter.inc(1)
        self._names[lora_id] = name
        self._models.lora_requests[name] = LoRARequest(
            lora_name=name, lora_int_id=lora_id, lora_path=f"graftwork:{self._losses}:{name}"
        )

    async def forget(self, name: str) -> None:
        """Drop every trace of a name, in the server too, which would keep it for ever.

        Waits until the engine has no request of it: a step that still computed with it would find the base,
        and leave the base's keys and values in the prefix cache under this name. Raises `ServiceError` when
        the engine does not answer.
        """
        left = self._leaving[name] = asyncio.get_running_loop().create_future()
        if self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_all())
        await left

    async def _forget_all(self) -> None:
        """Go on while there is something to forget."""
        pause = POLL_S
        try:
            # Whoever leaves in the same turn of the loop shares the first call.
            await asyncio.sleep(0)
            while self._leaving:
                pause = POLL_S if await self._forget_unused() else min(pause * 1.5, POLL_MAX_S)
                await asyncio.sleep(pause)
        finally:
            self._forgetting = None

    async def _forget_unused(self) -> bool:
        """Forget, in one call, what no request in the engine is for; return whether there was any."""
        going = {name: self._leaving.pop(name) for name in self._unused(self._leaving)}
        if not going:
            return False
        ids = {name: self._drop(name) for name in going}
        fault = None
        try:
            self._losses += any(await _call(self._client, "graftwork_forget", ids))
        except Exception as error:
            # vLLM's client raises whatever it likes. A worker may have forgotten one whose bytes were lost.
            self._losses += 1
            fault = ServiceError(f"The engine does not answer: {error!r}. Its log says more.")
        for future in going.values():
            if not future.done():
                future.set_exception(fault) if fault else future.set_result(None)
        return True

    def _unused(self, names: Collection[str]) -> list[str]:
        """Return those of the names that no request in the engine is for, and that no worker prepares.

        A worker might hear by its channel of a name that it has just forgotten, and keep it for nobody.
        """
        used = {state.lora_name for state in self._client.output_processor.request_states.values()}
        used = used.union(*(channel.unanswered for channel in self._channels))
        return [name for name in names if name not in used]

    def _drop(self, name: str) -> int | None:
        """Take a name from the server's tables; return the id that the workers know it by."""
        request = self._models.lora_requests.pop(name, None)
        if request is None:
            return None
        del self._names[request.lora_int_id]
        return request.lora_int_id


async def _call(client: Any, method: str, *args: Any) -> list[Any]:
    return await client.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)  # type: ignore[no-any-return]
