"""Tiny bases: Qwen3's architecture at 0.6M parameters, trained here on problems with known answers.

Each problem is answered in one of several styles, mostly in the style that its phrasing is used to, so
that under any one answer contract the base is right on a quarter of what it can solve: something for
GRPO to elicit. Knows how to make one. Does not know where it is kept.
"""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.base import Progress, Recipe, prompt_ids
from engine.training.problems import CONTRACTS, TASKS, render, stream

PAD, END = "<|pad|>", "<|end|>"
ROLES = ["<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED = -100
Pair = tuple[list[int], list[int]]


def build(recipe: Recipe, seed: int, directory: Path, progress: Progress) -> None:
    """Train a tiny base on answered problems and save it; the same recipe and seed give the same bytes."""
    examples = list(islice(_examples(recipe, seed), recipe.problems))
    tokenizer = _train_tokenizer(recipe, [part for pair in examples for part in pair])
    with torch.random.fork_rng(), _one_thread():
        torch.manual_seed(seed)
        model = _new_model(recipe, tokenizer)
        _fit(model, recipe, seed, _encode(tokenizer, examples), progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order on every machine; and threads that wait for each other starve beside the services."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _examples(recipe: Recipe, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs, tasks in turn, each phrasing mostly in its own style."""
    chance = random.Random(seed)
    streams = [stream(task, "train", seed) for task in TASKS]
    styles = list(CONTRACTS)
    while True:
        for source in streams:
            _, item = next(source)
            others = [style for style in styles if style != styles[item.phrasing]]
            style = styles[item.phrasing] if chance.random() < recipe.habit else chance.choice(others)
            yield item.question, render(style, item.answer)


def _train_tokenizer(recipe: Recipe, texts: list[str]) -> Any:
    """Byte-level BPE where every digit is a token and merges may cross words (short sequences)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )


def _encode(tokenizer: Any, examples: list[tuple[str, str]]) -> list[Pair]:
    end = tokenizer.eos_token_id
    return [
        (prompt_ids(tokenizer, question), [*tokenizer.encode(answer, add_special_tokens=False), end])
        for question, answer in examples
    ]


def _new_model(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _fit(model: Any, recipe: Recipe, seed: int, pairs: list[Pair], progress: Progress) -> None:
    """Minimise cross-entropy of the answers: Muon on the projections, AdamW on the rest, cosine schedule.

    Muon (https://kellerjordan.github.io/posts/muon) reaches in 300 steps what AdamW does not in 1,000.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizers = _optimizers(model, recipe)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(recipe.steps):
        chosen = torch.randint(len(pairs), (recipe.batch,), generator=generator).tolist()
        loss = _answer_loss(model, [pairs[index] for index in chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * _schedule(step, recipe)
            optimizer.step()
            optimizer.zero_grad()
        progress(step + 1, recipe.steps, loss.item())


def _optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    projections = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    known = {id(p) for p in projections}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(projections, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, recipe: Recipe) -> float:
    done = step / recipe.steps
    return min(1.0, (step + 1) / recipe.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _answer_loss(model: Any, pairs: list[Pair]) -> Tensor:
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.long)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        both = torch.tensor(prompt + answer)
        tokens[row, : len(both)] = both
        labels[row, len(prompt) : len(both)] = both[len(prompt) :]
    # Padding sits on the right, where causal attention never lets an answer see it.
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:] != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted])
