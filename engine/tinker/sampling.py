"""Samples of clients. Calls that come together and ask for the same go to the engine in one request.

Recipes ask for each rollout by a call of its own, hundreds at once.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from engine.errors import Busy, ConfigError
from engine.tinker import bodies
from engine.tinker.backend import Backend
from engine.tinker.results import PROTOBUF, Promise, Promises, Result, error_result

# Requests to the engine at once.
REQUESTS = 96
# Samples of a key that wait or run; beyond them its client pauses.
MOST_SAMPLES = 4096
# Requests of a key to the engine at once: one that waits for its limits leaves threads to others.
REQUESTS_OF_KEY = 48
# How long a sample waits for an engine that is full or starts, or for its key's limits; and several together,
# before each half is asked for alone: what fits into a limit one by one may not fit together.
PATIENCE_S, PATIENCE_TOGETHER_S = 600.0, 10.0
# A call waits so long for others that ask for the same; so many prompts, tokens and samples share a request.
TOGETHER_S = 0.01
MOST_PROMPTS, MOST_TOKENS, MOST_DRAWN = 64, 1 << 17, 1 << 14
NOT_SUPPORTED = (
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
    "topk_sample_logprobs",
)


# A call that waits: its promise, and what was asked.
_Call = tuple[Promise, bodies.SampleSent]


class _SampleBatch:
    """Calls of one sampler, key and settings that wait to be sent."""

    def __init__(self, served: str, plaintext: str, timer: asyncio.TimerHandle):
        self.served, self.plaintext, self.timer = served, plaintext, timer
        self.calls: list[_Call] = []
        self.tokens = self.drawn = 0

    def add(self, promise: Promise, body: bodies.SampleSent) -> bool:
        """Add a call; say whether the group is full."""
        self.calls.append((promise, body))
        self.tokens += sum(len(chunk.tokens) for chunk in body.prompt.chunks)
        self.drawn += body.num_samples
        return (
            len(self.calls) >= MOST_PROMPTS
            or self.tokens >= MOST_TOKENS
            or self.drawn + body.num_samples > MOST_DRAWN
        )


@dataclass(eq=False)
class _KeyQueue:
    """How many samples of a key wait or run, and its turns at the engine."""

    waiting: int = 0
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTS_OF_KEY))


class SampleBatcher:
    """Samples over an engine, as promises. Used on the event loop only."""

    def __init__(self, backend: Backend, promises: Promises):
        self.backend, self.promises = backend, promises
        self._threads = ThreadPoolExecutor(REQUESTS, "tinker-sample")
        self._groups: dict[Any, _SampleBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: dict[str, _KeyQueue] = {}
        self._sent = 0

    def close(self) -> None:
        """Drop what waits; a running request ends with its answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_full(self) -> bool:
        """Say whether requests wait for others to end."""
        return self._sent > REQUESTS

    def check(self, plaintext: str, body: bodies.SampleSent) -> None:
        """Raise `ConfigError` for what is not supported, `Busy` when too many samples of the key wait."""
        for name in NOT_SUPPORTED:
            if getattr(body, name):
                raise ConfigError(f"{name} is not supported. Leave it out.")
        queue = self._queues.get(plaintext)
        if (queue.waiting if queue else 0) >= MOST_SAMPLES:
            raise Busy(f"{MOST_SAMPLES} samples wait. Send the request again in a second.")

    def begin(self, promise: Promise, served: str, plaintext: str, body: bodies.SampleSent) -> None:
        """Sample for a promise."""
        self._queues.setdefault(plaintext, _KeyQueue()).waiting += 1
        kind = (served, plaintext, _settings(body))
        group = self._groups.get(kind)
        if group is None:
            timer = asyncio.get_running_loop().call_later(TOGETHER_S, self._send, kind)
            group = self._groups[kind] = _SampleBatch(served, plaintext, timer)
        if group.add(promise, body):
            group.timer.cancel()
            self._send(kind)

    def _send(self, kind: Any) -> None:
        group = self._groups.pop(kind)
        task = asyncio.create_task(self._sample(group.served, group.plaintext, group.calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sample(self, served: str, plaintext: str, calls: list[_Call]) -> None:
        queue = self._queues[plaintext]
        requests = [body for _, body in calls]
        patience_s = PATIENCE_S if len(calls) == 1 else PATIENCE_TOGETHER_S

        def work() -> list[bytes]:
            return self.backend.sample(served, plaintext, requests, patience_s)

        async with queue.turns:
            self._sent += 1
            results = await outcome_of(self._threads, work)
            self._sent -= 1
        if isinstance(results, Result) and len(calls) > 1:
            # Which of them it is about is told to its client alone.
            size = 1 if results.is_users else len(calls) // 2
            parts = [calls[start : start + size] for start in range(0, len(calls), size)]
            await asyncio.gather(*(self._sample(served, plaintext, part) for part in parts))
            return
        for number, (promise, _) in enumerate(calls):
            result = results if isinstance(results, Result) else Result(results[number], PROTOBUF)
            self.promises.keep(promise, result)
        queue.waiting -= len(calls)
        if not queue.waiting:
            self._queues.pop(plaintext, None)


def _settings(body: bodies.SampleSent) -> tuple[Any, ...]:
    """Return what calls must share to be sent together; a seed is one call's own."""
    params = body.sampling_params
    stop = tuple(params.stop) if isinstance(params.stop, list) else params.stop
    own = (body.sampling_session_id, body.seq_id) if params.seed is not None else None
    return (
        own, body.num_samples, params.max_tokens, stop, params.temperature, params.top_k, params.top_p,
        body.prompt_logprobs, body.topk_prompt_logprobs,
    )  # fmt: skip


async def outcome_of(executor: ThreadPoolExecutor, work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a thread, or the `Result` that tells its error."""
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    except Exception as error:
        return error_result(error, "A call failed")
