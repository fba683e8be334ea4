"""The evaluators' process: `python -m engine.evaluation --params FILE`, a child of the controller.

It pulls copies of users' answers from the engines while releases with evaluators run, and keeps them in
memory until they are scored.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from engine.catalog.opening import open_catalog
from engine.errors import GraftworkError
from engine.evaluation.evaluation import EvaluationLoop
from engine.ledger.spool import Spool
from engine.logs import set_up
from engine.process_reaper import die_with_parent
from engine.settings.params import load_params
from engine.threads import Work

EVERY_S = 0.25


def main() -> int:
    """Evaluate until SIGTERM, or until the controller ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.evaluation", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    arguments = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    die_with_parent(os.getppid())
    # On shared cores the engine's users go first; its children inherit it.
    os.nice(10)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        params = load_params(arguments.params)
    except GraftworkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    set_up(params.log_format)
    spool, work = Spool(params.paths.spool, "evaluation"), Work("evaluation")
    with open_catalog(params.paths) as catalog:
        evaluation = EvaluationLoop(params, catalog, spool)
        while not ended.wait(EVERY_S):
            work.turn(evaluation.turn)
        evaluation.close()
    spool.close()
    # A judge that hangs in a thread must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
