"""vLLM's client and its server's table of adapters, as far as our engine talks to them; no engine behind."""

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace

from vllm.utils.counter import AtomicCounter

from engine.serving.worker.host_tier_bytes import READY
from engine.serving.worker.load_channel import LoadListener


class FakeWorker:
    """Prepares an adapter within `seconds`, which it notes, and listens as a real worker does."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.asked: list[tuple[str, dict]] = []
        self.held: set[str] = set()
        self.refusals: dict[str, tuple[str, str]] = {}
        self.listener = LoadListener(self)

    def prepare(self, name, address, tell):
        self.asked.append((name, address))
        threading.Timer(self.seconds, self.end, (name, tell)).start()

    def end(self, name, tell):
        if name not in self.refusals:
            self.held.add(name)
        tell(self.refusals.get(name, READY))


class FakeClient:
    """An engine whose calls take `step_s`, as a step would."""

    def __init__(self, workers: int = 1, step_s: float = 0.0, prepare_s: float = 0.0):
        self.step_s = step_s
        # Each one is slower than the one before.
        self.workers = [FakeWorker(prepare_s * (rank + 1)) for rank in range(workers)]
        self.calls: list[tuple] = []
        self.ids_forgotten: list[int | None] = []
        self.output_processor = SimpleNamespace(request_states={})

    async def collective_rpc(self, method, timeout, args):
        if method == "graftwork_listen":
            return [(worker.listener.address, worker.listener.token) for worker in self.workers]
        self.calls.append((method, *args))
        await asyncio.sleep(self.step_s)
        assert method == "graftwork_forget"
        (leaving,) = args
        self.ids_forgotten += leaving.values()
        for worker in self.workers:
            worker.held -= leaving.keys()
        return [[] for _ in self.workers]

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
