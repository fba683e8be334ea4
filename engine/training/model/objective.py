"""A loss with its settings over the tokens of a microbatch: weights, gradient, finiteness checks.

The weights of all tokens are computed from the whole batch first, so the gradient does not depend on how the
examples are cut into microbatches.

Shape suffixes: _T completion tokens, one example after another.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.settings.losses import SUMMED, LossConfig, loss_config
from engine.threads import bounded
from engine.training.loss.corrections import Corrected, correct, uncorrected
from engine.training.loss.grpo import Loss, Tokens, kl_to_base, loss_of
from engine.training.model.packing import Example

T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """A loss with its settings: name and config as given, and the loss's own values.

    With `sums` it is the plain sum over all tokens, not the loss's own mean.
    """

    name: str
    loss: Loss
    config: LossConfig
    values: Mapping[str, Any]
    sums: bool = False

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any], sums: bool = False) -> "Objective":
        """Return the objective; `ConfigError` for an unknown loss, or an unknown or invalid setting."""
        config = loss_config(name, given)
        if sums and (name not in SUMMED or config.kl):
            said = f"setting kl of {name}" if name in SUMMED else f"loss {name}"
            raise ConfigError(
                f"The {said} has no plain sum. Choose a loss of {', '.join(SUMMED)} without kl, or the "
                "reduction mean."
            )
        return cls(name, _in_time(name, config, partial(loss_of, name)), config, config.values(name), sums)

    @property
    def needs_base(self) -> bool:
        """Say whether the base's log-probabilities are needed."""
        return self.loss.needs_base or self.config.kl > 0

    def terms(self, tokens: Tokens) -> tuple[Tensor, Tensor, Corrected]:
        """Return each token's part of the loss (T), the mask of clipped tokens (T), and the corrections."""
        corrected = correct(tokens, self.config) if self.loss.sampled else uncorrected(tokens)
        term_T, clipped_T = self.loss.terms(corrected.tokens, self.values)
        if self.config.kl:
            assert tokens.base_T is not None
            term_T = term_T + self.config.kl * kl_to_base(tokens.new_T, tokens.base_T)
        return term_T * corrected.factor_T * tokens.weight_T, clipped_T, corrected

    def gradient(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Corrected]:
        """Return the gradient of `new_T` (T), then `terms`; `ConfigError` when they exceed the time limit."""

        def differentiated() -> tuple[Tensor, Tensor, Tensor, Corrected]:
            loss_T, clipped_T, corrected = self.terms(tokens)
            (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.new_T)
            return gradient_T, loss_T, clipped_T, corrected

        return _in_time(self.name, self.config, differentiated)

    def shares(self, lengths: Sequence[int]) -> list[float]:
        """Return the weight of each example's tokens over the whole batch, given all lengths."""
        if self.sums:
            return [1.0] * len(lengths)
        if self.loss.per == "token":
            return [1 / sum(lengths)] * len(lengths)
        if self.loss.per == "budget":
            return [1 / (len(lengths) * self.values["budget"])] * len(lengths)
        size = self.loss.unit
        units = [sum(lengths[i : i + size]) for i in range(0, len(lengths), size)]
        return [1 / (len(units) * units[i // size]) for i in range(len(lengths))]


def _in_time(name: str, config: LossConfig, call: Callable[[], T]) -> T:
    """Call a function; a custom loss has a time limit, since a hanging one would block all sessions."""
    return bounded(f"loss {name}", config.timeout_s, call) if name.startswith("python:") else call()


def tokens_of(
    examples: Sequence[Example], shares: Sequence[float], new_T: Tensor, base_T: Tensor | None
) -> Tokens:
    """Return a microbatch's tokens; without samples, `old_T` are the trainer's own log-probabilities."""

    def column(rows: Iterable[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=dtype, device=new_T.device)

    def given(name: str) -> Tensor | None:
        return column(getattr(e, name) for e in examples) if getattr(examples[0], name) else None

    lengths = [example.row.length for example in examples]
    sampled = bool(examples[0].old_logprobs)
    return Tokens(
        new_T=new_T,
        old_T=column(example.old_logprobs for example in examples) if sampled else new_T.detach(),
        advantage_T=column(e.advantages for e in examples) if sampled else torch.zeros_like(new_T),
        sequence_T=column(([i] * length for i, length in enumerate(lengths)), torch.int64),
        sequences=len(examples),
        weight_T=column(
            e.weights or [share] * length for e, share, length in zip(examples, shares, lengths, strict=True)
        ),
        base_T=base_T,
        low_T=given("clip_low"),
        high_T=given("clip_high"),
        mask_T=given("ratio_mask"),
    )


def refuse_broken(loss_T: Tensor, gradient_T: Tensor, tokens: Tokens, numbers: Sequence[int]) -> None:
    """Raise `ConfigError` with the number of the first sample whose loss or gradient is not finite."""
    broken_T = ~(loss_T.isfinite() & gradient_T.isfinite())
    if broken_T.any():
        places = broken_T.nonzero()[:, 0].tolist()
        first = min(places, key=lambda place: numbers[int(tokens.sequence_T[place])])
        sample = numbers[int(tokens.sequence_T[first])]
        raise ConfigError(
            f"The loss of sample {sample} is not a finite number (trainer {tokens.new_T[first].item():.4g}, "
            f"sampler {tokens.old_T[first].item():.4g}, advantage {tokens.advantage_T[first].item():.4g}). "
            "Nothing was changed. Leave the sample out, or check its log-probabilities and advantages."
        )
