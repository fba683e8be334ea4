"""EngineCore is a fork of the API server that holds none of its sockets."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx

from tests.helpers.live import RunningEngine, server_and_core
from tests.helpers.repository import ROOT


def test_the_core_shares_the_servers_memory_and_thread_pool(engine: RunningEngine) -> None:
    server, core = server_and_core(engine.process.pid)
    # What a spawned core imports lies on pages of its own.
    memory = core.memory_full_info()
    assert memory.rss - memory.uss > 200 << 20
    for process in (server, core):
        pools = {one.path for one in process.memory_maps() if "libgomp" in one.path}
        assert any(path.endswith("torch/lib/libgomp.so.1") for path in pools), pools


def test_the_core_has_no_socket_of_the_engines_port(engine: RunningEngine) -> None:
    """The server's own is found, so that the look is not empty for another reason."""
    port = f":{httpx.URL(engine.url).port:04X} "
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines() if port in line]
    links = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    assert links
    server, core = server_and_core(engine.process.pid)
    for process, holds in ((server, True), (core, False)):
        found = set()
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            # What is no socket of the port may be closed meanwhile.
            with suppress(FileNotFoundError):
                found.add(os.readlink(link))
        assert bool(links & found) is holds


# A server whose event loop has a signal handler, and whose fork ends by that signal.
SERVER = """
import asyncio, os, signal, socket
from engine.serving.vllm_plugin.forked_core import leave_the_servers_sockets

async def main():
    port, pair = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: print("The server heard it."))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
        leave_the_servers_sockets()
        kept = os.readlink(f"/proc/self/fd/{port.fileno()}")
        pair[1].send(kept.encode())
        while True:
            signal.pause()
    print(pair[0].recv(100).decode())
    os.kill(child, signal.SIGUSR1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    # A turn of the loop in which it would hear.
    await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_a_fork_gives_up_the_port_and_keeps_its_signals() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SERVER], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [os.devnull, "7"]
