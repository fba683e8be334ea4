"""What is evaluated of one release: its evaluators at work on the copies of users' answers."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from engine.catalog.records import Release
from engine.evaluation.conversations import Exchange, exchange_of
from engine.evaluation.evaluators import Evaluator
from engine.evaluation.scorer import Answered, Emit, Scorer
from engine.evaluation.shadow import OLDEST_S, Question, Shadow
from engine.settings.evaluators import EvaluatorConfig
from engine.settings.releases import ReleaseConfig

# Answers that are scored at once, and those that may wait for it (2 MB each); further ones are not scored.
AT_ONCE, MOST_WAITING = 8, 32
# After so many seconds an evaluator that could not be loaded is tried again.
LOAD_AGAIN_S = 30.0
# Returns the evaluator of a policy by its settings; may raise anything.
Load = Callable[[str, EvaluatorConfig], Evaluator]
Progress = tuple[Mapping[str, float], Iterable[str]]
log = logging.getLogger("graftwork.evaluation")
# Steps of a release in which users' answers are copied.
EVALUATED = ("shadow", "canary")


class ReleaseEvaluation:
    """Scores the copies of a release's answers by its evaluators, until it is closed.

    `load` returns the evaluator of a policy by its settings. One that cannot be loaded is tried again, and
    each time the reason is a row of the ledger. `progress` is the cost by evaluator before, and the units
    that the shadow has met.
    """

    def __init__(self, release: Release, load: Load, emit: Emit, progress: Progress):
        self.release, self._load, self._emit = release, load, emit
        self._spent, self._units = progress[0], set(progress[1])
        self._settings = ReleaseConfig.stored(release.settings)
        self._missing, self._load_at = set(self._settings.asked_evaluators), 0.0
        self._scorers: list[Scorer] = []
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
        """Take the release's newest row, and load what could not be loaded before."""
        self.release = release
        if self._missing and time.monotonic() >= self._load_at:
            self._load_missing()
        # Without one of those that decide a comparison decides nothing.
        is_whole = not self._missing & self._settings.deciding_evaluators.keys()
        if release.step == "shadow" and self._shadow is None and is_whole:
            self._shadow = Shadow(release, self._scorers, self._emit, self._units)
        if self._shadow is not None:
            self._shadow.is_paused = bool(release.paused)
        if release.step != "shadow" and self._shadow is not None:
            self._shadow.close()
            self._shadow = None

    def _load_missing(self) -> None:
        for name in sorted(self._missing):
            config, spent = self._settings.evaluators[name], self._spent.get(name, 0.0)
            try:
                evaluator = self._load(self.release.policy, config)
            except Exception as error:
                # A function's module, a key's file and what MLflow has may fail in any way.
                log.error("The evaluator %r of %s: %s", name, self.release.policy, error)
                self._emit(
                    "evaluations", release=self.release.id, policy=self.release.policy, evaluator=name,
                    version=config.version, fault=f"unloaded: {error}",
                )  # fmt: skip
            else:
                self._scorers.append(Scorer(self.release, name, config, evaluator, self._emit, spent))
                self._missing.discard(name)
        self._load_at = time.monotonic() + LOAD_AGAIN_S

    def take(self, copy: dict[str, Any], engine: httpx.Client) -> None:
        """Take the copy of an answer that this engine gave."""
        if copy["digest"] not in (self.release.revision, self.release.baseline):
            return
        exchange = exchange_of(copy["path"], copy["request"], copy["is_stream"], copy["answer"])
        if exchange is None:
            return
        if self._shadow is not None:
            self._shadow.take(Question(copy, exchange, engine))
        elif self.release.step == "canary":
            self._score(copy, exchange)

    def _score(self, copy: dict[str, Any], exchange: Exchange) -> None:
        answered = [Answered(copy["id"], copy["digest"], exchange.answer)]
        taken_at = time.monotonic()

        def score(scorer: Scorer) -> None:
            if time.monotonic() - taken_at <= OLDEST_S:
                scorer.score(exchange.question, answered, {"messages": exchange.messages})

        for scorer in self._scorers:
            # A number in [0, 1) chooses. The gateway has copied the largest share that one of them scores.
            place = uuid.uuid5(uuid.NAMESPACE_OID, f"{copy['id']}/{scorer.name}").int / 2**128
            if place * self.share < scorer.config.share and self._places.acquire(blocking=False):
                self._pool.submit(score, scorer).add_done_callback(lambda _: self._places.release())

    def note_times(self, times: Mapping[str, Sequence[float]], engine: httpx.Client) -> None:
        """Take seconds to the first byte of an engine's users since the last call, by the answer's kind."""
        if self._shadow is not None:
            self._shadow.note_times(times, engine)

    def close(self) -> None:
        """End the evaluators; answers that still wait are not scored."""
        if self._shadow is not None:
            self._shadow.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for scorer in self._scorers:
            scorer.close()
