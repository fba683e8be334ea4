"""The controller's side of the evaluators' process: it runs while a release with evaluators does."""

import logging
import subprocess
import sys

from engine.settings.params import Params
from engine.threads import PeriodicThread

EVERY_S, STOP_S = 1.0, 5.0
log = logging.getLogger("graftwork.controller")


class EvaluationProcess:
    """Starts the process when a release needs it, again when it has died, and ends it when none does."""

    def __init__(self, params: Params):
        self._params, self._is_needed = params, False
        self._thread: PeriodicThread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def need(self, is_needed: bool) -> None:
        """Have the process run from now on, or no more; a thread sees to it."""
        self._is_needed = is_needed
        if self._thread is None:
            self._thread = PeriodicThread("evaluation-process", EVERY_S, self.look)
            self._thread.start()
        self._thread.wake()

    def look(self) -> None:
        """Start or end the process, as it is needed."""
        if not self._is_needed:
            return self.end()
        if self._process is not None and (status := self._process.poll()) is not None:
            log.error("The evaluators' process ended with %s and is started again.", status)
            self._process = None
        if self._process is None:
            command = [sys.executable, "-m", "engine.evaluation", "--params", str(self._params.source)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return None

    def stop(self) -> None:
        """End the thread and the process."""
        self._is_needed = False
        if self._thread is not None:
            self._thread.stop()
            # It might be about to start the process.
            self._thread.join()
        self.end()

    def end(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
