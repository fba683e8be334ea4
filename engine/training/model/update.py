"""The training pass: gradients of losses over the examples of one or several sessions.

It validates calls, runs microbatches and measures. Tokens of several sessions are adjacent in one stream:
each projection reads the base's weight once for all of them, and each adapter's factors for its own tokens,
at its own rank. Losses stay separate: each session's terms see only its own tokens. A failed pass leaves all
gathered gradients unchanged.

Shape suffixes: _T completion tokens, one example after another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.training.loss.grpo import Loss, Tokens
from engine.training.loss.objective import BatchMetrics, MicrobatchStats, Objective, measure, refuse_broken
from engine.training.model.adapter import Adapter
from engine.training.model.lora import Found, ResidentBase
from engine.training.model.packing import Example, TokenRow, first_fit, stream_tokens
from engine.training.model.replay import mask_unknown

# Stream tokens of one session up to which a shared pass is clearly faster; see `is_worth_fusing`.
FEW_TOKENS = 320


@dataclass(frozen=True)
class LossCall:
    """One session's part of a pass: the gradient of a loss over `data` is added to its adapter's.

    With `router_replay`, tokens without known experts are left out and counted as masked. With `sums` the
    loss is a plain sum over all tokens.
    """

    adapter: Adapter
    data: Sequence[Example]
    loss: str
    config: Mapping[str, Any]
    router_replay: bool = False
    sums: bool = False


@dataclass(frozen=True)
class Backward:
    """A pass's result for one call; `logprobs` has one value for each completion token of each example."""

    metrics: BatchMetrics
    logprobs: tuple[tuple[float, ...], ...]


def is_worth_fusing(base: ResidentBase, calls: Sequence[LossCall]) -> bool:
    """Say whether these calls are clearly faster in one pass than one by one; router replay runs alone.

    `graftwork bench fused` on a CPU measured CPU seconds one by one over those of one pass, for 3 and 9
    policies on tiny-dense: 1.30 and 1.34 with 8 samples each (about 130 tokens), 1.17 and 1.11 with 16 (260),
    0.94 and 1.08 with 32 (510), 1.04 and 1.00 with 128 (2000); on tiny-moe 1.18 and 1.41, 1.10 and
    1.08, 0.98 and 0.98, 1.03 and 0.98. What is saved is the cost of calls, which large calls hide.
    """
    small = all(is_small([example.row for example in call.data]) for call in calls)
    return len(calls) > 1 and can_share(base, calls) and small


def is_small(rows: Sequence[TokenRow]) -> bool:
    """Say whether one session's rows have few enough tokens for a shared pass."""
    return stream_tokens(rows) <= FEW_TOKENS


def can_share(base: ResidentBase, calls: Sequence[LossCall]) -> bool:
    """Say whether calls can share a pass; the counts of router replay cannot be split by call."""
    return base.shares_passes and all(example.row.routes is None for call in calls for example in call.data)


def forward_backward(
    base: ResidentBase, calls: Sequence[LossCall], between: Callable[[], None] = lambda: None
) -> list[Backward]:
    """Add each call's gradients to its adapter's; a shared pass gives those of each call alone, to rounding.

    On a CPU in float32 they are bit-identical wherever matrix products treat rows alike (MKL with the
    settings of `engine.settings.reproducible`, from four rows on) and experts' widths are multiples of 32:
    attention is bucketed for each call, experts have at least four rows, and gradients are summed for each
    call.

    `between` is called before each microbatch and may raise to end the pass. Raises `ConfigError` for calls
    that cannot share a pass, for an invalid loss, setting or example before anything is computed, and for a
    sample whose loss is not finite. After any error all gathered gradients are unchanged.
    """
    if len(calls) > 1 and not can_share(base, calls):
        raise ConfigError(
            "These calls cannot share a pass: a sample has routed_experts, or the base's attention cannot "
            "be packed. Send them one by one."
        )
    states = [_CallState(base, call) for call in calls]
    with adding_gradients(call.adapter for call in calls), base.holding(calls[0].adapter):
        for pieces in _rounds(base, states):
            between()
            base.learn(
                [one.rows(batch) for one, batch in pieces],
                [one.adapter for one, _ in pieces],
                any(one.objective.needs_base for one, _ in pieces),
                partial(_judged, pieces),
            )
    return [one.result() for one in states]


