"""Events of another machine: each reaches the controller's ledger once, whoever is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import duckdb
import httpx
import pytest

from engine.clients.controller import ControllerClient
from engine.ledger import sender as sending
from engine.ledger.ledger import Ledger
from engine.ledger.sender import MOST_BYTES, MOST_PAUSE_S, SENT, EventSender, open_spool
from engine.ledger.spool import REJECTED, Spool
from engine.security.credentials import credential
from engine.settings.params import Params, load_params
from tests.helpers.live import free_port

# Emits events one after another and prints each id once it is acknowledged.
WRITER = """
import sys
from pathlib import Path
from engine.ledger.sender import open_spool
from engine.settings.params import load_params
spool = open_spool(load_params(Path(sys.argv[1])), "gateway")
for number in range(int(sys.argv[2])):
    print(spool.emit("feedback", request_id=f"r{number}", reward=1.0, key="k"), flush=True)
    if number % 20 == 19:
        spool.rotate()
spool.close()
"""


class OtherMachine:
    """A controller process with a state directory, and another state directory that sends to it."""

    def __init__(self, root: Path):
        self.port = free_port()
        self.state, self.away = root / "state", root / "away"
        self.file, self.away_file = root / "params.yaml", root / "away.yaml"
        at = f"http://127.0.0.1:{self.port}"
        self.file.write_text(f"state_dir: {self.state}\ncontroller: {{port: {self.port}}}\n")
        self.away_file.write_text(f"state_dir: {self.away}\ncontroller: {{at: '{at}'}}\n")
        self.params, self.away_params = load_params(self.file), load_params(self.away_file)
        secret = credential(self.params.paths, "events")
        self.away_params.paths.credentials.mkdir(parents=True)
        (self.away_params.paths.credentials / "events").write_text(secret)
        self.url, self.secret = at, secret
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "engine.controller", "--params", str(self.file)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the controller ended"
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise TimeoutError

    def end(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)
            self.process.wait(60)

    def rows(self) -> list[str]:
        self.end(signal.SIGTERM)
        with duckdb.connect(str(self.params.paths.ledger), read_only=True) as ledger:
            return [row[0] for row in ledger.execute("SELECT id FROM feedback").fetchall()]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[OtherMachine]:
    machines = OtherMachine(tmp_path)
    yield machines
    machines.end(signal.SIGKILL)


def writer(machines: OtherMachine, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(machines.away_file), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.services
def test_events_survive_kills_of_writer_and_controller(machines: OtherMachine) -> None:
    machines.start()
    said: list[str] = []
    for is_controller_killed in (False, True):
        one = writer(machines, 1_000_000)
        assert one.stdout is not None
        said += [one.stdout.readline().strip() for _ in range(150)]
        if is_controller_killed:
            machines.end(signal.SIGKILL)
        one.kill()
        said += [line.strip() for line in one.stdout.readlines() if line.endswith("\n")]
        one.wait()
        if is_controller_killed:
            machines.start()
    last = writer(machines, 3)
    out, _ = last.communicate(timeout=60)
    said += out.split()
    left = [path for path in machines.away_params.paths.spool.iterdir() if path.suffix != ".lock"]
    # A writer that is killed while it makes a file leaves that one, which holds no event yet.
    assert [path for path in left if path.suffix != ".new" or path.stat().st_size] == []
    rows = machines.rows()
    assert len(rows) == len(set(rows))
    assert set(said) <= set(rows)
    # An event may be written and its writer killed before it could say so.
    assert len(set(rows) - set(said)) <= 4


class Recorder:
    """Takes files as a controller does, unless it is down."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bytes]] = []
        self.is_down = False
        self.instead: httpx.Response | None = None
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.began.set()
        assert self.goes_on.wait(60)
        if self.is_down:
            raise httpx.ConnectError("down")
        if self.instead is not None:
            return self.instead
        self.taken.append((request.url.path.rpartition("/")[2], request.read()))
        return httpx.Response(200, json={})


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def sender(tmp_path: Path, recorder: Recorder) -> EventSender:
    client = ControllerClient("http://controller", "secret", patience_s=0)
    client.http = httpx.Client(base_url="http://c", transport=httpx.MockTransport(recorder.handle))
    return EventSender(tmp_path / "spool", client)


def filled(root: Path) -> Spool:
    spool = Spool(root / "spool", "gateway")
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    spool.rotate()
    return spool


def test_files_stay_while_the_controller_is_down(
    tmp_path: Path,
    sender: EventSender,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: now[0]))
    filled(tmp_path)
    recorder.is_down = True
    assert sender.send() == 0
    assert len(list((tmp_path / "spool").glob("*.jsonl"))) == 1
    assert "wait" in caplog.text
    recorder.is_down = False
    # Not at once: a controller that starts is not flooded.
    assert sender.send() == 0
    now[0] += MOST_PAUSE_S
    assert sender.send() == 1
    assert len(recorder.taken) == 1
    assert list((tmp_path / "spool").glob("*.jsonl")) == []
    assert caplog.text.count("wait") == 1


