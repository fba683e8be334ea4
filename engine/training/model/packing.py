"""Packed sequences: rows of many lengths as one stream of tokens, without padding, each shared prompt once.

Norms, projections, experts and head work on single tokens, so they see the stream as one row. Only attention
needs sequences: each run of queries gathers its keys from the stream, the prompt's before its own, and runs
of similar length share one product. Causal attention makes a prompt's states independent of what follows, so
the samples of a group share them and their gradients are summed there.

Shape suffixes: _T tokens of the stream, _N completion tokens of all rows, _B runs of a bucket, _Q their
queries, _K their keys, _P padded places of all buckets, _W width of a token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from engine.planning.memory import COPIES

# Families with plain causal attention over the whole sequence through transformers' attention interface.
# Others (sparse, windowed, with sinks) use rows padded on the right.
PACKED = ("deepseek_v3", "glm4_moe", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
IMPLEMENTATION = "packed"
# A bucket may compute this many times the scores that its runs need, plus a floor that one call is worth.
WASTE = 1.5
FLOOR = 2**14
Piece = TypeVar("Piece")


@dataclass(frozen=True)
class TokenRow:
    """Token ids of a prompt and its completion, which begins at position `start` >= 1.

    `routes` (P, layers, K) are the experts that the engine chose for the first P tokens; see replay.py.
    `targets` are the tokens whose log-probabilities are asked for, as many after each token but the last;
    empty: the completion. `start` then only says which tokens may be shared with other rows.
    """

    tokens: tuple[int, ...]
    start: int
    routes: Tensor | None = field(default=None, compare=False)
    targets: tuple[int, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """Return the prompt's tokens."""
        return self.tokens[: self.start]

    @property
    def shared(self) -> tuple[tuple[int, ...], bytes]:
        """Return the key of rows that can share prompt states: the prompt's tokens and experts."""
        return self.prompt, b"" if self.routes is None else self.routes[: self.start].numpy().tobytes()

    @property
    def length(self) -> int:
        """Return the number of completion tokens, or of targets."""
        return len(self.targets) or len(self.tokens) - self.start

    @property
    def chosen(self) -> tuple[int, ...]:
        """Return the completion tokens, or the targets."""
        return self.targets or self.tokens[self.start :]

    @property
    def before(self) -> list[int]:
        """Return, for each token of `chosen`, the position whose state predicts it."""
        if not self.targets:
            return list(range(self.start - 1, len(self.tokens) - 1))
        each = len(self.targets) // (len(self.tokens) - 1)
        return [position for position in range(len(self.tokens) - 1) for _ in range(each)]


@dataclass(frozen=True)
class Example:
    """A row with the sampler's log-probability and the advantage of each completion token or target.

    Both are empty when the loss needs no samples. `number` is the sample's number in errors when others of
    its call were left out. `weights`, `ratio_mask`, `clip_low` and `clip_high` belong to `targets`; see
    `Tokens`.
    """

    row: TokenRow
    old_logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    number: int | None = None
    weights: tuple[float, ...] = ()
    ratio_mask: tuple[float, ...] = ()
    clip_low: tuple[float, ...] = ()
    clip_high: tuple[float, ...] = ()


@dataclass(frozen=True)
class QueryRun:
    """`count` queries from place `first` of the stream; their keys are a prompt's, then their own."""

    first: int
    count: int
    prompt_first: int = 0
    prompt_count: int = 0

    @property
    def keys(self) -> int:
        """Return the number of keys."""
        return self.prompt_count + self.count


@dataclass(frozen=True)
class Bucket:
    """Sizes of one attention product, and its additive mask (B, 1, Q, K); None means causal."""

    rows: int
    queries: int
    keys: int
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionLayout:
    """Index tensors that map between the stream and the attention buckets.

    `queries` and `keys` (P): the stream's place of each bucket entry, bucket after bucket. `place` (T): the
    entry at which each token is a query. `users`: all entries at which tokens are keys; those of token t
    start at `offsets[t]`, with `offsets` (T).
    """

    buckets: tuple[Bucket, ...]
    queries: Tensor
    keys: Tensor
    place: Tensor
    users: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Stream:
    """Rows as one stream: `tokens` and `positions` (T), and the attention layout.

    `chosen` (N) are the completion tokens or targets, row after row, and `before` (N) the place of the token
    before each; `counts` are the tokens of each part. `routes` are the tokens' experts as (ids, number of
    tokens).
    """

    tokens: Tensor
    positions: Tensor
    before: Tensor
    chosen: Tensor
    counts: tuple[int, ...]
    layout: AttentionLayout
    routes: tuple[tuple[Tensor | None, int], ...]


def can_pack(config: Any) -> bool:
    """Say whether `attend` can compute a model's attention; others need padded rows."""
    windowed = getattr(config, "sliding_window", None) is not None
    kinds = set(getattr(config, "layer_types", None) or ())
    return config.model_type in PACKED and not windowed and kinds <= {"full_attention"}


