"""vLLM's client and its server's table of adapters, as far as our engine talks to them; no engine behind."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

from vllm.utils.counter import AtomicCounter


class FakeClient:
    """Workers that prepare an adapter within `turns` calls; each call takes `step_s`, as a step would."""

    def __init__(self, workers: int = 1, step_s: float = 0.0, turns: int = 1):
        self.step_s, self.turns = step_s, turns
        self.calls: list[tuple] = []
        self.states: list[dict[str, int]] = [{} for _ in range(workers)]
        self.refusals: dict[str, tuple[str, str]] = {}
        self.ids_forgotten: list[int | None] = []
        self.output_processor = SimpleNamespace(request_states={})

    async def collective_rpc(self, method, timeout, args):
        self.calls.append((method, *args))
        await asyncio.sleep(self.step_s)
        assert method == "graftwork_exchange"
        asked, waiting, leaving = args
        self.ids_forgotten += leaving.values()
        told = []
        for rank, states in enumerate(self.states):
            for name in leaving:
                states.pop(name, None)
            for name in asked:
                # The second worker is slower than the first.
                states.setdefault(name, self.turns + rank)
            told.append({name: self._told(states, name, rank) for name in waiting})
        return told

    def _told(self, states, name, rank):
        if rank == len(self.states) - 1 and name in self.refusals:
            return self.refusals[name]
        if name not in states:
            return ["unknown", ""]
        states[name] -= 1
        return ["ready", ""] if states[name] <= 0 else ["loading", ""]

    def run(self, request, name):
        """Let a request be in the engine until it is popped from here."""
        self.output_processor.request_states[request] = SimpleNamespace(lora_name=name)


def models():
    return SimpleNamespace(
        lora_requests={},
        lora_resolver_lock=defaultdict(asyncio.Lock),
        lora_id_counter=AtomicCounter(0),
        lora_resolvers=["stock"],
    )
