"""What an adapter's rank is worth on a real model: score, bytes and seconds at rank 1, 8 and 32.

    graftwork bench ranks [--base smollm2-135m] [--policy extraction] [--ranks 1 8 32] [--seeds 3]
                          [--plot docs/benchmarks/ranks.png]     (after `make real`)

Real engine and trainer, started as `graftwork up` does, `engine.max_rank` 32. Each rank trains one policy of
the base's main job with each seed, all seeds at once, by the recipe that fits the base, and scores it on its
frozen items. `gain.rN`: the score over the base's on the same items. `bytes.rN`: the revision's tensors as
packed for the engine. `step_s.rN`: seconds for each step of a policy, with all seeds of the rank at once.

The check: every revision's score is above the base's.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _record as record
import concurrency
from _run import Run, options, start

from engine.base.fitting import fitted_policy
from engine.base.recipes import PACKAGED
from engine.catalog.catalog import open_catalog
from engine.settings.params import Params, load_params
from engine.threads import in_parallel

RANKS = (1, 8, 32)


@dataclass(frozen=True)
class Trained:
    """One revision: its mean score in [0, 1], the bytes of its packed tensors, seconds a step."""

    score: float
    bytes: int
    step_s: float


def trained(params: Params, policy: str, rank: int, seed: int, key: str) -> Trained:
    """Train and score a policy at a rank, under a name of its own."""
    from engine.training.loop import train
    from tasks import score

    config = fitted_policy(params, policy, {"rank": rank, "seed": seed}).config
    name = f"{policy}-r{rank}-s{seed}"
    own = params.model_copy(update={"policies": {name: config}})
    done = train(own, name, config, key)
    with open_catalog(params.paths) as catalog:
        row = catalog.revisions.get(name, done.digest)
    scored = score.score(own, name, done.digest, config.suite, key, reuse=False)
    print(f"  rank {rank}, seed {seed}: {scored.mean:.3f} after {done.seconds:.0f} s", flush=True)
    return Trained(scored.mean, row.bytes, done.seconds / config.steps)


def measure(params: Params, given: argparse.Namespace, key: str) -> tuple[record.Figures, float, float]:
    """Return the figures of all ranks, the base's score, and the least gain of a revision."""
    from tasks import score

    figures = record.Figures()
    suite = fitted_policy(params, given.policy).config.suite
    base, least = score.score(params, given.policy, None, suite, key, reuse=False).mean, 1.0
    for rank in given.ranks:
        runs = in_parallel(
            *(partial(trained, params, given.policy, rank, seed, key) for seed in range(1, given.seeds + 1))
        )
        least = min(least, *(run.score - base for run in runs))
        figures.add(
            {
                "score": [run.score for run in runs],
                "gain": [run.score - base for run in runs],
                "bytes": [run.bytes for run in runs],
                "step_s": [run.step_s / given.seeds for run in runs],
            },
            f".r{rank}",
        )
    return figures, base, least


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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    run = Run("ranks", given.long)
    own = load_params(f"params.{given.base}.yaml")
    with concurrency.live(load_params(given.params), given.base, 0, max_rank=max(given.ranks)) as bench:
        params = bench.params.model_copy(update={"policies": own.policies})
        figures, base, least = measure(params, given, bench.key)
    figures.values["score.base"] = base
    if given.plot and given.seeds > 1:
        draw(figures, base, given.ranks, given.plot)
    record.report(run, figures, {}, least > 0, given.out)


if __name__ == "__main__":
    start(main)
