"""Forms: the parameters of each Prefect flow, as one typed model a flow.

Prefect's UI shows them, and the command line fills them in. An empty field means "as configured".
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.settings.evaluators import EvaluatorConfig, EvaluatorName
from engine.settings.losses import PolicyLossConfig
from engine.settings.model import Settings, configured
from engine.settings.own_functions import LIKELIHOODS, OWN_RULES
from engine.settings.params import PolicyName
from engine.settings.policies import Contract, FewShotExample, Method, PolicyConfig, Rank
from engine.settings.releases import ReleaseConfig

# What to do while another release of the policy runs.
IfRunning = Literal["refuse", "wait", "replace"]
# Prefix of the tag of a release's flow run, before the release's id: by it a Cancel in Prefect is found.
RELEASE_TAG = "release:"
Why = Annotated[str, Field(min_length=3, max_length=500, description="Record this reason.")]
Who = Annotated[str, Field(min_length=1, max_length=100, description="Record this name for the decision.")]
Digest = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{6,64}$", description="Use the revision with this digest, or prefix of a digest."
    ),
]
OwnVerifier = Annotated[
    str,
    Field(
        pattern=rf"^({OWN_RULES}|{'|'.join(LIKELIHOODS)})$",
        description="Check answers with this verifier: exact, numeric, regex, json-schema or "
        "python:MODULE:FUNC. Examples and pairs need none.",
    ),
]


class Form(Settings):
    """The base class of forms; an empty field means "as configured"."""


class AdaptForm(Form):
    """Train a policy on the resident base, then export, register, verify and score a revision."""

    policy: PolicyName = Field(description="Train this policy.")
    steps: int | None = configured(PolicyConfig, "steps")
    lr: float | None = configured(PolicyConfig, "lr")
    rank: Rank | None = configured(PolicyConfig, "rank")
    contract: Contract | None = configured(PolicyConfig, "contract")
    verifier: str | None = configured(PolicyConfig, "verifier")
    loss: str | None = configured(PolicyConfig, "loss")
    seed: int | None = configured(PolicyConfig, "seed")
    scored: bool = Field(True, description="Score base and revision on the policy's suite.")

    def changes(self) -> dict[str, Any]:
        """Return the policy settings that this form replaces."""
        return self.model_dump(exclude={"policy", "scored"}, exclude_none=True)


class ReleaseForm(Form):
    """Release a revision: probe, score, canary, then promotion or rollback."""

    policy: PolicyName = Field(description="Release a revision of this policy.")
    digest: Digest | None = Field(
        None, description="Release the revision with this digest. Empty: the newest exported one."
    )
    by: Who = "prefect"
    if_running: IfRunning = Field(
        "refuse",
        description="While another release of the policy runs: refuse, wait for its verdict, or replace it. "
        "A replaced release is held.",
    )
    weight: float | None = configured(ReleaseConfig, "weight")
    margin: float | None = configured(ReleaseConfig, "margin")
    min_units: int | None = configured(ReleaseConfig, "min_units")
    max_s: float | None = configured(ReleaseConfig, "max_s")
    approval_s: float | None = configured(ReleaseConfig, "approval_s")
    approval_weights: tuple[float, ...] | None = configured(ReleaseConfig, "approval_weights")
    shadow: int | None = configured(ReleaseConfig, "shadow")
    evaluators: dict[EvaluatorName, EvaluatorConfig] | None = configured(ReleaseConfig, "evaluators")
    skip_score: Why | None = Field(None, description="Skip the offline score, for this reason.")
    skip_shadow: Why | None = Field(None, description="Skip the shadow, for this reason.")
    skip_canary: Why | None = Field(None, description="Skip the canary, for this reason.")

    def settings(self) -> dict[str, Any]:
        """Return the release settings that this form replaces."""
        return self.model_dump(mode="json", include={*ReleaseConfig.model_fields}, exclude_none=True)

    def skip_gates(self) -> dict[str, str]:
        """Return the skipped gates, each with its reason."""
        named = {"score": self.skip_score, "shadow": self.skip_shadow, "canary": self.skip_canary}
        return {gate: reason for gate, reason in named.items() if reason}


class ApprovalForm(Form):
    """Approve a waiting release, or the step that it waits for, or hold it."""

    approve: bool = Field(description="On: start the canary, or take its step. Off: hold the release.")
    by: Who
    reason: Why


class DecideForm(Form):
    """Promote or roll back one revision in a person's name."""

    policy: PolicyName = Field(description="Decide about a revision of this policy.")
    digest: Digest
    reason: Why
    by: Who = "prefect"


