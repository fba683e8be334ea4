"""What the gateway's own code computes for a request, in a loop without a server and without an engine.

python tests/bench/_gateway_loop.py [COUNT]      (milliseconds of CPU: a whole answer, a stream of 64 pieces)
"""

import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.gateways import open_world

PIECES = 64
LIMITS = {"tokens_per_day": 1e12, "tokens_per_minute": 1e12, "requests_per_minute": 1e9, "concurrency": 1e6}


class Answering:
    """A server that costs nothing: it has its answers ready."""

    def __init__(self) -> None:
        def said(**fields: Any) -> bytes:
            return json.dumps({"id": "cmpl-1", **fields}, separators=(",", ":")).encode()

        usage = {"prompt_tokens": 8, "total_tokens": 8 + PIECES, "completion_tokens": PIECES}
        word = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
        words = [*[word] * (PIECES - 1), word | {"finish_reason": "length"}]
        streamed = [b"data: %s\n\n" % said(choices=[word]) for word in words]
        streamed += [b"data: %s\n\n" % said(choices=[], usage=usage), b"data: [DONE]\n\n", b""]
        self.streamed = [
            {"type": "http.response.body", "body": piece, "more_body": bool(piece)} for piece in streamed
        ]
        text = {"index": 0, "text": " word" * PIECES, "logprobs": None, "finish_reason": "length"}
        self.whole = [{"type": "http.response.body", "body": said(choices=[text], usage=usage)}]

    def used(self, request_id: str) -> None:
        return

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in self.streamed if b'"stream":true' in message["body"] else self.whole:
            await send(dict(piece))


async def cpu_ms(app: Any, key: str, is_stream: bool, count: int) -> float:
    """Return the CPU milliseconds of a request, one after another."""
    fields = {"model": "tiny", "prompt": [40, 41, 42, 43, 44, 45, 46, 47], "max_tokens": PIECES}
    body = json.dumps(fields | ({"stream": True} if is_stream else {}), separators=(",", ":")).encode()
    headers = [
        (b"host", b"gateway"), (b"authorization", f"Bearer {key}".encode()),
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message

    async def ask() -> None:
        scope = {
            "type": "http", "path": "/v1/completions", "method": "POST", "headers": list(headers),
            "app": SimpleNamespace(state=SimpleNamespace()), "query_string": b"",
        }  # fmt: skip
        await app(scope, receive, send)

    for _ in range(50):
        await ask()
    before = time.process_time()
    for _ in range(count):
        await ask()
    return 1000 * (time.process_time() - before) / count


def measure(count: int) -> dict[str, float]:
    """Return the gateway's CPU milliseconds for a request, without those of the server behind it."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        server = Answering()
        world = open_world(Path(folder), server=server)  # type: ignore[arg-type]
        key = world.catalog.keys.create("tenant", "user", limits=LIMITS)
        # As vLLM does after its start: else a full collection falls into one of the two, or into neither.
        gc.collect()
        gc.freeze()
        for name, is_stream in (("loop_whole_ms", False), ("loop_stream_ms", True)):
            ours, bare = (asyncio.run(cpu_ms(app, key, is_stream, count)) for app in (world.app, server))
            found[name] = ours - bare
        world.close()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)))
