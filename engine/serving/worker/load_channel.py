"""What an API server and a worker say to each other of adapters, beside the engine's step loop.

A call into the engine waits for the step that runs; what needs no slot need not. The worker listens on a
socket of its own, with a thread for each server: a line asks for an adapter, a line tells how it fared, and
after a step that changed the slots a line says what is in them. Knows names, addresses, ids and states. Does
not know how an adapter is prepared.
"""

import asyncio
import os
import secrets
import socket
import socketserver
import struct
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import orjson

from engine.errors import ServiceError

# Of a line: a refusal's sentence, or an address whose layout has a rank of its own for every expert.
LINE_BYTES = 32 << 20
# For an answer to be taken by the server that asked.
SEND_S = 10
# What is to be told of an adapter: `ready` and nothing, or why not and a sentence.
LoadOutcome = tuple[str, str]
Tell = Callable[[LoadOutcome], None]


class Prepares(Protocol):
    """What a worker does with what it is asked."""

    def prepare(self, name: str, address: dict[str, Any], tell: Tell) -> None:
        """Begin to prepare an adapter, and tell once, from any thread, how that ended."""


@dataclass(frozen=True)
class SlotReport:
    """A worker's slots after a step: ids in a slot, ids whose bytes are lost, and counts since it started.

    It is the whole state, so that one which nobody heard is made good by the next.
    """

    in_slots: tuple[int, ...]
    lost: tuple[int, ...]
    activations: int
    slot_evictions: int


class LoadListener:
    """A worker's end: a socket in Linux's abstract names, for processes of the same user with its `token`."""

    def __init__(self, worker: Prepares):
        # No file: nothing stays behind when the engine is killed.
        self.address, self.token = f"graftwork-{uuid.uuid4().hex}", secrets.token_hex()
        self._server = _Server(f"\0{self.address}", self.token, worker)
        for work, name in ((self._server.serve_forever, "loads"), (self._send_reports, "reports")):
            threading.Thread(target=work, name=f"graftwork-{name}", daemon=True).start()

    def report(self, report: SlotReport) -> None:
        """Have every server told, soon; only the newest report is, where steps are faster than servers."""
        self._server.newest = [None, asdict(report)]
        self._server.has_news.set()

    def _send_reports(self) -> None:
        while self._server.has_news.wait():
            self._server.has_news.clear()
            for handler in list(self._server.handlers):
                handler.send(self._server.newest)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, address: str, token: str, worker: Prepares):
        self.token, self.worker = token, worker
        self.handlers: set[_Handler] = set()
        # The newest report, as it is sent, and whether somebody has not heard it.
        self.newest: list[Any] = []
        self.has_news = threading.Event()
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
        # A server that reads nothing must not hold up those who prepare; reading waits without a limit.
        limit = struct.pack("ll", SEND_S, 0)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def handle(self) -> None:
        if not secrets.compare_digest(self.rfile.readline().strip(), self.server.token.encode()):
            return
        self.server.handlers.add(self)
        if self.server.newest:
            # Who connects hears what was reported before; to hear it twice does no harm.
            self.server.has_news.set()
        try:
            for line in self.rfile:
                number, name, address = orjson.loads(line)
                self.server.worker.prepare(name, address, partial(self._tell, number))
        finally:
            self.server.handlers.discard(self)

    def _tell(self, number: int, state: LoadOutcome) -> None:
        kind, sentence = state
        self.send([number, [kind, sentence.encode(errors="replace").decode()]])

    def send(self, message: object) -> None:
        line = orjson.dumps(message) + b"\n"
        with self._lock:
            try:
                self.wfile.write(line)
            except (OSError, ValueError):
                # Part of a line may be out: who still listens is told that nothing more comes.
                with suppress(OSError):
                    self.request.shutdown(socket.SHUT_RDWR)


class LoadChannel:
    """An API server's end: one connection to one worker."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._waiting: dict[int, tuple[str, asyncio.Future[LoadOutcome]]] = {}
        self._on_report: Callable[[SlotReport], None] = lambda report: None
        self._numbers = count()
        # Why nothing is heard any more.
        self._fault: str | None = None
        self._hearing: asyncio.Task[None] | None = None

    @staticmethod
    async def connect(address: str, token: str) -> "LoadChannel":
        """Connect to a worker's `LoadListener`. Raises `OSError` when nobody listens."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(f"\0{address}")
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=LINE_BYTES)
        writer.write(token.encode() + b"\n")
        channel = LoadChannel(writer)
        channel._hearing = asyncio.create_task(channel._hear(reader))
        return channel

    async def prepare(self, name: str, address: dict[str, Any]) -> LoadOutcome:
        """Return how a name fared. Raises `ServiceError` when the worker does not answer any more."""
        if self._fault is not None:
            raise ServiceError(self._fault)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = name, future
        self._writer.write(orjson.dumps([number, name, address]) + b"\n")
        return await future

    def watch(self, on_report: Callable[[SlotReport], None]) -> None:
        """Have the worker's reports told from now on."""
        self._on_report = on_report

    @property
    def unanswered(self) -> set[str]:
        """Return the names that were asked for and not told of yet, also those that nobody waits for."""
        return {name for name, _ in self._waiting.values()}

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        reason = "it has gone"
        try:
            while line := await reader.readline():
                number, told = orjson.loads(line)
                if number is None:
                    # A fault of whoever hears it is not the channel's.
                    asyncio.get_running_loop().call_soon(self._on_report, SlotReport(**told))
                    continue
                _, future = self._waiting.pop(number)
                # Who asked may wait no longer.
                if not future.done():
                    future.set_result(tuple(told))
        except (OSError, ValueError, LookupError, TypeError) as error:
            # A connection that breaks, or a line that is no message.
            reason = repr(error)
        self._fault = f"The engine does not answer: {reason}. Its log says more."
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(ServiceError(self._fault))
        self._waiting.clear()
