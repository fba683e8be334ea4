"""What an adapter's rank is worth on a real model: score, bytes and seconds at rank 1, 8 and 32.

    graftwork bench ranks [--base smollm2-135m] [--policy extraction] [--ranks 1 8 32] [--seeds N]
                          [--plot docs/benchmarks/ranks.png] [--long]     (after `make real`)

Real engine and trainer, started as `graftwork up` does, `engine.max_rank` 32. Each rank trains one policy of
the base's main job with each seed, all seeds at once, by the recipe that fits the base, and scores it on its
frozen items. `gain.rN`: the score over the base's on the same items. `bytes.rN`: the revision's tensors as
packed for the engine. `step_s.rN`: seconds for each step of a policy but the first, with all seeds of the
rank at once. The default takes one seed and two steps of each rank, as far as its time goes, and no score:
two steps teach nothing. `--long` takes three seeds and all steps.

The check of the long form: every revision's score is above the base's.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _record as record
import concurrency
from _run import Run, options, start

from engine.base.fitting import fitted_policy
from engine.base.names import PACKAGED
from engine.catalog.opening import open_catalog
from engine.settings.params import Params, load_params
from engine.threads import in_parallel

RANKS = (1, 8, 32)
# Of the default: the first step warms up.
FEW_STEPS = 2


@dataclass(frozen=True)
class Trained:
    """One revision: the bytes of its packed tensors, seconds a step, and in the long form its mean score."""

    bytes: int
    step_s: float
    score: float | None


def trained(params: Params, policy: str, asked: dict[str, int], is_scored: bool, key: str) -> Trained:
    """Train a policy under a name of its own, with what is asked beside its settings, and score it."""
    from engine.training.loop import train
    from tasks import score

    config = fitted_policy(params, policy, asked).config
    name = f"{policy}-r{config.rank}-s{config.seed}"
    own, ends = params.model_copy(update={"policies": {name: config}}), list[float]()
    done = train(own, name, config, key, lambda _: ends.append(time.monotonic()))
    with open_catalog(params.paths) as catalog:
        row = catalog.revisions.get(name, done.digest)
    mean = None
    if is_scored:
        mean = score.score(own, name, done.digest, config.suite, key, reuse=False).mean
        print(f"  rank {config.rank}, seed {config.seed}: {mean:.3f} after {done.seconds:.0f} s", flush=True)
    return Trained(row.bytes, (ends[-1] - ends[0]) / (len(ends) - 1), mean)


def base_score(params: Params, policy: str, key: str) -> float:
    """Return the base's mean score on a policy's frozen items."""
    from tasks import score

    suite = fitted_policy(params, policy).config.suite
    return score.score(params, policy, None, suite, key, reuse=False).mean


def measure(run: Run, params: Params, given: argparse.Namespace, key: str, figures: record.Figures) -> float:
    """Add the figures of all ranks, and the base's score in the long form; return a revision's least gain."""
    gains: list[float] = []
    for score in run.parts(lambda: base_score(params, given.policy, key)) if run.is_long else ():
        figures.values["score.base"] = score
    fewer = {} if run.is_long else {"steps": FEW_STEPS}

    def take(number: int) -> None:
        rank = given.ranks[number]
        asked = [{"rank": rank, "seed": seed, **fewer} for seed in range(1, given.seeds + 1)]
        calls = (partial(trained, params, given.policy, one, run.is_long, key) for one in asked)
        found = in_parallel(*calls)
        repeats: dict[str, list[float]] = {
            "bytes": [one.bytes for one in found],
            "step_s": [one.step_s / given.seeds for one in found],
            "score": [one.score for one in found if one.score is not None],
        }
        repeats["gain"] = [score - figures.values["score.base"] for score in repeats["score"]]
        gains.extend(repeats["gain"])
        figures.add(repeats, f".r{rank}")

    run.repeats("rank", take, most=len(given.ranks))
    return min(gains, default=1.0)


def draw(figures: record.Figures, base: float, ranks: Sequence[int], path: Path) -> None:
    """Plot score, and bytes and seconds, over the rank; a bar spans the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"score": "score", "bytes": "bytes", "step_s": "seconds a step"}
    drawing, axes = pyplot.subplots(1, len(panels), figsize=(11, 3.4), layout="constrained")
    for one, (name, label) in zip(axes, panels.items(), strict=True):
        for rank in ranks:
            low, high = map(float, figures.spreads[f"{name}.r{rank}"].split(".."))
            middle = figures.values[f"{name}.r{rank}"]
            one.errorbar(
                [rank], [middle], [[middle - low], [high - middle]], marker="o", capsize=4, color="C0"
            )
        one.set(xscale="log", xlabel="rank", ylabel=label)
        one.set_ylim(bottom=0)
        one.set_xticks(ranks, [str(rank) for rank in ranks])
        one.minorticks_off()
    axes[0].axhline(base, linestyle="--", label="base")
    axes[0].legend()
    drawing.savefig(path, dpi=100)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=list(PACKAGED), default="smollm2-135m")
    parser.add_argument("--policy", default="extraction")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--seeds", type=int, help="1, and 3 with --long")
    parser.add_argument("--plot", type=Path, help="draw the figures of --long into this file")
    given = parser.parse_args()
    run = Run("ranks", given.long)
    given.seeds = given.seeds or (3 if run.is_long else 1)
    figures, least = record.Figures(), 1.0
    own = load_params(f"params.{given.base}.yaml")
    live = concurrency.live(load_params(given.params), given.base, 0, max_rank=max(given.ranks))
    with run.preparing(), live as bench:
        params = bench.params.model_copy(update={"policies": own.policies})
        least = measure(run, params, given, bench.key, figures)
    if given.plot and all(f"score.r{rank}" in figures.spreads for rank in given.ranks):
        draw(figures, figures.values["score.base"], given.ranks, given.plot)
    record.report(run, figures, {}, least > 0, given.out)


if __name__ == "__main__":
    start(main)
