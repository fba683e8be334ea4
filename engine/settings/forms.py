"""Forms: what a person fills in to start a flow, one typed model a flow.

Knows names, types and bounds of the fields; an empty one means "as configured". Prefect's pages and
the command line are made from these.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from engine.settings.losses import LossName
from engine.settings.model import Settings
from engine.settings.own_functions import OWN_RULES
from engine.settings.params import Contract, FewShotExample, Fraction, OpenFraction, PolicyName, Rank

Why = Annotated[str, Field(min_length=3, max_length=500, description="why; it is recorded")]
Who = Annotated[str, Field(min_length=1, max_length=100, description="who decides this; it is recorded")]
Digest = Annotated[
    str, Field(pattern=r"^[0-9a-f]{6,64}$", description="the revision's digest, or how it begins")
]
OwnVerifier = Annotated[
    str,
    Field(
        pattern=rf"^({OWN_RULES})$",
        description="exact, numeric, regex, json-schema or python:MODULE:FUNC",
    ),
]


class Form(Settings):
    """What a person fills in to start a run; an empty field means "as configured"."""


class AdaptForm(Form):
    """Train a policy on the resident base, then export, register, verify and score its revision."""

    policy: PolicyName = Field(description="which policy to train")
    steps: int | None = Field(None, ge=1, le=100_000, description="training steps")
    lr: float | None = Field(None, gt=0, le=1, description="learning rate")
    rank: Rank | None = Field(None, description="rank of the adapter")
    contract: Contract | None = Field(None, description="the answer format that earns the reward")
    loss: LossName | None = Field(None, description="what a step minimises; its settings stay as configured")
    seed: int | None = Field(None, ge=0, description="which problems and samples are drawn")
    no_signal_steps: int | None = Field(
        None, ge=1, description="steps without a gradient that end the training"
    )
    scored: bool = Field(True, description="score base and revision on the policy's suite")

    def changes(self) -> dict[str, Any]:
        """Return the policy settings that this form replaces."""
        return self.model_dump(exclude={"policy", "scored"}, exclude_none=True)


class ReleaseForm(Form):
    """Release a revision: probe, score, canary, then promotion or rollback by itself."""

    policy: PolicyName = Field(description="which policy")
    digest: Digest | None = Field(None, description="which revision; empty: the newest exported one")
    by: Who = "prefect"
    weight: OpenFraction | None = Field(None, description="share of users on the canary")
    margin: Fraction | None = Field(None, description="a canary within this of the baseline may promote")
    min_units: int | None = Field(None, ge=1, description="rated users on the canary before a promotion")
    max_seconds: float | None = Field(None, gt=0, description="a canary without a verdict then holds")
    approval_hours: float | None = Field(
        None, ge=0, le=24 * 30, description="a person must approve within this before users see it; 0: nobody"
    )
    skip_score: Why | None = Field(None, description="skip the offline score, for this reason")
    skip_canary: Why | None = Field(None, description="skip the canary, for this reason")

    def settings(self) -> dict[str, Any]:
        """Return the release settings that this form replaces."""
        given = self.model_dump(include={"weight", "margin", "min_units", "max_seconds"}, exclude_none=True)
        if self.approval_hours is not None:
            given["approval_s"] = self.approval_hours * 3600
        return given

    def skip_gates(self) -> dict[str, str]:
        """Return the gates that are skipped, with the reasons."""
        named = {"score": self.skip_score, "canary": self.skip_canary}
        return {gate: reason for gate, reason in named.items() if reason}


class ApprovalForm(Form):
    """Let a revision go to users, or hold it."""

    approve: bool = Field(description="on: the canary starts; off: the release is held")
    by: Who
    reason: Why


class DecideForm(Form):
    """Decide over one revision in a person's name."""

    policy: PolicyName = Field(description="which policy")
    digest: Digest
    reason: Why
    by: Who = "prefect"


class HoldForm(Form):
    """End a policy's running release without a change of champion."""

    policy: PolicyName = Field(description="which policy")
    reason: Why
    by: Who = "prefect"


class RestoreForm(Form):
    """Put an earlier revision back as champion."""

    policy: PolicyName = Field(description="which policy")
    digest: Digest | None = Field(None, description="which revision; empty: the one before the champion")
    reason: Why
    by: Who = "prefect"


class NightlyForm(Form):
    """Adapt the policies that are due, release what passed."""

    policies: tuple[PolicyName, ...] = Field((), description="only these; empty: every scheduled policy")
    release: bool = Field(True, description="release the revisions that passed")


class ReportForm(Form):
    """Write the HTML report."""

    since_hours: float | None = Field(None, gt=0, description="only the last hours; empty: everything")


class CreatePolicyForm(Form):
    """Create a policy from a person's own data and verifier."""

    name: PolicyName = Field(description="small letters, digits and hyphens")
    owner: Who = Field("local", description="whose policy it is")
    base: str | None = Field(None, description="the resident base; empty: as configured")
    data: Path = Field(description="a JSONL file on the worker's machine: question and answer on each line")
    verifier: OwnVerifier
    system: str | None = Field(None, description="system prompt before every question")
    few_shot: tuple[FewShotExample, ...] | None = Field(
        None, description="worked questions before every question"
    )
    steps: int | None = Field(None, ge=1, le=100_000, description="training steps")
    max_tokens: int | None = Field(None, ge=1, le=100_000, description="longest answer, tokens")
    again: bool = Field(False, description="take a name again that was purged once")
    items: int = Field(200, ge=10, le=10_000, description="frozen items at most")
    scheduled: bool | None = Field(None, description="adapted by the nightly flow when it is due")
    max_age_hours: float | None = Field(
        None, gt=0, description="due when the newest revision is older than this"
    )
    drift_after_hours: float | None = Field(
        None, gt=0, description="due when users rated its champion under its offline score for so long"
    )

    def settings(self) -> dict[str, Any]:
        """Return the policy's own settings, those that were given."""
        names = {"system", "few_shot", "steps", "max_tokens", "scheduled"}
        given = self.model_dump(mode="json", include=names, exclude_none=True)
        for name, hours in (("max_age_s", self.max_age_hours), ("drift_after_s", self.drift_after_hours)):
            if hours:
                given[name] = hours * 3600
        return given
