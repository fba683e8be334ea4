"""Settings of a policy's loss: the known losses, the settings of each, and its paper's values.

Settings are checked here without torch; the losses themselves are in engine/training/loss/grpo.py.
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
        description="Minimise this loss: dapo, grpo, dr_grpo, gspo, cispo, ppo, importance_sampling or "
        "python:MODULE:FUNC.",
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
    "dro": {"beta": 0.05},
    "dpo": {"beta": 0.1},
}
# Losses that are also computed as plain sums over all targets.
SUMMED = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
CORRECTIONS = ("tis", "geometric", "icepop", "outlier")


class PolicyLossConfig(Settings):
    """Settings of a policy's loss. An empty one has the value of the loss's paper.

    The corrections `tis`, `geometric`, `icepop` and `outlier` are off, on with their paper's value, or on
    with the given one. Their ratio is the trainer's probability of a token over the sampler's.
    """

    clip_low: float | None = Field(None, ge=0, le=1, description="Clip the ratio below 1 - this.")
    clip_high: float | None = Field(None, ge=0, description="Clip the ratio above 1 + this.")
    options: dict[str, Any] | None = Field(
        None, description="Pass these options to a python:MODULE:FUNC loss."
    )
    timeout_s: float = Field(
        60,
        gt=0,
        le=600,
        description="Fail a python:MODULE:FUNC loss whose import or microbatch takes this many seconds.",
    )
    beta: float | None = Field(
        None, gt=0, description="Hold the policy to the base (dpo) or the sampler (dro) with this strength."
    )
    kl: float = Field(0, ge=0, description="Add this times the KL divergence to the base.")
    tis: bool | Annotated[float, Field(ge=1)] = Field(
        False, description="Weight tokens by their ratio, capped at this. true: 2."
    )
    geometric: bool | Band = Field(
        False, description="Mask answers whose mean ratio (geometric) is outside this band. true: 0.99, 1.01."
    )
    icepop: bool | Band = Field(
        False, description="Weight tokens by their ratio, and mask those outside this band. true: 0.5, 2."
    )
    outlier: bool | Band = Field(
        False, description="Mask answers with a token whose ratio is outside this band. true: 0.0001, 100."
    )

    def sent(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON for the trainer."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def values(self, loss: str) -> dict[str, Any]:
        """Return all settings of `loss`, with its paper's values for those that are not given."""
        if loss.startswith("python:"):
            return dict(self.options or {})
        given = {name: getattr(self, name, None) for name in LOSS_SETTINGS[loss]}
        return LOSS_SETTINGS[loss] | {name: value for name, value in given.items() if value is not None}


class LossConfig(PolicyLossConfig):
    """Settings of a loss as the trainer takes them, from a policy or another client."""

    budget: int | None = Field(
        None, ge=1, description="Divide an answer's sum by this many tokens (dr_grpo)."
    )


def loss_config(loss: str, given: Mapping[str, Any]) -> LossConfig:
    """Validate the settings of a loss.

    Raises `ConfigError` for an unknown loss, or for a setting that the loss does not have.
    """
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
