"""Answers of the base carry the `model` that was asked for."""

from contextvars import ContextVar
from typing import Any

# The `model` of a request that the base answers, for its answer to carry.
ASKED: ContextVar[str | None] = ContextVar("asked", default=None)


def answer_as_asked(models: Any) -> None:
    """Make answers of the base carry the `model` of the request, such as a policy without a champion.

    `models` is vLLM's `OpenAIServingModels`, which writes the base's own name. Bound: 0.32.0. Goes when vLLM
    answers with the request's `model`.
    """
    stock = models.model_name

    def model_name(lora_request: Any = None) -> str:
        return str(stock(lora_request) if lora_request else ASKED.get() or stock())

    models.model_name = model_name
