"""Logs the metrics of a running training session to MLflow, from a background thread.

Rows are sent in batches: one row costs MLflow's server 0.15 s of a core, ten in a batch 0.3 s (SQLite).
Registering the revision reuses the run and logs the remaining rows. A failed run is not registered, so this
thread sends its remaining rows.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from engine.errors import ServiceError
from tasks.register import ensure_up, log_steps, run_of_session, start_run_of_session

EVERY_S = 20.0
# The longest wait for the thread when training ends.
LAST_S = 10.0


class Tracking:
    """Logs the rows of steps to their session's MLflow run, in batches until the block ends.

    An exception in the block marks the run as failed.
    """

    def __init__(self, url: str, policy: str):
        self.url, self.policy = url, policy
        self.rows: list[Mapping[str, Any]] = []
        self._sent, self._failed, self._closed = 0, False, threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"mlflow-{policy}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Callable[[Mapping[str, Any]], None]:
        return self.rows.append

    def __exit__(self, kind: object, *_: object) -> None:
        """Stop the thread, waiting at most `LAST_S`; a failed run's remaining rows are sent first."""
        self._failed = kind is not None
        self._closed.set()
        self._thread.join(LAST_S)

    @property
    def _is_over(self) -> bool:
        """Whether the registration owns the run by now, so that a late batch must not reopen it."""
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

        # On failure the next batch or the registration sends the rows.
        with suppress(ServiceError, MlflowException):
            ensure_up(self.url)
            client, session = MlflowClient(self.url, self.url), self.rows[0]["session"]
            if self._is_over:
                return
            existing = run_of_session(client, self.policy, session)
            run = existing or start_run_of_session(client, self.policy, session)
            log_steps(client, run, rows)
            if self._is_over:
                return
            # A run that failed before is running again.
            client.update_run(run.info.run_id, "FAILED" if self._failed else "RUNNING")
            self._sent += len(rows)
