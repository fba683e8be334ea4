"""A real engine for tests, in a process of its own."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import httpx
import psutil

from engine.serving.server import memory_arguments
from engine.settings.services import EngineConfig

# Below what the kernel gives to connections.
PORTS = range(10_000, 30_000)
# Seconds that a server has to stop by itself, before its reaper kills it.
STOP_S = 20
STOCK_SERVER = str(Path(__file__).with_name("stock_server.py"))
# The rank is one at which an adapter is mapped rather than copied: over 1 MiB.
CROWDED = {"slots": 3, "max_rank": 64, "host_bytes": 7 << 20}
# A stock server's limits are the defaults of ours.
DEFAULTS = EngineConfig()


def ports_from(begin: int) -> Iterator[int]:
    """Return each port once, beginning with one of them."""
    return iter([*PORTS[begin % len(PORTS) :], *PORTS[: begin % len(PORTS)]])


# A byte for each port: a process locks those of its ports, and the kernel unlocks them when it ends.
_reserved = os.open(Path(tempfile.gettempdir(), f"graftwork-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT)
# Another process begins elsewhere, so that it seldom meets a port that is reserved.
_ports = ports_from(os.getpid() * 37)


def free_port() -> int:
    """Return a port that nothing listens on, and that no other test process gets before this one ends."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            fcntl.lockf(_reserved, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("This process has taken every port.")


def eventually(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Wait until the condition holds; return whether it does. It is asked ever more rarely."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not (met := bool(condition())) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(0.5, 1.3 * pause)
    return met


def left_behind(root: Path) -> list[str]:
    """Return the command lines of live processes that name `root`.

    A process forked a moment ago shows its parent's; count different ones to know what has started.
    """
    found = []
    for process in psutil.process_iter():
        # It may end between any two of these reads.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = command_line(process)
            if str(root) in line and process.status() != psutil.STATUS_ZOMBIE:
                found.append(line)
    return found


def command_line(process: psutil.Process) -> str:
    """Return a process's command line. It is empty for a moment while a new program replaces the old one."""
    for _ in range(100):
        # A thread of the kernel has no program and never a command line.
        if (words := process.cmdline()) or not process.exe():
            return " ".join(words)
        time.sleep(0.001)
    return ""


@dataclass
class RunningEngine:
    """A real engine in a process of its own, with its catalog and store."""

    url: str
    key: str
    base_name: str
    base_path: Path
    base_digest: str
    state: Path
    process: subprocess.Popen[bytes]

    @cached_property
    def catalog(self) -> Any:
        from engine.catalog.opening import whole_catalog
        from engine.settings.params import Paths

        return whole_catalog(Paths(self.state).catalog_url)

    @cached_property
    def store(self) -> Any:
        from engine.settings.params import Paths
        from engine.store.segments import Store

        return Store(Paths(self.state).store)

    def client(self, **kwargs) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, **kwargs)

    def publish(self, policy: str, tensors: dict, rank: int, dtype: Any = None) -> str:
        """Put an adapter into store and catalog; return its served name. `dtype`: float32 unless given."""
        import torch

        from engine.adapters import packed, revision
        from engine.base.families import BaseShapes
        from engine.catalog.catalog import Policy, Revision
        from engine.catalog.records import served_name

        targets = tuple(sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}))
        digest = revision.digest(tensors, rank, targets, self.base_digest)
        whole = packed.pack(tensors, dtype or torch.float32, BaseShapes.read(self.base_path).fused)
        at = self.store.append(whole.tobytes())
        self.catalog.policies.add(Policy(policy, self.base_digest, {}, "test", time.time()))
        self.catalog.layouts.add(whole.layout.digest, whole.layout.to_json())
        self.catalog.revisions.add_many(
            [Revision(
                policy, digest, self.base_digest, None, 0, rank, at.length, whole.layout.digest, at.segment,
                at.offset, at.length, at.checksum, "exported", "test", time.time(),
            )]
        )  # fmt: skip
        return served_name(policy, digest)


