"""How many tokens a request reserves: the most that it can take, within what its limits admit at all."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.request_fields import Size

# What a chat template adds to a prompt, where it is not known, and what it adds for tools. For each message
# it adds less than the bytes of a message without text; a token has at least one byte of the body.
TEMPLATE_TOKENS = TOOL_TOKENS = 256
# Of text that is only tokenized, which costs less.
BYTES_A_TOKEN = 4


class Reservation(NamedTuple):
    """The tokens that a request can take; `length` caps each completion where the request names no number."""

    tokens: int
    length: int | None


def ceiling_of(*limits: Mapping[str, float]) -> float:
    """Return the tokens of a request that no wait makes these limits admit more than."""
    found = (one for given in limits for name, one in given.items() if name.startswith("tokens_per_"))
    return min(found, default=math.inf)


def reserve(size: Size, prompt_tokens: int, context: int, ceiling: float) -> Reservation:
    """Return what a request reserves: its prompts, of at most so many tokens, and all of its completions.

    Raises `Refused` (400), with the largest length, where the limits never admit it.
    """
    prompt = min(prompt_tokens, context * size.prompts)
    each = context if size.most_tokens is None else min(size.most_tokens, context)
    if prompt + size.samples * each <= ceiling:
        return Reservation(prompt + size.samples * each, None)
    most = int(ceiling - prompt) // size.samples
    if most < 1:
        said = (
            f"A limit of this key or its tenant admits {ceiling:g} tokens, and this prompt may have {prompt} "
            "already. Send a shorter one, in fewer parts."
        )
        raise Refused(400, said, "limit_too_low")
    if size.most_tokens is not None:
        said = (
            f"A limit of this key or its tenant admits {ceiling:g} tokens, and this request may take "
            f"{prompt + size.samples * each}. Ask for at most {most} tokens of each completion."
        )
        raise Refused(400, said, "limit_too_low", "max_tokens")
    return Reservation(prompt + size.samples * most, most)
