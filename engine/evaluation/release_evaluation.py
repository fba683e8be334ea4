"""What is evaluated of one release: its evaluators at work on the copies of users' answers."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.catalog.records import Release
from engine.evaluation.conversations import exchange_of
from engine.evaluation.evaluators import Evaluator
from engine.evaluation.scorer import Answered, Emit, Scorer
from engine.evaluation.shadow import Question, Shadow
from engine.settings.releases import ReleaseConfig

# Answers that are scored at once, and those that may wait for it; further ones are not scored.
AT_ONCE, MOST_WAITING = 8, 256
# Steps of a release in which users' answers are copied.
EVALUATED = ("shadow", "canary")


@dataclass(frozen=True)
class EvaluationProgress:
    """What the ledger has of a release: the cost by evaluator, and the units that the shadow has met."""

    spent: Mapping[str, float] = field(default_factory=dict)
    units: frozenset[str] = frozenset()


class ReleaseEvaluation:
    """Scores the copies of a release's answers by its evaluators, until it is closed."""

    def __init__(
        self, release: Release, evaluators: Mapping[str, Evaluator], emit: Emit, progress: EvaluationProgress
    ):
        self.release, self._emit, self._progress = release, emit, progress
        settings = ReleaseConfig.stored(release.settings)
        # Without one of those that decide a comparison decides nothing.
        deciding = {name for name, one in settings.deciding_evaluators.items() if not one.is_metric}
        self._is_whole = deciding <= evaluators.keys()
        self._scorers = [
            Scorer(release, name, settings.evaluators[name], evaluator, emit, progress.spent.get(name, 0.0))
            for name, evaluator in evaluators.items()
        ]
        self._pool = ThreadPoolExecutor(AT_ONCE, f"evaluation-{release.policy}")
        self._places = threading.Semaphore(AT_ONCE + MOST_WAITING)
        self._shadow: Shadow | None = None

    @property
    def share(self) -> float:
        """The share of the answers that some evaluator scores; the shadow looks at all."""
        if self.release.step == "shadow":
            return 1.0
        return max((scorer.config.share for scorer in self._scorers), default=0.0)

    def follow(self, release: Release) -> None:
        """Take the release's newest row."""
        self.release = release
        if release.step == "shadow" and self._shadow is None and self._is_whole:
            self._shadow = Shadow(release, self._scorers, self._emit, set(self._progress.units))
        if release.step != "shadow" and self._shadow is not None:
            self._shadow.close()
            self._shadow = None

    def take(self, copy: dict[str, Any], engine: httpx.Client) -> None:
        """Take the copy of an answer that this engine gave."""
        if copy["digest"] not in (self.release.revision, self.release.baseline):
            return
        exchange = exchange_of(copy["path"], copy["request"], copy["is_stream"], copy["answer"])
        if exchange is None:
            return
        if self._shadow is not None:
            self._shadow.take(Question(copy, exchange, engine))
            return
        answered = [Answered(copy["id"], copy["digest"], exchange.answer)]
        for scorer in self._scorers:
            if scorer.config.share < _place_of(copy["id"], scorer.name) or not self._places.acquire(False):
                continue
            context = {"messages": exchange.messages}
            done = self._pool.submit(scorer.score, exchange.question, answered, context)
            done.add_done_callback(lambda _: self._places.release())

    def note_times(self, times: Mapping[str, Sequence[float]]) -> None:
        """Take users' seconds to the first byte since the last call, by the kind of the answer."""
        if self._shadow is not None:
            self._shadow.times.add(times, self._shadow.has_asked())

    def close(self) -> None:
        """End the evaluators; answers that still wait are not scored."""
        if self._shadow is not None:
            self._shadow.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for scorer in self._scorers:
            scorer.close()


def _place_of(request: str, name: str) -> float:
    """Return a number in [0, 1) by which an evaluator's share of the answers is chosen."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{request}/{name}").int / 2**128
