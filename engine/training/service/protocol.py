"""Messages between client and trainer. Names and fields follow Tinker's public types.

Every body carries the client's request id, which is the operation's id. The same request sent again is the
same operation; a different request under its id is refused. Durable results are answered again after a
restart. An export is repeated then, which publishes the same digest; gradients are lost, and the step must be
repeated. `fence` is the number that the session was opened with; a request with an older fence is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.settings.params import PolicyName

# Names of sessions and of their states are parts of file paths.
SessionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9.-]{0,127}$")]
Kind = Literal["snapshot", "revision"]


@dataclass(frozen=True)
class SessionInfo:
    """An open session: steps done, data position, each step's record, the writer's fence."""

    session: str
    policy: str
    step: int
    position: int
    fence: int
    base: str
    parent: str | None
    history: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Exported:
    """A published revision; `directory` is None for a snapshot."""

    digest: str
    served_name: str
    directory: Path | None
    rank: int
    step: int
    bytes: int
    seconds: float


class Message(BaseModel):
    """Base of all messages: immutable, unknown fields are refused."""

    # NaN stays NaN on the wire, so that the trainer can name it.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class TensorData(Message):
    """Values of a loss input, one for each target, row-major; `shape` is (N) or (N, K), if given."""

    data: list[float]
    dtype: Literal["float32", "int64"] = "float32"
    shape: list[int] | None = None


class EncodedText(Message):
    """A chunk of token ids."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class ModelInput(Message):
    """The input tokens of a sample, chunk after chunk."""

    chunks: list[EncodedText]


InputName = Literal[
    "target_tokens",
    "weights",
    "logprobs",
    "advantages",
    "sequence_ratio_mask",
    "clip_low_threshold",
    "clip_high_threshold",
]


class Datum(Message):
    """One sample: `model_input` holds all tokens but the last, each loss input one value for each of them.

    With the reduction `mean`, `target_tokens` are the next tokens and `weights` is 1 where the target belongs
    to the completion. `logprobs` and `advantages` are read at those positions; only losses on samples need
    them. `routed_experts` are the engine's.

    With the reduction `sum`, `target_tokens` are any tokens, K for each of the N input tokens. cross_entropy
    also needs `weights`, any finite numbers. The other losses need `logprobs` and `advantages`, and gspo
    `sequence_ratio_mask` (0 or 1). `clip_low_threshold` and `clip_high_threshold` are absolute bounds of the
    ratio for each target, instead of the settings' (1 - clip_low, 1 + clip_high).
    """

    model_input: ModelInput
    loss_fn_inputs: dict[InputName, TensorData]
    routed_experts: str | None = Field(
        None,
        description="experts of the first tokens: (tokens, layers, experts of a token) as a .npy in base64",
    )


class ForwardBackwardInput(Message):
    """Samples, the loss and its settings."""

    data: list[Datum]
    loss_fn: str = "dapo"
    loss_fn_config: dict[str, Any] = Field(
        default_factory=dict, description="`engine.settings.losses.LossConfig`"
    )
    router_replay: bool = Field(
        False,
        description="leave out tokens without routed_experts, in the outputs too, and count them as masked",
    )
    reduction: Literal["mean", "sum"] = Field(
        "mean",
        description="mean: the loss's own mean over completions; sum: over all targets of all data, whose "
        "log-probabilities (N or N * K) are all in the outputs",
    )


class AdamParams(Message):
    """Settings of one AdamW step (arXiv 1711.05101)."""

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(1.0, ge=0, description="0 does not clip")


class Request(Message):
    """Base of all operations."""

    request_id: str = Field(min_length=1)


