"""Start, query and stop the supervisor process (package `supervisor`) of a state directory.

The supervisor is stopped by the pid recorded at its start, after a check of the process's start time.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.errors import ServiceError
from engine.files import write_whole
from engine.process_reaper import die_with_parent, still_alive
from engine.settings.params import content_hash

GROUP = "graftwork"
STOP_S = 10
# A program's process reaper stops it; the supervisor, and whoever stops that, each wait a little longer.
SUPERVISOR_STOP_S = STOP_S + 8
DOWN_S = SUPERVISOR_STOP_S + 7


@dataclass(frozen=True)
class Running:
    """The record of a started supervisor: its process, its owner's pid, and the hash of its settings."""

    pid: int
    created: float
    owner: int | None
    settings: str

    def process(self) -> psutil.Process | None:
        """Return the live process; None when it has ended or its pid has been reused."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


class Supervisor:
    """The supervisor of the state directory `root`, which holds its files."""

    def __init__(self, root: Path, logs: Path):
        self.logs = logs
        self.config = root / "supervisor.conf"
        self.pidfile = root / "supervisor.pid"
        self.note = root / "services.json"
        # Linux limits a socket's path to 107 bytes, and the supervisor appends its pid.
        near = root / "supervisor.sock"
        short = Path(tempfile.gettempdir()) / f"graftwork-{content_hash(str(root))[:16]}.sock"
        self.socket = near if len(os.fsencode(near)) <= 90 else short

    def running(self) -> Running | None:
        """Return the record of the running supervisor, or None."""
        if not self.note.is_file():
            return None
        running = Running(**json.loads(self.note.read_text()))
        return running if running.process() else None

    def spawn(
        self,
        programs: Mapping[str, tuple[str, ...]],
        environment: Mapping[str, str],
        owner: int | None,
        settings: str,
        own: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Start the supervisor with its programs stopped; with an `owner` (pid), it ends when that ends.

        `own` holds the variables that one program gets alone, such as its password, by its name. An owner
        must be this process, and the calling thread must live as long as the supervisor. Raises
        `ServiceError` when the supervisor does not start within 20 s.
        """
        write_whole(self.config, self.config_text(programs, own or {}), mode=0o600)
        signals = {signal.SIGINT, signal.SIGTERM}

        def prepare_child() -> None:
            # What the services write is their user's alone: rewards, artifacts, databases, logs.
            os.umask(0o077)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            if owner is not None:
                die_with_parent(owner)

        # An interrupt between the start and the record of its pid would orphan the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with open(self.logs / "supervisor.err", "w") as errors:
                child = subprocess.Popen(
                    [sys.executable, "-m", "supervisor.supervisord", "-c", str(self.config)],
                    env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    start_new_session=True, preexec_fn=prepare_child,
                )  # fmt: skip
            created = psutil.Process(child.pid).create_time()
            self.note.write_text(json.dumps(asdict(Running(child.pid, created, owner, settings))))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        # Reaps the supervisor when it ends: a zombie would look alive to anyone who waits for its pid.
        threading.Thread(target=child.wait, daemon=True).start()
        self._wait_until_it_answers(child)

    def start(self, name: str) -> None:
        """Start a program without waiting for it."""
        self._rpc().startProcess(f"{GROUP}:{name}", False)

    def programs(self) -> dict[str, dict[str, Any]]:
        """Return the supervisor's information on each program: statename, pid, start, now (epoch seconds).

        Raises `ServiceError` when the supervisor does not answer.
        """
        try:
            return {info["name"]: info for info in self._rpc().getAllProcessInfo()}
        except OSError:
            raise ServiceError(
                "The services were stopped by another command. Start them with `graftwork up`."
            ) from None

    def stop(self) -> bool:
        """Stop the supervisor, its programs and orphans; return False when there were none. Idempotent."""
        running = self.running()
        process = running.process() if running else None
        left = self._orphans()
        if process is not None:
            left += [process, *process.children(recursive=True)]
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        alive = still_alive(left, DOWN_S if left else 0)
        for late in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                late.kill()
        still_alive(alive, 5)
        for file in (self.socket, self.pidfile, self.note):
            file.unlink(missing_ok=True)
        return bool(left)

    def _orphans(self) -> list[psutil.Process]:
        """Return process reapers whose supervisor was killed, with their children; they are ending."""
        processes = psutil.process_iter(["cmdline"])
        reapers = [process for process in processes if str(self.pidfile) in (process.info["cmdline"] or [])]
        with contextlib.suppress(psutil.NoSuchProcess):
            return reapers + [child for reaper in reapers for child in reaper.children(recursive=True)]
        return reapers

    def _wait_until_it_answers(self, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 20
        while child.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._rpc().getState()
                return
            time.sleep(0.05)
        error = (self.logs / "supervisor.err").read_text().strip()
        raise ServiceError(f"The supervisor did not start. {self.logs}/supervisor.err says: {error}")

    def _rpc(self) -> Any:
        from xmlrpc.client import ServerProxy

        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, f"unix://{self.socket}")
        return ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def config_text(
        self, programs: Mapping[str, tuple[str, ...]], own: Mapping[str, Mapping[str, str]]
    ) -> str:
        """Return the configuration of these programs; `own` are variables of one program alone."""
        sections = [
            "[supervisord]", "nodaemon=true", "silent=true", f"pidfile={_escape(self.pidfile)}",
            f"childlogdir={_escape(self.logs)}", f"logfile={_escape(self.logs / 'supervisor.log')}",
            "logfile_maxbytes=5MB", "logfile_backups=1",
            "[unix_http_server]", f"file={_escape(self.socket)}", "chmod=0700",
            "[rpcinterface:supervisor]",
            "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
            # One group, so that all programs stop at the same time.
            f"[group:{GROUP}]", "programs=" + ",".join(programs),
        ]  # fmt: skip
        for name, arguments in programs.items():
            variables = own.get(name, {}).items()
            reaper = (sys.executable, "-m", "engine.process_reaper", self.pidfile, STOP_S, sys.executable)
            sections += [
                f"[program:{name}]",
                "command=" + " ".join(_escape(shlex.quote(str(part))) for part in (*reaper, *arguments)),
                f"stdout_logfile={_escape(self.logs / f'{name}.log')}", "redirect_stderr=true",
                "stdout_logfile_maxbytes=10MB", "stdout_logfile_backups=2",
                "autostart=false", "autorestart=true", "startsecs=1", "startretries=3",
                f"stopwaitsecs={SUPERVISOR_STOP_S}", "killasgroup=true",
                "environment=" + ",".join(f'{key}="{_escape(value)}"' for key, value in variables),
            ]  # fmt: skip
        return "\n".join(sections) + "\n"


def _escape(text: object) -> str:
    return str(text).replace("%", "%%")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C while the services stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
