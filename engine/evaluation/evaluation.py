"""The loop of the evaluators' process: it follows releases, and takes what the engines copied for them."""

import logging
from collections.abc import Mapping

from engine.catalog.catalog import Catalog, Release
from engine.catalog.fleet import Fleet
from engine.clients.engine import EngineClient
from engine.errors import GraftworkError
from engine.evaluation.evaluators import Evaluator, FunctionEvaluator, VerifierEvaluator
from engine.evaluation.judge import judge_of
from engine.evaluation.mlflow_judge import stored_judge
from engine.evaluation.release_evaluation import EVALUATED, Progress, ReleaseEvaluation
from engine.ledger.evaluations import release_progress
from engine.ledger.ledger import open_snapshot
from engine.ledger.spool import Spool
from engine.settings.evaluators import JUDGE, MLFLOW, EvaluatorConfig
from engine.settings.own_functions import refuse_unlisted
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig

# Copies that one engine hands over at once, how long that may take (s), and an answer of a shadow.
MOST_COPIES, COPIES_S, ANSWER_S = 200, 3.0, 120.0
log = logging.getLogger("graftwork.evaluation")


class EvaluationLoop:
    """Follows the releases that run, and gives each its copies; `turn` is one round."""

    def __init__(self, params: Params, catalog: Catalog, spool: Spool):
        self._params, self._catalog, self._emit = params, catalog, spool.emit
        self._fleet = Fleet(catalog)
        self._releases: dict[str, ReleaseEvaluation] = {}
        # By address: who hands over copies, and who answers a shadow, which may take long.
        self._engines: dict[str, tuple[EngineClient, EngineClient]] = {}

    def turn(self) -> None:
        """Follow the releases, and take what the engines have copied for them."""
        self._follow()
        evaluated = {
            one.release.policy: one for one in self._releases.values() if one.release.step in EVALUATED
        }
        urls = {one.url for one in self._fleet.live() if one.url} if evaluated else set()
        for gone in self._engines.keys() - urls:
            for client in self._engines.pop(gone):
                client.close()
        for url in sorted(urls):
            self._take(*self._clients(url), evaluated)

    def close(self) -> None:
        """End all evaluators."""
        for release in self._releases.values():
            release.close()

    def _follow(self) -> None:
        running = {
            one.id: one
            for one in self._catalog.releases.all(open_only=True)
            if ReleaseConfig.stored(one.settings).asked_evaluators
        }
        for ended in self._releases.keys() - running.keys():
            self._releases.pop(ended).close()
        for id, release in running.items():
            if id not in self._releases:
                progress = self._progress(release)
                self._releases[id] = ReleaseEvaluation(release, self._evaluator, self._emit, progress)
            self._releases[id].follow(release)

    def _evaluator(self, policy: str, config: EvaluatorConfig) -> Evaluator:
        """Return the evaluator with these settings; raises `GraftworkError` where it cannot be had."""
        kind, timeout_s = config.kind, config.timeout_s
        if kind.startswith(JUDGE):
            return judge_of(self._params.paths, config, kind.removeprefix(JUDGE), config.rubric or "")
        if kind.startswith(MLFLOW):
            return stored_judge(self._params, config)
        if kind == "verifier":
            verifier = self._catalog.policies.get(policy).config.get("verifier", "contract")
            return VerifierEvaluator(verifier, timeout_s)
        refuse_unlisted("evaluator", kind, self._params.python_modules)
        return FunctionEvaluator(kind, timeout_s)

    def _progress(self, release: Release) -> Progress:
        if not self._params.paths.ledger_snapshot.is_file():
            return {}, ()
        with open_snapshot(self._params.paths.ledger_snapshot) as ledger:
            return release_progress(ledger, release)

    def _clients(self, url: str) -> tuple[EngineClient, EngineClient]:
        if url not in self._engines:
            key = self._params.paths.local_key.read_text().strip()
            copying, answering = (EngineClient(url, key, "shadow", limit) for limit in (COPIES_S, ANSWER_S))
            self._engines[url] = copying, answering
        return self._engines[url]

    def _take(
        self, copying: EngineClient, answering: EngineClient, evaluated: Mapping[str, ReleaseEvaluation]
    ) -> None:
        try:
            told = copying.copies({name: one.share for name, one in evaluated.items()}, MOST_COPIES)
        except GraftworkError as error:
            # It may have ended just now; the fleet forgets it.
            log.debug("No copies: %s", error)
            return
        for release in evaluated.values():
            release.note_times(told["users"], answering.http)
        for copy in told["copies"]:
            if copy["policy"] in evaluated:
                evaluated[copy["policy"]].take(copy, answering.http)
