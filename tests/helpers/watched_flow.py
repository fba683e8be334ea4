"""A flow process for tests: it trains one policy as its flow does, and notes every phase that it enters.

    python tests/helpers/watched_flow.py SETTINGS POLICY NOTES

A note is a line of NOTES: monotonic seconds, the session's step, the phase. The revision's digest ends it.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine.services.lifecycle import environment
from engine.settings.params import load_params


class Notes:
    """What has been noted is there after a kill: each line is one write."""

    def __init__(self, path: Path):
        self.file, self.step = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 0

    def write(self, *words: object) -> None:
        os.write(self.file, f"{time.monotonic()} {self.step} {' '.join(map(str, words))}\n".encode())

    def watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Note when a phase begins; after it the flow itself is at work."""

        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            self.write("revision" if "revision" in given else phase)
            found = function(*given, **named)
            self.write("flow")
            return found

        return call

    def stepping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(run: Any, session: Any) -> Any:
            self.step = session.step
            return function(run, session)

        return call


def main() -> None:
    settings, policy, path = sys.argv[1:]
    params, notes = load_params(Path(settings)), Notes(Path(path))
    os.environ.update(environment(params))
    from engine.training import loop, rollout_data
    from engine.training.service.client import TrainerClient

    phases = (
        (TrainerClient, "create_session", "open"), (TrainerClient, "export", "export"),
        (rollout_data, "draw", "rollouts"), (rollout_data, "judge", "reward"), (loop, "judge", "reward"),
        (TrainerClient, "forward_backward", "forward_backward"), (TrainerClient, "optim_step", "optim_step"),
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name, phase in phases:
            stack.enter_context(patch.object(owner, name, notes.watched(getattr(owner, name), phase)))
        stack.enter_context(patch.object(loop, "grpo_step", notes.stepping(loop.grpo_step)))
        key = params.paths.local_key.read_text().strip()
        trained = loop.train(params, policy, params.policy(policy), key)
    notes.step = trained.step
    notes.write("end", trained.digest)


if __name__ == "__main__":
    main()
