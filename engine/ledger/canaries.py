"""Feeds a canary's judge from the ledger: for the controller, and again for reports."""

from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter

import duckdb

from engine.catalog.records import Release
from engine.ledger.evaluations import LiveScore, live_scores
from engine.ledger.queries import ANSWERED, Rating, canary_ratings, of_canary
from engine.quality.canary import CanaryAnswer, CanaryJudge, CanaryResult, FeedbackCounts
from engine.settings.releases import ReleaseConfig

# Where no pieces were counted the answer was not streamed, and `ttft_s` is the time of the whole answer.
ANSWERS = f"""
    SELECT rowid, "at", coalesce(route_version, 0), key, unit, arm = 'canary', coalesce(status, 200), outcome,
        CASE WHEN pieces IS NOT NULL AND status = 200 THEN ttft_s END, token_s,
        CASE WHEN status = 200 THEN coalesce(completion_tokens, pieces) END,
        CASE WHEN status = 200 THEN latency_s END
    {ANSWERED} AND rowid > $after AND "at" <= $ended ORDER BY rowid
"""
# Answers, rated ones, valid ratings by the answer's own key, those by other keys, and those outside [0, 1].
FEEDBACK = f"""
    WITH answers AS (SELECT id, key, status {ANSWERED} AND "at" <= $ended), said AS (
        SELECT request_id, feedback.key = answers.key AS is_own,
            coalesce(reward BETWEEN 0 AND 1, false) AS is_valid
        FROM feedback JOIN answers ON request_id = answers.id
        WHERE feedback."at" <= $ended AND coalesce(status, 200) < 400
    )
    SELECT (SELECT count(*) FROM answers WHERE coalesce(status, 200) < 400),
        count(DISTINCT request_id) FILTER (is_own AND is_valid),
        count(*) FILTER (is_own AND is_valid),
        count(*) FILTER (NOT is_own),
        count(*) FILTER (is_own AND NOT is_valid)
    FROM said
"""


class CanaryReader:
    """Feeds one canary's judge; `settings` replaces the release's own ones."""

    def __init__(self, release: Release, settings: ReleaseConfig | None = None):
        self._steps: dict[int, float] = {}
        self._follow(release)
        settings = settings or ReleaseConfig.stored(release.settings)
        self.judge = CanaryJudge(settings, self._steps, release.baseline is None)
        self._counts = FeedbackCounts()
        self._answers_until = -1
        self._rated: set[int] = set()
        self._rules = {name: one.version for name, one in settings.evaluators.items()}
        self._metrics = {name for name, one in settings.evaluators.items() if one.is_metric}
        self._scored: set[str] = set()

    def read(self, ledger: duckdb.DuckDBPyConnection, release: Release) -> CanaryResult:
        """Take the answers and ratings that are new, and return what all say."""
        self._follow(release)
        answers = self._answers(ledger, release, self._answers_until)
        ratings = [rating for rating in canary_ratings(ledger, release) if rating.seq not in self._rated]
        for number, _, answer in answers:
            self.judge.observe(answer)
            self._answers_until = number
        for rating in ratings:
            self.rate(rating)
            self._rated.add(rating.seq)
        for score in self._scores(ledger, release):
            self._evaluate(score)
        if answers or ratings:
            self._counts = self._feedback(ledger, release)
        return self.judge.result(self._counts)

    def replay(self, ledger: duckdb.DuckDBPyConnection, release: Release) -> Iterator[float]:
        """Take one answer or rating after the other by their times; yield each time, in epoch seconds."""
        events: list[tuple[float, Callable[[], None]]] = [
            (at, partial(self.judge.observe, answer)) for _, at, answer in self._answers(ledger, release)
        ]
        events += [(rating.at, partial(self.rate, rating)) for rating in canary_ratings(ledger, release)]
        events += [(score.at, partial(self._evaluate, score)) for score in self._scores(ledger, release)]
        for at, take in sorted(events, key=itemgetter(0)):
            take()
            yield at

    def rate(self, rating: Rating) -> None:
        """Give the judge one rating."""
        step = self._step_of(rating.version)
        self.judge.rate(step, rating.key, rating.unit, rating.is_canary, rating.reward, rating.segment)

    def _scores(self, ledger: duckdb.DuckDBPyConnection, release: Release) -> list[LiveScore]:
        """Return the new scores by this release's evaluators, in the version that each had at its start."""
        if not self._rules:
            return []
        return [
            score
            for score in live_scores(ledger, release)
            if score.seq not in self._scored
            and score.evaluator in self._rules
            and (score.evaluator in self._metrics or score.rule == self._rules[score.evaluator])
        ]

    def _evaluate(self, score: LiveScore) -> None:
        step = self._step_of(score.version)
        self.judge.evaluate(score.evaluator, step, score.key, score.unit, score.is_canary, score.value)
        self._scored.add(score.seq)

    def _answers(
        self, ledger: duckdb.DuckDBPyConnection, release: Release, after: int = -1
    ) -> list[tuple[int, float, CanaryAnswer]]:
        """Return the answers after row number `after`, in order: the row's number, its time, the answer."""
        rows = ledger.execute(ANSWERS, of_canary(release) | {"after": after}).fetchall()
        return [
            (number, at, CanaryAnswer(self._step_of(version), *seen)) for number, at, version, *seen in rows
        ]

    def _feedback(self, ledger: duckdb.DuckDBPyConnection, release: Release) -> FeedbackCounts:
        answers, rated, own, foreign, refused = ledger.execute(FEEDBACK, of_canary(release)).fetchall()[0]
        return FeedbackCounts(answers, rated, self.judge.rewards.late, own - rated, foreign, refused)

    def _follow(self, release: Release) -> None:
        """Note the steps so far; the judge shares this mapping."""
        self._steps |= {int(version): weight for version, weight in release.ramp or [[0, release.weight]]}

    def _step_of(self, version: int) -> int:
        """Return the step during which a route had this version."""
        starts = list(self._steps)
        return starts[max(0, bisect(starts, version) - 1)]
