"""The loop of the evaluators' process: it follows releases, and takes what the engines copied for them."""

import logging
from collections.abc import Mapping

from engine.catalog.catalog import Catalog, Release
from engine.catalog.fleet import Fleet
from engine.catalog.records import Replica
from engine.clients.engine import EngineClient
from engine.errors import GraftworkError
from engine.evaluation.evaluators import Evaluator, FunctionEvaluator, VerifierEvaluator
from engine.evaluation.judge import Judge
from engine.evaluation.mlflow_judge import stored_judge
from engine.evaluation.release_evaluation import EVALUATED, EvaluationProgress, ReleaseEvaluation
from engine.ledger.evaluations import release_progress
from engine.ledger.ledger import open_snapshot
from engine.ledger.spool import Spool
from engine.settings.evaluators import JUDGE, MLFLOW, EvaluatorConfig
from engine.settings.own_functions import refuse_unlisted
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig

# Copies that one engine hands over at once, and the longest answer of a shadow (s).
MOST_COPIES, ANSWER_S = 200, 120.0
log = logging.getLogger("graftwork.evaluation")


class EvaluationLoop:
    """Follows the releases that run, and gives each its copies; `turn` is one round."""

    def __init__(self, params: Params, catalog: Catalog, spool: Spool):
        self._params, self._catalog, self._emit = params, catalog, spool.emit
        self._fleet = Fleet(catalog)
        self._releases: dict[str, ReleaseEvaluation] = {}
        self._engines: dict[str, EngineClient] = {}

    def turn(self) -> None:
        """Follow the releases, and take what the engines have copied for them."""
        self._follow()
        shares = {
            one.release.policy: one.share for one in self._releases.values() if one.release.step in EVALUATED
        }
        engines = [one for one in self._fleet.live() if one.url] if shares else []
        for replica in engines:
            self._take(self._client(replica), shares)

    def close(self) -> None:
        """End all evaluators."""
        for release in self._releases.values():
            release.close()
        for engine in self._engines.values():
            engine.close()

    def _follow(self) -> None:
        running = {one.id: one for one in self._catalog.releases.all(open_only=True) if has_evaluators(one)}
        for ended in self._releases.keys() - running.keys():
            self._releases.pop(ended).close()
        for id, release in running.items():
            if id not in self._releases:
                evaluators = self._evaluators(release)
                self._releases[id] = ReleaseEvaluation(
                    release, evaluators, self._emit, self._progress(release)
                )
            self._releases[id].follow(release)

    def _evaluators(self, release: Release) -> dict[str, Evaluator]:
        """Return a release's evaluators; of one that cannot be loaded the reason is a row of the ledger."""
        evaluators: dict[str, Evaluator] = {}
        for name, config in ReleaseConfig.stored(release.settings).evaluators.items():
            if config.is_metric:
                continue
            try:
                evaluators[name] = self._evaluator(release.policy, config)
            except GraftworkError as error:
                log.error("The evaluator %r of %s: %s", name, release.policy, error)
                self._emit(
                    "evaluations",
                    release=release.id,
                    policy=release.policy,
                    evaluator=name,
                    version=config.version,
                    fault=f"unloaded: {error}",
                )
        return evaluators

    def _evaluator(self, policy: str, config: EvaluatorConfig) -> Evaluator:
        kind, timeout_s = config.kind, config.timeout_s
        if kind.startswith(JUDGE):
            model = kind.removeprefix(JUDGE)
            return Judge(config.url or "", model, config.rubric or "", timeout_s, config.key_file)
        if kind.startswith(MLFLOW):
            return stored_judge(self._params, config)
        if kind == "verifier":
            return VerifierEvaluator(self._catalog.policies.get(policy).config["verifier"], timeout_s)
        refuse_unlisted("evaluator", kind, self._params.python_modules)
        return FunctionEvaluator(kind, timeout_s)

    def _progress(self, release: Release) -> EvaluationProgress:
        if not self._params.paths.ledger_snapshot.is_file():
            return EvaluationProgress()
        with open_snapshot(self._params.paths.ledger_snapshot) as ledger:
            return EvaluationProgress(*release_progress(ledger, release))

    def _client(self, replica: Replica) -> EngineClient:
        key = self._params.paths.local_key.read_text().strip()
        if replica.url not in self._engines:
            self._engines[replica.url] = EngineClient(replica.url, key, "shadow", ANSWER_S)
        return self._engines[replica.url]

    def _take(self, engine: EngineClient, shares: Mapping[str, float]) -> None:
        try:
            told = engine.copies(shares, MOST_COPIES)
        except GraftworkError as error:
            # It may have ended just now; the fleet forgets it.
            log.debug("No copies: %s", error)
            return
        by_policy = {one.release.policy: one for one in self._releases.values()}
        for release in by_policy.values():
            release.note_times(told["users"])
        for copy in told["copies"]:
            if copy["policy"] in by_policy:
                by_policy[copy["policy"]].take(copy, engine.http)


def has_evaluators(release: Release) -> bool:
    """Return whether a release has evaluators that score answers here."""
    evaluators = ReleaseConfig.stored(release.settings).evaluators
    return any(not one.is_metric for one in evaluators.values())
