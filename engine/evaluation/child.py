"""The controller's side of the evaluators' process: it runs while a release with evaluators does."""

import logging
import subprocess
import sys

from engine.catalog.catalog import Catalog
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from engine.threads import PeriodicThread

EVERY_S, STOP_S = 1.0, 5.0
log = logging.getLogger("graftwork.controller")


class EvaluationProcess(PeriodicThread):
    """Starts the process when a release needs it, again when it has died, and ends it when none does."""

    def __init__(self, params: Params, catalog: Catalog):
        super().__init__("evaluation-process", EVERY_S, self.look)
        self._params, self._catalog = params, catalog
        self._process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Start or end the process, as the running releases need it."""
        running = self._catalog.releases.all(open_only=True)
        is_needed = any(ReleaseConfig.stored(one.settings).asked_evaluators for one in running)
        if not is_needed:
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
        super().stop()
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
