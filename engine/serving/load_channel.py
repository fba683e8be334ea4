"""What an API server and a worker say to each other of adapters, beside the engine's step loop.

A call into the engine waits for the step that runs; what needs no slot need not. The worker listens on a
socket of its own, with a thread for each server: a line asks for an adapter, a line tells how it fared.
Knows names, addresses and states. Does not know how an adapter is prepared.
"""

import asyncio
import os
import socket
import socketserver
import struct
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

import orjson

from engine.errors import ServiceError

# Of a line: a refusal's sentence, or an address whose layout has a rank of its own for every expert.
LINE_BYTES = 32 << 20
# What is to be told of an adapter: `ready` and nothing, or why not and a sentence.
State = tuple[str, str]
Tell = Callable[[State], None]


class Prepares(Protocol):
    """What a worker does with what it is asked."""

    def prepare(self, name: str, address: dict[str, Any], tell: Tell) -> None:
        """Begin to prepare an adapter, and tell once, from any thread, how that ended."""


class LoadListener:
    """A worker's end: a socket in Linux's abstract names, for processes of the same user."""

    def __init__(self, worker: Prepares):
        # No file: nothing stays behind when the engine is killed.
        self.address = f"graftwork-{uuid.uuid4().hex}"
        server = _Server(f"\0{self.address}", worker)
        threading.Thread(target=server.serve_forever, name="graftwork-loads", daemon=True).start()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, address: str, worker: Prepares):
        self.worker = worker
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Abstract names have no permissions, so the kernel says who it is."""
        credentials = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        return bool(user == os.getuid())


class _Handler(socketserver.StreamRequestHandler):
    """One API server, until it goes."""

    server: _Server
    rbufsize = 1 << 20

    def setup(self) -> None:
        super().setup()
        self._lock = threading.Lock()

    def handle(self) -> None:
        for line in self.rfile:
            number, name, address = orjson.loads(line)
            self.server.worker.prepare(name, address, partial(self._tell, number))

    def _tell(self, number: int, state: State) -> None:
        # A server that has gone needs no answer.
        with self._lock, suppress(OSError, ValueError):
            self.wfile.write(orjson.dumps([number, *state]) + b"\n")


class LoadChannel:
    """An API server's end: one connection to one worker."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[State]] = {}
        self._numbers = count()
        self._fault: ServiceError | None = None
        self._hearing: asyncio.Task[None] | None = None

    @staticmethod
    async def connect(address: str) -> "LoadChannel":
        """Connect to a worker's `LoadListener`. Raises `OSError` when nobody listens."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(f"\0{address}")
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=LINE_BYTES)
        channel = LoadChannel(writer)
        channel._hearing = asyncio.create_task(channel._hear(reader))
        return channel

    async def prepare(self, name: str, address: dict[str, Any]) -> State:
        """Return how a name fared. Raises `ServiceError` when the worker does not answer any more."""
        if self._fault is not None:
            raise self._fault
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(orjson.dumps([number, name, address]) + b"\n")
        return await future

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        reason = "it has gone"
        try:
            while line := await reader.readline():
                number, kind, sentence = orjson.loads(line)
                future = self._waiting.pop(number)
                # Who asked may wait no longer.
                if not future.done():
                    future.set_result((kind, sentence))
        except Exception as error:
            reason = repr(error)
        self._fault = ServiceError(f"The engine does not answer: {reason}. Its log says more.")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._fault)
        self._waiting.clear()
