"""How often a canary's verdict is wrong, and how late a right one comes.

    graftwork bench canary [--canaries 2000] [--requests 3000] [--effect-canaries 500] [--small 200]

Simulated users, and the code that decides: the judge, with all its guards, and `advance` after every answer
and every rating. Equal canaries (`aa_false_rollback_rate`), canaries that are worse by exactly the margin
(`aa_false_promote_rate`), then canaries that are worse by 1 to 30 points, beside a fixed-sample z-test with
the same looks and ten looks with a Bonferroni correction.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import _record as record
import numpy as np
from _canary_traffic import WEIGHT, Requests, Rule, bonferroni, events, fixed_sample, requests

from engine.catalog.records import Release, Route
from engine.controller.advance import Evidence, advance
from engine.quality.canary import CanaryAnswer, CanaryJudge
from engine.settings.params import ReleaseConfig

KINDS = {
    "plain": frozenset[str](),
    "drift": frozenset({"drift"}),
    "clusters": frozenset({"clusters"}),
    "feedback": frozenset({"feedback"}),
    "all": frozenset({"drift", "clusters", "feedback"}),
}
# Effects in points, the margin that each is judged with, and how many requests a canary has.
EFFECTS = {1: (0.02, 20_000), 2: (0.02, 20_000), 5: (0.1, 5000), 10: (0.1, 5000), 30: (0.1, 5000)}
ALPHA = 0.05
BOUNDS = {
    "aa_false_rollback_rate": record.at_most(ALPHA),
    "aa_false_promote_rate": record.at_most(ALPHA),
}


def ours(traffic: Requests, alpha: float, margin: float) -> tuple[str, int]:
    """Return the verdict of the product's own code, and the number of requests before it."""
    settings = ReleaseConfig(alpha=alpha, margin=margin)
    release = Release(
        "r", "p", "new", "old", "canary", WEIGHT, "running", settings.model_dump(), 0.0, 0.0,
        canary_started_at=0.0, canary_version=0,
    )  # fmt: skip
    route, asked = Route("p", "old", None, "new", WEIGHT), 0
    judge = CanaryJudge(settings, {0: WEIGHT}, is_against_base=False)
    users, arms = traffic.user_N.tolist(), traffic.canary_N.tolist()
    statuses, rewards = traffic.status_N.tolist(), traffic.reward_N.tolist()
    for number, is_rating in events(traffic):
        if is_rating:
            judge.rate(0, "k", str(users[number]), arms[number], rewards[number])
        else:
            asked = number + 1
            judge.observe(CanaryAnswer(0, "k", str(users[number]), arms[number], statuses[number]))
        action = advance(release, Evidence(0.0, route, canary=judge.result()))
        if action.kind != "wait":
            return action.kind, asked
    return "hold", asked


RULES: dict[str, Rule] = {"ours": ours, "fixed": fixed_sample, "bonferroni": bonferroni}


def share(verdicts: Sequence[str], verdict: str) -> float:
    return verdicts.count(verdict) / len(verdicts)


def null_figures(chance: np.random.Generator, canaries: int, count: int) -> Iterator[tuple[str, float]]:
    """Yield the rates of wrong verdicts for each kind of traffic, ours and the other rules'."""
    margin = ReleaseConfig().margin
    for name, kinds in KINDS.items():
        for effect, wrong, figure in ((0.0, "rollback", "rollback"), (-margin, "promote", "promote")):
            drawn = [requests(chance, count, effect, kinds) for _ in range(canaries)]
            for rule, judge in RULES.items():
                verdicts = [judge(traffic, ALPHA, margin)[0] for traffic in drawn]
                prefix = "" if rule == "ours" else f"{rule}_"
                yield f"{prefix}aa_false_{figure}_rate.{name}", share(verdicts, wrong)
                if rule == "ours":
                    yield f"aa_undecided.{figure}.{name}", share(verdicts, "hold")


def effect_figures(
    chance: np.random.Generator, canaries: int, small: int, points: Sequence[int]
) -> Iterator[tuple[str, float]]:
    """Yield delay, harmed requests and shares of verdicts for canaries that are worse by these points."""
    for effect in points:
        margin, count = EFFECTS[effect]
        number = small if margin < ReleaseConfig().margin else canaries
        drawn = [requests(chance, count, -effect / 100, KINDS["plain"]) for _ in range(number)]
        for rule, judge in RULES.items():
            found = [judge(traffic, ALPHA, margin) for traffic in drawn]
            harmed = [int(one.canary_N[:asked].sum()) for one, (_, asked) in zip(drawn, found, strict=True)]
            suffix, verdicts = f"{rule}.{effect}", [verdict for verdict, _ in found]
            yield f"delay_requests.{suffix}", record.median([asked for _, asked in found])
            yield f"harmed_requests.{suffix}", record.median(harmed)
            for verdict in ("promote", "rollback", "hold"):
                yield f"{verdict}_share.{suffix}", share(verdicts, verdict)


def draw(figures: Mapping[str, float], path: Path) -> None:
    """Plot the harmed requests over the effect's size, a line a rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [effect for effect in EFFECTS if f"harmed_requests.ours.{effect}" in figures]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for rule, label in (
        ("ours", "ours"),
        ("fixed", "fixed-sample z"),
        ("bonferroni", "Bonferroni, 10 looks"),
    ):
        harmed = [figures[f"harmed_requests.{rule}.{effect}"] for effect in points]
        axes[0].plot(points, harmed, marker="o", label=label)
        caught = [figures[f"rollback_share.{rule}.{effect}"] for effect in points]
        axes[1].plot(points, caught, marker="o", label=label)
    axes[0].set(xscale="log", yscale="log", ylabel="canary's answers before the verdict (median)")
    axes[1].set(xscale="log", ylabel="share rolled back")
    for one in axes:
        one.set(xlabel="points below the baseline")
        one.set_xticks(points, [str(effect) for effect in points])
        one.minorticks_off()
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--small", type=int, default=200, help="canaries that are worse by 1 and 2 points")
    parser.add_argument("--effect-canaries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    chance, began, figures = np.random.default_rng(given.seed), time.monotonic(), dict[str, float]()
    nulls = null_figures(chance, given.canaries, given.requests)
    effects = effect_figures(chance, given.effect_canaries, given.small, list(EFFECTS))
    for name, value in itertools.chain(nulls, effects):
        figures[name] = value
        print(f"{time.monotonic() - began:7.0f} s  {name} {value:.4g}", flush=True)
    draw(figures, given.out / "canary.png")
    # A rule that never decides would never be wrong.
    correct = figures["rollback_share.ours.30"] > 0.99 and figures["aa_undecided.rollback.plain"] < 0.5
    record.report("canary", figures, BOUNDS, {}, correct, given.out)


if __name__ == "__main__":
    main()
