"""The live engine as residency sees it: vLLM's client, its server's table of adapters, and our worker.

Every call into the engine waits for the step that runs and takes time from the next one, so all loads under
way share one: it says what to prepare, what to forget, and asks how the others fare. Knows vLLM 0.32.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from engine.errors import AdapterError, ServiceError
from engine.serving.host_tier import LOADING, READY, REFUSED

RPC_TIMEOUT_S = 60.0
POLL_S = 0.001
POLL_MAX_S = 0.05
# For requests of an adapter that leaves to be out of the engine: an abort takes a step.
ABORT_S = 30.0


class VllmEngine:
    """The two calls of `residency.Engine` on vLLM's client, and what the workers say of themselves."""

    def __init__(self, client: Any, models: OpenAIServingModels):
        self._client = client
        self._models = models
        # vLLM then never takes a name for an adapter that we did not tell it of, and keeps no lock for it.
        models.lora_resolvers = []
        self._asked: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._exchanging: asyncio.Task[None] | None = None

    async def marker(self) -> list[dict[str, Any]]:
        return await self._call("graftwork_marker")

    async def loads(self) -> list[dict[str, Any]]:
        """Return what each worker has read and copied."""
        return await self._call("graftwork_loads")

    async def slots(self) -> list[str]:
        """Return the names in a slot of the first worker; all of them hold the same."""
        return list((await self._call("graftwork_slots"))[0])

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        """Return when every worker has the adapter and the server takes requests for it.

        Raises the `AdapterError` of a worker that refuses it.
        """
        if (left := self._leaving.pop(name, None)) is not None and not left.done():
            # It has not left yet, and need not.
            left.set_result(None)
        self._asked[name] = address
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self._exchange_soon()
        try:
            await self._waiting[name]
        finally:
            self._asked.pop(name, None)
            self._waiting.pop(name, None)
        # As vLLM's server does for a resolver, without its call into the engine: our worker registers what a
        # step asks for. The path is constant for each name: the prefix cache is keyed by both.
        if name not in self._models.lora_requests:
            self._models.lora_requests[name] = LoRARequest(
                lora_name=name,
                lora_int_id=self._models.lora_id_counter.inc(1),
                lora_path=f"graftwork:{name}",
            )

    async def forget(self, name: str) -> None:
        """Drop every trace of a name, in the server too, which would keep it for ever.

        Waits until the engine has no request of it: a step that still computed with it would find the base,
        and leave the base's keys and values in the prefix cache under this name.
        """
        if name not in self._leaving:
            self._leaving[name] = asyncio.get_running_loop().create_future()
        self._exchange_soon()
        async with asyncio.timeout(ABORT_S):
            await asyncio.shield(self._leaving[name])

    def _exchange_soon(self) -> None:
        if self._exchanging is None:
            self._exchanging = asyncio.create_task(self._exchange())

    async def _exchange(self) -> None:
        """Go on while there is something to say or to hear."""
        pause = POLL_S
        try:
            # Whoever asks in the same turn of the loop shares the first call.
            await asyncio.sleep(0)
            while self._asked or self._waiting or self._leaving:
                pause = POLL_S if await self._turn() else min(pause * 1.5, POLL_MAX_S)
                await asyncio.sleep(pause)
        finally:
            self._exchanging = None

    async def _turn(self) -> bool:
        """Make one call; return whether anything changed."""
        asked, self._asked = self._asked, {}
        waiting = dict(self._waiting)
        leaving = {name: self._leaving[name] for name in self._unused(self._leaving)}
        ids = {name: self._drop(name) for name in leaving}
        if not (asked or waiting or leaving):
            return False
        try:
            told = await self._call("graftwork_exchange", asked, list(waiting), ids)
        except Exception as error:
            fault = ServiceError(f"The engine does not answer: {error!r}. Its log says more.")
            for future in (*waiting.values(), *leaving.values()):
                if not future.done():
                    future.set_exception(fault)
            for name in leaving:
                self._leaving.pop(name, None)
            return True
        for name, future in leaving.items():
            if self._leaving.get(name) is future:
                del self._leaving[name]
            if not future.done():
                future.set_result(None)
        ended = [
            name for name, future in waiting.items() if _settle(future, [states[name] for states in told])
        ]
        return bool(asked or leaving or ended)

    def _unused(self, names: Mapping[str, Any]) -> list[str]:
        """Return those of the names that no request in the engine is for."""
        if not names:
            return []
        used = {state.lora_name for state in self._client.output_processor.request_states.values()}
        return [name for name in names if name not in used]

    def _drop(self, name: str) -> int | None:
        """Take a name from the server's tables; return the id that the workers know it by."""
        request = self._models.lora_requests.pop(name, None)
        return None if request is None else request.lora_int_id

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._client.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)  # type: ignore[no-any-return]


def _settle(future: "asyncio.Future[None]", states: list[Any]) -> bool:
    """Tell who waits how its load ended on all workers; a refusal by any of them counts for all."""
    if future.done():
        return True
    kinds = [tuple(state) for state in states]
    refusal = next((state for state in kinds if state not in (READY, LOADING)), None)
    if refusal is not None:
        kind, sentence = refusal
        future.set_exception(REFUSED.get(kind, AdapterError)(sentence or "The engine has forgotten it."))
    elif all(state == READY for state in kinds):
        future.set_result(None)
    else:
        return False
    return True
