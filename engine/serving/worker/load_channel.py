"""The load channel: messages about adapters between API server and worker, outside the engine's step loop.

A call into the engine waits for the running step; work that needs no slot should not. The worker listens on
a Unix socket, with a thread for each server. Messages are JSON lines: a server asks for an adapter, the
worker answers with the outcome, and after a step that changed the slots it sends a report of them.
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

# Longest line: an address can hold a layout with its own rank for every expert.
LINE_BYTES = 32 << 20
# Send timeout in seconds, for a server that does not read.
SEND_S = 10
# A load's outcome: (`ready`, ""), or the kind of refusal and a message.
LoadOutcome = tuple[str, str]
Tell = Callable[[LoadOutcome], None]


class Prepares(Protocol):
    """What the listener needs of a worker."""

    def prepare(self, name: str, address: dict[str, Any], tell: Tell) -> None:
        """Start to prepare an adapter; call `tell` once, from any thread, with the outcome."""


@dataclass(frozen=True)
class SlotReport:
    """A worker's slots after a step: ids in a slot, ids whose bytes are lost, and counts since its start.

    A report holds the whole state, so a lost one is made good by the next.
    """

    in_slots: tuple[int, ...]
    lost: tuple[int, ...]
    activations: int
    slot_evictions: int


class LoadListener:
    """The worker's end: an abstract Unix socket for processes of the same user that send `token`."""

    def __init__(self, worker: Prepares):
        # An abstract socket has no file that a killed engine could leave behind.
        self.address, self.token = f"graftwork-{uuid.uuid4().hex}", secrets.token_hex()
        self._server = _Server(f"\0{self.address}", self.token, worker)
        for work, name in ((self._server.serve_forever, "loads"), (self._send_reports, "reports")):
            threading.Thread(target=work, name=f"graftwork-{name}", daemon=True).start()

    def report(self, report: SlotReport) -> None:
        """Have another thread send the newest report to every server; older unsent ones are skipped."""
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
        # The newest report as a message, and whether it is still to be sent.
        self.newest: list[Any] = []
        self.has_news = threading.Event()
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept peers of the same user only: abstract sockets have no file permissions."""
        credentials = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        return bool(user == os.getuid())


class _Handler(socketserver.StreamRequestHandler):
    """The connection of one API server."""

    server: _Server
    rbufsize = 1 << 20

    def setup(self) -> None:
        super().setup()
        self._lock = threading.Lock()
        # A server that does not read must not block the preparing threads; reads have no timeout.
        limit = struct.pack("ll", SEND_S, 0)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def handle(self) -> None:
        if not secrets.compare_digest(self.rfile.readline().strip(), self.server.token.encode()):
            return
        self.server.handlers.add(self)
        if self.server.newest:
            # A new connection gets the last report; receiving it twice is harmless.
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
                # Part of a line may have been sent, so end the connection.
                with suppress(OSError):
                    self.request.shutdown(socket.SHUT_RDWR)


class LoadChannel:
    """The API server's end: a connection to one worker."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._waiting: dict[int, tuple[str, asyncio.Future[LoadOutcome]]] = {}
        self._on_report: Callable[[SlotReport], None] = lambda report: None
        self._numbers = count()
        # Why the connection is broken, or None.
        self._fault: str | None = None
        self._hearing: asyncio.Task[None] | None = None

    @staticmethod
    async def connect(address: str, token: str) -> "LoadChannel":
        """Connect to a worker's `LoadListener`. Raises `OSError` when nothing listens there."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(f"\0{address}")
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=LINE_BYTES)
        writer.write(token.encode() + b"\n")
        channel = LoadChannel(writer)
        channel._hearing = asyncio.create_task(channel._hear(reader))
        return channel

    async def prepare(self, name: str, address: dict[str, Any]) -> LoadOutcome:
        """Have the worker prepare an adapter; return the outcome. Raises `ServiceError` if it is gone."""
        if self._fault is not None:
            raise ServiceError(self._fault)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = name, future
        self._writer.write(orjson.dumps([number, name, address]) + b"\n")
        return await future

    def watch(self, on_report: Callable[[SlotReport], None]) -> None:
        """Call `on_report` for each of the worker's reports from now on."""
        self._on_report = on_report

    @property
    def unanswered(self) -> set[str]:
        """The names without an outcome so far, including those whose caller has left."""
        return {name for name, _ in self._waiting.values()}

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        reason = "its process has ended"
        try:
            while line := await reader.readline():
                number, told = orjson.loads(line)
                if number is None:
                    # Called from the loop, so that an error in the callback does not end the channel.
                    asyncio.get_running_loop().call_soon(self._on_report, SlotReport(**told))
                    continue
                _, future = self._waiting.pop(number)
                # The caller may have left.
                if not future.done():
                    future.set_result(tuple(told))
        except (OSError, ValueError, LookupError, TypeError) as error:
            # A broken connection, or a malformed line.
            reason = repr(error)
        self._fault = f"The engine does not answer: {reason}. See its log."
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(ServiceError(self._fault))
        self._waiting.clear()
