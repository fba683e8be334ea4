"""Run one service so that its whole process tree ends with it, and with the supervisor.

    python -m engine.process_reaper PIDFILE STOP_S COMMAND...

Third-party servers start child processes, some in sessions of their own, and a killed parent leaves them
orphaned and holding ports. The reaper adopts such orphans (Linux's child subreaper), forwards SIGTERM to
the command, and ends every remaining process once the command has exited. It treats its own parent's death
as a SIGTERM.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent dies; at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def still_alive(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until these processes have ended; return those that have not after `timeout_s`.

    Linux answers ENOENT for one that is just being reaped, which psutil 7 does not expect: it is asked again.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(FileNotFoundError):
            return psutil.wait_procs(processes, timeout=left_s)[1]
        time.sleep(0.01)
    return [process for process in processes if process.is_running()]


def end_descendants(grace_s: float) -> None:
    """End every descendant, including ones started meanwhile: SIGTERM, after `grace_s` SIGKILL."""
    deadline = time.monotonic() + grace_s
    while descendants := psutil.Process().children(recursive=True):
        late = time.monotonic() > deadline
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill() if late else process.terminate()
        still_alive(descendants, max(deadline - time.monotonic(), 0.1))


def run(command: list[str], stop_s: float) -> int:
    """Run a command until it ends; SIGTERM stops it, SIGKILL follows after `stop_s` seconds.

    Returns its exit status (negative for a signal) once no descendant is left.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    # Blocked and waited for instead of handled: no race between a signal and the child's start.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    reaper = os.getpid()

    def prepare_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        die_with_parent(reaper)

    child = subprocess.Popen(command, preexec_fn=prepare_child)
    deadline = float("inf")
    while child.poll() is None:
        received = signal.sigtimedwait(signals, min(max(deadline - time.monotonic(), 0.05), 3600))
        if received is not None and received.si_signo != signal.SIGCHLD:
            child.terminate()
            deadline = min(deadline, time.monotonic() + stop_s)
        elif time.monotonic() >= deadline:
            child.kill()
    end_descendants(grace_s=min(stop_s, 5))
    return child.returncode


def main() -> None:
    """Run the command of the arguments; exit with its status, or 128 + N after signal N."""
    pidfile, stop_s, *command = sys.argv[1:]
    die_with_parent(int(Path(pidfile).read_text()))
    status = run(command, float(stop_s))
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