def start_engine(
    base: Path, state: Path, wait_s: float = 240, name: str = "params", log_format: str = "text", **settings
) -> RunningEngine:
    """Start `python -m engine.serving.server` and wait for its marker.

    A second one on the same state has its own `name`, that of its file of settings.
    """
    from engine.base.resident import base_digest
    from engine.catalog.catalog import migrate
    from engine.catalog.opening import whole_catalog
    from engine.settings.params import Paths

    port = free_port()
    paths = Paths(state)
    state.mkdir(parents=True, exist_ok=True)
    migrate(paths.catalog_url)
    catalog = whole_catalog(paths.catalog_url)
    key = catalog.keys.ensure_local(paths.local_key)
    catalog.close()
    params = {
        "state_dir": str(state),
        "base": {"name": str(base)},
        "engine": {"port": port, **settings},
        "log_format": log_format,
    }
    file = state / f"{name}.json"
    file.write_text(json.dumps(params))
    with file.with_suffix(".log").open("wb") as log:
        process = start_reaped(["-m", "engine.serving.server", "--params", str(file)], log)
    url = f"http://127.0.0.1:{port}"
    running = RunningEngine(url, key, base.name, base, base_digest(base), state, process)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/graftwork/marker", timeout=5).status_code == 200:
                return running
        except httpx.TransportError:
            time.sleep(0.5)
    stop_engine(running)
    raise RuntimeError("The engine did not start:\n" + file.with_suffix(".log").read_text()[-4000:])


def server_and_core(reaper: int) -> tuple[psutil.Process, psutil.Process]:
    """Return API server and EngineCore of the engine that this process started."""
    (server,) = psutil.Process(reaper).children()
    # Beside it there may be the process that compiles grammars.
    (core,) = (one for one in server.children() if "grammar_process" not in " ".join(one.cmdline()))
    return server, core


def stop_engine(running: RunningEngine) -> None:
    stop_reaped(running.process)


def start_reaped(
    arguments: Sequence[str], output: IO[bytes] | int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start Python with these arguments under a process reaper, and return the reaper's process.

    The whole process tree ends with this process, however that ends. It ends with the calling thread, too:
    that is what the kernel calls a parent.
    """
    reaper = ["-m", "engine.process_reaper", "/dev/stdin", str(STOP_S), sys.executable]
    process = subprocess.Popen(
        [sys.executable, *reaper, *arguments], env=environment, stdin=subprocess.PIPE, stdout=output,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdin
    with process.stdin as pidfile:
        pidfile.write(str(os.getpid()).encode())
    return process


def stop_reaped(process: subprocess.Popen[bytes]) -> None:
    """End what `start_reaped` started, and wait until nothing of it is left."""
    process.terminate()
    process.wait()


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started, and its children, by its process group."""
    for number, grace in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(grace)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class StockServer:
    """vLLM's own server on a checkpoint, without LoRA unless `more` asks for it; ready in the `with` block.

    Its environment, process settings and limits are our engine's (stock_server.py). `threads` is as in our
    settings: 0 takes every core but one. `program` is another server's, with the same arguments; `variables`
    are added to its environment.
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        max_model_len: int = DEFAULTS.max_model_len,
        threads: int = 0,
        more: Sequence[str] = (),
        program: Sequence[str] = (STOCK_SERVER,),
        variables: Mapping[str, str] = MappingProxyType({}),
    ):
        self.port = free_port()
        self.url, self.key = f"http://127.0.0.1:{self.port}", "none"
        limits = EngineConfig.model_validate({"dtype": dtype, "max_model_len": max_model_len})
        arguments = [
            "--model", str(checkpoint), "--served-model-name", "stock", "--port", str(self.port),
            "--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", str(max_model_len), "--enforce-eager",
            "--max-num-seqs", str(DEFAULTS.max_num_seqs), *memory_arguments(limits, checkpoint, None),
            "--no-enable-log-requests", "--disable-uvicorn-access-log", *more,
        ]  # fmt: skip
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "",
            "OMP_NUM_THREADS": str(threads or max(1, len(os.sched_getaffinity(0)) - 1)),
            **variables,
        }
        self.process = start_reaped([*program, *arguments], subprocess.DEVNULL, environment)
        self.client = httpx.Client(base_url=self.url, timeout=600)

    def __enter__(self) -> "StockServer":
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise RuntimeError("The stock server did not start.")

    def __exit__(self, *_: object) -> None:
        self.client.close()
        stop_reaped(self.process)
