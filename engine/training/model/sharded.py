"""A base that one device does not hold: its parameters are sharded over ranks by FSDP2.

Rank 0 has sessions, adapters and Adam moments, and decides everything. It sends the factors of a call, then
round after round one microbatch for each rank. It computes every loss in the order of the microbatches, and
adds their gradients in that order: W ranks give one rank's bits. A rank without a microbatch computes a row
of one token that does not count, because all ranks gather a layer's parameters at once.

Shape suffixes: _T completion tokens one after another.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.training.model.adapter import Adapter
from engine.training.model.lora import Found, ResidentBase
from engine.training.model.packing import Piece, Stream, TokenRow
from engine.training.model.ranks import Ranks

# What a rank computes that has no microbatch in a round.
IDLE = (TokenRow((0, 0), 1),)


class ShardedBase(ResidentBase):
    """A resident base of which each rank holds a part. All ranks create it with the same arguments.

    On rank 0 it serves as any resident base, for one thread; the others `follow`.
    """

    def __init__(self, ranks: Ranks, *given: Any):
        """Load this rank's part; `given` is what a resident base is given."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        self.ranks = ranks
        self._held: Adapter | None = None
        super().__init__(*given)
        # FSDP2 keeps the root's parameters, embedding and head, after a forward pass unless told otherwise.
        self.model.set_reshard_after_forward(True)
        # A pass calls the decoder and reads the head's weight; FSDP2 gathers both around this root method.
        self.model.logprobs_of = MethodType(self._logprobs_of, self.model)
        register_fsdp_forward_method(self.model, "logprobs_of")
        local = sum(parameter.to_local().nbytes for parameter in self.model.parameters())
        self._bytes = ranks.every(local)

    def _load(self, path: Path, dtype: torch.dtype) -> Any:
        """Load this rank's part of each parameter, by transformers' own reader of slices."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
        from transformers.distributed import DistributedConfig

        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        # One group for each layer. Embedding, norm and head stay in the root's, where tied weights can be.
        config.base_model_fsdp_plan = {"layers.*": "free_full_weight"}
        known: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

        def tied_first(model: Any, *given: Any) -> Any:
            # transformers ties after loading; FSDP2 gathers a tied weight once if it was tied before.
            model.tie_weights(recompute_mapping=False)
            return known.maybe_distribute_model(model, *given)

        changed = {"_fsdp_plan": {}, "maybe_distribute_model": staticmethod(tied_first)}
        # transformers reads the source of a class's module.
        kind: Any = type(known.__name__, (known,), {"__module__": known.__module__, **changed})
        return kind.from_pretrained(
            path, config=config, dtype=dtype, distributed_config=DistributedConfig(fsdp_size=self.ranks.count)
        )

    def _logprobs_of(self, _: Any, rows: Sequence[TokenRow] | Stream) -> tuple[Tensor, Tensor]:
        return super().logprobs_and_entropy(rows)

    def logprobs_and_entropy(self, rows: Sequence[TokenRow] | Stream) -> tuple[Tensor, Tensor]:
        """Return what the resident base returns; every rank calls it at the same time."""
        values: tuple[Tensor, Tensor] = self.model.logprobs_of(rows)
        return values

    def parameter_bytes(self) -> list[int]:
        """Return the bytes of the base's parameters that each rank holds."""
        return self._bytes

    @property
    def shares_passes(self) -> bool:
        """Say that a pass is of one adapter: ranks compute several microbatches at once anyway."""
        return False

    @contextmanager
    def holding(self, adapter: Adapter | None) -> Iterator[None]:
        """Send an adapter's factors to all ranks for the rounds inside; None is the plain base."""
        self._call("hold", [], shape_of(adapter), adapter)
        try:
            yield
        finally:
            self._held = None

    applied = holding

    def rounds(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """Yield microbatches in their order, one for each rank."""
        for at in range(0, len(pieces), self.ranks.count):
            yield pieces[at : at + self.ranks.count]

    def learn(
        self,
        parts: Sequence[Sequence[TokenRow]],
        adapters: Sequence[Adapter],
        needs_base: bool,
        judge: Callable[[Sequence[Found]], Sequence[Tensor]],
    ) -> None:
        """Add the gradients of a round to the held adapter's, microbatch after microbatch."""
        failed: list[BaseException] = []

        def judged(outputs: Sequence[Found]) -> list[Tensor | None]:
            try:
                # Where no token teaches, the backward pass would add zeros.
                return [one if one.any() else None for one in judge(outputs[: len(parts)])]
            except BaseException as error:
                # A custom loss may raise anything; all ranks then leave out the backward pass.
                failed.append(error)
                return []

        self._call("learn", parts, needs_base, judged)
        if failed:
            raise failed[0]

    def follow(self) -> None:
        """Compute what rank 0 sends until it stops; the process ends when rank 0 is gone."""
        while True:
            with self.ranks.in_step():
                message = self.ranks.send()
                if message is None:
                    return
                if message:
                    self._compute(*message)

    def _call(self, name: str, parts: Sequence[Any], given: Any = None, own: Any = None) -> list[Any]:
        """Compute on all ranks, each its part; return their results in order. `own` is rank 0's alone."""
        with self.ranks.in_step():
            self.ranks.send((name, parts, given))
            return self._compute(name, parts, given, own)[: len(parts)]

    def _compute(self, name: str, parts: Sequence[Any], given: Any, own: Any = None) -> list[Any]:
        if name == "hold":
            self._hold(given, own)
            return []
        rows = parts[self.ranks.number] if self.ranks.number < len(parts) else IDLE
        if name == "learn":
            self._learn(rows, given, own)
            return []
        with torch.no_grad(), self.using(self._held):
            values = self._computed(name, rows, given, own)
        # Without a backward pass FSDP2 would remember the order of layers of each pass.
        self.model.reset_iter_state()
        return self.ranks.gather(values.cpu() if name == "score" else values)

    def _hold(self, shape: dict[str, tuple[int, float]] | None, own: Adapter | None) -> None:
        """Take the factors of rank 0's adapter, which rank 0 gives as `own`."""
        self._held = own
        if shape is None:
            return
        if own is None:
            ranks = {name: rank for name, (rank, _) in shape.items()}
            self._held = Adapter({name: self.sites[name] for name in shape}, ranks, ranks, self.device)
            self._held.scales = {name: scale for name, (_, scale) in shape.items()}
        assert self._held
        factors = list(self._held.factors.values())
        flat = torch.cat([factor.detach().flatten() for factor in factors])
        dist.broadcast(flat, 0)
        if own is None:
            with torch.no_grad():
                for factor, values in zip(factors, split(flat, factors), strict=True):
                    factor.copy_(values)

    def _learn(
        self,
        rows: Sequence[TokenRow],
        needs_base: bool,
        judged: Callable[[Sequence[Found]], list[Tensor | None]] | None,
    ) -> None:
        assert self._held
        factors = list(self._held.factors.values())
        own: Stream | Sequence[TokenRow] = self.pack([rows]) if self.packs else rows
        base_T = None
        if needs_base:
            with torch.no_grad(), self.using(None):
                base_T = self.logprobs(own).cpu()
        with self.using(self._held):
            new_T, entropy_T = self.logprobs_and_entropy(own)
            every = self.ranks.gather((new_T.detach().cpu(), entropy_T.cpu(), base_T, self.replay.take()))
            slopes: list[Tensor | None] = self.ranks.send(judged(every) if judged else None)
            if not any(slope is not None for slope in slopes):
                self.model.reset_iter_state()
                return
            mine = slopes[self.ranks.number] if self.ranks.number < len(slopes) else None
            slope_T = torch.zeros_like(new_T) if mine is None else mine.to(new_T.device)
            gradients = torch.autograd.grad(new_T, factors, slope_T, allow_unused=True)
        whole = [torch.zeros_like(f) if g is None else g for f, g in zip(factors, gradients, strict=True)]
        if self.ranks.number:
            if mine is not None:
                dist.send(torch.cat([gradient.flatten() for gradient in whole]), 0)
            return
        for number, slope in enumerate(slopes):
            if slope is None:
                continue
            if number:
                flat = torch.empty(sum(factor.numel() for factor in factors), device=self.device)
                dist.recv(flat, number)
                whole = split(flat, factors)
            for factor, gradient in zip(factors, whole, strict=True):
                # Fused AdamW reads a gradient in its factor's layout, whatever its strides.
                factor.grad = gradient.contiguous() if factor.grad is None else factor.grad.add_(gradient)


def shape_of(adapter: Adapter | None) -> dict[str, tuple[int, float]] | None:
    """Return the rank and the scale of an adapter at each of its sites."""
    if adapter is None:
        return None
    return {
        name: (adapter.factors[f"{name}.lora_A"].shape[-2], scale) for name, scale in adapter.scales.items()
    }


def split(flat: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Return one flat tensor as tensors of the factors' shapes."""
    parts = flat.split([math.prod(factor.shape) for factor in factors])
    return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]
