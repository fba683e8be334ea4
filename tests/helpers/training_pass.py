"""A training pass of one session alone, which most tests need."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.training.model.adapter import Adapter
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import Example
from engine.training.model.update import Backward, LossCall, forward_backward
from engine.training.service.session import Session


def one_pass(
    base: ResidentBase,
    adapter: Adapter,
    data: Sequence[Example],
    loss: str,
    config: Mapping[str, Any],
    between: Callable[[], None] = lambda: None,
) -> Backward:
    return forward_backward(base, [LossCall(adapter, data, loss, config)], between)[0]


def gather(session: Session, data: Sequence[Example], loss: str = "dapo") -> Backward:
    """Gather gradients and count the call, as the trainer does."""
    found = one_pass(session.base, session.adapter, data, loss, {})
    session.calls += 1
    return found