class CreateSession(Request):
    """Open or continue a session of a policy; gradients that were never applied are dropped.

    A new session starts at the base, or at one of `parent`, `adapter`, `fork` and `fork_session`, whose rank,
    alpha and targets it takes unless given. With a larger rank than the source's it starts with the source's
    function: the added ranks are initialised, with B zero.
    """

    session: SessionName
    policy: PolicyName
    rank: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, gt=0, description="empty: equal to the rank")
    targets: list[str] | None = Field(
        None, min_length=1, description="projections, or ends of module paths such as `layers.2.mlp.up_proj`"
    )
    ranks: dict[str, Annotated[int, Field(ge=1)]] | None = Field(
        None, description="different ranks, as in PEFT's rank_pattern"
    )
    alphas: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None, description="different alphas, as in PEFT's alpha_pattern"
    )
    seed: int | None = Field(None, ge=0, description="a new session needs one; empty: the stored one")
    holder: str = Field(
        min_length=1,
        description="the writer, unique for each run; while its lease lasts, all others are refused in every "
        "session of the policy",
    )
    parent: str | None = Field(None, description="digest of the revision to start from")
    parent_policy: PolicyName | None = Field(
        None, description="policy of the revision `parent`; empty: `policy`"
    )
    adapter: str | None = Field(
        None, description="directory of a PEFT adapter to start from, in any supported layout"
    )
    fork: PolicyName | None = Field(
        None, description="policy to start from: its champion, else its newest exported revision"
    )
    fork_session: SessionName | None = Field(
        None, description="session to start from: its last step with its Adam moments"
    )
    fork_state: SessionName | None = Field(
        None, description="state of `fork_session` to start from; empty: its last step"
    )
    fork_moments: bool = Field(True, description="take the Adam moments of `fork_session` too")
    config: dict[str, Any] = Field(default_factory=dict, description="stored in the revisions' manifests")
    policy_config: dict[str, Any] | None = Field(None, description="stored in the catalog's policy")
    owner: str = "local"
    snapshot_ttl_s: float = Field(3600, gt=0)


class SessionRequest(Request):
    """Base of the operations on a session."""

    session: SessionName
    fence: int


class Heartbeat(Message):
    """Renew a session's lease while its writer does something else; not an operation."""

    session: SessionName
    fence: int


class CloseSession(SessionRequest):
    """Close a session: it is evicted, and other writers may open its policy at once."""


class Forward(SessionRequest):
    """Score data under the session's adapter without gradients."""

    forward_input: ForwardBackwardInput


class Gathering(SessionRequest):
    """Base of the operations that depend on gathered gradients."""

    gathered: int | None = Field(
        None, ge=0, description="number of calls whose gradients the trainer must hold; empty: not checked"
    )


class ForwardBackward(Gathering):
    """Compute gradients of a loss and add them to the session's gathered ones."""

    forward_backward_input: ForwardBackwardInput


class OptimStep(Gathering):
    """Apply the gathered gradients and store the session with the caller's position and record."""

    adam_params: AdamParams = AdamParams()
    skip: bool = Field(False, description="count a step without applying gradients")
    position: int = Field(0, ge=0, description="where the caller's data continues")
    record: dict[str, Any] = Field(default_factory=dict, description="stored in the session's history")


class NamedState(SessionRequest):
    """Base of the operations on a named state."""

    name: SessionName


class SaveState(NamedState):
    """Store the session under a name."""


class LoadState(NamedState):
    """Load the state of a name, by default the session's own.

    From another session, of the same shape, come the factors and moments; step and history stay.
    """

    source: SessionName | None = Field(None, description="session that has the state; empty: this one")
    moments: bool = Field(True, description="load the Adam moments too; else they begin at 0")


class DeleteState(Request):
    """Delete a session's state of a name, whoever has the session open."""

    session: SessionName
    name: SessionName


class Export(SessionRequest):
    """Publish the session's adapter as a snapshot or a revision."""

    kind: Kind = "snapshot"
    probe_prompts: list[list[int]] = Field(default_factory=list, description="required for a revision")
    probe_tokens: int = Field(24, ge=1)
    ttl_s: float | None = Field(
        None, gt=0, description="a snapshot expires after this; empty: the session's snapshot_ttl_s"
    )


class ProbeRevision(Request):
    """Compute the effect probe of a revision that no session trained, such as an imported one."""

    policy: PolicyName
    digest: str
    directory: str | None = Field(None, description="the revision's directory; empty: read from the store")
    prompts: list[list[int]] = Field(min_length=1)
    tokens: int = Field(24, ge=1)


class ForgetPolicy(Request):
    """Remove every session of a policy, from memory and disk; refused while one of them is open.

    With `only_ask` nothing is removed.
    """

    policy: PolicyName
    only_ask: bool = False
