"""Trains the revisions whose outcomes the benchmark replays, and records whether each answers each item
right.

Of each family, in this order: a half-trained revision; a whole one, trained on from it; one that learns on
from that with wrong answers among the right ones, or with another family's problems; and the best, trained on
from the whole one for long. All are LoRA adapters that peft trains by cross entropy of the answers' tokens.
"""

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from _quality_lines import ITEMS, Line
from torch.nn.functional import cross_entropy

from engine.base.families import BaseShapes
from engine.base.prompts import prompt_text, tokenizer_of
from engine.base.resident import ensure_base
from engine.problems.families import FAMILIES
from engine.problems.procedural import Problem, stream
from engine.settings.params import BaseConfig, load_params

# The families that the tiny base learns in part within a minute, in the order of their names.
LINES = 12
TAUGHT, BATCH, RATE, RANK, WARM = 8000, 32, 8e-3, 16, 20
STEPS = {"half": 60, "whole": 120, "odd": 50, "best": 240}
WRONG = 0.3
IGNORED = -100
Row = tuple[list[int], list[int]]
T = TypeVar("T")


def lines(params: Path) -> list[Line]:
    """Return the recorded lines of all families; minutes each."""
    base = ensure_base(BaseConfig(name="tiny-dense"), load_params(params).paths).path
    names = sorted(FAMILIES)[:LINES]
    return [record(base, name, names[number - 1], number % 2 == 0) for number, name in enumerate(names)]


def record(base: Path, family: str, other: str, is_decoy: bool) -> Line:
    """Train a family's revisions one from another, and return their outcomes."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    torch.manual_seed(0)
    tokenizer = tokenizer_of(base)
    taught = problems(family, "train", TAUGHT)
    items = sorted(problems(family, "eval", ITEMS), key=lambda item: item.segment)
    odd = wrong(taught) if is_decoy else taught[: TAUGHT // 2] + problems(other, "train", TAUGHT // 2)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=list(BaseShapes.read(base).targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    rows, frozen = encoded(tokenizer, taught), encoded(tokenizer, items)
    outcomes = [outcomes_of(model, frozen)]
    for name, own in (("half", rows), ("whole", rows), ("odd", encoded(tokenizer, odd)), ("best", rows)):
        # The odd one and the best are both children of the whole one.
        if name == "odd":
            kept = {key: value.clone() for key, value in model.state_dict().items() if "lora_" in key}
        if name == "best":
            model.load_state_dict(kept, strict=False)
        fit(model, own, STEPS[name])
        outcomes.append(outcomes_of(model, frozen))
    means = " ".join(f"{each.mean():.3f}" for each in outcomes)
    print(f"  {family}: {means} right, {time.monotonic() - began:.0f} s", flush=True)
    names = ("base", "half", "whole", "decoy" if is_decoy else "mixture", "best")
    _, sizes = np.unique([item.segment for item in items], return_counts=True)
    return Line(family, tuple(sizes.tolist()), names, (-1, 0, 1, 2, 2), np.stack(outcomes))


def problems(family: str, split: Any, count: int) -> list[Problem]:
    """Return so many problems of a split."""
    return [problem for _, problem in islice(stream(family, split, seed=1), count)]


def wrong(taught: Sequence[Problem]) -> list[Problem]:
    """Return the problems with a share of their answers exchanged among them."""
    answers = [problem.answer for problem in taught]
    random.Random(0).shuffle(answers)
    return [
        Problem(one.task, one.question, answer if number < WRONG * len(taught) else one.answer)
        for number, (one, answer) in enumerate(zip(taught, answers, strict=True))
    ]


def encoded(tokenizer: Any, asked: Sequence[Problem]) -> list[Row]:
    """Return each problem's prompt and answer with its end, as tokens."""
    end = tokenizer.eos_token
    return [
        (
            tokenizer.encode(prompt_text(tokenizer, one.asked), add_special_tokens=False),
            tokenizer.encode(one.answer + end, add_special_tokens=False),
        )
        for one in asked
    ]


def batch(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [rows, longest]; a label is the next token where that is the answer's."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens, labels = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.full((len(rows), longest), IGNORED),
    )
    for number, (prompt, answer) in enumerate(rows):
        ends = len(prompt) + len(answer)
        tokens[number, :ends] = torch.tensor(prompt + answer)
        labels[number, len(prompt) - 1 : ends - 1] = torch.tensor(answer)
    return tokens, labels


def fit(model: Any, rows: Sequence[Row], steps: int) -> None:
    """Train for so many steps by cross entropy of the answers."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM) * (1 - step / steps)
    )
    order = random.Random(1)
    for _ in range(steps):
        tokens, labels = batch(order.sample(rows, BATCH))
        logits = model(input_ids=tokens).logits
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def outcomes_of(model: Any, rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return whether the greedy answer to each row is right.

    It is where every token of the answer is the likeliest after those before it.
    """
    # A family of small problems asks some of them often.
    known = {(tuple(prompt), tuple(answer)): False for prompt, answer in rows}
    with torch.inference_mode():
        for chunk in chunks(sorted(known, key=lambda row: len(row[0]) + len(row[1])), 256):
            tokens, labels = batch([(list(prompt), list(answer)) for prompt, answer in chunk])
            matches = (model(input_ids=tokens).logits.argmax(-1) == labels) | (labels == IGNORED)
            known |= dict(zip(chunk, matches.all(-1).tolist(), strict=True))
    return np.array([known[tuple(prompt), tuple(answer)] for prompt, answer in rows])


def chunks(order: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield pieces of a sequence."""
    for first in range(0, len(order), size):
        yield order[first : first + size]
