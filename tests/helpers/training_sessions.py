"""Sessions of the trainer, opened and trained on data that a step's number decides."""

import torch

from engine.training.model.packing import Example, TokenRow
from engine.training.service.protocol import AdamParams, CreateSession, OptimStep
from engine.training.service.session import Session
from tests.helpers.training_pass import gather

BASE = "b" * 64

ADAM = AdamParams(learning_rate=1e-2)


def opening(name: str = "sums-1", **changes) -> CreateSession:
    fields = {
        "request_id": "open", "session": name, "policy": "sums", "rank": 4, "alpha": 8.0,
        "targets": ["q_proj", "down_proj"], "seed": 3, "holder": "me",
    }  # fmt: skip
    return CreateSession(**(fields | changes))


def train_one(session: Session, number: int, request_id: str | None = None, vocabulary: int = 300) -> None:
    """One step on data that depends on the step's number alone."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(5, vocabulary, (4, 9), generator=generator).tolist()
    data = [
        Example(TokenRow(tuple(row), 5), (-2.0,) * 4, (float(i) - 1.5,) * 4) for i, row in enumerate(tokens)
    ]
    gather(session, data)
    session.optim_step(
        OptimStep(
            request_id=request_id or f"step-{number}", session=session.name, fence=0, adam_params=ADAM,
            position=10 * number, record={"reward": number / 10},
        )
    )  # fmt: skip


def factors(session: Session) -> dict[str, torch.Tensor]:
    return {key: factor.detach().clone() for key, factor in session.adapter.factors.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
