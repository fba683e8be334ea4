"""A verifier's own process: `python -m engine.problems.verifier_process KIND DESCRIPTOR`.

Its first message on the pipe is why the verifier cannot be loaded, or None; then one (score, fault) for each
(question, answer, text). An evaluator's process does the same with other arguments. It starts
with the variables of `Apart` alone, so a user's function finds no password of the services in its
environment. It runs as their user, so it may read what that user may.
"""

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import ConfigError
from engine.problems.verifiers import load_judge, number
from engine.process_reaper import die_with_parent


def serve(load: Callable[[str], Callable[..., Any]], read: Callable[[Any], tuple[Any, str | None]]) -> None:
    """Call what `load` returns for each arguments from the pipe until it closes; `read` what it returns."""
    # A hanging verifier would otherwise outlive a killed parent.
    die_with_parent(os.getppid())
    kind, descriptor = sys.argv[1:]
    pipe = Connection(int(descriptor))
    try:
        function = load(kind)
    except ConfigError as error:
        return pipe.send(str(error))
    pipe.send(None)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            answer = read(function(*asked))
        except Exception as error:
            # A custom function may raise anything: that costs this answer, not the run.
            answer = (0.0, f"raised {type(error).__name__}")
        pipe.send(answer)


if __name__ == "__main__":
    serve(load_judge, number)
