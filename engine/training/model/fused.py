"""Several sessions' gradients in one forward and backward: their tokens lie one after another in a stream.

Each projection reads the base's weight once for all of them, and each adapter's factors for its own tokens,
at its own rank. The losses stay apart: each session's terms see its own tokens alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.training.loss.measures import MicrobatchStats, measure
from engine.training.model.adapter import Adapter
from engine.training.model.lora import ResidentBase
from engine.training.model.microbatches import first_fit, stream_tokens
from engine.training.model.packing import Example, TokenRow
from engine.training.model.update import Backward, Objective, adding_gradients, check, learn

# Tokens of one session's stream up to which fusing wins clearly; see `is_worth_fusing`.
FEW_TOKENS = 320


@dataclass(frozen=True)
class Call:
    """One session's forward_backward: what `update.forward_backward` takes."""

    adapter: Adapter
    data: Sequence[Example]
    loss: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A microbatch of one call: the numbers of its examples."""

    call: int
    batch: list[int]


def is_worth_fusing(base: ResidentBase, calls: Sequence[Call]) -> bool:
    """Say whether these calls are clearly faster together than in turns; what replays experts takes turns.

    `graftwork bench fused` on a CPU, CPU seconds of turns over those of one pass, for 3 and 9 policies
    on tiny-dense: 1.30 and 1.34 with 8 samples each (about 130 tokens), 1.17 and 1.11 with 16 (260),
    0.94 and 1.08 with 32 (510), 1.04 and 1.00 with 128 (2000); on tiny-moe 1.18 and 1.41, 1.10 and
    1.08, 0.98 and 0.98, 1.03 and 0.98. What is saved is the cost of calls, which larger ones hide.
    """
    small = all(is_small([example.row for example in call.data]) for call in calls)
    return len(calls) > 1 and base.packs and small and not replays(calls)


def is_small(rows: Sequence[TokenRow]) -> bool:
    """Say whether one session's rows are few enough tokens to go together with others."""
    return stream_tokens(rows) <= FEW_TOKENS


def replays(calls: Sequence[Call]) -> bool:
    """Say whether any example brings the experts that its tokens take."""
    return any(example.row.routes is not None for call in calls for example in call.data)


def forward_backward_many(
    base: ResidentBase, calls: Sequence[Call], between: Callable[[], None] = lambda: None
) -> list[Backward]:
    """Add each call's gradients to its own adapter's; the results are those of each call alone, to rounding.

    On a CPU in float32 they are equal to the last bit wherever matrix products treat rows alike (MKL as
    `engine.settings.reproducible` asks it, from four rows on) and experts' widths are whole 32s: attention is
    bucketed for each call, experts have at least four rows, and gradients are summed for each call.

    `between` is called before each microbatch and may raise to end all calls. Raises what the first call
    that fails would raise, and `ConfigError` for calls that cannot share a pass; then all gathered gradients
    stay as they were, and the calls may be made in turns.
    """
    if not base.packs or replays(calls):
        raise ConfigError(
            "These calls cannot share a pass: a sample has routed_experts, or the base's attention takes no "
            "packed stream. Make them one after another."
        )
    objectives = [Objective.of(call.loss, call.config) for call in calls]
    for call, objective in zip(calls, objectives, strict=True):
        check(base, call.data, call.loss, objective.loss)
    shares = [
        objective.shares([example.row.length for example in call.data])
        for call, objective in zip(calls, objectives, strict=True)
    ]
    seen: list[list[MicrobatchStats]] = [[] for _ in calls]
    logprobs: list[dict[int, Tensor]] = [{} for _ in calls]
    with adding_gradients(call.adapter for call in calls):
        for pieces in _together(base, calls, objectives):
            between()
            for piece, found in zip(
                pieces, _microbatch(base, calls, pieces, objectives, shares), strict=True
            ):
                seen[piece.call].append(found)
                lengths = [calls[piece.call].data[i].row.length for i in piece.batch]
                logprobs[piece.call] |= zip(piece.batch, found.new_T.split(lengths), strict=True)
    return [
        Backward(
            measure(seen[number], sampled=bool(call.data[0].old_logprobs)),
            tuple(tuple(logprobs[number][i].tolist()) for i in range(len(call.data))),
        )
        for number, call in enumerate(calls)
    ]


def _together(
    base: ResidentBase, calls: Sequence[Call], objectives: Sequence[Objective]
) -> list[list[Piece]]:
    """Cut each call into microbatches of its own, and put small ones of several calls together."""
    pieces: list[tuple[int, Piece]] = []
    for number, (call, objective) in enumerate(zip(calls, objectives, strict=True)):
        rows = [example.row for example in call.data]
        batches = base.microbatches(rows, objective.loss.unit)
        pieces += [(stream_tokens([rows[i] for i in batch]), Piece(number, batch)) for batch in batches]
    joined = first_fit(pieces, base.microbatch_tokens)
    return [sorted(batch, key=lambda piece: (piece.call, piece.batch)) for batch in joined]


def _microbatch(
    base: ResidentBase,
    calls: Sequence[Call],
    pieces: Sequence[Piece],
    objectives: Sequence[Objective],
    shares: Sequence[Sequence[float]],
) -> list[MicrobatchStats]:
    rows = [[calls[piece.call].data[i].row for i in piece.batch] for piece in pieces]
    stream = base.pack(rows)
    sizes = [sum(row.length for row in part) for part in rows]
    base_parts: Sequence[Tensor | None] = [None] * len(pieces)
    if any(objectives[piece.call].needs_base for piece in pieces):
        with torch.no_grad(), base.using(None):
            base_parts = base.logprobs(stream).split(sizes)
    adapters = [calls[piece.call].adapter for piece in pieces]
    with base.using_many(list(zip(adapters, stream.counts, strict=True))):
        new_T, entropy_T = base.logprobs_and_entropy(stream)
        parts = zip(pieces, new_T.split(sizes), entropy_T.split(sizes), base_parts, strict=True)
        learned = [
            learn(
                calls[piece.call].data, piece.batch, shares[piece.call], objectives[piece.call],
                new, entropy, base_T if objectives[piece.call].needs_base else None,
            )
            for piece, new, entropy, base_T in parts
        ]  # fmt: skip
        new_T.backward(torch.cat([gradient_T for gradient_T, _ in learned]))  # type: ignore[no-untyped-call]
    return [found for _, found in learned]