def use_packing(model: Any) -> None:
    """Install `attend` as a model's attention; without a `layout` it is transformers' SDPA."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    model.set_attn_implementation(IMPLEMENTATION)


def pack(parts: Sequence[Sequence[TokenRow]], device: torch.device, dtype: torch.dtype) -> Stream:
    """Return the rows of all parts as one stream; rows of a part with the same prompt share it.

    `dtype` is that of the attention masks. A row's last token predicts nothing and is left out.
    """
    tokens: list[int] = []
    positions: list[int] = []
    before: list[int] = []
    buckets: list[list[QueryRun]] = []
    routes: list[tuple[Tensor | None, int]] = []
    ends = [0]

    def add(row: TokenRow, begin: int, end: int) -> int:
        tokens.extend(row.tokens[begin:end])
        positions.extend(range(begin, end))
        routes.append((None if row.routes is None else row.routes[begin:end], end - begin))
        return len(tokens) - (end - begin)

    for rows in parts:
        named = [row.shared for row in rows]
        runs: list[QueryRun] = []
        samples, prompts = Counter(named), dict[Any, int]()
        for row, prompt in zip(rows, named, strict=True):
            alone = samples[prompt] == 1
            if prompt not in prompts:
                prompts[prompt] = add(row, 0, row.start)
                runs.append(QueryRun(prompts[prompt], len(row.tokens) - 1 if alone else row.start))
            first = add(row, row.start, len(row.tokens) - 1)
            own = first - row.start
            before.extend((prompts[prompt] if at < row.start else own) + at for at in row.before)
            if not alone and first < len(tokens):
                runs.append(QueryRun(first, len(tokens) - first, prompts[prompt], row.start))
        ends.append(len(tokens))
        # Buckets never mix parts, so attention rounds as it does for each part alone.
        buckets += _bucketed(runs)
    chosen = [token for rows in parts for row in rows for token in row.chosen]
    tokens_T, positions_T, before_N, chosen_N = (
        torch.tensor(values).to(device) for values in (tokens, positions, before, chosen)
    )
    counts = tuple(end - begin for begin, end in pairwise(ends))
    layout = _layout(buckets, len(tokens), device, dtype)
    return Stream(tokens_T, positions_T, before_N, chosen_N, counts, layout, tuple(routes))


def microbatches(
    rows: Sequence[TokenRow], budget: int, unit: int = 1, shared: bool = True
) -> list[list[int]]:
    """Return row indices in batches of at most `budget` stream tokens; a larger unit is a batch of its own.

    `unit` consecutive rows stay together. Rows with the same prompt stay together where they fit, so that
    they share it; without `shared` every row counts its own prompt. A prompt's keys are copied for each of
    its samples: a token of the budget allows for `COPIES` copies.
    """
    groups: dict[Any, list[list[int]]] = {}
    for begin in range(0, len(rows), unit):
        members = list(range(begin, min(begin + unit, len(rows))))
        groups.setdefault(rows[begin].shared if shared else begin, []).append(members)

    def size(units: Sequence[Sequence[int]]) -> int:
        chosen = [rows[i] for members in units for i in members]
        keys = sum(len(row.tokens) - 1 for row in chosen)
        if not shared:
            return keys
        return max(stream_tokens(chosen), -(-(_prompt_tokens(chosen) + keys) // COPIES))

    pieces: list[list[list[int]]] = []
    for units in groups.values():
        pieces.append([])
        for members in units:
            if pieces[-1] and size([*pieces[-1], members]) > budget:
                pieces.append([])
            pieces[-1].append(members)
    sized = [(size(piece), [i for members in piece for i in members]) for piece in pieces]
    return [sorted(i for piece in batch for i in piece) for batch in first_fit(sized, budget)]


def first_fit(pieces: Sequence[tuple[int, Piece]], budget: int) -> list[list[Piece]]:
    """Pack (size, piece) pairs into batches of at most `budget`, first-fit decreasing."""
    batches: list[list[Piece]] = []
    room: list[int] = []
    for size, piece in sorted(pieces, key=lambda sized: -sized[0]):
        at = next((at for at, left in enumerate(room) if size <= left), len(batches))
        if at == len(batches):
            batches.append([])
            room.append(budget)
        batches[at].append(piece)
        room[at] -= size
    return batches


def stream_tokens(rows: Sequence[TokenRow]) -> int:
    """Return the number of stream tokens that `pack` makes of one part's rows."""
    return _prompt_tokens(rows) + sum(len(row.tokens) - 1 - row.start for row in rows)


def _prompt_tokens(rows: Sequence[TokenRow]) -> int:
    """Return the number of tokens of the distinct prompts of these rows."""
    return sum({row.shared: row.start for row in rows}.values())


