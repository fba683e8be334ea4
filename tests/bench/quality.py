"""How well a revision is known from few items: whether intervals hold, and what they cost.

    graftwork bench quality [--long] [--train]

Replays recorded outcomes (`_quality_lines.py`: revisions of families of problems, each with 20,000 items) and
simulated ones whose truth is known. A suite of 200 items is drawn from a line again and again, and a revision
is read on it by the code that the product reads with.

`coverage`: the share of nominal 95% intervals that hold the truth, for each cell: how items are read
(`plain`: random items, unpaired; `adaptive`: predicted, chosen, paired with the parent; `early`: adaptive,
stopped as soon as the question of the release's gate is answered; `best`: adaptive, revisions better than all
before), and what the interval is of (`suite`, `task`). `fixed_coverage` is its mean over the cells that read
a fixed number of items. `items_vs_plain`, `items_vs_unpaired`, `items_vs_paired`: items of the adaptive
reading over those of another until its interval of the difference to the parent is as narrow, the median over
revisions. Of the task, after half of the suite, plain reading takes independent random items for each of the
two. Of the suite, `unpaired` does so without replacement, and `paired` takes random items for both, also for
revisions better than all before (`items_vs_paired_best`). First revisions have the base for a parent
(`items_vs_plain_base`, `items_vs_unpaired_base`). `missed` and `flagged`: how often the gate's question is
answered wrong for revisions that are exactly 5 points worse on the suite, and for equal ones; `gate_items` is
the mean of items read. `pass_speedup`: ten commands `graftwork score` over one of ten revisions, which must
print the same scores. `views_s`, `policy_view_s`: the slowest documented query on a made ledger, and the
slowest on one policy. `--long` replays ten times as many suites; `--train` first trains the revisions again
and records their outcomes, which takes hours.
"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median

import _quality_lines as recorded
import _quality_pass as scored
import _quality_views as views
import _record as record
import numpy as np
from _quality_lines import Line
from _quality_readings import (
    Drawn,
    IndependentItems,
    UniformPairs,
    UniformUnpaired,
    draw,
    items_for,
    steps,
)
from _run import Run, options, start
from _verdicts import Interval, mean_interval, share_interval

from engine.quality.estimate import interval
from engine.quality.prediction import OutcomePredictor
from engine.quality.reading import SuiteReading, TaskReading
from engine.quality.regression import RegressionReading, Target
from engine.settings.params import load_params

# Items of a suite, and how many of them are read: a quarter, and half.
SUITE, READS = 200, (50, 100)
# Plain reading ends here, however wide its interval is: the ratio is then larger than it would be.
MOST_PLAIN = 600
# What the gate looks for: a fall of this size.
FALL = 0.05
# Revisions that differ by more than this on the task are no models of equal ones.
NEAR = 0.2
SIMULATED = 12
# The most rounds over all lines, and pairs of passes over ten revisions, by whether the form is long.
ROUNDS, PASSES = {False: None, True: 100}, {False: None, True: 10}
# Of the time, what passes over ten revisions take; and the rows of the ledger whose views are timed.
PASS_SHARE, REVISIONS, SCORES = 0.3, {False: 100_000, True: 1_000_000}, 10
BOUNDS = {
    "coverage": record.at_least(0.94),
    "fixed_coverage": record.at_most(0.99),
    "items_vs_plain": record.at_most(0.5),
    "items_vs_paired": record.at_most(0.85),
    "items_vs_paired_best": record.at_most(1.1),
    "missed": record.at_most(0.05),
    "flagged": record.at_most(0.05),
    "gate_items": record.at_most(120),
    "pass_speedup": record.at_least(2),
    "views_s": record.at_most(2),
    "policy_view_s": record.at_most(0.1),
}
# What is judged by the interval of a share: a few readings tell little.
SHARES = ("coverage", "missed", "flagged")
# Each figure's values in one round, by name.
Found = dict[str, list[float]]


def read_plain(suite: Drawn, seed: int, read: int) -> dict[str, float]:
    """Read random items, without a parent: whether both intervals of the revision's own mean hold."""
    unknown_N = np.full(SUITE, np.nan)
    predictor = OutcomePredictor(unknown_N, np.empty((0, SUITE)), ())
    reading = SuiteReading(predictor, seed, uniform=1.0)
    for _ in steps(reading, suite.own_N, read):
        pass
    chosen = np.random.default_rng(seed).permutation(SUITE)[:read]
    low, high = interval(suite.own_N[chosen].tolist())
    return {
        "coverage.plain-suite": float(reading.interval.holds(float(suite.own_N.mean()))),
        "coverage.plain-task": float(low <= suite.own_truth <= high),
    }


def read_adaptive(suite: Drawn, seed: int, read: int, cell: str) -> dict[str, float]:
    """Read so many items, paired: what holds, and the items that others need for the same width."""
    of_suite = SuiteReading(suite.predictor(), seed)
    for _ in steps(of_suite, suite.own_N, read):
        pass
    of_task = TaskReading(suite.predictor(), suite.parent_N, seed, share=read / SUITE)
    for _ in steps(of_task, suite.own_N, SUITE):
        pass
    width, name = of_suite.interval.width, "items_vs_paired_best" if cell == "best" else "items_vs_paired"
    found = {
        f"coverage.{cell}-suite": float(of_suite.interval.holds(float(suite.own_N.mean()))),
        f"coverage.{cell}-task": float(of_task.difference.holds(suite.truth)),
        name: read / items_for(UniformPairs(suite, seed), width, SUITE),
    }
    of = "_base" if suite.is_first else ""
    if read == READS[0]:
        found[f"items_vs_unpaired{of}"] = read / items_for(UniformUnpaired(suite, seed), width, SUITE)
    else:
        plain = items_for(IndependentItems(suite, seed), of_task.difference.width, MOST_PLAIN)
        found[f"items_vs_plain{of}"] = of_task.items / plain
    return found


