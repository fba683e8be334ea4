"""Router replay: each token takes the experts in the trainer that the engine chose for it.

Engine and trainer compute a router's scores in a different order or dtype, so sometimes another expert wins.
The same token then passes through other weights, and its importance ratio is far from 1. With the engine's
ids the choice is the sampler's, and the weights are the trainer's own scores at these ids, so the router
still sees the adapter's effect (rollout routing replay, arXiv 2510.11370).

It hooks transformers' routers (`gate` beside `experts`, with the output logits, weights, ids).

Shapes: T tokens of a forward, P positions of a row, L layers of the base, K experts of a token.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.base.families import BaseShapes
from engine.errors import ConfigError
from engine.training.model.packing import Example

UNKNOWN = -1


def decode(text: str) -> Tensor:
    """Return expert ids (P, L, K), int64, from vLLM's `routed_experts`, a `.npy` in base64.

    They belong to the first P tokens, prompt included. Raises `ConfigError` for anything else.
    """
    try:
        ids = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"A datum's routed_experts must be a .npy in base64: {error}.") from None
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ConfigError(f"A datum's routed_experts are {ids.dtype} {ids.shape}, not integers (P, L, K).")
    return torch.from_numpy(ids.astype(np.int64))


class Replay:
    """Hooks on a base's routers, and the expert ids of the current forward pass; -1 means unknown.

    The ids stay until the next forward pass, because a recomputing backward pass needs them. With `follows`
    off, the trainer's own choice is used and only compared with the engine's.
    """

    def __init__(self, model: Any, shapes: BaseShapes):
        self.follows = True
        self.shape = (model.config.num_hidden_layers, getattr(model.config, "num_experts_per_tok", 0))
        self.experts = min((experts.count for experts in shapes.experts.values()), default=0)
        self._routes_TLK: Tensor | None = None
        self._strayed_T = torch.zeros(0, dtype=torch.bool)
        self._counts = torch.zeros(2, dtype=torch.long)
        for path in shapes.experts:
            gate = model.get_submodule(f"{path.rpartition('.')[0]}.gate")
            gate.register_forward_hook(partial(self._choose, int(path.split(".")[2])))

    def check(self, routes_PLK: Tensor) -> None:
        """Raise `ConfigError` unless the ids fit this base's layers and experts."""
        known = not routes_PLK.numel() or 0 <= int(routes_PLK.min()) <= int(routes_PLK.max()) < self.experts
        if routes_PLK.shape[1:] != self.shape or not known:
            raise ConfigError(
                f"A datum's routed_experts are {tuple(routes_PLK.shape)}; this base needs (P, "
                f"{self.shape[0]}, {self.shape[1]}) with ids below {self.experts}. Sample from an engine "
                "with the same base."
            )

    def lay(self, pieces: Iterable[tuple[Tensor | None, int]], device: torch.device) -> None:
        """Set the ids of the next forward pass; a piece is (ids of its first tokens, number of tokens).

        Only for a base with experts.
        """
        parts = list(pieces)
        self._routes_TLK = None
        if any(routes is not None for routes, _ in parts):
            nothing = torch.empty(0, *self.shape, dtype=torch.long)
            rows = [(nothing if routes is None else routes[:count], count) for routes, count in parts]
            whole = [pad(ids, (0, 0, 0, 0, 0, count - len(ids)), value=UNKNOWN) for ids, count in rows]
            self._routes_TLK = torch.cat(whole).to(device)
            self._strayed_T = torch.zeros(len(self._routes_TLK), dtype=torch.bool, device=device)

    def count(self, at: Tensor) -> None:
        """Count the tokens at the places `at` for which the trainer's router chose other experts."""
        if self._routes_TLK is not None:
            known = self._routes_TLK[at, 0, 0] != UNKNOWN
            counts = torch.stack([(self._strayed_T[at] & known).sum(), known.sum()])
            self._counts = self._counts.to(counts.device) + counts

    def forget(self) -> None:
        """Reset the counts, which belong to another adapter or to a failed call."""
        self._counts = torch.zeros(2, dtype=torch.long)

    def take(self) -> tuple[int, int]:
        """Return (tokens whose experts differ, tokens with the engine's ids) and reset the counts."""
        strayed, known = self._counts.tolist()
        self.forget()
        return strayed, known

    def _choose(self, layer: int, gate: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Return a router's output with the engine's ids (T, K) and the trainer's weights for them."""
        logits, weights, own = output
        if self._routes_TLK is None:
            return output
        given = self._routes_TLK[:, layer]
        ids = torch.where(given == UNKNOWN, own, given)
        self._strayed_T |= (ids.sort(1).values != own.sort(1).values).any(1)
        return (logits, weights_at(gate, logits, ids).to(weights.dtype), ids) if self.follows else output


def weights_at(gate: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Return a router's weights (T, K) for given experts, by the formula of its own `forward`.

    DeepSeek's routers (recognised by their score correction) use a sigmoid, the others a softmax. Mixtral's
    router always normalises.
    """
    if hasattr(gate, "e_score_correction_bias"):
        weights = logits.sigmoid().gather(1, ids)
        if gate.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * gate.routed_scaling_factor
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(gate, "norm_topk_prob", True) else weights


def mask_unknown(data: Sequence[Example], unit: int = 1) -> tuple[list[Example], int]:
    """Cut examples after their last token with known experts; return them and the number of cut tokens.

    A token depends on the states of all tokens before it, so everything after the first unknown token is cut.
    When nothing of an example is left, its whole unit of `unit` consecutive examples is dropped. Cut tokens
    have no gradient and count in no mean; kept examples carry their number in `data`. Raises `ConfigError`
    when nothing is left.
    """
    kept: list[Example] = []
    for begin in range(0, len(data), unit):
        cut = [_known_part(data[i], i) for i in range(begin, begin + unit)]
        if all(example.row.length > 0 for example in cut):
            kept += cut
    if not kept:
        raise ConfigError(
            "None of these samples has the experts of its tokens. Set engine.routed_experts to true and "
            "restart the engine, or set the policy's router_replay to false."
        )
    return kept, sum(example.row.length for example in data) - sum(example.row.length for example in kept)


def _known_part(example: Example, number: int) -> Example:
    row = example.row
    known = 0 if row.routes is None else len(row.routes)
    count = max(0, min(row.length, known - row.start + 1))
    cut = replace(row, tokens=row.tokens[: row.start + count])
    logprobs, advantages = example.old_logprobs[:count], example.advantages[:count]
    return replace(example, row=cut, old_logprobs=logprobs, advantages=advantages, number=number)
