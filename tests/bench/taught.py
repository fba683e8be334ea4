"""SFT and DPO against TRL's `SFTTrainer` and `DPOTrainer`: the same losses, and seconds a step side by side.

    graftwork bench taught [--base tiny-dense|smollm2-135m]

Both sides start at the same LoRA adapter (B is 0), on the same base in float32, with the same rows in the
same order, learning rate, Adam settings and clipping. Ours are the steps of `graftwork adapt`, with the
trainer that `graftwork up` starts; TRL runs alone, in the environment of `graftwork bench trl`, and reads the
same texts by its own tokenization.

`sft_loss_gap`, `dpo_loss_gap`: the largest difference of a step's loss over ten steps, in nats.
`sft_step_ratio`, `dpo_step_ratio`: median seconds of a step after the first two, ours / TRL's.
Red: losses that do not fall.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import _record as record
import _run
from _trl_job import environment
from trl import local_key, run_worker, settings, tell

from engine.base.prompts import prompt_text, tokenizer_of
from engine.base.resident import ensure_base
from engine.problems.procedural import render, stream
from engine.services import lifecycle as services
from engine.settings.losses import LOSS_SETTINGS
from engine.settings.params import BaseConfig, Params, load_params
from engine.settings.policies import PolicyConfig
from engine.training.run import prepare
from engine.training.service.protocol import AdamParams
from engine.training.supervised import supervised_step

STEPS, ROWS, WARM, CONTEXT = 10, 16, 2, 256
GAP = 1e-4
RATE = {"sft": 1e-3, "dpo": 3e-4}
VERIFIERS = {"sft": "likelihood", "dpo": "preference"}
# Loss and seconds of each step.
Steps = list[dict[str, float]]
WORKER = Path(__file__).with_name("_trl_worker.py")


def write_rows(file: Path) -> None:
    """Write so many sums, answered in a sentence, which is better than the number alone."""
    seen = dict[str, str]()
    for _, problem in stream("addition", "train", 1):
        sentence, number = render("sentence", problem.answer), problem.answer
        seen.setdefault(
            problem.question,
            json.dumps({"question": problem.question, "answer": sentence, "rejected": number}),
        )
        if len(seen) == STEPS * ROWS:
            break
    file.write_text("\n".join(seen.values()) + "\n")


def write_adapter(base: Path, targets: Sequence[str], directory: Path) -> Path:
    """Write a new adapter as PEFT makes it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(targets), task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(directory)
    return directory


def ours(params: Params, config: PolicyConfig, adapter: Path, key: str, number: int) -> Steps:
    """Return loss and seconds of each of our steps, of a policy of its own."""
    name = f"{config.method}-{number}"
    with closing(prepare(params.model_copy(update={"policies": {name: config}}), name, config, key)) as run:
        session = run.client.create_session(
            run.line.session, name, rank=config.rank, alpha=config.alpha, targets=run.line.targets,
            seed=run.line.seed, holder=run.holder, adapter=str(adapter),
            policy_config=config.model_dump(mode="json"),
        )  # fmt: skip
        seconds = []
        for _ in range(STEPS):
            began = time.monotonic()
            session = supervised_step(run, session)
            seconds.append(time.monotonic() - began)
        run.client.close_session(session)
    return [{"loss": row["loss"], "seconds": s} for row, s in zip(session.history, seconds, strict=True)]


def theirs(python: Path, job: dict[str, Any], scratch: Path) -> Steps:
    """Return loss and seconds of each of TRL's steps."""
    file = scratch / f"{job['method']}.json"
    file.write_text(json.dumps(job))
    return run_worker(python, WORKER, file)