class RunningForm(Form):
    """Hold, pause or resume a policy's running release."""

    policy: PolicyName = Field(description="Decide about this policy's running release.")
    reason: Why
    by: Who = "prefect"


class RestoreForm(Form):
    """Make an earlier revision the champion again."""

    policy: PolicyName = Field(description="Change the champion of this policy.")
    digest: Digest | None = Field(
        None, description="Restore the revision with this digest. Empty: the previous champion."
    )
    reason: Why
    by: Who = "prefect"


class NightlyForm(Form):
    """Adapt the policies that are due, and release the revisions that passed."""

    policies: tuple[PolicyName, ...] = Field(
        (), description="Consider only these policies. Empty: every scheduled policy."
    )
    release: bool = Field(True, description="Release the revisions that passed.")


class ReportForm(Form):
    """Write the HTML report."""

    since_s: float | None = Field(
        None, gt=0, description="Report only this many last seconds. Empty: everything."
    )


class CreatePolicyForm(Form):
    """Create a policy from your own data and verifier."""

    name: PolicyName = Field(description="Create a policy of this name: small letters, digits and hyphens.")
    owner: Who = Field("local", description="Record this owner.")
    base: str | None = Field(None, description="Train on this resident base. Empty: as configured.")
    data: Path = Field(
        description="Read questions with answers, example chats or pairs of answers from this file on the "
        "worker's machine: JSON lines, JSON, CSV, Parquet or a saved dataset."
    )
    method: Method | None = Field(
        None,
        description="Train by grpo (questions with a verifier), sft (example answers) or dpo (pairs). Empty: "
        "as the data suggest.",
    )
    verifier: OwnVerifier | None = None
    start: str | None = configured(PolicyConfig, "start")
    epochs: int | None = configured(PolicyConfig, "epochs")
    system: str | None = configured(PolicyConfig, "system")
    few_shot: tuple[FewShotExample, ...] | None = configured(PolicyConfig, "few_shot")
    steps: int | None = configured(PolicyConfig, "steps")
    lr: float | None = configured(PolicyConfig, "lr")
    loss: str | None = configured(PolicyConfig, "loss")
    kl: float | None = configured(PolicyLossConfig, "kl")
    rank: Rank | None = configured(PolicyConfig, "rank")
    groups: int | None = configured(PolicyConfig, "groups")
    group_size: int | None = configured(PolicyConfig, "group_size")
    max_tokens: int | None = configured(PolicyConfig, "max_tokens")
    again: bool = Field(False, description="Allow a policy name that was purged before.")
    items: int = Field(200, ge=10, le=10_000, description="Freeze at most this many evaluation items.")
    scheduled: bool | None = configured(PolicyConfig, "scheduled")
    max_age_s: float | None = configured(PolicyConfig, "max_age_s")
    drift_after_s: float | None = configured(PolicyConfig, "drift_after_s")

    def settings(self) -> dict[str, Any]:
        """Return the policy settings that this form sets."""
        names = {*PolicyConfig.model_fields} - {"owner", "verifier"}
        given = self.model_dump(mode="json", include=names, exclude_none=True)
        if self.kl is not None:
            given["loss_config"] = {"kl": self.kl}
        return given
