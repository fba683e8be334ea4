"""Forms: the parameters of each Prefect flow, as one typed model a flow.

Prefect's UI shows them, and the command line fills them in. An empty field means "as configured".
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.settings.losses import LossName
from engine.settings.model import Fraction, OpenFraction, Settings
from engine.settings.own_functions import OWN_RULES
from engine.settings.params import PolicyName
from engine.settings.policies import Contract, FewShotExample, Rank, Verifier

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
        pattern=rf"^({OWN_RULES})$",
        description="Check answers with this verifier: exact, numeric, regex, json-schema or "
        "python:MODULE:FUNC.",
    ),
]


class Form(Settings):
    """The base class of forms; an empty field means "as configured"."""


class AdaptForm(Form):
    """Train a policy on the resident base, then export, register, verify and score a revision."""

    policy: PolicyName = Field(description="Train this policy.")
    steps: int | None = Field(None, ge=1, le=100_000, description="Train for this many steps.")
    lr: float | None = Field(None, gt=0, le=1, description="Use this learning rate of Adam.")
    rank: Rank | None = Field(None, description="Train an adapter of this LoRA rank.")
    contract: Contract | None = Field(None, description="Reward answers in this format.")
    verifier: Verifier | None = Field(None, description="Reward answers by this verifier.")
    loss: LossName | None = Field(None, description="Minimise this loss, with its settings as configured.")
    seed: int | None = Field(None, ge=0, description="Draw problems and samples from this seed.")
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
    weight: OpenFraction | None = Field(None, description="Send this share of users to the canary.")
    margin: Fraction | None = Field(
        None, description="Promote a canary whose mean reward is at most this much below the baseline's."
    )
    min_units: int | None = Field(
        None, ge=1, description="Require ratings of this many canary users to promote."
    )
    max_s: float | None = Field(
        None, gt=0, description="Hold a canary that has no verdict after this many seconds."
    )
    approval_s: float | None = Field(
        None,
        ge=0,
        description="Require an approval before the canary, and hold after this many seconds without one. 0: "
        "no approval.",
    )
    skip_score: Why | None = Field(None, description="Skip the offline score, for this reason.")
    skip_canary: Why | None = Field(None, description="Skip the canary, for this reason.")

    def settings(self) -> dict[str, Any]:
        """Return the release settings that this form replaces."""
        names = {"weight", "margin", "min_units", "max_s", "approval_s"}
        return self.model_dump(include=names, exclude_none=True)

    def skip_gates(self) -> dict[str, str]:
        """Return the skipped gates, each with its reason."""
        named = {"score": self.skip_score, "canary": self.skip_canary}
        return {gate: reason for gate, reason in named.items() if reason}


class ApprovalForm(Form):
    """Approve a waiting release, or hold it."""

    approve: bool = Field(description="On: start the canary. Off: hold the release.")
    by: Who
    reason: Why


class DecideForm(Form):
    """Promote or roll back one revision in a person's name."""

    policy: PolicyName = Field(description="Decide about a revision of this policy.")
    digest: Digest
    reason: Why
    by: Who = "prefect"


class HoldForm(Form):
    """End a policy's running release and keep its champion."""

    policy: PolicyName = Field(description="End this policy's running release.")
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
        description="Read questions and answers from this file on the worker's machine: JSON lines, JSON, "
        "CSV, Parquet or a saved dataset."
    )
    verifier: OwnVerifier
    system: str | None = Field(None, description="Put this system prompt before every question.")
    few_shot: tuple[FewShotExample, ...] | None = Field(
        None, description="Put these worked examples before every question."
    )
    steps: int | None = Field(None, ge=1, le=100_000, description="Train for this many steps.")
    lr: float | None = Field(None, gt=0, le=1, description="Train with this learning rate.")
    loss: LossName | None = Field(None, description="Train with this loss.")
    kl: float | None = Field(None, ge=0, description="Add this times the KL divergence to the base.")
    rank: Rank | None = Field(None, description="Train an adapter of this rank.")
    groups: int | None = Field(None, ge=1, le=10_000, description="Sample this many problems a step.")
    group_size: int | None = Field(None, ge=2, le=1000, description="Sample this many answers a problem.")
    max_tokens: int | None = Field(
        None, ge=1, le=100_000, description="End an answer after this many tokens."
    )
    again: bool = Field(False, description="Allow a policy name that was purged before.")
    items: int = Field(200, ge=10, le=10_000, description="Freeze at most this many evaluation items.")
    scheduled: bool | None = Field(None, description="Let the nightly flow adapt the policy when it is due.")
    max_age_s: float | None = Field(
        None, gt=0, description="Make it due when its newest revision is older than this many seconds."
    )
    drift_after_s: float | None = Field(
        None,
        gt=0,
        description="Make it due when users' rewards were below the champion's offline score interval for "
        "this many seconds.",
    )

    def settings(self) -> dict[str, Any]:
        """Return the policy settings that this form sets."""
        names = {"system", "few_shot", "steps", "lr", "loss", "rank", "groups", "group_size"}
        names |= {"max_tokens", "scheduled", "max_age_s", "drift_after_s"}
        given = self.model_dump(mode="json", include=names, exclude_none=True)
        if self.kl is not None:
            given["loss_config"] = {"kl": self.kl}
        return given