def job_of(config: PolicyConfig, base: Path, adapter: Path, scratch: Path) -> dict[str, Any]:
    """Return what TRL is given: texts, the adapter, and our settings."""
    tokenizer, adam = tokenizer_of(base), AdamParams()
    rows = []
    for _, one in islice(stream(config.task, "train", config.seed), STEPS * ROWS):
        prompt = {"prompt": prompt_text(tokenizer, one.asked)}
        answers = {"completion": one.answer + tokenizer.eos_token}
        if config.method == "dpo":
            sides = {"chosen": one.answer, "rejected": one.rejected}
            answers = {side: text + tokenizer.eos_token for side, text in sides.items()}
        rows.append(prompt | answers)
    return {
        "method": config.method, "lr": config.lr, "groups": config.groups, "steps": STEPS,
        "beta": LOSS_SETTINGS["dpo"]["beta"], "betas": [adam.beta1, adam.beta2],
        "clip_norm": adam.grad_clip_norm, "base": str(base), "adapter": str(adapter), "data": rows,
        "output": str(scratch / "trl"),
    }  # fmt: skip


def measure(params: Params, base: Path, python: Path, scratch: Path, number: int) -> dict[str, float]:
    """Return the figures of both methods, whose sides run in either order."""
    from engine.base.families import BaseShapes

    write_rows(task := scratch / "train.jsonl")
    adapter = write_adapter(base, BaseShapes.read(base).targets, scratch / "adapter")
    configs = [
        PolicyConfig(
            task=str(task), suite="s", method=method, verifier=VERIFIERS[method], groups=ROWS, steps=STEPS,
            lr=rate, patience=0,
        )
        for method, rate in RATE.items()
    ]  # fmt: skip

    def mine() -> list[Steps]:
        with services.session(params, lambda: None, tell, ("engine", "trainer")):
            return [ours(params, config, adapter, local_key(params), number) for config in configs]

    def trl() -> list[Steps]:
        return [theirs(python, job_of(config, base, adapter, scratch), scratch) for config in configs]

    sides = {"ours": mine, "trl": trl}
    found = {side: sides[side]() for side in record.in_turn(sides, number)}
    figures: dict[str, float] = {}
    for config, own, other in zip(configs, found["ours"], found["trl"], strict=True):
        figures |= compared(config.method, own, other)
    return figures


def compared(method: str, own: Steps, other: Steps) -> dict[str, float]:
    """Return a method's figures; `RuntimeError` where the loss does not fall."""
    first, last = own[0]["loss"], own[-1]["loss"]
    if last >= first:
        raise RuntimeError(f"The loss of {method} did not fall: {first} to {last}.")
    gap = max(abs(one["loss"] - two["loss"]) for one, two in zip(own, other, strict=True))
    mine, theirs = (median(step["seconds"] for step in side[WARM:]) for side in (own, other))
    print(f"  {method}: loss {first:.4f} to {last:.4f}, TRL's at most {gap:.1e} away", flush=True)
    return {f"{method}_loss_gap": gap, f"{method}_step_ratio": mine / theirs, f"{method}_step_s": mine}


def main() -> None:
    parser = _run.options(__doc__)
    parser.add_argument("--base", choices=("tiny-dense", "smollm2-135m"), default="tiny-dense")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    python = environment(given.out.absolute())
    base = ensure_base(BaseConfig(name=given.base), load_params(given.params).paths).path
    run = _run.Run("taught", given.long)
    figures, suffix = record.Figures(), f".{given.base}"
    with tempfile.TemporaryDirectory(prefix="graftwork-taught-") as state, run.preparing():
        scratch = Path(state)
        params = settings(base, scratch, CONTEXT)
        os.environ.update(services.environment(params))
        pairs = run.pairs("pair", partial(measure, params, base, python, scratch), {}, suffix=suffix)
        # Not a measurement that varies: no step of any pair may be further away.
        gaps = {name: max(values) for name, values in pairs.items() if name.endswith("_loss_gap")}
        figures.add_pairs({name: values for name, values in pairs.items() if name not in gaps}, suffix)
        figures.values |= {f"{name}{suffix}": value for name, value in gaps.items()}
    bounds = {f"{method}_loss_gap": record.at_most(GAP) for method in RATE}
    record.report(run, figures, bounds, True, given.out)


if __name__ == "__main__":
    _run.start(main)
