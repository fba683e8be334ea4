"""Users of a policy on several engines, from a thread: what each was answered, by which revision and when.

Short requests arrive at their times, whatever became of those before. Listeners have one long stream after
another, so that some are under way whenever a release ends. A watcher asks for one token again and again, so
that it is soon seen who answers its side of the split. Times are epoch seconds: users, engines and controller
on this machine have one clock.
"""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp
import orjson
from _traffic import VOCABULARY, Server

REVISION = "x-graftwork-revision"
GLANCE, SHORT, LONG = 1, 4, 160
# Of a watcher, between an answer and its next request.
WATCH_S = 0.05
# Few prompts, so that every stream can be compared with what its revision says alone.
PROMPTS, PROMPT_TOKENS, USERS = 4, 16, 40
PATIENCE_S = 60.0


@dataclass
class Asked:
    """A request of a user, and the id of its answer; `sent`, `begun` and `ended` are epoch seconds."""

    engine: int
    user: str
    prompt: int
    tokens: int
    sent: float
    begun: float = 0.0
    ended: float = 0.0
    revision: str = ""
    fault: str = ""
    answer: str = ""
    ids: list[int] = field(default_factory=list)


class Users:
    """Users who ask `policy` on every server, for the `with` block: `rate` short requests a second each.

    `listeners` are the names of those with long streams, `watcher` is that of one who asks all the time. From
    `reject` on all rate their answers.
    """

    def __init__(
        self, servers: Sequence[Server], policy: str, rate: float, listeners: Sequence[str], watcher: str
    ):
        chance = random.Random(1)
        self.prompts = [chance.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(PROMPTS)]
        self.asked: list[Asked] = []
        self._servers, self._policy, self._rate = servers, policy, rate
        self._listeners, self._watcher = listeners, watcher
        self._rejected: str | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(2 * PATIENCE_S)

    def reject(self, name: str | None) -> None:
        """Rate answers from now on: 0 for those of the served name, 1 for others. None: rate no more."""
        self._rejected = name

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for engine in range(len(self._servers)):
                tasks.create_task(self._arrive(session, tasks, engine))
                tasks.create_task(self._keep_asking(session, engine, self._watcher, GLANCE, WATCH_S))
                for user in self._listeners:
                    tasks.create_task(self._keep_asking(session, engine, user, LONG))

    async def _arrive(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup, engine: int) -> None:
        chance = random.Random(engine)
        while not self._leaving.is_set():
            await asyncio.sleep(chance.expovariate(self._rate))
            one = Asked(engine, f"u{chance.randrange(USERS)}", chance.randrange(PROMPTS), SHORT, time.time())
            tasks.create_task(self._ask(session, one))

    async def _keep_asking(
        self, session: aiohttp.ClientSession, engine: int, user: str, tokens: int, pause_s: float = 0.0
    ) -> None:
        chance = random.Random(f"{engine} {user}")
        while not self._leaving.is_set():
            await self._ask(session, Asked(engine, user, chance.randrange(PROMPTS), tokens, time.time()))
            await asyncio.sleep(pause_s)

    async def _ask(self, session: aiohttp.ClientSession, one: Asked) -> None:
        self.asked.append(one)
        server = self._servers[one.engine]
        headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json"}
        body = request(self._policy, self.prompts[one.prompt], one.tokens) | {"user": one.user}
        try:
            async with session.post(
                f"{server.url}/v1/completions", data=orjson.dumps(body), headers=headers
            ) as response:
                one.revision = response.headers.get(REVISION, "")
                if response.status != 200:
                    one.fault = f"{response.status}: {(await response.text())[:200]}"
                    return
                await self._read(response, one)
            if (rejected := self._rejected) is not None and not one.fault:
                rated = {"request_id": one.answer, "reward": float(one.revision != rejected)}
                feedback = f"{server.url}/v1/feedback"
                async with session.post(feedback, data=orjson.dumps(rated), headers=headers) as response:
                    response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            one.fault = f"{type(error).__name__}: {error}"
        finally:
            one.ended = time.time()

    async def _read(self, response: aiohttp.ClientResponse, one: Asked) -> None:
        """Take the stream's tokens and the answer's id."""
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            one.begun = one.begun or time.time()
            event = orjson.loads(line[6:])
            # vLLM tells of a failure in the stream, behind its 200.
            if "error" in event:
                one.fault = str(event["error"])[:200]
                break
            one.answer = event["id"]
            for choice in event["choices"]:
                one.ids += choice["token_ids"] or []
        if not one.fault and len(one.ids) != one.tokens:
            one.fault = f"It has {len(one.ids)} of {one.tokens} tokens."


def request(model: str, prompt: Sequence[int], tokens: int, stream: bool = True) -> dict[str, object]:
    """Return the body of a request for greedy tokens."""
    return {
        "model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": stream, "return_token_ids": True,
    }  # fmt: skip
