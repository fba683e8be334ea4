"""A training run in MLflow while it trains: its steps' metrics, from a thread that nothing waits for.

Rows go together and seldom: one takes MLflow's server 0.15 s of a core, ten together 0.3 s (SQLite). What is
left when training ends is logged as the revision is registered, whose run this one then is; a run that failed
is registered nowhere, and sends it.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from engine.errors import ServiceError
from engine.settings.params import Params
from tasks.register import ensure_up, log_steps, run_of_session, start_run_of_session

EVERY_S = 20.0
# How long the end of a training run waits for what is being sent.
LAST_S = 10.0


def tracked(params: Params, policy: str) -> "Tracking":
    """Give what logs a step's row to the MLflow run of its session, which fails when what is inside does."""
    return Tracking(params.url("mlflow"), policy)


class Tracking:
    """Sends `rows`, which only grow, until the block ends."""

    def __init__(self, url: str, policy: str):
        self.url, self.policy = url, policy
        self.rows: list[Mapping[str, Any]] = []
        self._sent, self._failed, self._closed = 0, False, threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"mlflow-{policy}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Callable[[Mapping[str, Any]], None]:
        return self.rows.append

    def __exit__(self, kind: object, *_: object) -> None:
        """End, after `LAST_S` at most; of a run that failed, what is left is sent."""
        self._failed = kind is not None
        self._closed.set()
        self._thread.join(LAST_S)

    @property
    def _is_over(self) -> bool:
        """Whether the run is the registration's by now: one that was sent late must not open it again."""
        return self._closed.is_set() and not self._failed

    def _work(self) -> None:
        while not self._closed.wait(EVERY_S):
            self._send()
        if self._failed:
            self._send()

    def _send(self) -> None:
        rows = self.rows[self._sent :]
        if not self.rows or not (rows or self._failed):
            return
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        # The next time sends them, or the registration.
        with suppress(ServiceError, MlflowException):
            ensure_up(self.url)
            client, session = MlflowClient(self.url, self.url), self.rows[0]["session"]
            if self._is_over:
                return
            found = run_of_session(client, self.policy, session)
            run = found or start_run_of_session(client, self.policy, session)
            log_steps(client, run, rows)
            if self._is_over:
                return
            # One that failed before runs again.
            client.update_run(run.info.run_id, "FAILED" if self._failed else "RUNNING")
            self._sent += len(rows)
