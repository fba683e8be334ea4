"""How often a canary's verdict is wrong, and how late a right one comes.

    graftwork bench canary [--canaries 2000] [--requests 3000] [--effect-canaries 500] [--small 200]

Simulated users, and the code that decides: the judge with all its guards after every answer and every rating,
and `advance` whenever a guard finds something (until then it waits). Equal canaries
(`aa_false_rollback_rate`), canaries that are worse by exactly the margin (`aa_false_promote_rate`), then
canaries that are worse by 1 to 30 points, beside a fixed-sample z-test with the same looks and ten looks with
a Bonferroni correction. `request_us` is the CPU time of our rule for a request, its answer and its rating.
Writes the figures and their plot, `canary.png`, to `--out`.

One core, about fifteen minutes; `--workers` uses more and gives the same figures.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import _record as record
import numpy as np
from _canary_traffic import WEIGHT, Requests, Rule, bonferroni, events, fixed_sample, requests

from engine.catalog.records import Release, Route
from engine.controller.advance import Evidence, advance
from engine.quality.canary import CanaryAnswer, CanaryJudge
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
}
# The plot: each panel's figure with its label and scale, and the name of each rule.
PANELS = {
    "delay_requests": ("requests before the verdict (median)", "log"),
    "harmed_requests": ("of these answered by the canary (median)", "log"),
    "rollback_share": ("share rolled back", "linear"),
}
TITLES = {"ours": "ours", "fixed": "fixed-sample z", "bonferroni": "Bonferroni, 10 looks"}
# Canaries between two lines on progress.
CHUNK = 250


def ours(traffic: Requests, alpha: float, margin: float, is_thorough: bool = False) -> tuple[str, int]:
    """Return the verdict of the product's own code, and the number of requests before it.

    `is_thorough` asks `advance` also while no guard finds anything.
    """
    settings = ReleaseConfig(alpha=alpha, margin=margin)
    release = Release(
        "r", "p", "new", "old", "canary", WEIGHT, "running", settings.model_dump(), 0.0, 0.0,
        canary_started_at=0.0, canary_version=0,
    )  # fmt: skip
    route, asked = Route("p", "old", None, "new", WEIGHT), 0
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


@dataclass(frozen=True)
class Part:
    """Canaries of `requests` requests each that differ by chance alone; `effect` is theirs on the reward."""

    kind: str
    effect: float
    margin: float
    canaries: int
    requests: int
    seed: int

    def judge(self) -> tuple[dict[str, RuleVerdicts], float]:
        """Let every rule judge them; return the verdicts, and the CPU seconds of our rule.

        The seed and what the canaries are like determine the verdicts, whichever process draws them.
        """
        points = round(1000 * self.effect)
        chance = np.random.default_rng([self.seed, list(KINDS).index(self.kind), abs(points)])
        found, own_s = {rule: RuleVerdicts() for rule in RULES}, 0.0
        for number in range(1, self.canaries + 1):
            traffic = requests(chance, self.requests, self.effect, KINDS[self.kind])
            for rule, judge in RULES.items():
                began = time.process_time()
                verdict, asked = judge(traffic, ALPHA, self.margin)
                own_s += (time.process_time() - began) * (rule == "ours")
                found[rule].kinds.append(verdict)
                found[rule].asked.append(asked)
                found[rule].harmed.append(int(traffic.canary_N[:asked].sum()))
            if number % CHUNK == 0 or number == self.canaries:
                said = f"{self.kind} {100 * self.effect:+g} points: {number} of {self.canaries}"
                print(f"{said}, {own_s:.0f} s of CPU", flush=True)
        return found, own_s


def null_figures(part: Part, found: Mapping[str, RuleVerdicts]) -> Iterator[tuple[str, float]]:
    """Yield the rates of wrong verdicts on equal canaries, or on those that are worse by the margin."""
    wrong = "promote" if part.effect else "rollback"
    for rule, verdicts in found.items():
        prefix = "" if rule == "ours" else f"{rule}_"
        yield f"{prefix}aa_false_{wrong}_rate.{part.kind}", verdicts.share(wrong)
    yield f"aa_undecided.{wrong}.{part.kind}", found["ours"].share("hold")


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
        if holding
    }


def draw(figures: Mapping[str, float], path: Path) -> None:
    """Plot delay, harmed requests and share of rollbacks over the effect's size, a line a rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = list(EFFECTS)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--small", type=int, default=200, help="canaries that are worse by 1 and 2 points")
    parser.add_argument("--effect-canaries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes; the figures stay the same")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    figures: dict[str, float] = {}
    margin, own_s, asked = ReleaseConfig().margin, 0.0, 0
    nulls = [
        Part(kind, effect, margin, given.canaries, given.requests, given.seed)
        for kind in KINDS
        for effect in (0.0, -margin)
    ]
    effects = [
        Part("plain", -effect / 100, within, given.small if within < margin else given.effect_canaries, count,
             given.seed + 1)
        for effect, (within, count) in EFFECTS.items()
    ]  # fmt: skip
    with ProcessPoolExecutor(given.workers) as pool:
        for number, (part, (found, part_s)) in enumerate(
            zip([*nulls, *effects], pool.map(Part.judge, [*nulls, *effects]), strict=True)
        ):
            own_s, asked = own_s + part_s, asked + sum(found["ours"].asked)
            is_null = number < len(nulls)
            new = null_figures(part, found) if is_null else effect_figures(round(-100 * part.effect), found)
            for name, value in new:
                figures[name] = value
                print(f"{name} {value:.4g}", flush=True)
    figures["request_us"] = own_s / asked * 1e6
    figures |= ratios(figures)
    draw(figures, given.out / "canary.png")
    # A rule that never decides would never be wrong.
    correct = figures["rollback_share.ours.30"] > 0.99 and figures["aa_undecided.rollback.plain"] < 0.5
    record.report("canary", figures, BOUNDS, {}, correct, given.out)


if __name__ == "__main__":
    main()
