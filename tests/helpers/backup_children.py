"""Processes that back up or restore and die at a given moment, forked by one that has imported all.

Reads lines `backup PARAMS PLACE CALLS` and `restore PARAMS PLACE CALLS`; answers each with the child's pid.
The child ends itself before its CALLS-th call of a C function; 0: never.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

from store_children import die_before_call

# Imported before the first child, which begins with them.
import engine.ledger.ledger
from engine.settings.params import load_params
from tasks.backup import backup
from tasks.restore_backup import restore_backup

OPERATIONS = {"backup": backup, "restore": restore_backup}
FAULT = "fault.txt"


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
            os._exit(0)
        except BaseException:
            (Path(file).parent / FAULT).write_text(traceback.format_exc())
        finally:
            os._exit(1)


if __name__ == "__main__":
    assert engine.ledger.ledger
    serve()
