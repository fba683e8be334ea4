"""Users of the scale benchmark, on a thread: what each was answered, by which revision and when.

Times are epoch seconds: all processes here have one clock.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
from _traffic import VOCABULARY

REVISION = "x-graftwork-revision"
PATIENCE_S = 60.0
PROMPTS = [random.Random(number).choices(VOCABULARY, k=16) for number in range(4)]


@dataclass
class Asked:
    """A request and what came of it: `begun` is when its answer began, `id` the answer's.

    `fault` is what its client sees of a failure. `is_short`: it ended well without all tokens,
    which its client does not see.
    """

    url: str
    policy: str
    user: str
    tokens: int
    is_stream: bool
    sent: float
    begun: float = 0.0
    ended: float = 0.0
    status: int = 0
    revision: str = ""
    fault: str = ""
    id: str = ""
    got: int = 0
    has_ended: bool = False

    @property
    def is_whole(self) -> bool:
        return bool(self.ended) and not self.fault and self.got == self.tokens

    @property
    def is_short(self) -> bool:
        return bool(self.ended) and not self.fault and self.got != self.tokens


Rate = Callable[[Asked], float | None]


class Flow:
    """Requests that go on until `stop`; `asked` has all of them."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.is_over = False

    def stop(self) -> None:
        """Ask no more; what is under way goes on."""
        self.is_over = True

    def rest(self, limit_s: float = PATIENCE_S) -> None:
        """Stop, and wait until every request has ended."""
        self.stop()
        deadline = time.monotonic() + limit_s
        while not all(one.ended for one in self.asked):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{sum(not one.ended for one in self.asked)} requests never ended.")
            time.sleep(0.02)


class Crowd:
    """All users of one key, for the `with` block."""

    def __init__(self, key: str):
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.flows: list[Flow] = []
        self.asked: list[Asked] = []

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def stop(self) -> None:
        """Have no flow ask any more."""
        for flow in self.flows:
            flow.stop()

    def rest(self) -> None:
        """Stop every flow, and wait until its requests have ended."""
        for flow in self.flows:
            flow.rest()

    async def _open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    def arrive(
        self,
        url: str,
        policy: str,
        rate: float,
        users: Iterator[str],
        tokens: int = 4,
        rated: Rate | None = None,
    ) -> Flow:
        """Have users come one after another, `rate` a second, each with one request without streaming."""
        flow, chance = Flow(), random.Random(policy)

        async def run() -> None:
            running = set()
            for user in users:
                if flow.is_over:
                    break
                task = asyncio.ensure_future(self._ask(flow, url, policy, user, tokens, False, rated))
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(chance.expovariate(rate))
            await asyncio.gather(*running)

        return self._begin(flow, run())

    def keep_asking(
        self, url: str, policy: str, user: str, tokens: int, is_stream: bool = False, pause_s: float = 0.0
    ) -> Flow:
        """Have one user ask again and again."""
        flow = Flow()

        async def run() -> None:
            while not flow.is_over:
                await self._ask(flow, url, policy, user, tokens, is_stream, None)
                await asyncio.sleep(pause_s)

        return self._begin(flow, run())

    def once(self, url: str, policy: str, user: str, tokens: int, is_stream: bool = False) -> Flow:
        """Have one user ask once."""
        flow = Flow()
        return self._begin(flow, self._ask(flow, url, policy, user, tokens, is_stream, None))

    def _begin(self, flow: Flow, work: Coroutine[Any, Any, None]) -> Flow:
        self.flows.append(flow)
        asyncio.run_coroutine_threadsafe(work, self._loop)
        return flow

    async def _ask(
        self, flow: Flow, url: str, policy: str, user: str, tokens: int, is_stream: bool, rated: Rate | None
    ) -> None:
        one = Asked(url, policy, user, tokens, is_stream, time.time())
        flow.asked.append(one)
        self.asked.append(one)
        prompt = PROMPTS[random.Random(user).randrange(len(PROMPTS))]
        body = {
            "model": policy, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": is_stream, "return_token_ids": True, "user": user,
        }  # fmt: skip
        try:
            async with self._session.post(
                f"{url}/v1/completions", data=orjson.dumps(body), headers=self._headers
            ) as response:
                one.status, one.begun = response.status, time.time()
                one.revision = response.headers.get(REVISION, "")
                if response.status != 200:
                    one.fault = f"{response.status}: {(await response.text())[:200]}"
                elif is_stream:
                    await self._stream(response, one)
                else:
                    answer = orjson.loads(await response.read())
                    one.id = answer["id"]
                    one.got = len(answer["choices"][0]["token_ids"] or [])
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            one.fault = f"{type(error).__name__}: {error}"
        finally:
            one.ended = time.time()
        if rated is not None and one.is_whole and (reward := rated(one)) is not None:
            await self._rate(one, reward, url)

    async def _stream(self, response: aiohttp.ClientResponse, one: Asked) -> None:
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                one.has_ended = True
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                one.fault = str(event["error"])[:200]
                return
            one.id = event["id"]
            one.got += sum(len(choice["token_ids"] or []) for choice in event["choices"])

    async def _rate(self, one: Asked, reward: float, url: str) -> None:
        """Rate an answer; a few attempts, as a client makes them."""
        body = orjson.dumps({"request_id": one.id, "reward": reward})
        for _ in range(5):
            try:
                async with self._session.post(
                    f"{url}/v1/feedback", data=body, headers=self._headers
                ) as response:
                    if response.status == 202:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
