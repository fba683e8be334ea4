"""Seconds a training step against TRL's `GRPOTrainer`, side by side on the same machine.

    graftwork bench trl [--seeds 3] [--steps 12]

Both sides train LoRA of the same rank, alpha and targets by DAPO's loss on the same base, in float32: the
same problems in the same order, group size, groups a step, learning rate, Adam settings, clipping of
gradients and ratios, temperature, and limit of tokens. Completions have a long tail, and it is the base's own
(`_lengthy_base.py`), so that neither side is told a length: `length_*` reports what each side drew.

TRL runs in an environment of its own, without gradient checkpointing, on all cores, and in whichever of
`VARIANTS` was fastest for it in a short run before: samples of one forward, and whether it generates by
continuous batching. Ours is the loop as `graftwork up` starts it: engine and trainer in processes of their
own, the adapter handed over at every step, with one policy and with three at once. The first steps of each
run warm it up and are not counted.

`step_ratio_1`: mean seconds a step, ours with one policy / TRL's. `step_ratio_3`: seconds for each step of
a policy with three at once (elapsed / steps of all three) / TRL's; `round_ratio_3` is the same without the
division by three. Rewards are means of the last `LAST` steps.

What TRL does not have: we leave samples of groups whose rewards are all equal out of the update, and the
sum over tokens is divided by the tokens that are left; theirs is divided by all.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import _lengthy_base as lengthy
import _record as record

sys.path.insert(0, str(Path(__file__).parents[1]))
from live import free_port

from engine import services
from engine.config import Params, PolicyConfig, content_hash

HERE = Path(__file__).parent
WARM, LAST = 2, 3
# Samples in one forward of TRL's, and whether it generates by continuous batching.
VARIANTS = ((128, False), (32, False), (128, True))
TRIAL_S = 900
TARGETS = {
    "step_ratio_1": "<= 1.0", "step_ratio_3": "<= 0.5", "reward_gap": "no worse, within the spread",
    "length_trl": "about 32", "length_ours": "about 32",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One side's run: when each step ended (seconds; of all policies), each step's reward and lengths."""

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


def policy(seed: int, steps: int) -> PolicyConfig:
    """Return the settings of both sides: the main job's recipe, with room for long answers."""
    return PolicyConfig(
        task="addition", contract="terse", suite="addition-terse", seed=seed, steps=steps,
        max_tokens=lengthy.LIMIT,
    )  # fmt: skip


def job(config: PolicyConfig, base: Path, output: Path, batch: int, continuous: bool) -> dict[str, Any]:
    """Return a run of TRL with the settings that our loop has: from the policy, and from the trainer."""
    from engine.adapters.families import BaseShapes
    from engine.training.protocol import AdamParams

    adam = AdamParams()
    return {
        **config.model_dump(include={"groups", "group_size", "lr", "rank", "alpha", "steps", "max_tokens"}),
        **config.model_dump(include={"temperature", "seed"}),
        **config.loss_config.values(config.loss),
        "base": str(base),
        "targets": list(BaseShapes.of(json.loads((base / "config.json").read_text())).targets),
        "betas": [adam.beta1, adam.beta2],
        "clip_norm": adam.grad_clip_norm,
        "data": questions(config, base),
        "output": str(output),
        "batch": batch,
        "continuous": continuous,
    }


def questions(config: PolicyConfig, base: Path) -> list[dict[str, Any]]:
    """Return the problems that our loop draws in its steps, in its order, as text and as token ids."""
    from transformers import AutoTokenizer

    from engine.base import prompt_ids, prompt_text
    from engine.training.problems import render, stream

    tokenizer = AutoTokenizer.from_pretrained(base)
    drawn = islice(stream(config.task, "train", config.seed), config.groups * config.steps)
    return [
        {
            "prompt": prompt_text(tokenizer, problem.question),
            "ids": prompt_ids(tokenizer, problem.question),
            "expected": render(config.contract, problem.answer),
        }
        for _, problem in drawn
    ]


def environment(directory: Path) -> Path:
    """Install TRL into an environment of its own, once for each list of requirements; return its Python."""
    requirements = HERE / "trl-requirements.txt"
    root = directory / f"trl-env-{content_hash(requirements.read_text())[:12]}"
    python, done = root / "bin" / "python", root / "installed"
    if not done.exists():
        print(f"Installing TRL into {root}; it takes minutes.", flush=True)
        venv.create(root, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "--requirement", requirements], check=True, timeout=1800)
        done.touch()
    return python


def run_theirs(python: Path, task: dict[str, Any], scratch: Path, limit_s: float = 7200) -> Run:
    """Train with TRL in a process of its own; only what the trainer does in its steps is timed.

    Raises `SubprocessError` when it fails, or takes longer than `limit_s`.
    """
    file = scratch / f"trl-{task['seed']}.json"
    file.write_text(json.dumps(task))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_"))}
    # Without -P its `import trl` would find this file.
    command = [python, "-P", HERE / "_trl_worker.py", file]
    log = file.with_suffix(".log")
    with log.open("w") as out:
        subprocess.run(command, env=clean | offline, stdout=out, stderr=out, timeout=limit_s, check=True)
    steps = json.loads(file.with_suffix(".steps.json").read_text())
    ends = tuple(sum(step["seconds"] for step in steps[: i + 1]) for i in range(len(steps)))
    lengths = tuple(sum(step["lengths"]) / len(step["lengths"]) for step in steps)
    return Run(ends, 1, tuple(step["reward"] for step in steps), lengths)


