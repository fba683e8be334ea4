"""Processes that back up or restore and die at a given moment, forked by one that has imported all.

Reads lines `backup PARAMS PLACE CALLS` and `restore PARAMS PLACE CALLS`; answers each with the child's pid.
The child ends itself before its CALLS-th call of a C function; with 0 it writes how many there are.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

# Imported before the first child, which begins with them.
import engine.ledger.ledger
from engine.settings.params import load_params
from tasks.backup import backup
from tasks.restore_backup import restore_backup
from tests.helpers.store_children import die_before_call

OPERATIONS = {"backup": backup, "restore": restore_backup}
FAULT, CALLS = "fault.txt", "calls.txt"


def count_calls(work: Callable[[], object]) -> int:
    made = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal made
        made += event == "c_call"

    sys.setprofile(count)
    work()
    sys.setprofile(None)
    return made


def serve() -> None:
    # Ended children leave the list of processes by themselves.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        operation, file, place, calls = line.split()
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            params = load_params(file)
            if int(calls):
                die_before_call(int(calls))
                OPERATIONS[operation](params, place)
            else:
                made = count_calls(partial(OPERATIONS[operation], params, place))
                (Path(file).parent / CALLS).write_text(str(made))
        except BaseException:
            (Path(file).parent / FAULT).write_text(traceback.format_exc())
        finally:
            os._exit(1)


if __name__ == "__main__":
    assert engine.ledger.ledger
    serve()
