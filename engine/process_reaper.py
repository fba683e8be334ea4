"""Keep one service's whole process tree: it dies with its supervisor, and leaves nobody behind.

    python -m engine.process_reaper PIDFILE STOP_S COMMAND...

Servers of other projects start children of their own, some in sessions of their own, and a killed
parent leaves those holding ports. The reaper adopts such orphans (Linux's child subreaper), passes
SIGTERM on to the command, and ends what is left when the command is gone. Its parent's death is
a SIGTERM too. Knows nothing of what it runs.
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
    """Ask the kernel for a SIGTERM when the parent dies; stop at once if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def end_descendants(grace_s: float) -> None:
    """End every descendant of this process, and those that they start meanwhile."""
    deadline = time.monotonic() + grace_s
    while descendants := psutil.Process().children(recursive=True):
        late = time.monotonic() > deadline
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill() if late else process.terminate()
        psutil.wait_procs(descendants, timeout=max(deadline - time.monotonic(), 0.1))


def run(command: list[str], stop_s: float) -> int:
    """Run a command until it ends; SIGTERM stops it, at the latest after `stop_s` seconds.

    Returns its exit status, negative for a signal, when no descendant is left.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    # Blocked and waited for, never handled: no race between a signal and the start of the child.
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
    pidfile, stop_s, *command = sys.argv[1:]
    die_with_parent(int(Path(pidfile).read_text()))
    status = run(command, float(stop_s))
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
