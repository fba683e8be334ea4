"""Settings of a policy's loss: which losses there are, what each of them has, and its paper's values.

Knows no tensors, so that settings are checked without torch; the losses are in engine/training/loss/grpo.py.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from engine.errors import ConfigError
from engine.settings.model import Settings, explain
from engine.settings.own_functions import OWN

LossName = Annotated[
    str,
    Field(
        pattern=rf"^(dapo|grpo|dr_grpo|gspo|cispo|ppo|importance_sampling|{OWN})$",
        description="dapo, grpo, dr_grpo, gspo, cispo, ppo, importance_sampling or python:MODULE:FUNC",
    ),
]
Band = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1)]]

# Each loss's own settings with the values of its paper; engine/training/loss/grpo.py names the papers.
LOSS_SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "budget": 1},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "dpo": {"beta": 0.1},
}
CORRECTIONS = ("tis", "geometric", "icepop", "outlier")


class LossConfig(Settings):
    """Settings of a loss: what is empty is as in the loss's paper. Corrections are off, on, or as given."""

    clip_low: float | None = Field(None, ge=0, le=1, description="the ratio is clipped below 1 - this")
    clip_high: float | None = Field(None, ge=0, description="the ratio is clipped above 1 + this")
    budget: int | None = Field(
        None, ge=1, description="dr_grpo: tokens that an answer's sum is divided by; empty: max_tokens"
    )
    beta: float | None = Field(None, gt=0, description="dpo: how strongly it is held to the base")
    options: dict[str, Any] | None = Field(None, description="for a loss of one's own")
    timeout_s: float = Field(
        60, gt=0, le=600, description="of a loss of one's own: for its import, and for each microbatch"
    )
    kl: float = Field(0, ge=0, description="weight of the KL divergence to the base")
    tis: bool | Annotated[float, Field(ge=1)] = Field(
        False, description="tokens weigh trainer over sampler, at most this; on: 2"
    )
    geometric: bool | Band = Field(
        False, description="mask answers whose mean ratio is outside; on: 0.99 to 1.01"
    )
    icepop: bool | Band = Field(
        False, description="tokens weigh trainer over sampler, masked outside; on: 0.5 to 2"
    )
    outlier: bool | Band = Field(
        False, description="mask answers with a token whose ratio is outside; on: 0.0001 to 100"
    )

    def sent(self) -> dict[str, Any]:
        """Return what differs from the defaults, as a trainer takes it."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def values(self, loss: str) -> dict[str, Any]:
        """Return the loss's own settings, its paper's where nothing else is given."""
        if loss.startswith("python:"):
            return dict(self.options or {})
        given = {name: getattr(self, name) for name in LOSS_SETTINGS[loss]}
        return LOSS_SETTINGS[loss] | {name: value for name, value in given.items() if value is not None}


def loss_config(loss: str, given: Mapping[str, Any]) -> LossConfig:
    """Return a loss's settings; `ConfigError` names an unknown loss, or a setting that it does not have."""
    if re.fullmatch(OWN, loss):
        known: set[str] = {"options", "timeout_s", "kl", *CORRECTIONS}
    elif loss in LOSS_SETTINGS:
        sampled = loss not in ("cross_entropy", "dpo")
        known = {*LOSS_SETTINGS[loss], *(("kl", *CORRECTIONS) if sampled else ())}
    else:
        raise ConfigError(
            f"There is no loss {loss!r}. Known losses: {', '.join(LOSS_SETTINGS)}, python:MODULE:FUNC."
        )
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"The loss {loss} has no setting {', '.join(unknown)}. "
            f"It has: {', '.join(sorted(known)) or 'none'}."
        )
    try:
        return LossConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError(
            f"The settings of the loss {loss} are not valid. {explain(error, LossConfig)}"
        ) from None