def fastest(python: Path, base: Path, scratch: Path) -> tuple[int, bool]:
    """Return the variant of TRL that takes the fewest seconds a step; one that fails does not count."""
    found: dict[tuple[int, bool], float] = {}
    for variant in VARIANTS:
        task = job(policy(0, WARM + 2), base, scratch / "trial", *variant)
        with suppress(subprocess.SubprocessError):
            found[variant] = run_theirs(python, task, scratch, TRIAL_S).seconds()
        print(
            f"TRL, samples a forward and continuous batching {variant}: {found.get(variant, math.nan):.2f} s"
        )
    return min(found, key=lambda variant: found[variant])


def run_ours(params: Params, configs: Sequence[PolicyConfig], key: str) -> Run:
    """Train one policy, or several at once, with the services that run."""
    from tasks.parallel import in_parallel
    from tasks.train import train

    ends: list[float] = []
    named = {f"p{config.seed}-of-{len(configs)}": config for config in configs}
    params = params.model_copy(update={"policies": named})

    def one(name: str, config: PolicyConfig) -> Any:
        return train(params, name, config, key, lambda row: ends.append(time.monotonic()))

    trained = in_parallel(*(partial(one, name, config) for name, config in named.items()))
    rewards = [row["reward"] for row in trained[0].curve]
    lengths = [
        mean_length(config, row) for t, config in zip(trained, configs, strict=True) for row in t.curve
    ]
    return Run(tuple(ends), len(configs), tuple(rewards), tuple(lengths))


def mean_length(config: PolicyConfig, row: Mapping[str, Any]) -> float:
    """Return the mean length of the completions that were learned from; a step learns from some groups."""
    return float(row["tokens"] / ((row["groups_kept"] or config.groups) * config.group_size))


def settings(base: Path, state: Path) -> Params:
    """Return what `graftwork up` starts with by default, on this base, at free ports."""
    services = ("controller", "mlflow", "prefect", "trainer")
    ports = {name: {"port": free_port()} for name in services}
    engine = {"port": free_port(), "max_model_len": lengthy.CONTEXT}
    return Params.model_validate({"state_dir": state, "base": {"name": str(base)}, "engine": engine, **ports})


def lengthy_base(directory: Path, params: Path) -> Path:
    """Return the base of long answers, built once for each way of building it; about four minutes."""
    from engine.base import ensure_base, progress_bar
    from engine.config import BaseConfig, load_params

    source = ensure_base(BaseConfig(name="tiny-dense"), load_params(params).paths).path
    name = content_hash([source.name, Path(lengthy.__file__).read_text()])
    path = directory / f"lengthy-{name[:12]}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory) as draft, progress_bar("long answers") as bar:
            lengthy.build(source, Path(draft) / "base", bar)
            (Path(draft) / "base").rename(path)
    return path


def measure(params: Params, base: Path, python: Path, given: argparse.Namespace) -> dict[str, list[Run]]:
    """Return each side's runs, one for each seed, in turns: TRL, one policy, three policies."""
    from engine.adapters.catalog import Catalog, ensure_local_key

    catalog = Catalog(params.paths.catalog_url)
    key = ensure_local_key(catalog, params.paths.local_key)
    catalog.close()
    variant = fastest(python, base, params.state_dir)
    runs: dict[str, list[Run]] = {"trl": [], "one": [], "three": []}
    for seed in range(1, given.seeds + 1):
        configs = [policy(number, given.steps) for number in (seed, seed + 100, seed + 200)]
        task = job(configs[0], base, params.state_dir / "trl", *variant)
        runs["trl"].append(run_theirs(python, task, params.state_dir))
        runs["one"].append(run_ours(params, configs[:1], key))
        runs["three"].append(run_ours(params, configs, key))
        print(f"seed {seed}: " + ", ".join(f"{name} {r[-1].seconds():.2f} s" for name, r in runs.items()))
    return runs


def report(runs: Mapping[str, Sequence[Run]], out: Path) -> None:
    theirs, one, three = runs["trl"], runs["one"], runs["three"]

    def ratios(ours: Sequence[Run], factor: float = 1) -> list[float]:
        return [factor * o.seconds() / t.seconds() for o, t in zip(ours, theirs, strict=True)]

    values = {
        "step_ratio_1": ratios(one),
        "step_ratio_3": ratios(three),
        "round_ratio_3": ratios(three, 3),
        "trl_step_s": [run.seconds() for run in theirs],
        "one_step_s": [run.seconds() for run in one],
        "three_step_s": [run.seconds() for run in three],
        "reward_first": [run.rewards[0] for run in one],
        "reward_trl": [run.reward() for run in theirs],
        "reward_ours": [run.reward() for run in one],
        "length_trl": [mean(run.lengths) for run in theirs],
        "length_ours": [mean(run.lengths) for run in one],
    }
    figures = {name: mean(found) for name, found in values.items()}
    gap = figures["reward_ours"] - figures["reward_trl"]
    apart = max(max(values[name]) - min(values[name]) for name in ("reward_trl", "reward_ours"))
    spreads = {name: record.spread(found) for name, found in values.items()}
    record.report("trl", {**figures, "reward_gap": gap}, TARGETS, spreads, gap >= -apart, out)


def tell(service: str, line: str) -> None:
    print(f"{service}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.absolute()
    python, base = environment(out), lengthy_base(out, given.params)
    with tempfile.TemporaryDirectory(prefix="graftwork-trl-") as state:
        params = settings(base, Path(state))
        os.environ.update(services.environment(params))
        with services.session(params, lambda: None, tell, ("engine", "trainer")):
            runs = measure(params, base, python, given)
    report(runs, out)


if __name__ == "__main__":
    main()
