"""Settings of a release: its gates, its guards, and the canary's steps."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from engine.settings.evaluators import EvaluatorConfig, EvaluatorName
from engine.settings.model import Fraction, OpenFraction, Settings

SEGMENT_NAME = re.compile(r"[\w.-]{1,64}")
SegmentName = Annotated[str, Field(pattern=rf"^{SEGMENT_NAME.pattern}$")]

GuardName = Literal[
    "reward", "errors", "invalid", "refused", "truncated", "ttft", "token_time", "length", "cost"
]
GUARDS: tuple[GuardName, ...] = get_args(GuardName)
# The canary's weight while 5% of the units are left on the old champion.
BAKE_WEIGHT = 0.95
# Seconds until every engine that serves the base has loaded the revision.
LOAD_S = 60.0


# What rows of earlier versions call a setting.
STORED_NAMES = {"max_seconds": "max_s", "step_seconds": "step_s", "bake_seconds": "bake_s"}


def score_guard(evaluator: str) -> str:
    """Return what the guard of an evaluator's scores is called."""
    return f"score by {evaluator}"


class ReleaseConfig(Settings):
    """The gates of a release: offline score, approval and canary."""

    weight: OpenFraction = Field(0.2, description="Send this share of users to the canary.")
    alpha: OpenFraction = Field(0.05, description="Limit the probability of a wrong verdict on a canary.")
    feedback: Literal["reward", "evaluators", "none"] = Field(
        "reward",
        description="Promote on users' rewards. evaluators: promote on the evaluators that decide `both`; "
        "rewards may still roll back. none: there are neither; promote on the offline score's lower bound "
        "and all other guards.",
    )
    evaluators: dict[EvaluatorName, EvaluatorConfig] = Field(
        default_factory=dict, description="Evaluators of users' live answers, by name."
    )
    shadow: int = Field(
        1000,
        ge=0,
        description="Before the canary, have the revision answer the first questions of this many users "
        "too, unseen, and have the evaluators compare. It takes an evaluator that decides; 0: no shadow.",
    )
    guards: tuple[GuardName, ...] = Field(
        GUARDS,
        description="Judge a canary by these: users' rewards, rates of errors (5xx) and of invalid, refused "
        "and truncated answers, time to the first token and for each token (streamed answers), length of an "
        "answer (tokens) and its cost (the engine's seconds).",
    )
    segments: tuple[SegmentName, ...] = Field(
        (),
        description="Roll a canary back also when its rewards are worse in one of these segments: values of "
        "the header x-graftwork-segment. Others are reported only.",
    )
    margin: Fraction = Field(
        0.1,
        description="Promote a canary whose mean reward is at most this much below the baseline's. 1: any "
        "that is not rolled back.",
    )
    rate_margin: OpenFraction = Field(
        0.05,
        description="Without feedback, promote a canary whose rates are at most this much above the "
        "baseline's.",
    )
    min_units: int = Field(20, ge=1, description="Require ratings of this many canary users to promote.")
    max_s: float = Field(600, gt=0, description="Hold a canary that has no verdict after this many seconds.")
    score_margin: Fraction = Field(
        0.05,
        description="Hold a revision whose offline score is more than this below its parent's. The default "
        "is three standard errors of 200 paired items.",
    )
    ramp: tuple[OpenFraction, ...] = Field(
        (), description="Send these shares of users to the canary first, from the smallest, before `weight`."
    )
    step_s: float = Field(
        300,
        gt=0,
        description="End a step of the ramp after this many seconds; before, it ends with `min_units` units. "
        "A step that recent traffic cannot fill is skipped.",
    )
    bake_s: float = Field(
        0,
        ge=0,
        description="Before the promotion, leave 5% of users on the old champion for this many seconds.",
    )
    approval_s: float = Field(
        0,
        ge=0,
        le=30 * 86400,
        description="Require an approval before the canary, and hold after this many seconds without one. "
        "0: no approval.",
    )
    approval_weights: tuple[OpenFraction, ...] = Field(
        (),
        description="Require an approval also before these steps of the canary: weights of `ramp`, `weight`, "
        "or 0.95 for the bake. Each has `approval_s`.",
    )

    @classmethod
    def stored(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings in a release's row, also in one that an earlier version wrote."""
        named = {STORED_NAMES.get(name, name): value for name, value in settings.items()}
        return cls.model_validate({name: value for name, value in named.items() if name in cls.model_fields})

    @property
    def promoting_guards(self) -> tuple[str, ...]:
        """The names of the guards that a promotion needs clear, which are fixed at the start of a release.

        By `feedback`: the reward's guard, the evaluators that decide `both`, or all guards but the reward's.
        Where rewards promote, the evaluators that decide `both` are needed as well.
        """
        promoting = tuple(score_guard(name) for name, one in self.evaluators.items() if one.decides == "both")
        if self.feedback == "none":
            return (*(name for name in self.guards if name != "reward"), *promoting)
        rewards = ("reward",) if self.feedback == "reward" and "reward" in self.guards else ()
        return (*rewards, *promoting)

    @property
    def deciding_evaluators(self) -> dict[str, EvaluatorConfig]:
        """The evaluators that may end a release."""
        return {name: one for name, one in self.evaluators.items() if one.decides != "nothing"}

    @property
    def asked_evaluators(self) -> dict[str, EvaluatorConfig]:
        """The evaluators that are asked for scores: all but metrics, which clients report."""
        return {name: one for name, one in self.evaluators.items() if not one.is_metric}

    @property
    def shadow_evaluators(self) -> dict[str, EvaluatorConfig]:
        """The evaluators that decide in the shadow; where there are none, the release has no shadow.

        Metrics do not: nobody reports them of an answer that no user saw.
        """
        deciding = self.deciding_evaluators if self.shadow else {}
        return {name: one for name, one in self.asked_evaluators.items() if name in deciding}

    @model_validator(mode="after")
    def _ramp_only_grows(self) -> Self:
        weights = self.weights
        if any(following <= weight for weight, following in pairwise(weights)):
            said = ", ".join(f"{weight:g}" for weight in weights)
            raise ValueError(
                f"units only move from champion to canary, so `ramp`, `weight` and the bake's "
                f"{BAKE_WEIGHT:g} must grow (found {said})"
            )
        return self

    @model_validator(mode="after")
    def _segments_are_judged_by_rewards(self) -> Self:
        if self.segments and "reward" not in self.promoting_guards:
            raise ValueError(
                "segments are judged by rewards: remove `segments`, or set `feedback` to reward and put it "
                "into `guards`"
            )
        return self

    @model_validator(mode="after")
    def _approvals_are_of_steps(self) -> Self:
        others = [weight for weight in self.approval_weights if weight not in self.weights]
        if others:
            steps = ", ".join(f"{weight:g}" for weight in self.weights)
            raise ValueError(
                f"`approval_weights` are steps of the canary, here {steps} (found {others[0]:g})"
            )
        if self.approval_weights and not self.approval_s:
            raise ValueError("`approval_weights` need the time of an approval: set `approval_s`")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """The canary's weight in each step: the ramp, `weight`, and the bake if there is one."""
        return (*self.ramp, self.weight, *((BAKE_WEIGHT,) if self.bake_s else ()))

    @property
    def longest_s(self) -> float:
        """The most seconds from a release's start to its verdict."""
        shadow_s = self.max_s if self.shadow_evaluators else 0.0
        approvals_s = self.approval_s * (1 + len(self.approval_weights))
        return shadow_s + approvals_s + LOAD_S + self.max_s + self.bake_s