class _CallState:
    """A running call: its examples, their weights in the loss, and the statistics so far."""

    def __init__(self, base: ResidentBase, call: LossCall):
        self.adapter, self.data, self.left_out = call.adapter, call.data, dict[str, int]()
        self.objective = Objective.of(call.loss, call.config, call.sums)
        unit = self.objective.loss.unit
        check(base, call.data, call.loss, self.objective.loss)
        if call.router_replay:
            self.data, self.left_out["router_replay"] = mask_unknown(call.data, unit)
        rows = self.rows(range(len(self.data)))
        self.shares = self.objective.shares([row.length for row in rows])
        self.batches = base.microbatches(rows, unit)
        self.seen: list[MicrobatchStats] = []
        self.logprobs: dict[int, Tensor] = {}

    def rows(self, batch: Iterable[int]) -> list[TokenRow]:
        """Return the token rows of a batch."""
        return [self.data[i].row for i in batch]

    def learn(
        self,
        batch: Sequence[int],
        new_T: Tensor,
        entropy_T: Tensor,
        base_T: Tensor | None,
        routed: tuple[int, int],
    ) -> Tensor:
        """Return the loss's gradient (T) for a microbatch's log-probabilities, and record its statistics.

        `routed` are the counts of `Replay.take`. Raises `ConfigError` when the loss is not finite, before the
        gradient reaches any factor.
        """
        leaf_T, examples = new_T.detach().requires_grad_(), [self.data[i] for i in batch]
        # Another call of the round may be the one that needs them.
        base_T = base_T if self.objective.needs_base else None
        tokens = tokens_of(examples, [self.shares[i] for i in batch], leaf_T, base_T)
        gradient_T, loss_T, clipped_T, corrected = self.objective.gradient(tokens)
        numbers = [i if (sent := self.data[i].number) is None else sent for i in batch]
        refuse_broken(loss_T, gradient_T, tokens, numbers)
        strayed, known = routed
        self.seen.append(
            MicrobatchStats(
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
                strayed=strayed,
                routed=known,
            )
        )
        parts = new_T.detach().split([example.row.length for example in examples])
        self.logprobs |= zip(batch, parts, strict=True)
        return gradient_T

    def result(self) -> Backward:
        """Return the metrics and log-probabilities of the whole call."""
        metrics = measure(self.seen, sampled=bool(self.data[0].old_logprobs))
        metrics = replace(metrics, masked=metrics.masked | self.left_out)
        return Backward(metrics, tuple(tuple(self.logprobs[i].tolist()) for i in range(len(self.data))))


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


def loss_sum(objective: Objective, data: Sequence[Example], logprobs: Sequence[Sequence[float]]) -> float:
    """Return a summed loss of examples with these log-probabilities, without gradient.

    Raises `ConfigError` with the number of the first sample whose loss is not finite.
    """
    new_T = torch.tensor([value for row in logprobs for value in row])
    tokens = tokens_of(data, objective.shares([len(row) for row in logprobs]), new_T, None)
    loss_T, _, _ = objective.terms(tokens)
    refuse_broken(loss_T, torch.zeros_like(loss_T), tokens, range(len(data)))
    return float(loss_T.sum())


