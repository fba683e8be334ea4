"""The supervisor and the process reapers, on real processes: nothing outlives whoever started it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from engine.errors import ConfigError, Conflict, PortInUse, ServiceError
from engine.process_reaper import still_alive
from engine.services import lifecycle as services
from engine.services.supervisor import Supervisor
from engine.settings.params import Params
from tests.helpers.live import eventually
from tests.helpers.own_ports import own_ports

# A server that ignores SIGTERM's spirit: it leaves a child in a session of its own behind.
LEAVES_ORPHAN = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]],"
    " start_new_session=True);"
    "time.sleep(600)"
)
OWNER = """
import os, sys, time
from pathlib import Path
from engine.services.supervisor import Supervisor
root = Path(sys.argv[1])
supervisor = Supervisor(root, root)
supervisor.spawn({"server": ("-c", sys.argv[2], str(root))}, os.environ, os.getpid(), "settings")
supervisor.start("server")
time.sleep(600)
"""


def marked(root: Path) -> list[psutil.Process]:
    """Return live processes that name `root`: every process of these tests does, this one does not."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(root) in part for part in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, tmp_path)
    yield supervisor
    supervisor.stop()


def spawn(supervisor: Supervisor, **programs: str) -> None:
    commands = {name: ("-c", code, str(supervisor.pidfile.parent)) for name, code in programs.items()}
    supervisor.spawn(commands, os.environ, None, "settings")


def full_tree(root: Path) -> bool:
    # supervisor, reaper, server, and the server's child
    return len(marked(root)) >= 4


def test_stop_ends_every_descendant_and_is_idempotent(supervisor: Supervisor, tmp_path: Path) -> None:
    spawn(supervisor, server=LEAVES_ORPHAN)
    supervisor.start("server")
    assert eventually(lambda: full_tree(tmp_path))
    assert supervisor.running()
    assert supervisor.stop() is True
    assert marked(tmp_path) == []
    assert supervisor.running() is None
    assert supervisor.stop() is False


def test_killed_service_takes_its_children_along_and_is_restarted(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    spawn(supervisor, server=LEAVES_ORPHAN)
    supervisor.start("server")
    assert eventually(lambda: full_tree(tmp_path))
    reaper = psutil.Process(supervisor.programs()["server"]["pid"])
    before = reaper.children(recursive=True)
    reaper.children()[0].kill()
    assert eventually(lambda: not any(process.is_running() for process in [reaper, *before]))
    assert eventually(lambda: full_tree(tmp_path))
    assert supervisor.programs()["server"]["pid"] != reaper.pid


@pytest.mark.parametrize("victim", ["owner", "supervisor", "reaper"])
def test_kill_9_leaves_nothing_behind(supervisor: Supervisor, tmp_path: Path, victim: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), LEAVES_ORPHAN])
    try:
        # The owner names the directory too.
        assert eventually(lambda: len(marked(tmp_path)) >= 5)
        running = supervisor.running()
        assert running is not None
        assert running.owner == owner.pid
        if victim == "owner":
            owner.kill()
            owner.wait()
        elif victim == "supervisor":
            os.kill(running.pid, signal.SIGKILL)
            owner.kill()
            owner.wait()
        else:
            reaper = psutil.Process(supervisor.programs()["server"]["pid"])
            server = reaper.children()[0]
            reaper.kill()
            assert eventually(lambda: not server.is_running())
            owner.kill()
            owner.wait()
        gone = eventually(lambda: len(marked(tmp_path)) <= (1 if victim == "reaper" else 0))
        assert gone, marked(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            owner.kill()
        owner.wait()
        # A child that outlived its killed reaper has no reaper left that could adopt it.
        for process in marked(tmp_path):
            process.kill()


def test_a_process_that_is_just_being_reaped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_pidfd = list[int](), os.pidfd_open
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child,
        ThreadPoolExecutor(1) as pool,
    ):

        def reaped_at_first(pid: int, flags: int = 0) -> int:
            # psutil's first look in a process is at the process itself: that one finds out how to wait.
            if pid == child.pid:
                opened.append(pid)
                if len(opened) == 1:
                    raise FileNotFoundError(2, "No such file or directory")
            return open_pidfd(pid, flags)

        monkeypatch.setattr(os, "pidfd_open", reaped_at_first)
        waiting = pool.submit(still_alive, [psutil.Process(child.pid)], 60)
        # It is looked at again, and lives.
        is_seen_again = eventually(lambda: len(opened) >= 2)
        has_ended = waiting.done()
        child.kill()
        assert waiting.result(60) == []
    assert (is_seen_again, has_ended) == (True, False)


