"""The measurement of a running engine, on a small server that answers as an engine with known times."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine.catalog.catalog import Policy, migrate
from engine.catalog.opening import whole_catalog
from engine.errors import ServiceError
from engine.planning.fleet.fit import COLD_LOAD, LOADS, answers_of
from engine.settings.params import Params
from tests.helpers.command_line import graftwork
from tests.helpers.rows import make_revision

TOKENS, STEP_S, LOAD_S = 4, 0.02, 0.1
POLICIES, BASE = 40, "b" * 64


class TimedEngine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    loaded: ClassVar[set[str]] = set()
    asked: ClassVar[list[dict[str, Any]]] = []
    # Where it is set, the body of each answer, instead of pieces; empty, the connection breaks.
    says: ClassVar[bytes | None] = None

    def do_GET(self) -> None:
        body = json.dumps({"adapters": {f"{name}@0": {} for name in self.loaded}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        if body["model"] not in self.loaded:
            time.sleep(LOAD_S)
            self.loaded.add(body["model"])
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if self.says is not None:
            if self.says:
                self._piece(self.says)
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = not self.says
            return
        # A step begins every `STEP_S`, whoever asks, and has a token for each request that came before.
        begins = math.ceil(time.monotonic() / STEP_S) * STEP_S
        for number in range(body["max_tokens"]):
            time.sleep(max(0.0, begins + (number + 1) * STEP_S - time.monotonic()))
            self._piece(b'data: {"choices": []}\n\n')
        self._piece(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _piece(self, line: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    TimedEngine.loaded.clear()
    TimedEngine.asked.clear()
    # By default five connections may wait, and 24 come at once.
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 64)
    server = ThreadingHTTPServer(("127.0.0.1", 0), TimedEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "params.yaml"
    file.write_text(
        f"state_dir: {tmp_path / 'state'}\nengine: {{port: {server.server_port}, max_num_seqs: 3000}}\n"
    )
    given = Params.model_validate({"state_dir": str(tmp_path / "state")})
    given.paths.root.mkdir()
    migrate(given.paths.catalog_url)
    yield file
    server.shutdown()
    server.server_close()


def publish(folder: Path, count: int) -> None:
    given = Params.model_validate({"state_dir": str(folder / "state")})
    catalog = whole_catalog(given.paths.catalog_url)
    catalog.keys.ensure_local(given.paths.local_key)
    for number in range(count):
        name, digest = f"policy-{number:02}", f"{number:064x}"
        catalog.policies.add(Policy(name, BASE, {}, "test", 0.0))
        catalog.revisions.add_many([make_revision(digest, policy=name, state="exported", expires_at=None)])
        catalog.revisions.set_probe(name, digest, {"accepted": True, "reason": "It reproduces."})
        catalog.routes.update(replace(catalog.routes.get(name), champion=digest), 0)
    catalog.close()


@pytest.mark.long
def test_a_running_engines_times_are_written_for_calibrate(params: Path) -> None:
    publish(params.parent, POLICIES)
    file = params.parent / "engine.json"
    given = ["plan", "engines", "--params", str(params)]
    done = graftwork(*given, "--measure", str(file), "--prompt", "20", "--answer", "4", "--json")
    found = json.loads(file.read_text())
    assert json.loads(done.stdout) == found
    assert (found["prompt"], found["answer"]) == (20, 4)
    # What the settings give the engine, so that the fit and what is simulated later are of it.
    assert (found["rows"], found["budget"]) == (3000, 3000)
    # What a request alone takes for a token, of which noise moves parts between the three. A busy machine
    # sleeps longer.
    alone_s = found["step_s"] + found["adapter_s"] + found["token_s"]
    assert 0.5 * STEP_S < alone_s < 10 * STEP_S
    assert 0.5 * LOAD_S < found["fetch_s"] < 10 * LOAD_S
    assert {len(body["prompt"]) for body in TimedEngine.asked} == {20}
    cold = [body["model"] for body in TimedEngine.asked[: COLD_LOAD.requests]]
    assert len(set(cold)) == COLD_LOAD.requests
    # Those of the last load that begin it are spread over the steps.
    last = [body["max_tokens"] for body in TimedEngine.asked[-LOADS[-1].requests :]]
    assert sorted(last) == sorted(answers_of(LOADS[-1], TOKENS))
    assert set(last) == {1, 2, 3, 4}
    few = ["--policies", "50", "--rate", "5", "--seconds", "10", "--host", "50"]
    assert "(20 tokens in, 4 out)" in graftwork(*given, *few, "--calibrate", str(file)).stdout


def test_a_file_without_a_directory_is_refused_before_anything_is_asked(params: Path) -> None:
    done = graftwork("plan", "engines", "--params", str(params), "--measure", "no/engine.json")
    assert done.returncode == 2
    assert "directory no" in done.stderr
    assert not TimedEngine.asked


def test_without_a_champion_there_is_nothing_to_ask(params: Path) -> None:
    publish(params.parent, 0)
    done = graftwork("plan", "engines", "--params", str(params), "--measure", "engine.json")
    assert done.returncode == 2
    assert "champion" in done.stderr


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (b"", "broke the answer off"),
        (b"data: [DONE]\n\n", "has no token"),
        (b'data: {"error": {"message": "It is out of memory."}}\n\n', "It is out of memory."),
        (b'data: {"choices": []}\n\n', "in one piece"),
    ],
)
def test_an_engine_that_does_not_answer_is_told_and_nothing_written(
    params: Path, says: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(params.parent, 1)
    monkeypatch.setattr(TimedEngine, "says", says)
    file = params.parent / "engine.json"
    done = graftwork("plan", "engines", "--params", str(params), "--measure", str(file))
    assert done.returncode == ServiceError.exit_code
    assert sentence in done.stderr
    assert not file.exists()


def test_an_answer_of_one_token_has_no_time_between_tokens(params: Path) -> None:
    file = params.parent / "one.json"
    file.write_text('{"answer": 1}')
    given = ["--calibrate", str(file), "--measure", str(params.parent / "engine.json")]
    done = graftwork("plan", "engines", "--params", str(params), *given)
    assert done.returncode == 2
    assert "--answer of 2 or more" in done.stderr
    assert not TimedEngine.asked
