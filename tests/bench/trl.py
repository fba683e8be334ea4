"""Seconds a training step against TRL's `GRPOTrainer`, side by side on the same machine.

    graftwork bench trl [--base smollm2-135m] [--seeds N] [--steps 8] [--long]

Both sides train LoRA of the same rank, alpha and targets on the same base, in float32: the same problems in
the same order, group size, groups a step, learning rate, Adam settings, clipping of gradients and ratios,
temperature, and limit of tokens. Both losses are a mean over all tokens of all groups with DAPO's bounds:
TRL calls it `dapo`, we `ppo`. Completions have a long tail, and it is the base's own (`_lengthy_base.py`), so
that neither side is told a length: `length_*` reports what each side drew.

TRL runs alone, in an environment of its own, without gradient checkpointing, on all cores, and with as many
samples in one forward (`BATCHES`) as was fastest for it in a short run before. Ours is the loop as
`graftwork up` starts it: engine and trainer in processes of their own, the adapter handed over at every
step, with one policy and with three at once. The first steps of each run warm it up and are not counted.
A pair is one seed's runs of both sides, in the other order every other time; pairs go on until both ratios
are decided. The default is one pair of 8 steps a run, too few for rewards to be compared, so its figures
have no verdict, and gives TRL the first of `BATCHES`; `--long` has 24. What is made once, TRL's environment
and the base, is made before the time begins.

`step_ratio_1`: mean seconds a step, ours with one policy / TRL's. `step_ratio_3`: seconds for each step of
a policy with three at once (elapsed / steps of all three) / TRL's; `round_ratio_3` is the same without the
division by three. `token_ratio_*` are the same ratios for each token that was drawn. `step_ratio_1_dapo`
is `step_ratio_1` with our own `dapo`, which leaves samples of groups whose rewards are all equal out of the
update: less work than TRL's, so no target is set on it. Rewards are means of the first or last `LAST` steps,
of three policies over all three.

With `--base smollm2-135m` (after `make real`) both sides train its policy `facts`, whose answers are short by
themselves; figures then have the base's name as a suffix.

The learning rate is smaller than the recipe's: nothing in the reward holds a tail, so its length goes on a
random walk, with either side, as long as the learning rate is large (at 2e-3 within six steps to 7 tokens or
to 200).
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import _lengthy_base as lengthy
import _record as record
import _run
from _trl_job import environment, job

from engine.base.names import PACKAGED
from engine.process_reaper import die_with_parent
from engine.services import lifecycle as services
from engine.settings.losses import PolicyLossConfig
from engine.settings.params import Params, content_hash, load_params
from engine.settings.policies import PolicyConfig
from tests.helpers.live import free_port

WARM, LAST = 2, 3
LEARNING_RATE = 3e-4
# Samples in one forward of TRL's.
BATCHES = (128, 32)
TRIAL_S = 900
# Each side's mean length over what it should be; tails are heavy, and training may move them a little.
LENGTHS = (0.75, 1.25)
LENGTHY = "lengthy"
# Rewards and lengths are the correctness check's. The short form does not check rewards, so it has no bounds.
BOUNDS = {"step_ratio_1": record.at_most(1.0), "step_ratio_3": record.at_most(0.5)}
BOUNDS |= {f"step_ratio_3.{base}": record.at_most() for base in PACKAGED}


@dataclass(frozen=True)
class Run:
    """One side's run: when each step ended (s; of all policies), and each step's means over policies."""

    ends: tuple[float, ...]
    policies: int
    rewards: tuple[float, ...]
    lengths: tuple[float, ...]

    def seconds(self) -> float:
        """Return the mean seconds for each step of a policy, after the steps that warm up."""
        warm = self.ends[WARM * self.policies - 1]
        return (self.ends[-1] - warm) / (len(self.ends) - WARM * self.policies)

    def reward(self) -> float:
        return mean(self.rewards[-LAST:])

    def first_reward(self) -> float:
        return mean(self.rewards[:LAST])

    def length(self) -> float:
        """Return the mean tokens of a completion, after the steps that warm up."""
        return mean(self.lengths[WARM:])


def policy(seed: int, steps: int, loss: str = "ppo", base: str = LENGTHY) -> PolicyConfig:
    """Return the settings of both sides: the main job's recipe, with room for long answers."""
    asked: dict[str, Any] = {"task": "addition", "contract": "terse", "suite": "addition-terse"}
    asked |= {"max_tokens": lengthy.LIMIT}
    if base in PACKAGED:
        facts = load_params(f"params.{base}.yaml").policies["facts"]
        asked = facts.model_dump(include={"task", "verifier", "suite", "max_tokens"})
    return PolicyConfig(
        **asked, seed=seed, steps=steps, lr=LEARNING_RATE, loss=loss, alpha=16, warmup_steps=0,
        loss_config=PolicyLossConfig(clip_low=0.2, clip_high=0.28, kl=0),
    )  # fmt: skip


