"""Small HTTP servers that stand for engines behind a load balancer."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fake:
    """An engine's HTTP side: `answers` is what it does with a completion; `ids` are those it was sent."""

    answers: Callable[["Handler"], None]
    is_ready: bool = True
    ids: list[str] = field(default_factory=list)
    url: str = ""
    # Of the newest request.
    body: dict[str, Any] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    """Answers /graftwork/ready as the fake is, and hands over all else."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: Fake
    model = ""

    def do_GET(self) -> None:
        if self.path == "/graftwork/ready":
            return self.say(200 if self.fake.is_ready else 503)
        self.say(200)

    def do_POST(self) -> None:
        self.fake.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.model = str(self.fake.body["model"])
        self.fake.ids.append(self.headers["x-request-id"] or "")
        self.fake.answers(self)

    def say(self, status: int) -> None:
        body = json.dumps({"from": self.fake.url}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def vanish(self) -> None:
        """Reset the connection, as the kernel does for a process that is killed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def cut_stream(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\ndata:\r\n")
        self.wfile.flush()
        self.vanish()

    def finish(self) -> None:
        if not self.wfile.closed:
            super().finish()

    def log_message(self, format: str, *args: object) -> None: ...


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None: ...


def well(handler: Handler) -> None:
    handler.say(200)


@contextmanager
def two_fakes() -> Iterator[list[Fake]]:
    """Serve two fakes on free ports for the block."""
    fakes, servers = [Fake(well), Fake(well)], []
    for fake in fakes:
        server = Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": fake}))
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    yield fakes
    for server in servers:
        server.shutdown()
        server.server_close()