def _rounds(
    base: ResidentBase, states: Sequence[_CallState]
) -> Iterator[Sequence[tuple[_CallState, list[int]]]]:
    """Return what is learned at a time: microbatches of one call, or small ones of several calls together."""
    pieces = [(number, batch) for number, one in enumerate(states) for batch in one.batches]
    if len(states) == 1:
        # Already as full as possible, and this keeps the summation order.
        rounds = base.rounds(pieces)
    else:
        sized = [(stream_tokens(states[number].rows(batch)), (number, batch)) for number, batch in pieces]
        rounds = (sorted(together) for together in first_fit(sized, base.microbatch_tokens))
    return ([(states[number], batch) for number, batch in together] for together in rounds)


def _judged(pieces: Sequence[tuple[_CallState, list[int]]], outputs: Sequence[Found]) -> list[Tensor]:
    return [one.learn(batch, *values) for (one, batch), values in zip(pieces, outputs, strict=True)]


@contextmanager
def adding_gradients(adapters: Iterable[Adapter]) -> Iterator[None]:
    """Add the gradients computed inside to the earlier ones; restore the earlier ones after an error.

    Raises `ConfigError` when the norm of an adapter's gradients is then not finite.
    """
    held = set(adapters)
    factors = [factor for adapter in held for factor in adapter.factors.values()]
    before = [factor.grad for factor in factors]
    for adapter in held:
        adapter.clear_gradients()
    try:
        yield
        for factor, gradient in zip(factors, before, strict=True):
            if factor.grad is None:
                factor.grad = torch.zeros_like(factor) if gradient is None else gradient
            elif gradient is not None:
                factor.grad.add_(gradient)
        for adapter in held:
            refuse_infinite(adapter)
    except BaseException:
        # Any end of the pass, even a custom loss that exits, must not leave a partial sum.
        for factor, gradient in zip(factors, before, strict=True):
            factor.grad = gradient
        raise


def refuse_infinite(adapter: Adapter) -> None:
    """Raise `ConfigError` unless the norm of the gathered gradients is finite.

    An infinite norm would clip them to zero, and without clipping Adam would keep their squares.
    """
    gathered = [factor.grad for factor in adapter.factors.values() if factor.grad is not None]
    if not torch.nn.utils.get_total_norm(gathered).isfinite():
        raise ConfigError(
            "The gradients of these samples are too large: their norm, with the gradients gathered before, "
            "is not finite, although every loss is. Nothing was changed. Check the size of the advantages."
        )


def check(base: ResidentBase, data: Sequence[Example], name: str, loss: Loss) -> None:
    """Raise `ConfigError` that names the first example that the loss or the base does not accept."""
    check_rows(base, [example.row for example in data])
    if len(data) % loss.unit:
        raise ConfigError(f"The loss {name} needs samples in groups of {loss.unit}; there are {len(data)}.")
    sampled = loss.sampled or bool(data[0].old_logprobs)
    for i, example in enumerate(data):
        want = example.row.length if sampled else 0
        counts = len(example.old_logprobs), len(example.advantages)
        if counts != (want, want):
            raise ConfigError(
                f"Sample {i} has {example.row.length} completion tokens, {counts[0]} log-probabilities and "
                f"{counts[1]} advantages. The loss {name} needs {want} of each here."
            )


def check_rows(base: ResidentBase, rows: Sequence[TokenRow]) -> None:
    """Raise `ConfigError` for no rows, or with the first row that the base does not accept."""
    if not rows:
        raise ConfigError("There are no samples. Send at least one.")
    for i, row in enumerate(rows):
        if not 1 <= row.start < len(row.tokens):
            raise ConfigError(f"Sample {i} needs a prompt and a completion of at least one token each.")
        if len(row.tokens) > base.longest:
            raise ConfigError(
                f"Sample {i} has {len(row.tokens)} tokens; the trainer accepts {base.longest}. Shorten it, "
                "or raise trainer.microbatch_tokens where the base's context allows."
            )
        if wrong := [token for token in (*row.tokens, *row.targets) if not 0 <= token < base.vocabulary]:
            raise ConfigError(
                f"Sample {i} has the token {wrong[0]}; the base's vocabulary is 0 to {base.vocabulary - 1}. "
                "Was it made with another tokenizer?"
            )