def _bucketed(runs: Sequence[QueryRun]) -> list[list[QueryRun]]:
    """Group runs of similar length; prompts and whole rows apart from runs that follow a prompt."""
    buckets: list[list[QueryRun]] = []
    needed = queries = keys = 0
    for run in sorted(runs, key=lambda run: (run.prompt_count == 0, -run.keys, -run.count)):
        needed, queries, keys = needed + run.count * run.keys, max(queries, run.count), max(keys, run.keys)
        same = buckets and (buckets[-1][0].prompt_count == 0) == (run.prompt_count == 0)
        if not same or (len(buckets[-1]) + 1) * queries * keys > WASTE * needed + FLOOR:
            buckets.append([])
            needed, queries, keys = run.count * run.keys, run.count, run.keys
        buckets[-1].append(run)
    return buckets


def _places(runs: Sequence[QueryRun], dtype: torch.dtype) -> tuple[Bucket, Tensor, Tensor]:
    """Return a bucket and the stream places of its queries (B, Q) and keys (B, K); padding is -1."""
    numbers = [(run.first, run.count, run.prompt_first, run.prompt_count) for run in runs]
    first_B1, count_B1, prompt_first_B1, prompt_B1 = torch.tensor(numbers).T[:, :, None]
    query_Q = torch.arange(int(count_B1.max()))
    key_K = torch.arange(int((prompt_B1 + count_B1).max()))
    query_BQ = (first_B1 + query_Q).where(query_Q < count_B1, -1)
    own_BK = (first_B1 + key_K - prompt_B1).where(key_K < prompt_B1 + count_B1, -1)
    key_BK = (prompt_first_B1 + key_K).where(key_K < prompt_B1, own_BK)
    mask = None
    if runs[0].prompt_count:
        later_BQK = key_K > (prompt_B1 + query_Q)[:, :, None]
        mask = torch.zeros(later_BQK.shape, dtype=dtype).masked_fill(later_BQK, -torch.inf)[:, None]
    return Bucket(len(runs), len(query_Q), len(key_K), mask), query_BQ, key_BK


def _layout(
    runs: Sequence[Sequence[QueryRun]], total: int, device: torch.device, dtype: torch.dtype
) -> AttentionLayout:
    """Return the layout of bucketed runs; computed on the CPU, so that a GPU is not synchronised."""
    buckets, queries, keys = zip(*(_places(bucket, dtype) for bucket in runs), strict=True)
    query_P, key_P = (torch.cat([part.flatten() for part in parts]) for parts in (queries, keys))
    read = (query_P >= 0).nonzero()[:, 0]
    place_T = torch.empty(total, dtype=torch.long).index_copy_(0, query_P[read], read)
    read = (key_P >= 0).nonzero()[:, 0]
    times_T = torch.bincount(key_P[read], minlength=total)
    users = read[key_P[read].argsort(stable=True)]
    numbers = (query_P.clamp(min=0), key_P.clamp(min=0), place_T, users, times_T.cumsum(0) - times_T)
    moved = tuple(
        replace(bucket, mask=None if bucket.mask is None else bucket.mask.to(device)) for bucket in buckets
    )
    return AttentionLayout(moved, *(values.to(device) for values in numbers))


class Take(Function):
    """Gather lines (P, W) of x (T, W) at `index` (P); gradients of repeated lines sum in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, users: Tensor, offsets: Tensor) -> Tensor:
        """Return lines (P, W); `users` and `offsets` are as in `AttentionLayout`."""
        ctx.save_for_backward(users, offsets)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x (T, W)."""
        users, offsets = ctx.saved_tensors
        return embedding_bag(users, grads[0].contiguous(), offsets, mode="sum"), None, None, None


class GatherUnique(Function):
    """Gather lines of x at `index`, each read at most once; `back` is the inverse index."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        """Return the lines at `index`."""
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within the runs of a stream, as an attention function of transformers.

    `query`, `key` and `value` are (1, heads, T, D); returns (1, T, heads, D). Without a `layout` it is
    transformers' SDPA on whole rows.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert (attention_mask, sliding_window, dropout) == (None, None, 0.0), "no such model is packed"
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)
    query_P = GatherUnique.apply(_lines(query), layout.queries, layout.place)
    key_P, value_P = (Take.apply(_lines(x), layout.keys, layout.users, layout.offsets) for x in (key, value))
    out_P, query_at, key_at = [], 0, 0
    for bucket in layout.buckets:
        query_end, key_end = query_at + bucket.rows * bucket.queries, key_at + bucket.rows * bucket.keys
        out = scaled_dot_product_attention(
            _heads(query_P[query_at:query_end], bucket.rows, query.shape[1]),
            _heads(key_P[key_at:key_end], bucket.rows, key.shape[1]),
            _heads(value_P[key_at:key_end], bucket.rows, value.shape[1]),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out_P.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        query_at, key_at = query_end, key_end
    out_TW = torch.cat(out_P).index_select(0, layout.place)
    return out_TW.view(1, len(out_TW), query.shape[1], -1), None


def _lines(x: Tensor) -> Tensor:
    """Return heads (1, heads, T, D) as lines (T, W)."""
    return x[0].transpose(0, 1).flatten(1)


def _heads(x: Tensor, rows: int, heads: int) -> Tensor:
    """Return lines (B * S, W) as heads (B, heads, S, D)."""
    return x.view(rows, len(x) // rows, heads, -1).transpose(1, 2)
