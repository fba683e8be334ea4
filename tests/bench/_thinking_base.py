"""A base that thinks before it answers: `tiny-dense`, taught to write blanks first.

Its own answers are a few tokens long. Real completions have a long tail, and an honest one is the model's
own: here most answers begin with a few spaces and some with many line breaks, each run ended by a coin, so
that any sampler draws lengths from the same mixture of two geometric distributions, cut at `LIMIT`. Outer
blanks do not count in any contract, so the rewards are those of the task.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from engine.base import Progress
from engine.recipes import RECIPES
from engine.training import tiny

# Of a completion, with its end token: a mean of 32, at most 256.
MEAN, LIMIT = 32, 256
CONTEXT = 512
# How often an answer thinks in this blank, and how many of them it takes in the mean.
KINDS = {"Ġ": (0.85, 13.0), "Ċ": (0.15, 110.0)}
SEED, PROBLEMS, STEPS, BATCH = 1, 4096, 250, 24


def thoughts(chance: random.Random) -> Iterator[tuple[str, int]]:
    """Yield kinds of blank and how many come before the answer, without end."""
    blanks, shares = list(KINDS), [share for share, _ in KINDS.values()]
    while True:
        (blank,) = chance.choices(blanks, shares)
        stop = 1 / (KINDS[blank][1] + 1)
        count = 0
        while chance.random() > stop:
            count += 1
        yield blank, count


def build(source: Path, directory: Path, progress: Progress) -> None:
    """Teach the base in `source` to think, and save it with a context of `CONTEXT` tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = replace(RECIPES["tiny-dense"], steps=STEPS, batch=BATCH, adam_lr=1e-3, muon_lr=0.005)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    pairs = tiny._encode(tokenizer, list(islice(tiny._examples(recipe, SEED), PROBLEMS)))
    blanks = {blank: tokenizer.convert_tokens_to_ids(blank) for blank in KINDS}
    drawn = thoughts(random.Random(SEED))
    # One that would be too long is cut, as a sampler cuts it: the coin stays the same up to there.
    taught = [
        (prompt, ([blanks[blank]] * count + answer)[:LIMIT])
        for (prompt, answer), (blank, count) in zip(pairs, drawn, strict=False)
    ]
    with tiny._one_thread():
        tiny._fit(model, recipe, SEED, taught, progress)
    # Rotary positions have no weights, so a longer context needs none.
    model.config.max_position_embeddings = tokenizer.model_max_length = CONTEXT
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
