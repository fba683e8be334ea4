"""Settings of an evaluator: who judges users' live answers, how often, and what follows from it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.settings.model import Fraction, Settings
from engine.settings.own_functions import OWN

EvaluatorName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
# Metrics are what clients report of an answer themselves, with `POST /v1/feedback`.
METRICS = ("metric", "metric-lower")
JUDGE, MLFLOW = "judge:", "mlflow:"
KIND = rf"^(verifier|metric|metric-lower|{OWN}|judge:\S+|mlflow:\S+)$"


class EvaluatorConfig(Settings):
    """An evaluator of users' live answers while a release runs. Its name is its key."""

    kind: str = Field(
        pattern=KIND,
        description="Score answers by this: verifier (the policy's own, without an expected answer), "
        "python:MODULE:FUNC, judge:MODEL (a model behind `url`), mlflow:NAME (a judge made in MLflow), or "
        "metric and metric-lower (what clients report under this name; higher, or lower, is better).",
    )
    version: str = Field(
        "1",
        min_length=1,
        max_length=64,
        description="Record this version with each score. Change it with the rule: scores of two versions "
        "are never compared.",
    )
    decides: Literal["nothing", "rollback", "both"] = Field(
        "rollback",
        description="Let the evaluator roll a revision back, or with `both` promote it as well. nothing: "
        "its scores are shown only.",
    )
    share: Fraction = Field(1.0, description="Score this share of the answers.")
    per_minute: int = Field(600, ge=1, description="Score at most this many answers a minute.")
    budget: float = Field(
        1e6,
        gt=0,
        description="Spend at most this much on a release: tokens of a judge, seconds of a function.",
    )
    timeout_s: float = Field(10, gt=0, le=300, description="Give up on an answer after this many seconds.")
    url: str | None = Field(
        None,
        pattern=r"^https?://[^?#@]+$",
        description="Ask the judge at this OpenAI-compatible address, such as https://judge.example/v1.",
    )
    rubric: str | None = Field(
        None, min_length=1, max_length=20_000, description="Have the judge score answers by this text."
    )
    key_file: str | None = Field(
        None,
        pattern=r"^[\w.-]{1,64}$",
        description="Read the API key of the judge from this file in the directory judges/ of the state.",
    )

    @model_validator(mode="after")
    def _judge_has_its_settings(self) -> Self:
        is_judge, is_stored = self.kind.startswith(JUDGE), self.kind.startswith(MLFLOW)
        if (is_judge or is_stored) != bool(self.url):
            raise ValueError("judge:MODEL and mlflow:NAME need `url`, and no other kind takes it")
        if is_judge != bool(self.rubric):
            raise ValueError("judge:MODEL needs `rubric`, and no other kind takes it")
        if self.key_file and not self.url:
            raise ValueError("only judge:MODEL and mlflow:NAME take `key_file`")
        return self

    @property
    def is_metric(self) -> bool:
        """Whether clients report its values."""
        return self.kind in METRICS
