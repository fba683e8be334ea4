"""What a run of TRL is given: our settings under its names, our questions, an environment of its own."""

import importlib.util
import json
import subprocess
import venv
from itertools import islice
from pathlib import Path
from typing import Any

from engine.settings.params import content_hash
from engine.settings.policies import PolicyConfig

PYTHON = "python:"
HERE = Path(__file__).parent


def job(config: PolicyConfig, base: Path, output: Path, batch: int) -> dict[str, Any]:
    """Return a run of TRL with the settings that our loop has: from the policy, and from the trainer."""
    from engine.base.families import BaseShapes
    from engine.training.sample_groups import Sampling
    from engine.training.service.protocol import AdamParams

    adam = AdamParams()
    return {
        **config.model_dump(include={"groups", "group_size", "lr", "rank", "alpha", "steps", "max_tokens"}),
        "temperature": Sampling.temperature,
        "seed": config.seed,
        **config.loss_config.values(config.loss),
        "base": str(base),
        "targets": list(BaseShapes.of(json.loads((base / "config.json").read_text())).targets),
        "betas": [adam.beta1, adam.beta2],
        "clip_norm": adam.grad_clip_norm,
        "data": questions(config, base),
        "reward": own_function(config.verifier),
        "output": str(output),
        "batch": batch,
    }


def own_function(verifier: str) -> list[str] | None:
    """Return file and name of a function that judges answers; None for the contract `terse`."""
    if not verifier.startswith(PYTHON):
        return None
    module, name = verifier.removeprefix(PYTHON).split(":")
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    return [spec.origin, name]


def questions(config: PolicyConfig, base: Path) -> list[dict[str, Any]]:
    """Return the problems that our loop draws in its steps, in its order, as text and as token ids."""
    from transformers import AutoTokenizer

    from engine.base.prompts import prompt_ids, prompt_text
    from engine.problems.procedural import render, stream

    tokenizer = AutoTokenizer.from_pretrained(base)
    drawn = islice(stream(config.task, "train", config.seed), config.groups * config.steps)
    return [
        {
            "prompt": prompt_text(tokenizer, problem.question),
            "ids": prompt_ids(tokenizer, problem.question),
            "question": problem.question,
            "expected": render(config.contract, problem.answer) if config.contract else problem.answer,
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
        lines = requirements.read_text().splitlines()
        packages = [line for line in lines if "==" in line]
        index = next(line for line in lines if line.startswith("--extra-index-url"))
        torch = next(line for line in packages if line.startswith("torch=="))
        # That index is needed for torch alone, and asking one that is away for each package takes minutes.
        for what in ([*index.split(), "--no-deps", torch], packages):
            subprocess.run([*pip, *what], check=True, timeout=1800)
        done.touch()
    return python
