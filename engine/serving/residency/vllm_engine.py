"""Residency's interface to the live engine: vLLM's client, its server's adapter table, and our workers.

A call into the engine waits for the running step and delays the next one, so adapters are prepared over a
separate channel to each worker. Only forgetting goes through the engine, many names in one call, because a
step may use any slot. Written for vLLM 0.32.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.engine.output_processor import RequestState

from engine.errors import AdapterError, ServiceError
from engine.serving.worker.host_tier_bytes import READY, REFUSED
from engine.serving.worker.load_channel import LoadChannel, SlotReport

RPC_TIMEOUT_S = 60.0
# Polling interval, first and longest, for the end of a leaving adapter's last request: an abort takes a step.
POLL_S = 0.001
POLL_MAX_S = 0.05
# Called with the names of adapters in a slot, the names with lost bytes, and the worker's counts.
OnReport = Callable[[Collection[str], Collection[str], SlotReport], None]


class VllmEngine:
    """Implements `loads.Engine` on vLLM's client, and passes on the workers' reports."""

    def __init__(self, client: Any, models: OpenAIServingModels, channels: list[LoadChannel]):
        self._client = client
        self._models = models
        # Without resolvers vLLM accepts only names that we registered, and keeps no lock for others.
        models.lora_resolvers = []
        self._channels = channels
        # Served names by the integer ids that workers use.
        self._names: dict[int, str] = {}
        # Names that the next call forgets, with a future for whoever waits.
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._forgetting: asyncio.Task[None] | None = None
        self._losses = 0
        # What each ended sample of a followed request has spent, by the request's id.
        self._ended: dict[str, list[tuple[str, int, int]]] = {}

    @staticmethod
    async def markers(client: Any) -> list[dict[str, Any]]:
        """Return each worker's marker, which shows that our plugin runs in it."""
        return await _call(client, "graftwork_marker")

    @staticmethod
    async def connect(client: Any, models: OpenAIServingModels) -> "VllmEngine":
        """Connect to every worker. Raises `OSError` when one does not listen."""
        listeners = await _call(client, "graftwork_listen")
        return VllmEngine(client, models, [await LoadChannel.connect(*listener) for listener in listeners])

    def watch(self, on_report: OnReport) -> None:
        """Call `on_report` for each report of the first worker; all ranks have the same slots."""

        def tell(report: SlotReport) -> None:
            # A report may be older than the last `forget`, so ids may be unknown.
            in_slots, lost = (
                [self._names[lora_id] for lora_id in ids if lora_id in self._names]
                for ids in (report.in_slots, report.lost)
            )
            on_report(in_slots, lost, report)

        self._channels[0].watch(tell)

    async def loads(self) -> list[dict[str, Any]]:
        """Return how much each worker has read and copied."""
        return await _call(self._client, "graftwork_loads")

    def used(self, request_id: str) -> tuple[int, int] | None:
        """Return (prompt, completion) tokens that the engine has spent on a request so far.

        `request_id` is part of the id that vLLM gives it, and of each of its prompts and samples. Ended
        samples count within `followed`. None when the engine does not have it (any more), or hands its
        samples over at their end only. Bound: 0.32.0.
        """
        processor = self._client.output_processor
        states = [
            processor.request_states[inner]
            for outer, inners in list(processor.external_req_ids.items())
            if request_id in outer
            for inner in inners
            if inner in processor.request_states
        ]
        if any(state.detokenizer is None for state in states):
            return None
        spent = [*map(_spent, states), *self._ended.get(request_id, [])]
        # The samples of a prompt share it.
        prompts = {prompt: tokens for prompt, tokens, _ in spent}
        return (sum(prompts.values()), sum(tokens for *_, tokens in spent)) if spent else None

    @contextmanager
    def followed(self, request_id: str) -> Iterator[None]:
        """Have `used` count the request's samples that end in the block, too.

        vLLM forgets a sample when it ends. Only requests of several samples need this, so vLLM's method is
        wrapped only while there is one. Bound: 0.32.0.
        """
        processor = self._client.output_processor
        if not self._ended:
            processor._finish_request = partial(self._finish, processor._finish_request)
        self._ended[request_id] = []
        try:
            yield
        finally:
            del self._ended[request_id]
            if not self._ended:
                del processor._finish_request

    def _finish(self, stock: Callable[[RequestState], None], state: RequestState) -> None:
        stock(state)
        for request_id, ended in self._ended.items():
            if request_id in state.external_req_id and state.detokenizer is not None:
                ended.append(_spent(state))

    async def prepare(self, name: str, address: dict[str, Any]) -> None:
        """Return once every worker has the adapter and the server takes requests for it.

        The name must not be one that is being forgotten. Raises the `AdapterError` of a worker that refuses
        the adapter, and `ServiceError` when a worker's machine fails.
        """
        states = await asyncio.gather(*(channel.prepare(name, address) for channel in self._channels))
        # A refusal by any worker counts for all.
        for kind, sentence in states:
            if (kind, sentence) != READY:
                raise REFUSED.get(kind, AdapterError)(sentence)
        # As vLLM does for a resolver, but without a call into the engine: the worker registers adapters in
        # the step. The prefix cache is keyed by name and path: a returning name finds its blocks, but the
        # count of losses in the path hides blocks that were computed without its bytes.
        lora_id = self._models.lora_id_counter.inc(1)
        self._names[lora_id] = name
        self._models.lora_requests[name] = LoRARequest(
            lora_name=name, lora_int_id=lora_id, lora_path=f"graftwork:{self._losses}:{name}"
        )

    async def forget(self, name: str) -> None:
        """Forget a name in workers and server, which would otherwise keep it for ever.

        Waits until the engine has no request for it: a step without the adapter would compute with the base
        and leave the base's keys and values in the prefix cache under this name. Raises `ServiceError` when
        the engine does not answer.
        """
        left = self._leaving[name] = asyncio.get_running_loop().create_future()
        if self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_all())
        await left

    async def _forget_all(self) -> None:
        """Forget names until none is left."""
        pause = POLL_S
        try:
            # Names that leave in the same iteration of the loop share the first call.
            await asyncio.sleep(0)
            while self._leaving:
                pause = POLL_S if await self._forget_unused() else min(pause * 1.5, POLL_MAX_S)
                await asyncio.sleep(pause)
        finally:
            self._forgetting = None

    async def _forget_unused(self) -> bool:
        """Forget, in one call, all leaving names without requests; return whether there were any."""
        going = {name: self._leaving.pop(name) for name in self._unused(self._leaving)}
        if not going:
            return False
        ids = {name: self._forget_here(name) for name in going}
        fault = None
        try:
            self._losses += any(await _call(self._client, "graftwork_forget", ids))
        except Exception as error:
            # vLLM's client raises many types. A worker may have forgotten an adapter with lost bytes.
            self._losses += 1
            fault = ServiceError(f"The engine does not answer: {error!r}. See its log.")
        for future in going.values():
            if not future.done():
                future.set_exception(fault) if fault else future.set_result(None)
        return True

    def _unused(self, names: Collection[str]) -> list[str]:
        """Return the names that no request in the engine uses and no worker is preparing.

        Otherwise a worker could receive a name over its channel just after forgetting it, and keep it.
        """
        used = {state.lora_name for state in self._client.output_processor.request_states.values()}
        used = used.union(*(channel.unanswered for channel in self._channels))
        return [name for name in names if name not in used]

    def _forget_here(self, name: str) -> int | None:
        """Forget a name in the server's tables; return the workers' id of it, or None."""
        request = self._models.lora_requests.pop(name, None)
        if request is None:
            return None
        del self._names[request.lora_int_id]
        return request.lora_int_id


async def _call(client: Any, method: str, *args: Any) -> list[Any]:
    return await client.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)  # type: ignore[no-any-return]


def _spent(state: RequestState) -> tuple[str, int, int]:
    """Return the prompt of a sample, which others may share, its tokens, and those of its completion."""
    assert state.detokenizer is not None
    return state.external_req_id, state.prompt_len, state.detokenizer.num_output_tokens()
