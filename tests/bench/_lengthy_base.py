"""A base whose completions have a long tail: `tiny-dense`, taught to write blanks after its answer.

Its own answers are a few tokens long. An honest tail is the model's own, since then no side of a comparison
is told a length: here an answer goes on with spaces, or now and then with line breaks, and after each of
them a coin ends it. So lengths are a mixture of two geometric distributions, cut at `LIMIT` tokens. Outer
blanks do not count in any contract, so an answer earns what it earned before, however long it is.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from engine.base.progress import Progress
from engine.base.toys import build as tiny
from engine.base.toys.recipes import RECIPES

# Of a completion, with its end token: a mean of 32, at most 256.
MEAN, LIMIT = 32, 256
CONTEXT = 512
# How often an answer goes on with this blank, and for how many of them in the mean.
KINDS = {"Ġ": (0.85, 13.0), "Ċ": (0.15, 110.0)}
SEED, PROBLEMS, STEPS, BATCH = 1, 4096, 400, 24


def tails(chance: random.Random) -> Iterator[tuple[str, int]]:
    """Yield kinds of blank and how many follow an answer, without end."""
    blanks, shares = list(KINDS), [share for share, _ in KINDS.values()]
    while True:
        (blank,) = chance.choices(blanks, shares)
        stop = 1 / (KINDS[blank][1] + 1)
        count = 0
        while chance.random() > stop:
            count += 1
        yield blank, count


def build(source: Path, directory: Path, progress: Progress) -> None:
    """Teach the base in `source` to go on, and save it with a context of `CONTEXT` tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = replace(RECIPES["tiny-dense"], steps=STEPS, batch=BATCH, adam_lr=1e-3, muon_lr=0.003)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    pairs = tiny.encode(tokenizer, list(islice(tiny.draw_examples(recipe, SEED), PROBLEMS)))
    blanks = {blank: tokenizer.convert_tokens_to_ids(blank) for blank in KINDS}
    # One that would be too long is cut, as a sampler cuts it: the coin stays the same up to there.
    taught = [
        (prompt, [*answer[:-1], *[blanks[blank]] * count, answer[-1]][:LIMIT])
        for (prompt, answer), (blank, count) in zip(pairs, tails(random.Random(SEED)), strict=False)
    ]
    with tiny.one_thread():
        tiny.fit(model, recipe, SEED, taught, progress)
    # Rotary positions have no weights, so a longer context needs none.
    model.config.max_position_embeddings = tokenizer.model_max_length = CONTEXT
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
