"""The load client, a process of its own: plans of requests come in by stdin, what came of them goes out.

Open loop: a request is sent at its time, whatever became of those before it. It honours `Retry-After` of
a 429 and asks again until it has its answer or its deadline. Answers are streamed, so that the time of the
first token is seen. One JSON line a plan and one a result; it ends when its stdin does.
"""

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import aiohttp
import orjson

FILES = 16_384


class Request:
    """One request of a plan, with what came of it; seconds since the plan began."""

    def __init__(
        self, at: float, model: str, prompt: Sequence[int], tokens: int, logprobs: bool, began: float
    ):
        self.at, self.model, self._began = at, model, began
        self.sent = self.first = self.done = 0.0
        self.status, self.refused, self.fault = 0, 0, ""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        body: dict[str, Any] = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        if logprobs:
            # Of the tokens that were chosen, and of no others.
            body["logprobs"] = 0
        self._body = orjson.dumps(body)

    async def run(self, session: aiohttp.ClientSession, gate: Any, deadline_s: float) -> None:
        await asyncio.sleep(self.at - self._now())
        async with gate:
            self.sent = self._now()
            try:
                async with asyncio.timeout(deadline_s):
                    while (pause := await self._try(session)) is not None:
                        await asyncio.sleep(pause)
            except TimeoutError:
                self.status, self.fault = 0, f"no answer within {deadline_s:g} s"
            except (aiohttp.ClientError, ValueError, LookupError) as error:
                self.status, self.fault = 0, f"{type(error).__name__}: {error}"
        self.done = self._now()

    async def _try(self, session: aiohttp.ClientSession) -> float | None:
        """Ask once; return after how many seconds to ask again, or None."""
        async with session.post("/v1/completions", data=self._body) as response:
            self.status = response.status
            if response.status == 429 and "retry-after" in response.headers:
                self.refused += 1
                return float(response.headers["retry-after"])
            if response.status != 200:
                self.fault = (await response.text())[:300]
                return None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(orjson.loads(line[6:]))
        return None

    def _take(self, event: Mapping[str, Any]) -> None:
        # vLLM tells of a failure in the stream, behind its 200.
        if "error" in event:
            self.status, self.fault = 500, str(event["error"])[:300]
            return
        for choice in event["choices"]:
            if choice["token_ids"]:
                self.first = self.first or self._now()
                self.ids += choice["token_ids"]
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]

    def _now(self) -> float:
        return time.monotonic() - self._began

    def result(self) -> list[Any]:
        times = [self.sent, self.first, self.done]
        return [*times, self.status, self.refused, self.ids, self.fault, self.logprobs]


async def run(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a plan; `at_once` bounds how many requests are under way (0: no bound)."""
    headers = {"authorization": f"Bearer {plan['key']}", "content-type": "application/json"}
    gate: Any = asyncio.Semaphore(plan["at_once"]) if plan["at_once"] else nullcontext()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    # A collection in the middle would look like a slow answer.
    gc.collect()
    gc.disable()
    async with aiohttp.ClientSession(
        plan["url"], headers=headers, timeout=timeout, connector=connector
    ) as session:
        cpu, began = time.process_time(), time.monotonic()
        requests = [Request(*ask, began) for ask in plan["asks"]]
        await asyncio.gather(*(one.run(session, gate, plan["deadline_s"]) for one in requests))
        wall, cpu = time.monotonic() - began, time.process_time() - cpu
    gc.enable()
    return {"answers": [one.result() for one in requests], "wall_s": wall, "cpu_s": cpu, "pid": os.getpid()}


def main() -> None:
    import uvloop

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, most), most))
    for line in sys.stdin.buffer:
        answer(orjson.dumps(uvloop.run(run(orjson.loads(line)))) + b"\n")


def answer(line: bytes) -> None:
    """Write a whole line past the buffer of `sys.stdout`, where the end of large ones was seen to stay."""
    left = memoryview(line)
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]


if __name__ == "__main__":
    main()
