"""Gradients of a loss over a session's examples: refuse what is wrong, run microbatches, measure.

The weights of all tokens come from the whole batch before anything runs, so the gradient does not depend on
how the examples are cut into microbatches. A call that fails leaves the gathered gradients as they were.
Knows no session and no HTTP.

Shape suffixes: _T completion tokens, one example after another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.settings.losses import LossConfig, loss_config
from engine.threads import bounded
from engine.training.loss.corrections import Corrected, correct, uncorrected
from engine.training.loss.grpo import Loss, Tokens, kl_to_base, loss_of
from engine.training.loss.measures import BatchMetrics, MicrobatchStats, measure
from engine.training.model.adapter import Adapter
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example, TokenRow

T = TypeVar("T")


@dataclass(frozen=True)
class Backward:
    """What a backward pass found; `logprobs` are each example's, one a completion token."""

    metrics: BatchMetrics
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Objective:
    """A loss with its settings: name and config as they were given, and the loss's own values."""

    name: str
    loss: Loss
    config: LossConfig
    values: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> "Objective":
        """Raise `ConfigError` for an unknown loss, or a setting that is unknown or out of bounds."""
        config = loss_config(name, given)
        return cls(name, _in_time(name, config, partial(loss_of, name)), config, config.values(name))

    @property
    def needs_base(self) -> bool:
        return self.loss.needs_base or self.config.kl > 0

    def terms(self, tokens: Tokens) -> tuple[Tensor, Tensor, Corrected]:
        """Return each token's part of the loss (T), which tokens are clipped (T), and the corrections."""
        corrected = correct(tokens, self.config) if self.loss.sampled else uncorrected(tokens)
        term_T, clipped_T = self.loss.terms(corrected.tokens, self.values)
        if self.config.kl:
            assert tokens.base_T is not None
            term_T = term_T + self.config.kl * kl_to_base(tokens.new_T, tokens.base_T)
        return term_T * corrected.factor_T * tokens.weight_T, clipped_T, corrected

    def gradient(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Corrected]:
        """Return the gradient for `new_T` (T), then `terms`; `ConfigError` when they take too long."""

        def differentiated() -> tuple[Tensor, Tensor, Tensor, Corrected]:
            loss_T, clipped_T, corrected = self.terms(tokens)
            (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.new_T)
            return gradient_T, loss_T, clipped_T, corrected

        return _in_time(self.name, self.config, differentiated)

    def shares(self, lengths: Sequence[int]) -> list[float]:
        """Return what share each example's tokens have in the whole batch's mean, given all lengths."""
        if self.loss.per == "token":
            return [1 / sum(lengths)] * len(lengths)
        if self.loss.per == "budget":
            return [1 / (len(lengths) * self.values["budget"])] * len(lengths)
        size = self.loss.unit
        units = [sum(lengths[i : i + size]) for i in range(0, len(lengths), size)]
        return [1 / (len(units) * units[i // size]) for i in range(len(lengths))]


def _in_time(name: str, config: LossConfig, call: Callable[[], T]) -> T:
    """Return what a call returns; one's own loss may hang in it, and all sessions would wait."""
    return bounded(f"loss {name}", config.timeout_s, call) if name.startswith("python:") else call()


def forward(
    base: ResidentBase,
    adapter: Adapter | None,
    rows: Sequence[TokenRow],
    between: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Return each row's completion log-probabilities, without gradients; `ConfigError` for wrong rows.

    `between` is called before each microbatch and may raise to end the call.
    """
    check_rows(base, rows)
    return base.score(adapter, rows, between)


def forward_backward(
    base: ResidentBase,
    adapter: Adapter,
    data: Sequence[Example],
    loss: str,
    config: Mapping[str, Any],
    between: Callable[[], None] = lambda: None,
) -> Backward:
    """Add the gradient of a loss over `data` to the adapter's gathered gradients.

    `between` is called before each microbatch and may raise to end the call. Raises `ConfigError` for a
    wrong loss, setting or example before anything is computed, and for a sample whose loss is no number;
    whatever is raised, the gathered gradients stay as they were.
    """
    objective = Objective.of(loss, config)
    check(base, data, loss, objective.loss)
    shares = objective.shares([example.row.length for example in data])
    seen: list[MicrobatchStats] = []
    logprobs: dict[int, Tensor] = {}
    with adding_gradients([adapter]):
        for batch in base.microbatches([example.row for example in data], objective.loss.unit):
            between()
            seen.append(_microbatch(base, adapter, data, batch, shares, objective))
            parts = seen[-1].new_T.split([data[i].row.length for i in batch])
            logprobs |= dict(zip(batch, parts, strict=True))
    metrics = measure(seen, sampled=bool(data[0].old_logprobs))
    return Backward(metrics, tuple(tuple(logprobs[i].tolist()) for i in range(len(data))))


def _microbatch(
    base: ResidentBase,
    adapter: Adapter,
    data: Sequence[Example],
    batch: Sequence[int],
    shares: Sequence[float],
    objective: Objective,
) -> MicrobatchStats:
    rows = [data[i].row for i in batch]
    base_T = None
    if objective.needs_base:
        with torch.no_grad(), base.using(None):
            base_T = base.logprobs(rows)
    with base.using(adapter):
        new_T, entropy_T = base.logprobs_and_entropy(rows)
        gradient_T, seen = learn(data, batch, shares, objective, new_T, entropy_T, base_T)
        new_T.backward(gradient_T)  # type: ignore[no-untyped-call]
    strayed, routed = base.replay.take()
    return replace(seen, strayed=strayed, routed=routed)


def learn(
    data: Sequence[Example],
    batch: Sequence[int],
    shares: Sequence[float],
    objective: Objective,
    new_T: Tensor,
    entropy_T: Tensor,
    base_T: Tensor | None,
) -> tuple[Tensor, MicrobatchStats]:
    """Return the loss's gradient (T) for the log-probabilities of a microbatch, and what was seen of it.

    In two halves, so that a loss that is no number is found before it reaches any factor: `ConfigError`.
    """
    leaf_T = new_T.detach().requires_grad_()
    tokens = tokens_of([data[i] for i in batch], [shares[i] for i in batch], leaf_T, base_T)
    gradient_T, loss_T, clipped_T, corrected = objective.gradient(tokens)
    refuse_broken(loss_T, gradient_T, tokens, [number_of(data, i) for i in batch])
    return gradient_T, MicrobatchStats(
        new_T=new_T.detach(),
        old_T=tokens.old_T,
        base_T=new_T.new_zeros(0) if base_T is None else base_T,
        loss_T=loss_T.detach(),
        entropy_T=entropy_T,
        clipped_T=clipped_T,
        learned_T=gradient_T != 0,
        factor_T=corrected.factor_T,
        capped_T=corrected.capped_T,
        masked=corrected.masked,
        strayed=0,
        routed=0,
    )


def number_of(data: Sequence[Example], i: int) -> int:
    """Return which sample of the client's this example is."""
    number = data[i].number
    return i if number is None else number


def tokens_of(
    examples: Sequence[Example], shares: Sequence[float], new_T: Tensor, base_T: Tensor | None
) -> Tokens:
    """Return a microbatch's tokens; without samples, the trainer's own log-probabilities stand for them."""

    def column(rows: Iterable[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=dtype, device=new_T.device)

    lengths = [example.row.length for example in examples]
    sampled = bool(examples[0].old_logprobs)
    return Tokens(
        new_T=new_T,
        old_T=column(example.old_logprobs for example in examples) if sampled else new_T.detach(),
        advantage_T=column(e.advantages for e in examples) if sampled else torch.zeros_like(new_T),
        sequence_T=column(([i] * length for i, length in enumerate(lengths)), torch.int64),
        sequences=len(examples),
        weight_T=column([share] * length for share, length in zip(shares, lengths, strict=True)),
        base_T=base_T,
    )


@contextmanager
def adding_gradients(adapters: Iterable[Adapter]) -> Iterator[None]:
    """Add what gradients come up inside to those from before, or put those back when something fails.

    Raises `ConfigError` when an adapter's gradients are then too large to make a step of.
    """
    held = set(adapters)
    factors = [factor for adapter in held for factor in adapter.factors.values()]
    before = [factor.grad for factor in factors]
    for adapter in held:
        adapter.clear_gradients()
    try:
        yield
        for factor, gradient in zip(factors, before, strict=True):
            if gradient is not None:
                factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)
        for adapter in held:
            refuse_infinite(adapter)
    except BaseException:
        for factor, gradient in zip(factors, before, strict=True):
            factor.grad = gradient
        raise


def refuse_broken(loss_T: Tensor, gradient_T: Tensor, tokens: Tokens, numbers: Sequence[int]) -> None:
    """Raise `ConfigError` with the number of the first sample whose loss, or its gradient, is not finite."""
    broken_T = ~(loss_T.isfinite() & gradient_T.isfinite())
    if broken_T.any():
        places = broken_T.nonzero()[:, 0].tolist()
        first = min(places, key=lambda place: numbers[int(tokens.sequence_T[place])])
        sample = numbers[int(tokens.sequence_T[first])]
        raise ConfigError(
            f"The loss of sample {sample} is not a finite number (trainer {tokens.new_T[first].item():.4g}, "
            f"sampler {tokens.old_T[first].item():.4g}, advantage {tokens.advantage_T[first].item():.4g}). "
            "Nothing was changed; leave the sample out, or look at its log-probabilities and advantages."
        )


def refuse_infinite(adapter: Adapter) -> None:
    """Raise `ConfigError` unless the norm of the gathered gradients is finite, and so each of them.

    Clipped by an infinite one they would be nothing, and without a clip Adam would keep their squares.
    """
    gathered = [factor.grad for factor in adapter.factors.values() if factor.grad is not None]
    if not torch.nn.utils.get_total_norm(gathered).isfinite():
        raise ConfigError(
            "The gradients with these samples are too large: their norm, with those gathered before, is no "
            "finite number, though every loss is. Nothing was changed; look at the size of their advantages."
        )


def check(base: ResidentBase, data: Sequence[Example], name: str, loss: Loss) -> None:
    """Raise `ConfigError` that names the first example that the loss or the base cannot take."""
    check_rows(base, [example.row for example in data])
    if len(data) % loss.unit:
        raise ConfigError(f"The loss {name} takes its samples {loss.unit} by {loss.unit}, not {len(data)}.")
    sampled = loss.sampled or bool(data[0].old_logprobs)
    for i, example in enumerate(data):
        want = example.row.length if sampled else 0
        found = len(example.old_logprobs), len(example.advantages)
        if found != (want, want):
            raise ConfigError(
                f"Sample {i} has {example.row.length} completion tokens, {found[0]} log-probabilities and "
                f"{found[1]} advantages. The loss {name} needs {want} of each here."
            )


def check_rows(base: ResidentBase, rows: Sequence[TokenRow]) -> None:
    """Raise `ConfigError` when there are no rows, or that names the first one that the base cannot take."""
    if not rows:
        raise ConfigError("There are no samples. Send at least one.")
    for i, row in enumerate(rows):
        if not 1 <= row.start < len(row.tokens):
            raise ConfigError(f"Sample {i} needs a prompt and a completion of at least one token each.")
        if len(row.tokens) > base.longest:
            raise ConfigError(
                f"Sample {i} has {len(row.tokens)} tokens; the trainer takes {base.longest}. Shorten it, or "
                "raise trainer.microbatch_tokens where the base's context allows."
            )
        if wrong := [token for token in row.tokens if not 0 <= token < base.vocabulary]:
            raise ConfigError(
                f"Sample {i} has the token {wrong[0]}; the base knows 0 to {base.vocabulary - 1}. "
                "Was it made with another tokenizer?"
            )
