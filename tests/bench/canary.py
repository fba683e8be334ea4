"""How often a canary's verdict is wrong, and how late a right one comes.

    graftwork bench canary [--requests 3000] [--workers N] [--long]

Simulated users, and the code that decides: the judge with all its guards after every answer and every rating,
and `advance` whenever a guard finds something (until then it waits). Equal canaries
(`aa_false_rollback_rate`), canaries that are worse by exactly the margin (`aa_false_promote_rate`), then
canaries that are worse by 1 to 30 points, beside a fixed-sample z-test with the same looks and ten looks with
a Bonferroni correction. `request_us` is the CPU time of our rule for a request, its answer and its rating.
Writes the figures and their plot, `canary.png`, to `--out`.

Then releases with an evaluator, 500 of a kind: how often equal ones end in shadow or by the evaluator
(`evaluated_false_end_rate`), how many that are 10 points worse end in shadow (`shadow_ends_worse`), what a
judge that is 0.1 kinder to one revision does (`biased_judge`), and how many users meet a revision before its
verdict where they rate one answer in a hundred (`exposed_users`, and the plot `exposed.png`).

Canaries of a kind are drawn until an interval of its rate, valid at every look, lies on one side of alpha.
`--long` has 2,000 of each kind, at least of canaries, and effects of 1 and 2 points. The figures are the same
with any number of workers.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path

import _canary_evaluated as evaluated
import _record as record
import numpy as np
from _canary_traffic import WEIGHT, Requests, Rule, bonferroni, events, fixed_sample, requests
from _run import Run, options, start
from _verdicts import Interval

from engine.controller.advance import Evidence, advance
from engine.quality.canary import CanaryAnswer, CanaryJudge
from engine.quality.sequential import MeanSequence
from engine.settings.releases import ReleaseConfig

KINDS = {
    "plain": frozenset[str](),
    "drift": frozenset({"drift"}),
    "clusters": frozenset({"clusters"}),
    "feedback": frozenset({"feedback"}),
    "all": frozenset({"drift", "clusters", "feedback", "faults"}),
}
# Effects in points, the margin that each is judged with, and how many requests a canary has.
EFFECTS = {1: (0.02, 20_000), 2: (0.02, 20_000), 5: (0.1, 5000), 10: (0.1, 5000), 30: (0.1, 5000)}
ALPHA = 0.05
BOUNDS = {
    "aa_false_rollback_rate": record.at_most(ALPHA),
    "aa_false_promote_rate": record.at_most(ALPHA),
    **evaluated.BOUNDS,
}
# The most of the time that releases with an evaluator take.
EVALUATED_SHARE = 0.5
# The plot: each panel's figure with its label and scale, and the name of each rule.
PANELS = {
    "delay_requests": ("requests before the verdict (median)", "log"),
    "harmed_requests": ("of these answered by the canary (median)", "log"),
    "rollback_share": ("share rolled back", "linear"),
}
TITLES = {"ours": "ours", "fixed": "fixed-sample z", "bonferroni": "Bonferroni, 10 looks"}
# Canaries that are drawn together; the number of a chunk is in its seed.
CHUNK = 50
LEAST_LONG = 2000
# By whether the form is long, how many canaries have an effect, and of 1 and 2 points.
EFFECT_CANARIES = {False: (100, 0), True: (500, 200)}


def ours(traffic: Requests, alpha: float, margin: float, is_thorough: bool = False) -> tuple[str, int]:
    """Return the verdict of the product's own code, and the number of requests before it.

    `is_thorough` asks `advance` also while no guard finds anything.
    """
    settings = ReleaseConfig(alpha=alpha, margin=margin)
    (release, route), asked = evaluated.running(settings), 0
    judge = CanaryJudge(settings, {0: WEIGHT}, is_against_base=False)
    users, rewards = list(map(str, traffic.user_N.tolist())), traffic.reward_N.tolist()
    arms, told = traffic.canary_N.tolist(), list(traffic.told())
    for number, is_rating in events(traffic):
        if is_rating:
            judge.rate(0, "k", users[number], arms[number], rewards[number])
        else:
            asked = number + 1
            judge.observe(CanaryAnswer(0, "k", users[number], arms[number], *told[number]))
        if judge.is_open and not is_thorough:
            continue
        action = advance(release, Evidence(0.0, route, canary=judge.result()))
        if action.kind != "wait":
            return action.kind, asked
    return "hold", asked


RULES: dict[str, Rule] = {"ours": ours, "fixed": fixed_sample, "bonferroni": bonferroni}


@dataclass
class RuleVerdicts:
    """What a rule said of some canaries: verdicts, requests before them, and those that the canary had."""

    kinds: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    harmed: list[int] = field(default_factory=list)

    def share(self, verdict: str) -> float:
        """Return the share of a verdict."""
        return self.kinds.count(verdict) / len(self.kinds)

    def extend(self, more: "RuleVerdicts") -> None:
        self.kinds += more.kinds
        self.asked += more.asked
        self.harmed += more.harmed


Verdicts = dict[str, RuleVerdicts]


@dataclass(frozen=True)
class Part:
    """Canaries of `requests` requests each that differ by chance alone; `effect` is theirs on the reward."""

    kind: str
    effect: float
    margin: float
    requests: int
    seed: int

    @property
    def wrong(self) -> str:
        """Return the wrong verdict on an equal canary, or on one that is worse by the margin."""
        return "promote" if self.effect else "rollback"

    def judge(self, chunk: int) -> tuple[Verdicts, float]:
        """Let every rule judge a chunk; return the verdicts, and the CPU seconds of our rule.

        The seed and what the canaries are like determine the verdicts, whichever process draws them.
        """
        points = round(1000 * self.effect)
        chance = np.random.default_rng([self.seed, list(KINDS).index(self.kind), abs(points), chunk])
        found, own_s = {rule: RuleVerdicts() for rule in RULES}, 0.0
        for _ in range(CHUNK):
            traffic = requests(chance, self.requests, self.effect, KINDS[self.kind])
            for rule, judge in RULES.items():
                began = time.process_time()
                verdict, asked = judge(traffic, ALPHA, self.margin)
                own_s += (time.process_time() - began) * (rule == "ours")
                one = RuleVerdicts([verdict], [asked], [int(traffic.canary_N[:asked].sum())])
                found[rule].extend(one)
        return found, own_s


@dataclass
class Rate:
    """A part's verdicts so far, and a confidence sequence of the rate of wrong ones."""

    part: Part
    found: Verdicts = field(default_factory=lambda: {rule: RuleVerdicts() for rule in RULES})
    rate: MeanSequence = field(default_factory=lambda: MeanSequence(ALPHA, above=ALPHA, below=ALPHA))

    def extend(self, more: Verdicts) -> None:
        for rule, verdicts in more.items():
            self.found[rule].extend(verdicts)
        self.rate.update(float(kind == self.part.wrong) for kind in more["ours"].kinds)

    def is_open(self, least: int) -> bool:
        """Say whether it needs more canaries."""
        return self.rate.n < least or not (self.rate.is_above or self.rate.is_below)


