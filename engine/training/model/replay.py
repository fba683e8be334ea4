"""Router replay: each token takes the experts in the trainer that the engine chose for it.

Engine and trainer compute a router's scores in another order or dtype, so now and then another expert wins;
the same token then passes through other weights, and its importance ratio is far from 1. With the engine's
ids the choice is the sampler's, and the weights are the trainer's own scores at these ids: the router still
sees what the adapter changed before it (rollout routing replay, arXiv 2510.11370).

Knows transformers' routers (`gate` beside `experts`: logits, weights, ids). Knows no loss and no adapter.

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
    """Return the ids (P, L, K) of a completion from vLLM's `routed_experts`, a `.npy` in base64.

    They are those of its first P tokens, prompt included. Raises `ConfigError` when they are no such ids.
    """
    try:
        ids = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"A datum's routed_experts must be a .npy in base64: {error}.") from None
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ConfigError(f"A datum's routed_experts are {ids.dtype} {ids.shape}, not integers (P, L, K).")
    return torch.from_numpy(ids.astype(np.int64))


class Replay:
    """Hooks behind a base's routers, and the ids of the forward under way; -1 where there are none.

    The ids stay until the next forward: a backward that computes activations again needs them. With
    `follows` off, the trainer's own choice stands and is only compared with the engine's.
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

    def check(self, routes_PLK: Tensor | None) -> None:
        """Raise `ConfigError` unless the ids, if there are any, are of this base's layers and experts."""
        if routes_PLK is None:
            return
        known = not routes_PLK.numel() or 0 <= int(routes_PLK.min()) <= int(routes_PLK.max()) < self.experts
        if routes_PLK.shape[1:] != self.shape or not known:
            raise ConfigError(
                f"A datum's routed_experts are {tuple(routes_PLK.shape)}; this base needs (P, "
                f"{self.shape[0]}, {self.shape[1]}) with ids below {self.experts}. Sample from an engine "
                "with the same base."
            )

    def lay(self, pieces: Iterable[tuple[Tensor | None, int]], device: torch.device) -> None:
        """Lay out the ids of the next forward, piece by piece of its tokens: ids of the first ones, count."""
        found = list(pieces)
        self._routes_TLK = None
        if any(routes is not None for routes, _ in found):
            nothing = torch.empty(0, *self.shape, dtype=torch.long)
            rows = [(nothing if routes is None else routes[:count], count) for routes, count in found]
            whole = [pad(ids, (0, 0, 0, 0, 0, count - len(ids)), value=UNKNOWN) for ids, count in rows]
            self._routes_TLK = torch.cat(whole).to(device)
            self._strayed_T = torch.zeros(len(self._routes_TLK), dtype=torch.bool, device=device)

    def count(self, at: Tensor) -> None:
        """Count for which of the last forward's tokens `at` the trainer's router chose otherwise."""
        if self._routes_TLK is not None:
            known = self._routes_TLK[at, 0, 0] != UNKNOWN
            counts = torch.stack([(self._strayed_T[at] & known).sum(), known.sum()])
            self._counts = self._counts.to(counts.device) + counts

    def forget(self) -> None:
        """Begin to count anew: what was counted belongs to another adapter, or to a call that failed."""
        self._counts = torch.zeros(2, dtype=torch.long)

    def take(self) -> tuple[int, int]:
        """Return how many tokens went elsewhere under the last adapter, of how many with the engine's ids."""
        strayed, known = self._counts.tolist()
        self.forget()
        return strayed, known

    def _choose(self, layer: int, gate: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Return a router's output with the weights and ids (T, K) of the engine's choice."""
        logits, weights, own = output
        if self._routes_TLK is None:
            return output
        given = self._routes_TLK[:, layer]
        ids = torch.where(given == UNKNOWN, own, given)
        self._strayed_T |= (ids.sort(1).values != own.sort(1).values).any(1)
        return (logits, weights_at(gate, logits, ids).to(weights.dtype), ids) if self.follows else output


def weights_at(gate: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Return a router's weights (T, K) of any experts, by the formula of its `forward` for the best.

    DeepSeek's routers (known by their correction of scores) use a sigmoid, the others a softmax; Mixtral's
    has no switch for the normalisation, which is always on.
    """
    if hasattr(gate, "e_score_correction_bias"):
        weights = logits.sigmoid().gather(1, ids)
        if gate.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * gate.routed_scaling_factor
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(gate, "norm_topk_prob", True) else weights


def mask_unknown(data: Sequence[Example], unit: int = 1) -> tuple[list[Example], int]:
    """Return the examples up to their last token with known experts, and how many tokens that leaves out.

    A token is drawn from the states of all tokens before it, so what follows the first unknown one is left
    out, and where nothing of an example is left, all the `unit` consecutive ones that it belongs to. What is
    left out has no gradient and counts for no mean; what is kept has its number in `data`. Raises
    `ConfigError` when nothing is left.
    """
    kept: list[Example] = []
    for begin in range(0, len(data), unit):
        cut = [_known_part(data[i], i) for i in range(begin, begin + unit)]
        if all(example.row.length > 0 for example in cut):
            kept += cut
    if not kept:
        raise ConfigError(
            "None of these samples carries the experts that its tokens took. Set engine.routed_experts to "
            "true and start the engine anew, or set the policy's router_replay to false."
        )
    return kept, sum(example.row.length for example in data) - sum(example.row.length for example in kept)


def _known_part(example: Example, number: int) -> Example:
    row = example.row
    known = 0 if row.routes is None else len(row.routes)
    count = max(0, min(row.length, known - row.start + 1))
    cut = replace(row, tokens=row.tokens[: row.start + count])
    logprobs, advantages = example.old_logprobs[:count], example.advantages[:count]
    return replace(example, row=cut, old_logprobs=logprobs, advantages=advantages, number=number)
