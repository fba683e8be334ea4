"""Ten steps of TRL's `SFTTrainer` or `DPOTrainer`, in TRL's own environment.

    python _taught_worker.py JOB.json

Imports nothing of Graftwork. Starts at the adapter that the job names, tokenizes the job's texts itself, and
writes `steps` beside the job: the loss of each step, and its seconds.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make TRL do what our loop does."""
    return {
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": job["betas"][0],
        "adam_beta2": job["betas"][1],
        "max_grad_norm": job["clip_norm"],
        "per_device_train_batch_size": job["groups"],
        "gradient_accumulation_steps": 1,
        "max_steps": job["steps"],
        # In the order in which our loop takes them.
        "shuffle_dataset": False,
        "seed": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": job["output"],
    }


def train(job: dict[str, Any]) -> list[dict[str, float]]:
    """Train by a job; each returned step says how long it took from the end of the one before."""
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

    def in_order(trainer: Any) -> Any:
        trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
        return trainer

    model = AutoModelForCausalLM.from_pretrained(job["base"])
    given: dict[str, Any] = {
        "model": PeftModel.from_pretrained(model, job["adapter"], is_trainable=True),
        "train_dataset": Dataset.from_list(job["data"]),
        "processing_class": AutoTokenizer.from_pretrained(job["base"]),
        "callbacks": [Clock()],
    }
    shared = settings(job)
    if job["method"] == "dpo":
        shared.pop("shuffle_dataset", None)
        trainer = DPOTrainer(args=DPOConfig(**shared, beta=job["beta"]), **given)
    else:
        trainer = SFTTrainer(args=SFTConfig(**shared, completion_only_loss=True), **given)
    in_order(trainer).train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    seconds = [end - begin for begin, end in pairwise(times)]
    return [{"loss": loss, "seconds": s} for loss, s in zip(losses, seconds, strict=True)]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.with_suffix(".steps.json").write_text(json.dumps(train(json.loads(path.read_text()))))