def test_long_state_directory_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    assert Supervisor(tmp_path, tmp_path).socket.name == "supervisor.sock" or len(str(tmp_path)) > 70
    assert len(str(Supervisor(deep, deep).socket)) < 90
    assert Supervisor(deep, deep).socket != Supervisor(deep / "x", deep).socket


def test_stale_note_of_a_killed_supervisor_is_no_running_supervisor(supervisor: Supervisor) -> None:
    supervisor.note.write_text('{"pid": 1, "created": 5.0, "owner": null, "settings": "x"}')
    assert supervisor.running() is None
    supervisor.socket.write_text("stale")
    supervisor.pidfile.write_text("1")
    spawn(supervisor, server="import time; time.sleep(600)")
    supervisor.start("server")
    assert eventually(lambda: supervisor.programs()["server"]["statename"] == "RUNNING")


def test_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        params = own_ports(state_dir=tmp_path, trainer={"port": port})
        with pytest.raises(PortInUse, match=rf"{port}.*`trainer\.port`"):
            services.up(params, lambda: pytest.fail("the base was built"), lambda name, state: None)
    assert marked(tmp_path) == []


@pytest.mark.services
def test_failing_service_shows_its_log_and_stops_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = own_ports(state_dir=tmp_path)
    broken = services.Service("mlflow", ("-c", "print('no such table'); raise SystemExit(3)"), "/health", 60)
    monkeypatch.setattr(services, "services", lambda params: (broken,))
    with pytest.raises(ServiceError, match=r"(?s)mlflow service ended.*no such table"):
        services.up(params, lambda: None, lambda name, state: None)
    assert marked(tmp_path) == []
    assert [state.state for state in services.status(params)] == ["stopped"]


def test_services_of_other_settings_are_not_reused(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn(supervisor, server="import time; time.sleep(600)")
    params = own_ports(state_dir=tmp_path)
    monkeypatch.setattr(services, "supervisor_of", lambda params: supervisor)
    with pytest.raises(Conflict, match="other settings"):
        services.up(params, lambda: None, lambda name, state: None)
    assert supervisor.running() is not None


def test_environment_is_quiet_and_offline_only_for_a_local_base(tmp_path: Path) -> None:
    local = services.environment(Params(state_dir=tmp_path))
    assert local["HF_HUB_OFFLINE"] == local["DO_NOT_TRACK"] == local["VLLM_NO_USAGE_STATS"] == "1"
    hub = Params.model_validate({"state_dir": tmp_path, "base": {"name": "Qwen/Qwen3-0.6B"}})
    assert "HF_HUB_OFFLINE" not in services.environment(hub)


def test_one_service_in_the_foreground_has_no_login_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "of-the-user")
    params = Params.model_validate({"state_dir": tmp_path, "trainer": {"at": "http://127.0.0.1:8461"}})
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "prefect").write_text("secret\n")
    for name in ("engine", "trainer", "controller"):
        command, environment = services.foreground(params, name)
        assert command[0] == sys.executable
        assert str(tmp_path / "params.json") in command
        assert not {"MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING"} & set(environment)
    assert services.foreground(params, "worker")[1]["PREFECT_API_AUTH_STRING"] == "graftwork:secret"
    # A place that was given some credentials makes no others.
    assert [file.name for file in (tmp_path / "credentials").iterdir()] == ["prefect"]
    assert services.foreground(params, "mlflow")[1]["MLFLOW_AUTH_ADMIN_PASSWORD"]
    with pytest.raises(ConfigError, match="Unknown service 'gateway'"):
        services.foreground(params, "gateway")


@pytest.mark.services
def test_a_controller_in_the_foreground_ends_by_its_signal(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    params = own_ports(state_dir=tmp_path / "state")
    file.write_text(params.to_json())
    command = [sys.executable, "-m", "flows.cli", "start", "controller", "--params", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert eventually(lambda: is_healthy(f"{params.url('controller')}/health"), 60)
            # It is this process, not a child of it.
            assert marked(tmp_path) == [psutil.Process(process.pid)]
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


def is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=2).status_code == 200
    return False
