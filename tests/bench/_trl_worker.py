"""One training run of TRL's `GRPOTrainer`, `SFTTrainer` or `DPOTrainer`, in TRL's own environment.

    python _trl_worker.py JOB.json

Imports nothing of Graftwork but the function that judges answers, from its file, where the job names one.
Reads the job that `trl.py` wrote, and writes `steps` beside it: for each step its seconds, its mean reward
and the lengths of its completions.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any


def reward(_question: str, expected: str, text: str) -> float:
    """Earn what the contract `terse` earns: the answer alone, up to outer space."""
    return float(text.strip() == expected)


def function(file: str, name: str) -> Callable[[str, str, str], float]:
    """Return a function of a file."""
    spec = importlib.util.spec_from_file_location("judge", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[str, str, str], float] = getattr(module, name)
    return found


class Recorder:
    """Keeps what each step brought: TRL calls it with every completion of a step."""

    # TRL logs a reward function by its name.
    __name__ = "reward"

    def __init__(self, judge: Callable[[str, str, str], float]) -> None:
        self.judge, self.steps = judge, list[dict[str, Any]]()

    def __call__(
        self,
        completions: list[str],
        completion_ids: list[list[int]],
        question: list[str],
        expected: list[str],
        **_: Any,
    ) -> list[float]:
        rewards = [self.judge(*each) for each in zip(question, expected, completions, strict=True)]
        lengths = [len(tokens) for tokens in completion_ids]
        self.steps.append({"reward": sum(rewards) / len(rewards), "lengths": lengths})
        return rewards


def shared(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make each of TRL's trainers do what our loop does, at its fastest here."""
    return {
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": job["betas"][0],
        "adam_beta2": job["betas"][1],
        "max_grad_norm": job["clip_norm"],
        "max_steps": job["steps"],
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": job["output"],
    }


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig`."""
    samples = job["groups"] * job["group_size"]
    return shared(job) | {
        "num_generations": job["group_size"],
        "per_device_train_batch_size": job["batch"],
        "gradient_accumulation_steps": samples // job["batch"],
        "max_completion_length": job["max_tokens"],
        "temperature": job["temperature"],
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": job["clip_low"],
        "epsilon_high": job["clip_high"],
        "scale_rewards": "group",
        "num_iterations": 1,
        # In the order in which our loop asks them.
        "shuffle_dataset": False,
        "seed": job["seed"],
        "logging_steps": job["steps"],
    }


def clock(times: list[float]) -> Any:
    """Return a callback that notes when the training begins, and when each step ends."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

    return Clock()


def train(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Train by a job; each returned step says how long it took from the end of the one before."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job["base"])
    for row in job["data"]:
        assert tokenizer(row["prompt"])["input_ids"] == row.pop("ids"), "both sides ask the same tokens"
    times: list[float] = []
    recorder = Recorder(function(*job["reward"]) if job["reward"] else reward)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["base"]),
        args=GRPOConfig(**settings(job)),
        reward_funcs=recorder,
        train_dataset=Dataset.from_list(job["data"]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=job["alpha"], target_modules=job["targets"], task_type="CAUSAL_LM"
        ),
        callbacks=[clock(times)],
    )
    trainer.train()
    seconds = [end - begin for begin, end in pairwise(times)]
    return [{**step, "seconds": s} for step, s in zip(recorder.steps, seconds, strict=True)]


def train_taught(job: dict[str, Any]) -> list[dict[str, float]]:
    """Train by `SFTTrainer` or `DPOTrainer` from the job's adapter; return each step's loss and seconds."""
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    times: list[float] = []

    def in_order(trainer: Any) -> Any:
        trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
        return trainer

    model = AutoModelForCausalLM.from_pretrained(job["base"])
    given: dict[str, Any] = {
        "model": PeftModel.from_pretrained(model, job["adapter"], is_trainable=True),
        "train_dataset": Dataset.from_list(job["data"]),
        "processing_class": AutoTokenizer.from_pretrained(job["base"]),
        "callbacks": [clock(times)],
    }
    own = shared(job) | {"per_device_train_batch_size": job["groups"], "logging_steps": 1, "seed": 1}
    if job["method"] == "dpo":
        trainer = DPOTrainer(args=DPOConfig(**own, beta=job["beta"]), **given)
    else:
        trainer = SFTTrainer(args=SFTConfig(**own, completion_only_loss=True), **given)
    in_order(trainer).train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    seconds = [end - begin for begin, end in pairwise(times)]
    return [{"loss": loss, "seconds": s} for loss, s in zip(losses, seconds, strict=True)]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    task = json.loads(path.read_text())
    steps = (train_taught if "method" in task else train)(task)
    path.with_suffix(".steps.json").write_text(json.dumps(steps))