def test_one_process_sends_at_a_time(tmp_path: Path, sender: EventSender, recorder: Recorder) -> None:
    filled(tmp_path)
    import fcntl

    with (tmp_path / "spool" / "sending.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sender.send() == 0
    assert sender.send() == 1


def test_the_end_waits_for_what_is_being_sent_and_sends_the_rest(
    tmp_path: Path, sender: EventSender, recorder: Recorder
) -> None:
    recorder.goes_on.clear()
    spool = Spool(tmp_path / "spool", "gateway", sender.send)
    ids = [spool.emit("feedback", request_id="r1", reward=1.0, key="k")]
    spool.rotate()
    assert recorder.began.wait(60)
    ids.append(spool.emit("feedback", request_id="r2", reward=1.0, key="k"))
    threading.Timer(0.2, recorder.goes_on.set).start()
    spool.close()
    assert [id for _, lines in recorder.taken for id in ids if id.encode() in lines] == ids


def test_what_others_sent_is_not_sent_on(tmp_path: Path, sender: EventSender, recorder: Recorder) -> None:
    filled(tmp_path)
    (tmp_path / "spool" / f"{SENT}x.jsonl").write_text("{}\n")
    assert sender.send() == 1
    assert (tmp_path / "spool" / f"{SENT}x.jsonl").is_file()


def test_a_large_file_goes_in_parts_and_what_is_never_taken_is_set_aside(
    tmp_path: Path, sender: EventSender, recorder: Recorder
) -> None:
    spool = filled(tmp_path)
    lines = [b"x" * (MOST_BYTES // 3) + b"%d\n" % number for number in range(7)]
    (spool.root / "a.jsonl").write_bytes(b"".join(lines))
    (spool.root / "b.jsonl").write_bytes(b"y" * MOST_BYTES + b"\n")
    assert sender.send() == 2
    taken = dict(recorder.taken)
    assert [name for name in taken if name.startswith("a")] == ["a", "a-1", "a-2", "a-3"]
    assert b"".join(taken[name] for name in ("a", "a-1", "a-2", "a-3")) == b"".join(lines)
    assert max(map(len, taken.values())) <= MOST_BYTES
    assert [path.name for path in (spool.root / REJECTED).iterdir()] == ["b.jsonl"]
    # It keeps nothing back.
    filled(tmp_path)
    assert sender.send() == 1


@pytest.mark.parametrize(("status", "body"), [(502, b"null"), (502, b"[]"), (200, b"null"), (200, b"<html>")])
def test_whatever_a_proxy_says_events_stay(
    tmp_path: Path, sender: EventSender, recorder: Recorder, status: int, body: bytes
) -> None:
    filled(tmp_path)
    recorder.instead = httpx.Response(status, content=body, headers={"content-type": "application/json"})
    assert sender.send() == 0
    assert len(list((tmp_path / "spool").glob("*.jsonl"))) == 1


def test_a_torn_line_is_not_sent(tmp_path: Path, sender: EventSender, recorder: Recorder) -> None:
    filled(tmp_path)
    (path,) = (tmp_path / "spool").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "half')
    assert sender.send() == 1
    assert recorder.taken == [(path.stem, whole)]


def test_a_controller_of_this_machine_gets_files_as_before(tmp_path: Path) -> None:
    params = Params(state_dir=tmp_path)
    spool = open_spool(params, "gateway")
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    spool.close()
    with_ledger = Ledger(params.paths.ledger)
    assert with_ledger.ingest(params.paths.spool) == 1
    with_ledger.close()


@pytest.mark.services
def test_the_controller_refuses_what_is_no_spool_file(machines: OtherMachine) -> None:
    machines.start()
    with httpx.Client(base_url=machines.url) as web:
        assert web.post("/events/a", content=b"{}\n").status_code == 401
        web.headers["authorization"] = f"Bearer {machines.secret}"
        assert web.post("/events/a%20b", content=b"{}\n").status_code == 400
        assert web.post("/events/" + "a" * 201, content=b"{}\n").status_code == 400
        assert web.post("/events/a", content=b"x" * ((2 << 20) + 1)).status_code == 400
        assert not list(machines.params.paths.spool.glob(f"{SENT}*"))
        # A spool that cannot be written, as with a full disk.
        spool = machines.params.paths.spool
        spool.rename(spool.with_name("aside"))
        spool.touch()
        assert web.post("/events/a", content=b"{}\n").status_code == 503
