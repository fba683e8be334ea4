"""What a call's data teach: completions of the next tokens, or any targets with any weights.

Shapes: N input tokens of a datum, K targets of each.
"""

import math

from engine.errors import ConfigError
from engine.training.model.packing import Example, TokenRow
from engine.training.model.replay import decode
from engine.training.service.protocol import Datum, ForwardBackwardInput

# What a summed loss reads of a datum, beside its targets.
SAMPLED = ("logprobs", "advantages")
READ = {"cross_entropy": ("weights",), "gspo": (*SAMPLED, "sequence_ratio_mask")}
CLIPS = ("clip_low_threshold", "clip_high_threshold")
CLIPPED = ("ppo", "cispo", "gspo")


def examples_of(batch: ForwardBackwardInput) -> list[Example]:
    """Return a call's examples by its reduction; `ConfigError` with the first datum that is not valid."""
    if batch.reduction == "mean":
        return [example_of(datum) for datum in batch.data]
    if batch.router_replay:
        raise ConfigError("A sum is over all targets, and router_replay leaves some out. Send one of them.")
    for i, datum in enumerate(batch.data):
        if other := set(datum.loss_fn_inputs) ^ set(batch.data[0].loss_fn_inputs):
            raise ConfigError(
                f"Only one of the data 0 and {i} has {' and '.join(sorted(other))}. Give all data the same "
                "loss inputs."
            )
    return [summed_example(datum, batch.loss_fn, i) for i, datum in enumerate(batch.data)]


def example_of(datum: Datum) -> Example:
    """Turn a datum into a row with its completion's log-probabilities and advantages, where it has them.

    Raises `ConfigError` when the completion is not one run at the end, when lengths differ, or when the last
    target is not a token id.
    """
    inputs = {name: tensor.data for name, tensor in datum.loss_fn_inputs.items()}
    tokens = _tokens(datum)
    missing = {"target_tokens", "weights"} - set(inputs)
    if missing or any(len(values) != len(tokens) for values in inputs.values()):
        raise ConfigError(
            f"A datum needs target_tokens and weights, and {len(tokens)} values in each loss input; "
            f"missing: {sorted(missing)}."
        )
    first = inputs["weights"].index(1.0) if 1.0 in inputs["weights"] else len(tokens)
    if first == len(tokens) or inputs["weights"][first:] != [1.0] * (len(tokens) - first):
        raise ConfigError("A datum's weights must be 0 over the prompt and then 1 to the end.")
    last = inputs["target_tokens"][-1]
    if not last.is_integer():
        raise ConfigError(
            f"A datum's target_tokens must be token ids (whole numbers); the last one is {last}."
        )
    whole = (*tokens, int(last))
    routes = decode(datum.routed_experts) if datum.routed_experts else None
    old, advantages = (tuple(inputs.get(name, ())[first:]) for name in ("logprobs", "advantages"))
    return Example(TokenRow(whole, first + 1, routes), old, advantages)


def summed_example(datum: Datum, loss: str, number: int) -> Example:
    """Turn datum `number` of a summed call into a row with N * K targets and what the loss reads of them.

    Raises `ConfigError` for missing and unread inputs, other shapes than the targets', and numbers that are
    not finite.
    """
    inputs, tokens = datum.loss_fn_inputs, _tokens(datum)
    needed = {"target_tokens", *READ.get(loss, SAMPLED)}
    if missing := needed - set(inputs):
        raise ConfigError(
            f"Datum {number} lacks {' and '.join(sorted(missing))} for the loss {loss}. Add it."
        )
    if unread := set(inputs) - needed - set(CLIPS if loss in CLIPPED else ()):
        raise ConfigError(
            f"Datum {number} has {' and '.join(sorted(unread))}, which the loss {loss} does not read. Leave "
            "it out."
        )
    targets = inputs["target_tokens"].data
    each = len(targets) // max(1, len(tokens))
    shape = [len(tokens)] if each == 1 else [len(tokens), each]
    for name, tensor in inputs.items():
        count = math.prod(shape)
        if not count or len(tensor.data) != count or tensor.shape not in (None, shape, [len(tokens), each]):
            raise ConfigError(
                f"Datum {number} has {len(tokens)} input tokens, {len(targets)} target_tokens and "
                f"{len(tensor.data)} {name} of shape {tensor.shape or 'unknown'}. Give each input token "
                "the same number of targets, at least one, and each target a value."
            )
        if wrong := [i for i, value in enumerate(tensor.data) if not math.isfinite(value)]:
            raise ConfigError(
                f"Datum {number} has the {name} {tensor.data[wrong[0]]} at position {wrong[0]}. Give finite "
                "numbers."
            )
    if wrong := [i for i, value in enumerate(targets) if not value.is_integer()]:
        raise ConfigError(
            f"Datum {number} has the target {targets[wrong[0]]} at position {wrong[0]}. Give token ids, "
            "which are whole numbers."
        )
    taught = inputs["weights" if loss == "cross_entropy" else "advantages"].data
    # Up to the first target that teaches, rows of one prompt can share their states.
    start = 1 + next((i // each for i, value in enumerate(taught) if value), len(tokens) - 1)
    routes = decode(datum.routed_experts) if datum.routed_experts else None
    row = TokenRow((*tokens, 0), start, routes, tuple(map(int, targets)))
    read = {name: tuple(tensor.data) for name, tensor in inputs.items()}
    return Example(
        row,
        read.get("logprobs", ()),
        read.get("advantages", ()),
        weights=read.get("weights", ()),
        ratio_mask=read.get("sequence_ratio_mask", ()),
        clip_low=read.get("clip_low_threshold", ()),
        clip_high=read.get("clip_high_threshold", ()),
    )


def _tokens(datum: Datum) -> list[int]:
    return [token for chunk in datum.model_input.chunks for token in chunk.tokens]
