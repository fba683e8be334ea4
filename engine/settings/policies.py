"""Settings of a policy: what it is trained on, how, and how it is scored."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError
from engine.settings.losses import LossName, PolicyLossConfig, loss_config
from engine.settings.model import Settings
from engine.settings.own_functions import LIKELIHOODS, OWN_RULES

Contract = Literal["terse", "json", "sentence", "boxed"]
Rank = Literal[1, 2, 4, 8, 16, 32, 64, 128]
Method = Literal["grpo", "sft", "dpo"]
# The loss of a method that learns from answers as they are written.
TAUGHT = {"sft": "cross_entropy", "dpo": "dpo"}
Verifier = Annotated[
    str,
    Field(
        pattern=rf"^(contract|{OWN_RULES}|{'|'.join(LIKELIHOODS)})$",
        description="Check answers with this verifier: contract (generated tasks), exact, numeric, regex, "
        "json-schema or python:MODULE:FUNC. Without one, a policy trained by sft is scored by the likelihood "
        "of its held-out answers, by dpo by its preference.",
    ),
]


class FewShotExample(Settings):
    """A worked example that is put before the real question."""

    question: str = Field(min_length=1, description="Show this question.")
    answer: str = Field(min_length=1, description="Show this answer to it.")


class PolicyConfig(Settings):
    """A policy: what it is trained on, how, and how it is scored. The defaults are the main job's recipe."""

    task: str = Field(
        description="Train on this task: a key of TASKS in engine/problems/procedural.py, or a .jsonl file."
    )
    method: Method = Field(
        "grpo",
        description="Train by grpo (questions with a verifier), sft (example answers) or dpo (a better and a "
        "worse answer to each question).",
    )
    start: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9-]{0,62}@[0-9a-f]{6,64}$",
        description="Start the first line of training at this revision, POLICY@DIGEST, not at the base.",
    )
    contract: Contract = Field("terse", description="Reward answers in this format.")
    verifier: Verifier = "contract"
    owner: str = Field("local", min_length=1, max_length=100, description="Record this owner.")
    verifier_timeout_s: float = Field(
        5, gt=0, le=300, description="Stop the verifier of an answer after this many seconds and reward it 0."
    )
    system: str | None = Field(None, description="Put this system prompt before every question.")
    few_shot: tuple[FewShotExample, ...] = Field(
        (), description="Put these worked examples before every question."
    )
    rank: Rank = Field(8, description="Train adapters of this LoRA rank, at most engine.max_rank.")
    alpha: float = Field(16, gt=0, description="Scale the adapter's output by alpha / rank.")
    targets: tuple[str, ...] | None = Field(
        None, min_length=1, description="Train LoRA on these projections. Empty: all that the base has."
    )
    steps: int = Field(20, ge=1, le=100_000, description="Train for this many steps.")
    patience: int = Field(
        3,
        ge=0,
        le=1000,
        description="Stop sft and dpo when the held-out loss has not fallen in this many validations, of "
        "which there are at most ten a run, and export the best step. 0: train all steps, export the last.",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Go over examples or pairs this many times: `graftwork policy create` sets `steps` to as "
        "many. Empty: 3 for sft, 1 for dpo.",
    )
    groups: int = Field(16, ge=1, le=10_000, description="Draw this many problems, examples or pairs a step.")
    collapse: Literal["ignore", "warn", "stop"] = Field(
        "ignore", description="Warn when the answers seem to collapse, or stop the training there."
    )
    group_size: int = Field(8, ge=2, le=1000, description="Sample this many answers a problem.")
    lr: float = Field(2e-3, gt=0, le=1, description="Use this learning rate of Adam.")
    warmup_steps: int = Field(
        0, ge=0, le=1000, description="Raise the learning rate linearly to `lr` over this many first steps."
    )
    loss: LossName = "dapo"
    loss_config: PolicyLossConfig = Field(
        default_factory=PolicyLossConfig, description="Change settings of the loss."
    )
    max_tokens: int = Field(24, ge=1, le=100_000, description="End an answer after this many tokens.")
    router_replay: bool = Field(
        False,
        description="Train each token on the experts that the engine chose. Needs engine.routed_experts.",
    )
    staleness: int = Field(
        0, ge=0, le=16, description="Accept rollouts of a revision this many steps old. 0: on-policy."
    )
    seed: int = Field(1, ge=0, description="Draw problems and samples from this random seed.")
    suite: str = Field(description="Score on this suite, a directory under eval_suites/.")
    score_reads: Literal["all", "suite", "task"] = Field(
        "all",
        description="Score a new revision on all items of the suite, or on as many as show whether it has "
        "fallen by release.score_margin: on the suite, or on the task that its items are a sample of.",
    )
    general: bool = Field(
        False,
        description="Also score the perplexity on general text, and hold a revision that loses too much.",
    )
    keeps: str | None = Field(
        None,
        description="Also score on this suite, such as mixed, and hold a revision that is shown to lose more "
        "than release.score_margin on it against its baseline.",
    )
    data_digest: str | None = Field(
        None, description="Record the training file's sha256. Set by `graftwork policy create`."
    )
    scheduled: bool = Field(False, description="Let the nightly flow adapt this policy when it is due.")
    max_age_s: float | None = Field(
        None,
        gt=0,
        description="Make the policy due when its newest revision is older than this many seconds.",
    )
    drift_after_s: float | None = Field(
        None,
        gt=0,
        description="Make the policy due when users' rewards were below the champion's offline score "
        "interval for this many seconds.",
    )
    recheck: Literal["alarm", "rollback", "off"] = Field(
        "alarm",
        description="At night, score the champion again beside its predecessor when suite, verifier, "
        "tokenizer, template or engine has changed. One that has lost by more than `release.score_margin` "
        "raises an alarm, or is rolled back.",
    )
    recheck_after_s: float = Field(
        7 * 86_400, gt=0, description="Score it again also after this many seconds without a change."
    )

    @model_validator(mode="after")
    def _loss_has_its_settings(self) -> Self:
        if self.method in TAUGHT:
            if self.verifier == "contract":
                raise ValueError(f"The method {self.method} learns from your own data, not a generated task.")
            return self
        if self.verifier in LIKELIHOODS:
            raise ValueError(f"The method grpo needs a verifier of answers, and {self.verifier} is none.")
        try:
            loss_config(self.loss, self.loss_config.sent())
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def loss_fn(self) -> str:
        """The loss that the trainer minimises."""
        return TAUGHT.get(self.method, self.loss)

    def loss_sent(self) -> dict[str, Any]:
        """Return the loss's settings as the trainer takes them."""
        if self.method in TAUGHT:
            beta = self.loss_config.beta
            return {"beta": beta} if self.method == "dpo" and beta is not None else {}
        budget = {"budget": self.max_tokens} if self.loss == "dr_grpo" else {}
        return budget | self.loss_config.sent()
