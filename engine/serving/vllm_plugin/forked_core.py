"""EngineCore as a fork of the API server, for an engine whose only worker is on the CPU.

vLLM's CPU platform forces `spawn`: EngineCore imports torch and vLLM a second time, which is half of the CPU
time of a start. A fork has what the server has imported, and shares its memory.

Two things make the fork safe. No OpenMP region runs in the server before it: libgomp's threads do not
survive a fork. And torch's libgomp is preloaded into the server itself: vLLM preloads it into a spawned
EngineCore, so that torch and vLLM's kernels share one thread pool, but a fork reads no `LD_PRELOAD`.

Checked with vLLM 0.32.0. Remove when vLLM's CPU platform leaves the start method to the user.
"""

import multiprocessing
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

LIBGOMP = "libgomp"


def preload_libgomp() -> None:
    """Restart this process in place with torch's libgomp preloaded; return if it is, or torch has none."""
    loaded = os.environ.get("LD_PRELOAD", "")
    spec = find_spec("torch")
    if LIBGOMP in loaded or spec is None or spec.origin is None:
        return
    if library := next((Path(spec.origin).parent / "lib").glob(f"{LIBGOMP}*.so*"), None):
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [loaded, str(library)]))
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, sys.orig_argv)


def fork_engine_core() -> None:
    """Have vLLM fork EngineCore instead of spawning it, on a CPU with libgomp preloaded. Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    fork = multiprocessing.get_context("fork")
    if not current_platform.is_cpu() or LIBGOMP not in os.environ.get("LD_PRELOAD", ""):
        return
    if utils.get_mp_context() is not fork:
        utils.get_mp_context = lambda: fork  # type: ignore[assignment]
        os.register_at_fork(after_in_child=leave_the_servers_sockets)


def leave_the_servers_sockets() -> None:
    """Let go of inherited internet sockets, and keep this process's signals out of the server's event loop.

    Otherwise the port would stay taken while EngineCore outlives a killed server, and a SIGTERM to EngineCore
    would reach the server too. The descriptor's number stays taken: the server's object may still close it.
    Server and core talk by Unix sockets.
    """
    signal.set_wakeup_fd(-1)
    with open(os.devnull) as nothing:
        for number in map(int, os.listdir("/proc/self/fd")):
            # Not a socket, or the directory's own descriptor, which is closed by now.
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    os.dup2(nothing.fileno(), number)
