"""LoRA on a resident base: the base is loaded once and frozen, each adapter is a small set of factors.

`ResidentBase.using(adapter)` applies one adapter, `using_many` several, each to its own tokens of a stream.
The base may be in bfloat16 and on a GPU.

Shape suffixes: _B rows, _S positions, _T completion tokens one after another, _R rank, _I input
features, _O output features, _H hidden size.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapters.revision import validate
from engine.base.families import BaseShapes
from engine.training.model.adapter import Adapter, Part, by_pattern, chosen_sites, ranks_at, sites_of
from engine.training.model.linear import ChosenLogprobs, SlottedLinear
from engine.training.model.packing import (
    IMPLEMENTATION,
    Piece,
    Stream,
    TokenRow,
    can_pack,
    microbatches,
    pack,
    use_packing,
)
from engine.training.model.replay import Replay


class Slotted(Protocol):
    """A frozen module that adds the products of the active adapters."""

    def switch(self, name: str, parts: Sequence[Part]) -> None:
        """Activate the adapters of `parts` that have factors at `name`, this module's path."""


# A part's log-probabilities, entropies, the base's log-probabilities or None (T), and `Replay.take`.
Found = tuple[Tensor, Tensor, Tensor | None, tuple[int, int]]


class ResidentBase:
    """The frozen base in `dtype` on a device, shared by all adapters. Not thread-safe.

    With `checkpointing`, the backward pass recomputes each layer's activations. `longest` limits a row's
    tokens, within the base's context. A base with routed experts needs `slot_experts`, which wraps a layer's
    (`experts.slotted_experts`).
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        microbatch_tokens: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
        longest: int | None = None,
        slot_experts: Callable[[Any], Slotted] | None = None,
    ):
        from transformers import AutoConfig

        torch.set_num_threads(threads)
        self.shapes = BaseShapes.of(AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict())
        self.device, self.checkpointing = torch.device(device), checkpointing
        self.model: Any = self._load(path, dtype).eval()
        self.model.requires_grad_(False)
        self.packs = can_pack(self.model.config)
        if self.packs:
            use_packing(self.model)
        if checkpointing:
            checkpoint_layers(self.model)
        self.microbatch_tokens = microbatch_tokens
        text = self.model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.longest = min(int(text.max_position_embeddings), longest or sys.maxsize)
        self.modules, self.sites = self.shapes.modules(), sites_of(self.shapes)
        self.slotted = {name: self._slot(name, SlottedLinear) for name in self.shapes.linear}
        if self.shapes.experts:
            assert slot_experts, "this base has routed experts"
            self.slotted |= {name: self._slot(name, slot_experts) for name in self.shapes.experts}
        self.replay, self.has_routers = Replay(self.model, self.shapes), bool(self.shapes.experts)

    def _load(self, path: Path, dtype: torch.dtype) -> Any:
        """Return the model on the device."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        return model.to(self.device)

    def parameter_bytes(self) -> list[int]:
        """Return the bytes of the base's parameters that each rank holds: here one process, all of them."""
        return [sum(parameter.nbytes for parameter in self.model.parameters())]

    def _slot(self, name: str, wrap: Callable[[Any], Slotted]) -> Slotted:
        parent, _, leaf = name.rpartition(".")
        slotted = wrap(self.model.get_submodule(name))
        setattr(self.model.get_submodule(parent), leaf, slotted)
        return slotted

    def new_adapter(
        self,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        generator: torch.Generator,
        ranks: Mapping[str, int] | None = None,
        alphas: Mapping[str, float] | None = None,
    ) -> Adapter:
        """Return a fresh adapter at `targets`; `ranks` and `alphas` are PEFT's patterns for exceptions.

        Raises `ConfigError` that names unknown targets or patterns.
        """
        chosen = chosen_sites(self.sites, targets)
        adapter = Adapter(
            chosen,
            by_pattern(chosen, rank, ranks or {}),
            by_pattern(chosen, alpha, alphas or {}),
            self.device,
        )
        adapter.draw(generator)
        return adapter

    def hold(self, tensors: dict[str, Tensor]) -> Adapter:
        """Return an adapter with a revision's tensors; ranks may differ, and experts may be missing.

        Raises `AdapterError` that names a tensor that does not fit the base.
        """
        validate(tensors, None, self.modules)
        ranks = ranks_at(self.sites, tensors)
        chosen = {name: self.sites[name] for name in ranks}
        adapter = Adapter(chosen, ranks, ranks, self.device)
        adapter.place(tensors)
        return adapter

    def using(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Apply an adapter, or with None the plain base, to the passes inside the `with` block."""
        return self._switched([Part(adapter, slice(None))] if adapter else [])

    def using_many(self, counts: Sequence[tuple[Adapter, int]]) -> AbstractContextManager[None]:
        """Apply adapters to consecutive spans of a stream, each with its token count (`Stream.counts`)."""
        ends = list(accumulate((count for _, count in counts), initial=0))
        spans = [slice(*pair) for pair in pairwise(ends)]
        parts = [Part(adapter, span) for (adapter, _), span in zip(counts, spans, strict=True)]
        return self._switched(parts)

    @contextmanager
    def _switched(self, parts: Sequence[Part]) -> Iterator[None]:
        if self.has_routers:
            self.replay.forget()
        for name, slotted in self.slotted.items():
            slotted.switch(name, parts)
        try:
            yield
        finally:
            for name, slotted in self.slotted.items():
                slotted.switch(name, ())
            if self.has_routers:
                self.replay.lay((), self.device)

    def pack(self, parts: Sequence[Sequence[TokenRow]]) -> Stream:
        """Return rows of several adapters as one stream for `logprobs` under `using_many`."""
        return pack(parts, self.device, self.model.dtype)

    def microbatches(self, rows: Sequence[TokenRow], unit: int = 1) -> list[list[int]]:
        """Return row indices in batches for `logprobs`; `unit` consecutive rows stay together."""
        return microbatches(rows, self.microbatch_tokens, unit, shared=self.packs)

    def logprobs(self, rows: Sequence[TokenRow] | Stream) -> Tensor:
        """Return the log-probabilities (T,) in float32 of all completion tokens, row after row."""
        return self.logprobs_and_entropy(rows)[0]

    def logprobs_and_entropy(self, rows: Sequence[TokenRow] | Stream) -> tuple[Tensor, Tensor]:
        """Return `logprobs` and the predicted distributions' entropies (T,), in nats, without gradient."""
        head = self.model.get_output_embeddings()
        logprob_T, entropy_T = ChosenLogprobs.apply(*self.hidden(rows), head.weight, head.bias)
        return logprob_T, entropy_T

    def hidden(self, rows: Sequence[TokenRow] | Stream) -> tuple[Tensor, Tensor]:
        """Return the hidden states (T, H) that predict the completion tokens, and these tokens (T,)."""
        if not isinstance(rows, Stream):
            return self.hidden(self.pack([rows])) if self.packs else self._padded(rows)
        stream = rows
        if self.has_routers:
            self.replay.lay(stream.routes, self.device)
        output = self.model.get_decoder()(
            stream.tokens[None],
            position_ids=stream.positions[None],
            use_cache=False,
            layout=stream.layout,
        )
        if self.has_routers:
            self.replay.count(stream.before)
        return output.last_hidden_state[0].index_select(0, stream.before), stream.chosen

    def _padded(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        """Return `hidden` for rows padded on the right, where causal attention ignores the padding."""
        width = max(len(row.tokens) for row in rows)
        tokens_BS = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            tokens_BS[i, : len(row.tokens)] = torch.tensor(row.tokens)
        chosen_T, before_T = (
            torch.tensor(values).to(self.device)
            for values in (
                [token for row in rows for token in row.chosen],
                [i * width + at for i, row in enumerate(rows) for at in row.before],
            )
        )
        decoder = self.model.get_decoder()
        if self.has_routers:
            self.replay.lay(((row.routes, width) for row in rows), self.device)
        hidden_BSH = decoder(tokens_BS.to(self.device), use_cache=False).last_hidden_state
        if self.has_routers:
            self.replay.count(before_T)
        return hidden_BSH.flatten(0, 1).index_select(0, before_T), chosen_T

    @property
    def shares_passes(self) -> bool:
        """Say whether one pass can compute the tokens of several adapters."""
        return self.packs

    def holding(self, adapter: Adapter) -> AbstractContextManager[None]:
        """Prepare the rounds of `learn` inside; `adapter` is that of the first part."""
        return nullcontext()

    def rounds(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """Yield the pieces that are computed at a time: one, as full as a pass can be."""
        return ([piece] for piece in pieces)

    def learn(
        self,
        parts: Sequence[Sequence[TokenRow]],
        adapters: Sequence[Adapter],
        needs_base: bool,
        judge: Callable[[Sequence[Found]], Sequence[Tensor]],
    ) -> None:
        """Add the gradients of a round to its adapters'; here its parts share one pass.

        `judge` returns the loss's gradient (T) for each part; when it raises, nothing is added.
        """
        rows: Stream | Sequence[TokenRow]
        if self.packs:
            rows = self.pack(parts)
            switched = self.using_many(list(zip(adapters, rows.counts, strict=True)))
        else:
            # Padded rows belong to a single call.
            rows, switched = parts[0], self.using(*adapters)
        sizes = [sum(row.length for row in part) for part in parts]
        base_parts: Sequence[Tensor | None] = [None] * len(parts)
        if needs_base:
            with torch.no_grad(), self.using(None):
                base_parts = self.logprobs(rows).split(sizes)
        with switched:
            new_T, entropy_T = self.logprobs_and_entropy(rows)
            routed = self.replay.take() if self.has_routers else (0, 0)
            parts_of_rows = zip(new_T.split(sizes), entropy_T.split(sizes), base_parts, strict=True)
            gradient_T = torch.cat([*judge([(*values, routed) for values in parts_of_rows])])
            # Where no token teaches, the backward pass would add zeros.
            if gradient_T.any():
                new_T.backward(gradient_T)  # type: ignore[no-untyped-call]

    def score(
        self, adapter: Adapter | None, rows: Sequence[TokenRow], between: Callable[[], None] = lambda: None
    ) -> list[list[float]]:
        """Return each row's completion log-probabilities under an adapter, or with None the base.

        `between` is called before each round and may raise to end the call.
        """
        scored: dict[int, list[float]] = {}
        with self.applied(adapter):
            for batches in self.rounds(self.microbatches(rows)):
                between()
                scores = self._call("score", [[rows[i] for i in batch] for batch in batches])
                for batch, values in zip(batches, scores, strict=True):
                    parts = values.split([rows[i].length for i in batch])
                    scored |= {i: part.tolist() for i, part in zip(batch, parts, strict=True)}
        return [scored[i] for i in range(len(rows))]

    def greedy(
        self,
        adapter: Adapter | None,
        prompts: Sequence[Sequence[int]],
        ends: Collection[int],
        limit: int,
        between: Callable[[], None] = lambda: None,
    ) -> list[TokenRow]:
        """Return each prompt with its greedy completion, up to `limit` tokens or a token of `ends`.

        `between` is called after each token and may raise to end the call.
        """
        rows: dict[int, TokenRow] = {}
        longest = [TokenRow((*prompt, *[0] * limit), len(prompt)) for prompt in prompts]
        failed: list[BaseException] = []

        def stops() -> bool:
            try:
                between()
            except BaseException as error:
                failed.append(error)
            return bool(failed)

        with self.applied(adapter):
            for batches in self.rounds(microbatches(longest, self.microbatch_tokens, shared=False)):
                parts = [[longest[i] for i in batch] for batch in batches]
                completions = self._call("complete", parts, (tuple(ends), limit), stops)
                if failed:
                    raise failed[0]
                for batch, completed in zip(batches, completions, strict=True):
                    rows |= zip(batch, completed, strict=True)
        return [rows[i] for i in range(len(prompts))]

    @contextmanager
    def applied(self, adapter: Adapter | None) -> Iterator[None]:
        """Let the rounds of `score` and `greedy` inside compute with an adapter, or with None the base."""
        with torch.no_grad(), self.using(adapter):
            yield

    def _call(self, name: str, parts: Sequence[Any], given: Any = None, own: Any = None) -> list[Any]:
        """Return the results of a round, `score` or `complete`: one for each of its batches."""
        return [self._computed(name, rows, given, own) for rows in parts]

    def _computed(self, name: str, rows: Sequence[TokenRow], given: Any, own: Any) -> Any:
        return self.logprobs(rows) if name == "score" else self._complete(rows, given, own)

    def _complete(
        self, rows: Sequence[TokenRow], ending: tuple[Collection[int], int], stops: Callable[[], bool] | None
    ) -> list[TokenRow]:
        """Return prompts of one batch with their greedy completions; `stops` after a token ends them all."""
        from transformers import GenerationConfig, StoppingCriteriaList

        asked, (ends, limit) = [row.prompt for row in rows], ending

        def ended(tokens_BS: Tensor, scores: Any) -> Tensor:
            return torch.full((len(tokens_BS),), bool(stops and stops()), device=tokens_BS.device)

        # Override the base's own generation settings.
        settings = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=limit,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
        width = max(map(len, asked))
        tokens_BS = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in asked])
        start_B1 = torch.tensor([[width - len(prompt)] for prompt in asked])
        with self._generating():
            found_BS = self.model.generate(
                tokens_BS.to(self.device),
                attention_mask=(torch.arange(width) >= start_B1).to(self.device),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([ended]),
            )
        completed = []
        for prompt, sampled in zip(asked, found_BS[:, width:].tolist(), strict=True):
            count = next((at for at, token in enumerate(sampled, 1) if token in ends), len(sampled))
            completed.append(TokenRow((*prompt, *sampled[:count]), len(prompt)))
        return completed

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Let the model generate from padded rows with a KV cache, without packing and checkpointing."""
        if self.packs:
            self.model.set_attn_implementation("sdpa")
        if self.checkpointing:
            switch_checkpoints(self.model, False)
        try:
            yield
        finally:
            if self.packs:
                self.model.set_attn_implementation(IMPLEMENTATION)
            if self.checkpointing:
                switch_checkpoints(self.model, True)


def checkpoint_layers(model: Any) -> None:
    """Enable gradient checkpointing (arXiv 1604.06174) in every decoder layer; dropout stays off.

    transformers' hook that makes embeddings require gradients is only for reentrant checkpoints. Without it
    the backward pass ends at the lowest adapter.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    switch_checkpoints(model, True)


def switch_checkpoints(model: Any, on: bool) -> None:
    """Switch checkpointing on or off by the training mode of the layers alone, not of their children."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = on