def null_figures(rate: Rate) -> record.Figures:
    """Return the rates of wrong verdicts on equal canaries, or on those that are worse by the margin."""
    wrong, kind, figures = rate.part.wrong, rate.part.kind, record.Figures()
    for rule, verdicts in rate.found.items():
        prefix = "" if rule == "ours" else f"{rule}_"
        figures.values[f"{prefix}aa_false_{wrong}_rate.{kind}"] = verdicts.share(wrong)
    figures.values[f"aa_undecided.{wrong}.{kind}"] = rate.found["ours"].share("hold")
    interval = Interval(rate.rate.lower, rate.rate.upper, rate.rate.n)
    figures.intervals[f"aa_false_{wrong}_rate.{kind}"] = interval
    return figures


def effect_figures(effect: int, found: Mapping[str, RuleVerdicts]) -> Iterator[tuple[str, float]]:
    """Yield delay, harmed requests and shares of verdicts for canaries that are worse by `effect` points."""
    for rule, verdicts in found.items():
        suffix = f"{rule}.{effect}"
        yield f"delay_requests.{suffix}", record.median(verdicts.asked)
        yield f"harmed_requests.{suffix}", record.median(verdicts.harmed)
        for verdict in ("promote", "rollback", "hold"):
            yield f"{verdict}_share.{suffix}", verdicts.share(verdict)


def ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Return our delay over that of the fastest other rule that holds alpha, for each effect."""
    holding = [
        rule
        for rule in RULES
        if rule != "ours"
        and all(value <= ALPHA for name, value in figures.items() if name.startswith(f"{rule}_aa_false_"))
    ]
    return {
        f"delay_over_others.{effect}": figures[f"delay_requests.ours.{effect}"]
        / min(figures[f"delay_requests.{rule}.{effect}"] for rule in holding)
        for effect in EFFECTS
        if holding and f"delay_requests.ours.{effect}" in figures
    }


def draw(figures: Mapping[str, float], path: Path) -> None:
    """Plot delay, harmed requests and share of rollbacks over the effect's size, a line a rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [effect for effect in EFFECTS if f"delay_requests.ours.{effect}" in figures]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(12, 3.6), layout="constrained")
    for one, (name, (label, scale)) in zip(axes, PANELS.items(), strict=True):
        for rule, title in TITLES.items():
            heights = [figures[f"{name}.{rule}.{effect}"] for effect in points]
            one.plot(points, heights, marker="o", label=title)
        one.set(xscale="log", yscale=scale, xlabel="points below the baseline", ylabel=label)
        one.set_xticks(points, [str(effect) for effect in points])
        one.minorticks_off()
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    given = parser.parse_args()
    run = Run("canary", given.long)
    figures = record.Figures()
    with ProcessPoolExecutor(given.workers) as pool:
        evaluated.measure(run, pool, given.seed, figures, EVALUATED_SHARE)
        own_s, asked = nulls(run, pool, given, figures)
        more_s, more = effects(run, pool, given, figures)
    values = figures.values
    if asked + more:
        values["request_us"] = (own_s + more_s) / (asked + more) * 1e6
    values |= ratios(values)
    if more:
        draw(values, given.out / "canary.png")
    if all(f"exposed_users.{name}" in values for name in evaluated.EXPOSED):
        evaluated.draw(values, given.out / "exposed.png")
    # A rule that never decides would never be wrong.
    correct = values.get("rollback_share.ours.30", 1.0) > 0.99
    correct &= values.get("aa_undecided.rollback.plain", 0.0) < 0.5
    record.report(run, figures, BOUNDS, correct, given.out)


def nulls(run: Run, pool: Executor, given: argparse.Namespace, figures: record.Figures) -> tuple[float, int]:
    """Add the rates of wrong verdicts; return our rule's CPU seconds, and its requests."""
    margin, own_s = ReleaseConfig().margin, 0.0
    effects = (0.0, -margin)
    parts = [Part(kind, effect, margin, given.requests, given.seed) for kind in KINDS for effect in effects]
    rates, least = [Rate(part) for part in parts], LEAST_LONG if run.is_long else CHUNK

    def take(chunk: int) -> None:
        nonlocal own_s
        left = [rate for rate in rates if rate.is_open(least)]
        judged = pool.map(Part.judge, [rate.part for rate in left], repeat(chunk))
        for rate, (found, seconds) in zip(left, list(judged), strict=True):
            rate.extend(found)
            own_s += seconds

    def is_enough(_: object) -> bool:
        return not any(rate.is_open(least) for rate in rates)

    run.repeats(f"{CHUNK} canaries of each open kind", take, share=0.85, is_enough=is_enough)
    for rate in rates:
        if rate.rate.n:
            found = null_figures(rate)
            figures.values |= found.values
            figures.intervals |= found.intervals
    return own_s, sum(sum(rate.found["ours"].asked) for rate in rates)


def effects(
    run: Run, pool: Executor, given: argparse.Namespace, figures: record.Figures
) -> tuple[float, int]:
    """Add delays and verdicts by the effect's size; return our rule's CPU seconds, and its requests."""
    many, few = EFFECT_CANARIES[run.is_long]
    own_s, asked = 0.0, 0

    def take(effect: int, margin: float, count: int) -> None:
        nonlocal own_s, asked
        part = Part("plain", -effect / 100, margin, count, given.seed + 1)
        found = {rule: RuleVerdicts() for rule in RULES}
        chunks = range((few if margin < ReleaseConfig().margin else many) // CHUNK)
        for verdicts, seconds in pool.map(part.judge, chunks):
            own_s += seconds
            for rule, more in verdicts.items():
                found[rule].extend(more)
        if chunks:
            figures.values.update(effect_figures(effect, found))
            asked += sum(found["ours"].asked)

    run.parts(*(partial(take, effect, *how) for effect, how in reversed(EFFECTS.items())))
    return own_s, asked


if __name__ == "__main__":
    start(main)
