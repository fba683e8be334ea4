"""Simulated releases with an evaluator: what the shadow ends, what the canary ends, and who meets it before.

Scores and ratings are 0 or 1 and independent of each other, also those of the two answers to one question:
real ones agree more often, which needs fewer units. Each request has a user of its own.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import _record as record
import numpy as np
from _canary_traffic import WEIGHT
from _run import Run
from _verdicts import UNDECIDED, Interval

from engine.catalog.records import Release, Route
from engine.controller.advance import Evidence, advance
from engine.quality.canary import CanaryJudge
from engine.quality.sequential import MeanSequence
from engine.quality.shadow import ShadowAnswer, ShadowJudge, ShadowPair
from engine.settings.releases import ReleaseConfig

ALPHA = 0.05
BOUNDS = {
    "evaluated_false_end_rate": record.at_most(ALPHA),
    "evaluated_false_promote_rate": record.at_most(ALPHA),
    "shadow_ends_worse": record.at_least(1 - ALPHA),
    "shadow_goes_on_equal": record.at_least(1 - ALPHA),
}
NAME = "sums"


def _settings(decides: str, **settings: Any) -> dict[str, Any]:
    return {"evaluators": {NAME: {"kind": "verifier", "decides": decides}}, **settings}


# Who may promote: rated users, an evaluator, an evaluator after a shadow; then users again, after a shadow
# and with an evaluator that may only end the release.
RATINGS: dict[str, Any] = {}
EVALUATOR = _settings("both", feedback="evaluators", shadow=0)
SHADOW = _settings("both", feedback="evaluators")
AUDITED = _settings("rollback")
TITLES = {"ratings": "ratings", "evaluator": "evaluator", "shadow": "shadow, then evaluator"}
# Requests that are drawn at once, and after which a canary has no verdict.
BLOCK = 1000
# Releases that are drawn together, and by whether the form is long, how many there are at first: more follow
# until a bound is decided, up to those of the long form.
CHUNK = 50
RELEASES = {False: 500, True: 2000}
EXPOSED_RELEASES = {False: 100, True: 500}
# Of those with many keys, which take longer.
FEW = 100


class End(NamedTuple):
    """How a release ended: `shadow`, `rollback`, `promote` or `hold`; and how many users met it."""

    verdict: str
    exposed: int
    pairs: int


def running(settings: ReleaseConfig) -> tuple[Release, Route]:
    """Return a release whose canary has just started, and its route."""
    row = Release(
        "r", "p", "new", "old", "canary", WEIGHT, "running", settings.model_dump(), 0.0, 0.0,
        canary_started_at=0.0, canary_version=0,
    )  # fmt: skip
    return row, Route("p", "old", None, "new", WEIGHT)


@dataclass(frozen=True)
class Part:
    """Releases that differ by chance alone, of which a figure counts those that end like `counted`.

    `baseline` and `revision` are the means of what users think; the judge thinks better of the revision by
    `bias`. `rated` is the share of answers that users rate. They ask with `keys` API keys equally often. A
    verdict is due at every `look`th request, or pair. Without `has_canary` the shadow alone is simulated.
    """

    settings: dict[str, Any]
    baseline: float
    revision: float
    counted: tuple[str, ...]
    bias: float = 0.0
    rated: float = 0.0
    keys: int = 1
    look: int = 1
    has_canary: bool = True
    requests: int = 6000
    is_slow: bool = False

    def judge(self, name: str, seed: int, chunk: int) -> list[End]:
        """Judge a chunk of releases; its name, seed and number determine them."""
        chance = np.random.default_rng([seed, crc32(name.encode()), chunk])
        return [self.release(chance) for _ in range(CHUNK)]

    def release(self, chance: np.random.Generator) -> End:
        """Return how one release ends."""
        settings, pairs = ReleaseConfig.model_validate({"alpha": ALPHA, **self.settings}), 0
        if settings.shadow_evaluators:
            has_harm, pairs = self._shadow(settings, chance)
            if has_harm:
                return End("shadow", 0, pairs)
        return self._canary(settings, chance, pairs) if self.has_canary else End("hold", 0, pairs)

    def _shadow(self, settings: ReleaseConfig, chance: np.random.Generator) -> tuple[bool, int]:
        """Return whether the shadow finds harm, and after how many pairs it ends."""
        judge, means = (
            ShadowJudge(settings, is_against_base=False),
            [self.revision + self.bias, self.baseline],
        )
        scores = (chance.random((settings.shadow, 2)) < means).astype(float).tolist()
        for number, (new, old) in enumerate(scores):
            answers = ShadowAnswer(scores={NAME: new}), ShadowAnswer(scores={NAME: old})
            judge.observe(ShadowPair(f"k{number % self.keys}", f"u{number}", *answers))
            is_due = (number + 1) % self.look == 0 or number + 1 == settings.shadow
            if is_due and not judge.is_open:
                found = judge.result()
                if found.harm or found.is_clear:
                    return found.harm is not None, number + 1
        return False, settings.shadow

    def _canary(self, settings: ReleaseConfig, chance: np.random.Generator, pairs: int) -> End:
        judge, (row, route), exposed = CanaryJudge(settings, {0: WEIGHT}, False), running(settings), 0
        for first in range(0, self.requests, BLOCK):
            canary_N = chance.random(BLOCK) < WEIGHT
            mean_N = np.where(canary_N, self.revision, self.baseline)
            rated_N = chance.random(BLOCK) < self.rated
            reward_N = (chance.random(BLOCK) < mean_N).astype(float)
            score_N = (chance.random(BLOCK) < mean_N + self.bias * canary_N).astype(float)
            for number in range(BLOCK) if settings.evaluators else np.flatnonzero(rated_N).tolist():
                at = 0, f"k{number % self.keys}", f"u{first + number}", bool(canary_N[number])
                if settings.evaluators:
                    judge.evaluate(NAME, *at, score_N[number])
                if rated_N[number]:
                    judge.rate(*at, reward_N[number])
                if judge.is_open or number % self.look:
                    continue
                verdict = advance(row, Evidence(0.0, route, canary=judge.result())).kind
                if verdict != "wait":
                    return End(verdict, exposed + int(canary_N[: number + 1].sum()), pairs)
            exposed += int(canary_N.sum())
        return End("hold", exposed, pairs)


ENDED = ("shadow", "rollback")
# By the figure: of releases whose baseline earns 0.9, or 0.6.
PARTS = {
    "evaluated_false_end_rate.shadow-90": Part(SHADOW, 0.9, 0.9, ("shadow",), has_canary=False),
    "evaluated_false_end_rate.shadow-60": Part(SHADOW, 0.6, 0.6, ("shadow",), has_canary=False),
    "evaluated_false_end_rate.canary-90": Part(EVALUATOR, 0.9, 0.9, ("rollback",)),
    "evaluated_false_end_rate.canary-60": Part(EVALUATOR, 0.6, 0.6, ("rollback",), requests=3000),
    "evaluated_false_end_rate.release-90": Part(SHADOW, 0.9, 0.9, ENDED),
    "evaluated_false_promote_rate.canary-90": Part(EVALUATOR, 0.9, 0.8, ("promote",)),
    "evaluated_false_promote_rate.canary-60": Part(EVALUATOR, 0.6, 0.5, ("promote",), requests=3000),
    "shadow_ends_worse.90": Part(SHADOW, 0.9, 0.8, ("shadow",), has_canary=False),
    "shadow_ends_worse_at_60": Part(SHADOW, 0.6, 0.5, ("shadow",), has_canary=False),
    "shadow_ends_worse_of_10_keys": Part(
        SHADOW, 0.9, 0.8, ("shadow",), keys=10, look=50, has_canary=False, is_slow=True
    ),
    "biased_judge_false_end_rate": Part(SHADOW, 0.9, 0.9, ENDED, bias=-0.1),
    "biased_judge_false_promote_rate.alone": Part(SHADOW, 0.9, 0.8, ("promote",), bias=0.1),
    "biased_judge_false_promote_rate.audited": Part(
        AUDITED, 0.9, 0.8, ("promote",), bias=0.1, rated=1.0, look=50
    ),
}
# Users rate one answer in a hundred; of a better revision, each verdict but a promotion is wrong.
EXPOSED = {
    f"{effect}.{rule}": Part(settings, *means, right, rated=0.01, requests=500_000)
    for effect, means, right in (("worse", (0.9, 0.8), ENDED), ("better", (0.8, 0.9), ("promote",)))
    for rule, settings in (("ratings", RATINGS), ("evaluator", EVALUATOR), ("shadow", SHADOW))
}


def measure(run: Run, pool: Executor, seed: int, figures: record.Figures, share: float) -> None:
    """Add the figures of all parts, in at most this share of the time that is left."""

    def ends(name: str, part: Part, count: int, first: int = 0) -> list[End]:
        chunks = range(first // CHUNK, (first + count) // CHUNK)
        return [end for found in pool.map(part.judge, repeat(name), repeat(seed), chunks) for end in found]

    def rate(name: str, part: Part) -> None:
        count, found = FEW if part.is_slow else RELEASES[run.is_long], list[End]()
        while not found or (len(found) < RELEASES[True] and is_undecided(figures, name)):
            found += ends(name, part, count, len(found))
            add_rate(figures, name, part, found)

    def exposed(name: str, part: Part) -> None:
        found = ends(name, part, EXPOSED_RELEASES[run.is_long])
        figures.add({f"exposed_users.{name}": [end.exposed for end in found]})
        figures.values[f"exposed_right.{name}"] = share_of(found, part.counted)

    parts: list[Callable[[], None]] = [partial(rate, *one) for one in PARTS.items()]
    parts += [partial(exposed, *one) for one in EXPOSED.items()]
    run.repeats("releases with an evaluator", lambda number: parts[number](), most=len(parts), share=share)


def share_of(found: list[End], counted: tuple[str, ...]) -> float:
    """Return the share of releases that ended so."""
    return sum(end.verdict in counted for end in found) / len(found)


def is_undecided(figures: record.Figures, name: str) -> bool:
    """Say whether a figure has a bound and its interval lies on both sides of it."""
    return record.verdicts(figures, BOUNDS).get(name) == UNDECIDED


def add_rate(figures: record.Figures, name: str, part: Part, found: list[End]) -> None:
    """Add a part's rate, with an interval where it has a bound, and of a shadow what it took."""
    figures.values[name] = share_of(found, part.counted)
    plain, _, suffix = name.partition(".")
    if plain in BOUNDS:
        sequence = MeanSequence(ALPHA, above=1 - ALPHA, below=ALPHA)
        sequence.update(float(end.verdict in part.counted) for end in found)
        figures.intervals[name] = Interval(sequence.lower, sequence.upper, sequence.n)
    if not part.has_canary and part.keys == 1:
        kind = "equal" if part.revision == part.baseline else "worse"
        figures.add({f"shadow_pairs.{kind}-{100 * part.baseline:.0f}": [end.pairs for end in found]})
    if suffix.startswith("shadow"):
        on = f"shadow_goes_on_equal.{suffix.removeprefix('shadow-')}"
        figures.values[on] = 1 - figures.values[name]
        wrong = figures.intervals[name]
        figures.intervals[on] = Interval(1 - wrong.upper, 1 - wrong.lower, wrong.count)


def draw(figures: Mapping[str, float], path: Path) -> None:
    """Plot the users who met a revision before its verdict, a panel for worse and one for better ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 2.6), layout="constrained", sharex=True)
    for one, effect in zip(axes, ("worse", "better"), strict=True):
        heights = [figures[f"exposed_users.{effect}.{rule}"] for rule in TITLES]
        bars = one.barh(list(TITLES.values()), heights)
        one.bar_label(bars, [f" {height:,.0f}" for height in heights])
        one.set(xscale="symlog", title=f"10 points {effect}", xlabel="users before the verdict (median)")
        one.set_xlim(0, 100 * max(heights))
        one.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
