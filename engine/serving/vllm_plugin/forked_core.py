"""EngineCore as a fork of the API server, and its ranks as forks of EngineCore, on a CPU.

vLLM's CPU platform forces `spawn`: EngineCore imports torch and vLLM a second time, which is half of the CPU
time of a start, and so does each rank. A fork has what the server has imported, and shares its memory.

Two things make the forks safe. No OpenMP region runs in their parent before: libgomp's threads do not survive
a fork. And torch's libgomp is preloaded into the server itself: vLLM preloads it into a spawned EngineCore,
so that torch and vLLM's kernels share one thread pool, but a fork reads no `LD_PRELOAD`.

Checked with vLLM 0.32.0. Remove when vLLM's CPU platform leaves the start method to the user.
"""

import multiprocessing
import os
import signal
import socket
import stat
from contextlib import suppress

INTERNET = (socket.AF_INET, socket.AF_INET6)


def fork_engine_core() -> None:
    """Have vLLM fork EngineCore and ranks on a CPU, not spawn them; libgomp must be preloaded. Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    fork = multiprocessing.get_context("fork")
    if current_platform.is_cpu() and utils.get_mp_context() is not fork:
        for module in (utils, multiproc_executor):
            module.get_mp_context = lambda: fork  # type: ignore[attr-defined]
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
            # The directory's own descriptor is closed by now.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode) and _family(number) in INTERNET:
                    os.dup2(nothing.fileno(), number)


def _family(number: int) -> socket.AddressFamily:
    with socket.socket(fileno=os.dup(number)) as duplicate:
        return socket.AddressFamily(duplicate.family)