def gate(suite: Drawn, seed: int, target: Target) -> RegressionReading:
    """Read until it is known whether the revision has fallen by `FALL`."""
    reading = RegressionReading(
        target, suite.parent_N, suite.siblings_HN, suite.segments, seed, margin=FALL
    )  # fmt: skip
    for _ in steps(reading, suite.own_N, SUITE):
        pass
    return reading


def read_early(suite: Drawn, seed: int) -> dict[str, float]:
    """Stop once the gate's question is answered: whether both intervals of the difference hold then."""
    truths: dict[Target, float] = {"suite": suite.difference, "task": suite.truth}
    return {
        f"coverage.early-{target}": float(gate(suite, seed, target).difference.holds(truth))
        for target, truth in truths.items()
    }


def read_line(line: Line, seed: int) -> Found:
    """Return what is found with one suite for each of a line's revisions."""
    found, random = defaultdict[str, list[float]](list), np.random.default_rng(seed)

    def take(values: dict[str, float]) -> None:
        for name, value in values.items():
            found[name].append(value)

    for revision in range(1, len(line.revisions)):
        suite = draw(line, revision, SUITE, random)
        cell = "best" if line.is_best_yet(revision) else "adaptive"
        for read in READS:
            take(read_adaptive(suite, seed, read, cell) | read_plain(suite, seed, read))
        take(read_early(suite, seed))
        if line.parents[revision] <= 0 or abs(suite.truth) > NEAR:
            continue
        for name, lost in (("missed", round(FALL * SUITE)), ("flagged", 0)):
            if of_known := draw(line, revision, SUITE, random, -lost):
                reading = gate(of_known, seed, "suite")
                is_wrong = reading.has_fallen != (name == "missed")
                take({name: float(is_wrong), "gate_items": float(reading.items)})
    return found


def fixed_coverage(found: Found) -> float:
    """Return the mean coverage of the cells that read a fixed number of items."""
    fixed = (name for name in found if name.startswith("coverage.") and ".early" not in name)
    return fmean(fmean(found[name]) for name in fixed)


def summary(taken: Sequence[Found]) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the figures of all rounds, and the intervals of those that are shares."""
    found = defaultdict[str, list[float]](list)
    for one in taken:
        for name, values in one.items():
            found[name] += values
    figures = {
        name: (median if name.startswith("items_vs") else fmean)(values) for name, values in found.items()
    }
    figures |= {"fixed_coverage": fixed_coverage(found), "readings": float(len(found["gate_items"]))}
    shares = [name for name in found if name.partition(".")[0] in SHARES]
    intervals = {name: share_interval(found[name]) for name in shares}
    return figures, intervals | {"fixed_coverage": mean_interval([fixed_coverage(one) for one in taken])}


def rounds(lines: list[Line], pool: ProcessPoolExecutor, first: int) -> Iterator[Found]:
    """Yield what each round over all lines finds, whatever the number of workers."""
    for number in count(first):
        found = defaultdict[str, list[float]](list)
        for each in pool.map(read_line, lines, [1000 * number + place for place in range(len(lines))]):
            for name, values in each.items():
                found[name] += values
        yield found


def replay(run: Run, lines: list[Line], what: str, share: float) -> list[Found]:
    """Return what is found in some lines, read again and again while the share of the time lasts."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        each = rounds(lines, pool, 0)
        return run.repeats(what, lambda _: next(each), share=share, most=ROUNDS[run.is_long])


def slowest(seconds: dict[str, float], suffix: str) -> dict[str, float]:
    """Return the slowest query over all policies, and the slowest of one."""
    of_one = {name for name in seconds if name.endswith(" of one policy")}
    parts = {"policy_view_s": of_one, "views_s": seconds.keys() - of_one}
    return {name + suffix: max(seconds[query] for query in queries) for name, queries in parts.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--train", action="store_true", help="record the outcomes of new revisions first")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    run, figures = Run("quality", given.long), record.Figures()
    if given.train:
        import _quality_training as training

        with run.preparing():
            recorded.save(training.lines(given.params), recorded.FILE)
    lines = {"recorded": recorded.load(), "simulated": list(recorded.simulated(SIMULATED, seed=1))}
    with tempfile.TemporaryDirectory(prefix="graftwork-quality-", dir=given.out) as root, run.preparing():
        params = load_params(given.params)
        repeats = partial(run.repeats, "pass", share=PASS_SHARE, most=PASSES[run.is_long])
        passes = scored.measured(params, Path(root), repeats)
        figures.add({name: [one[name] for one in passes] for name in (passes[0] if passes else ())})
        for taken in run.parts(lambda: views.measure(Path(root), REVISIONS[run.is_long], SCORES)):
            figures.values |= slowest(taken, f".{REVISIONS[run.is_long]}")
    for (source, each), share in zip(lines.items(), (0.6, 1.0), strict=True):
        if taken := replay(run, each, f"rounds of {source} outcomes", share):
            found, intervals = summary(taken)
            figures.values |= {f"{name}.{source}": value for name, value in found.items()}
            figures.intervals |= {f"{name}.{source}": value for name, value in intervals.items()}
    record.report(run, figures, BOUNDS, True, given.out)


if __name__ == "__main__":
    start(main)