def ours(seed: int, steps: int, base: str = LENGTHY) -> dict[str, dict[str, PolicyConfig]]:
    """Return our runs of a seed, each with its policies by name; the first of each asks what TRL asks."""
    seeds = (seed, seed + 100, seed + 200)
    return {
        "one": {f"one-{seed}": policy(seed, steps, base=base)},
        "dapo": {f"dapo-{seed}": policy(seed, steps, "dapo", base)},
        "three": {f"three-{number}": policy(number, steps, base=base) for number in seeds},
    }


def run_theirs(python: Path, task: dict[str, Any], scratch: Path, limit_s: float = 7200) -> Run:
    """Train with TRL in a process of its own; only what the trainer does in its steps is timed.

    Raises `SubprocessError` when it fails, or takes longer than `limit_s`.
    """
    file = scratch / f"trl-{task['seed']}.json"
    file.write_text(json.dumps(task))
    steps = run_worker(python, Path(__file__).with_name("_trl_worker.py"), file, limit_s)
    ends = tuple(sum(step["seconds"] for step in steps[: i + 1]) for i in range(len(steps)))
    lengths = tuple(sum(step["lengths"]) / len(step["lengths"]) for step in steps)
    return Run(ends, 1, tuple(step["reward"] for step in steps), lengths)


def run_worker(python: Path, worker: Path, file: Path, limit_s: float = 7200) -> list[dict[str, Any]]:
    """Run a worker in TRL's environment on a job; return the steps that it wrote. Errors as `run_theirs`."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    # TRL promises no equal bits, so it does not pay for them.
    ours = ("PYTHON", "OMP_", "MKL_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # Without -P its `import trl` would find this file.
    command = [python, "-P", worker, file]
    log = file.with_suffix(".log")
    with log.open("w") as out:
        subprocess.run(
            command, env=clean | offline, stdout=out, stderr=out, timeout=limit_s, check=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    steps: list[dict[str, Any]] = json.loads(file.with_suffix(".steps.json").read_text())
    return steps


def fastest(python: Path, name: str, base: Path, scratch: Path) -> int:
    """Return the batch with which TRL takes the fewest seconds a step; one that fails does not count."""
    found: dict[int, float] = {}
    for batch in BATCHES:
        with suppress(subprocess.SubprocessError):
            task = job(policy(0, WARM + 2, base=name), base, scratch / "trial", batch)
            found[batch] = run_theirs(python, task, scratch, TRIAL_S).seconds()
            print(f"TRL, {batch} samples a forward: {found[batch]:.2f} s", flush=True)
    return min(found, key=lambda batch: found[batch])


def run_ours(params: Params, named: Mapping[str, PolicyConfig], key: str) -> Run:
    """Train one policy, or several at once, with the services that run."""
    from engine.threads import in_parallel
    from engine.training import rollout_data
    from engine.training.loop import train

    ends: list[float] = []
    known = params.model_copy(update={"policies": named})

    def one(name: str, config: PolicyConfig) -> Any:
        return train(known, name, config, key, lambda row: ends.append(time.monotonic()))

    # TRL replaces no groups.
    with patch.object(rollout_data, "REFILLS", 0):
        trained = in_parallel(*(partial(one, name, config) for name, config in named.items()))
    steps = list(zip(*(t.curve for t in trained), strict=True))
    rewards, lengths = (
        tuple(mean(row[figure] for row in rows) for rows in steps) for figure in ("reward", "length_mean")
    )
    return Run(tuple(ends), len(named), rewards, lengths)


def settings(base: Path, state: Path, context: int = lengthy.CONTEXT) -> Params:
    """Return what `graftwork up` starts with by default, on this base, at free ports."""
    services = ("controller", "mlflow", "prefect", "trainer")
    ports = {name: {"port": free_port()} for name in services}
    engine = {"port": free_port(), "max_model_len": context}
    return Params.model_validate({"state_dir": state, "base": {"name": str(base)}, "engine": engine, **ports})


def packaged_base(name: str, params: Path) -> Path:
    from engine.base.resident import ensure_base
    from engine.settings.params import BaseConfig

    return ensure_base(BaseConfig(name=name), load_params(params).paths).path


def lengthy_base(directory: Path, params: Path) -> Path:
    """Return the base of long answers, built once for each way of building it; about four minutes."""
    from engine.base.resident import ensure_base
    from engine.settings.params import BaseConfig
    from flows.display import base_bar

    source = ensure_base(BaseConfig(name="tiny-dense"), load_params(params).paths).path
    name = content_hash([source.name, Path(lengthy.__file__).read_text()])
    path = directory / f"lengthy-{name[:12]}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory) as draft, base_bar() as bar:
            lengthy.build(source, Path(draft) / "base", bar)
            (Path(draft) / "base").rename(path)
    return path


def measure(
    run: _run.Run, params: Params, base: Path, python: Path, given: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[Run]]]:
    """Return each figure's pairs, a seed each, and each side's runs; TRL's while no service of ours runs."""
    name = given.base or LENGTHY
    # The short form leaves out the trial.
    batch = fastest(python, name, base, params.state_dir) if run.is_long else BATCHES[0]
    runs: dict[str, list[Run]] = {}

    def theirs(seed: int) -> dict[str, Run]:
        task = job(policy(seed, given.steps, base=name), base, params.state_dir / "trl", batch)
        return {"trl": run_theirs(python, task, params.state_dir)}

    def mine(seed: int) -> dict[str, Run]:
        with services.session(params, lambda: None, tell, ("engine", "trainer")):
            key, asked = local_key(params), ours(seed, given.steps, name)
            return {side: run_ours(params, named, key) for side, named in asked.items()}

    sides = {"theirs": theirs, "ours": mine}

    def take(number: int) -> dict[str, float]:
        found: dict[str, Run] = {}
        for side in record.in_turn(sides, number):
            found |= sides[side](number + 1)
        for side, one in found.items():
            runs.setdefault(side, []).append(one)
        return figures_of(found)

    suffix = f".{given.base}" if given.base else ""
    return run.pairs("pair", take, bounds_of(run), suffix=suffix, most=given.seeds), runs


