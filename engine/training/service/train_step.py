"""The row of a training step. This is the only place that lists its columns.

The loop creates the row, the trainer stores it in the session's history, and the spool brings it to the
ledger's `train_steps`. MLflow, `/metrics`, the report and the terminal show parts of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

# Seconds of one phase of a step.
Seconds = Annotated[float | None, "seconds"]
Counts = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """One step of a policy's training; None means unknown.

    A column with a text is a gauge of the trainer's `/metrics`, with the text as its help. Rewards and shares
    are in [0, 1]; ratios are trainer over engine; means are over a step's tokens or answers.
    """

    policy: str | None = None
    session: str | None = None
    # Digest of the revision that sampled; None is the base.
    digest: str | None = None
    loss_fn: str | None = None
    step: Annotated[int, "Steps done."]
    reward: Annotated[float | None, "Mean reward of the last step."] = None
    reward_std: Annotated[float | None, "Standard deviation of the last step's rewards."] = None
    zero_spread: Annotated[
        float | None, "Share of the last step's groups whose samples all got the same reward."
    ] = None
    # Number and share of the groups that teach.
    groups_kept: int | None = None
    kept: float | None = None
    # Answers that the verifier failed on: their number, and by fault.
    verifier_errors: int | None = None
    verifier_faults: Counts = field(default_factory=dict)
    importance_ratio: Annotated[
        float | None, "Mean importance ratio of the last step, trainer over engine."
    ] = None
    ratio_min: Annotated[float | None, "Smallest importance ratio of the last step."] = None
    ratio_max: Annotated[float | None, "Largest importance ratio of the last step."] = None
    clip_fraction: Annotated[float | None, "Share of the last step's tokens that the loss clipped."] = None
    # Tokens without effect on the gradient, by reason.
    masked: Counts = field(default_factory=dict)
    capped: Annotated[int | None, "Tokens of the last step whose weight a correction cut."] = None
    correction_weight: Annotated[
        float | None, "Mean weight that corrections gave the last step's tokens."
    ] = None
    kl: Annotated[float | None, "KL divergence to the base in the last step, nats."] = None
    kl_old: Annotated[float | None, "KL divergence between engine and trainer in the last step, nats."] = None
    entropy: Annotated[float | None, "Mean entropy of a token in the last step, nats."] = None
    out_of_route: Annotated[
        float | None,
        "Share of the last step's tokens whose experts the trainer would have chosen otherwise.",
    ] = None
    loss: Annotated[float | None, "Loss of the last step."] = None
    # Of rows that are not trained on; only at the steps before which a run is validated.
    held_out_loss: float | None = None
    grad_norm: Annotated[float | None, "Norm of the last step's gradients before clipping."] = None
    length_mean: Annotated[float | None, "Mean length of the last step's answers, tokens."] = None
    length_max: Annotated[int | None, "Length of the last step's longest answer, tokens."] = None
    truncated: Annotated[float | None, "Share of the last step's answers that were cut off."] = None
    repeated: Annotated[
        float | None, "Mean share of an answer's 3-grams that it had before, in the last step."
    ] = None
    # A warning with two answers, at a step that shows a new sign of collapse.
    collapse: str | None = None
    staleness: Annotated[
        float | None, "Steps between the revision that sampled and the one that learned."
    ] = None
    tokens: int | None = None
    # Tokens with a gradient.
    learned_tokens: int | None = None
    tokens_per_s: Annotated[float | None, "Tokens of the last step by its seconds."] = None
    rollout_s: Seconds = None
    # Part of the rollouts during which the loop only waited.
    wait_s: Seconds = None
    reward_s: Seconds = None
    # Gradients only: the optimizer's step stores this row, so its own seconds cannot be in it.
    update_s: Seconds = None
    handoff_s: Seconds = None
    # Seconds in which the trainer was full since the last row, that row's optimizer step included.
    backpressure_s: Seconds = None
    # The trainer's peak memory in bytes.
    peak_memory: int | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "TrainStep":
        """Read a row of any version: missing columns stay None, unknown ones are ignored."""
        values = {item.name: row[item.name] for item in fields(cls) if row.get(item.name) is not None}
        # The ledger returns JSON as text.
        counts = {name: json.loads(values[name]) for name in COUNTS if isinstance(values.get(name), str)}
        return cls(**values | counts)

    @property
    def phases(self) -> dict[str, float]:
        """Return the step's seconds by phase; rows without `wait_s` count the whole rollout as waiting."""
        waited = self.wait_s if self.wait_s is not None else self.rollout_s
        return {
            "rollout wait": waited or 0.0,
            "reward": self.reward_s or 0.0,
            "update": self.update_s or 0.0,
            "handoff": self.handoff_s or 0.0,
        }


COLUMNS = get_type_hints(TrainStep, include_extras=True)
COUNTS = tuple(name for name, kind in COLUMNS.items() if kind == Counts)
SECONDS = tuple(name for name, kind in COLUMNS.items() if kind == Seconds)
GAUGES = {
    name: kind.__metadata__[0]
    for name, kind in COLUMNS.items()
    if hasattr(kind, "__metadata__") and name not in SECONDS
}