def bounds_of(run: _run.Run) -> record.Bounds:
    """Return the bounds that a form can judge."""
    return BOUNDS if run.is_long else {}


def figures_of(pair: Mapping[str, Run]) -> dict[str, float]:
    """Return the figures of one seed's runs."""
    theirs = pair["trl"]
    step = {side: one.seconds() / theirs.seconds() for side, one in pair.items()}
    token = {side: ratio * theirs.length() / pair[side].length() for side, ratio in step.items()}
    return {
        "step_ratio_1": step["one"],
        "step_ratio_1_dapo": step["dapo"],
        "step_ratio_3": step["three"],
        "round_ratio_3": 3 * step["three"],
        "token_ratio_1": token["one"],
        "token_ratio_3": token["three"],
        "reward_gap": pair["one"].reward() - theirs.reward(),
        "reward_gap_3": pair["three"].reward() - theirs.reward(),
        **{f"{side}_step_s": one.seconds() for side, one in pair.items()},
        **{f"reward_first_{side}": one.first_reward() for side, one in pair.items()},
        **{f"reward_{side}": one.reward() for side, one in pair.items()},
        **{f"length_{side}": one.length() for side, one in pair.items()},
    }


def local_key(params: Params) -> str:
    from engine.catalog.opening import whole_catalog

    catalog = whole_catalog(params.paths.catalog_url)
    key = catalog.keys.ensure_local(params.paths.local_key)
    catalog.close()
    return key


def faults(
    runs: Mapping[str, Sequence[Run]], wanted: float = lengthy.MEAN, has_learned: bool = True
) -> list[str]:
    """Return what makes the two sides incomparable, a sentence each; lengths alone where none has learned.

    A side is worse when its rewards are lower by more than two standard errors of a difference of two shares
    of so many answers, sqrt(2 p (1 - p) / n), at most sqrt(0.5 / n). `wanted` is the mean length, in tokens.
    """
    config = policy(0, 1)
    answers = len(runs["trl"]) * LAST * config.groups * config.group_size
    noise = 2 * math.sqrt(0.5 / answers)
    theirs = mean(run.reward() for run in runs["trl"])
    found = []
    for side, each in runs.items():
        first, last = mean(run.first_reward() for run in each), mean(run.reward() for run in each)
        length = mean(run.length() for run in each)
        if has_learned and last < first + noise:
            found.append(f"{side} has not learned: rewards went from {first:.3f} to {last:.3f}.")
        if has_learned and last < theirs - noise:
            found.append(f"{side} has a reward of {last:.3f}, TRL one of {theirs:.3f}.")
        if not LENGTHS[0] <= length / wanted <= LENGTHS[1]:
            found.append(f"{side} drew a mean length of {length:.1f} tokens, not about {wanted:g}.")
    return found


def tell(service: str, line: str) -> None:
    print(f"{service}: {line}", flush=True)


def main() -> None:
    parser = _run.options(__doc__)
    parser.add_argument("--base", choices=list(PACKAGED))
    parser.add_argument("--seeds", type=int, help="pairs, at most")
    parser.add_argument("--steps", type=int, help="8, and 24 with --long")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.absolute()
    python = environment(out)
    base = packaged_base(given.base, given.params) if given.base else lengthy_base(out, given.params)
    run = _run.Run("trl", given.long)
    given.steps = given.steps or (24 if run.is_long else 8)
    figures, wrong = record.Figures(), list[str]()
    with tempfile.TemporaryDirectory(prefix="graftwork-trl-") as state, run.preparing():
        params = settings(base, Path(state))
        os.environ.update(services.environment(params))
        pairs, runs = measure(run, params, base, python, given)
        figures.add_pairs(pairs, f".{given.base}" if given.base else "")
        if pairs:
            wanted = mean(one.length() for one in runs["trl"]) if given.base else lengthy.MEAN
            wrong = faults(runs, wanted, run.is_long)
    print(*wrong, sep="\n")
    record.report(run, figures, bounds_of(run), not wrong, out)


if __name__ == "__main__":
    _run.start(main)
