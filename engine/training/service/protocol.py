"""What client and trainer say to each other. Names and fields follow Tinker's public types.

Every body carries the client's request id, which is the operation's id: the same request sent again is
the same operation, another one under its id is refused, and what it changed durably is answered again after
a restart. An export is done again then, which publishes the same digest; gradients are lost, and the step is
to be repeated. `fence` is the number that the session was created with; an older one is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.settings.params import PolicyName

SESSION_NAME = r"^[a-z][a-z0-9.-]{0,127}$"
Kind = Literal["snapshot", "revision"]


@dataclass(frozen=True)
class SessionInfo:
    """An open session: the steps done, where its data goes on, each step's record, the writer's fence."""

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
    """A published revision; `directory` is None for a snapshot of a single step."""

    digest: str
    served_name: str
    directory: Path | None
    rank: int
    step: int
    bytes: int
    seconds: float


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorData(Message):
    data: list[float]
    dtype: Literal["float32", "int64"] = "float32"


class EncodedText(Message):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class ModelInput(Message):
    chunks: list[EncodedText]


class Datum(Message):
    """`model_input` holds all tokens but the last; the loss inputs have one value for each of its positions.

    `target_tokens` are the next tokens, `weights` is 1 where the target belongs to the completion, and
    `logprobs` and `advantages`, which only losses on samples need, are read at those positions.
    `routed_experts` is what the engine returned.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[Literal["target_tokens", "weights", "logprobs", "advantages"], TensorData]
    routed_experts: str | None = Field(
        None, description="of the first tokens, (tokens, layers, experts of a token) as a .npy in base64"
    )


class ForwardBackwardInput(Message):
    data: list[Datum]
    loss_fn: str = "dapo"
    loss_fn_config: dict[str, Any] = Field(
        default_factory=dict, description="`engine.settings.losses.LossConfig`"
    )
    router_replay: bool = Field(
        False, description="what has no routed_experts is left out, of the outputs too, and counted as masked"
    )


class AdamParams(Message):
    learning_rate: float = Field(1e-4, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(1.0, ge=0, description="0 does not clip")


class Request(Message):
    request_id: str = Field(min_length=1)

    def content(self) -> int:
        """Return a hash of what is asked for, whoever writes now and whatever is there; of this process."""
        return hash((type(self), self.model_dump_json(exclude={"fence", "gathered"})))


class CreateSession(Request):
    """Open a session of a policy, or go on with it; gradients that were never applied are dropped.

    A new one begins at the base, or at one of `parent`, `adapter`, `fork` and `fork_session`; rank, alpha
    and targets that are left out are then the source's. A larger rank than the source's begins with the
    source's function, and what is beyond it as drawn.
    """

    session: str = Field(pattern=SESSION_NAME)
    policy: PolicyName
    rank: int | None = Field(None, ge=1)
    alpha: float | None = Field(None, gt=0, description="empty: as the rank")
    targets: list[str] | None = Field(
        None, min_length=1, description="projections, or ends of paths: `layers.2.mlp.up_proj`"
    )
    ranks: dict[str, Annotated[int, Field(ge=1)]] | None = Field(
        None, description="other ranks by PEFT's rank_pattern"
    )
    alphas: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None, description="other alphas by PEFT's alpha_pattern"
    )
    seed: int = Field(ge=0)
    holder: str = Field(
        min_length=1,
        description="who writes; while it is active any other is refused in all sessions of the policy",
    )
    parent: str | None = Field(None, description="digest of the revision to start from")
    parent_policy: PolicyName | None = Field(
        None, description="whose revision `parent` is; empty: `policy`'s"
    )
    adapter: str | None = Field(None, description="directory of a PEFT adapter to start from, of any layout")
    fork: PolicyName | None = Field(
        None, description="policy to start from: at its champion, or else at its newest exported revision"
    )
    fork_session: str | None = Field(
        None, pattern=SESSION_NAME, description="session to start from: its last step, Adam moments included"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="recorded in the revisions' manifests")
    policy_config: dict[str, Any] | None = Field(None, description="recorded in the catalog's policy")
    owner: str = "local"
    snapshot_ttl_s: float = Field(3600, gt=0)


class SessionRequest(Request):
    session: str
    fence: int


class Heartbeat(Message):
    """Keep a session's lease while its writer does something else; no operation."""

    session: str
    fence: int


class CloseSession(SessionRequest):
    """Give a session up: it leaves memory, and other holders may write its policy at once."""


class Forward(SessionRequest):
    """Score data under the session's adapter; nothing is gathered."""

    forward_input: ForwardBackwardInput


class Gathering(SessionRequest):
    gathered: int | None = Field(
        None, ge=0, description="calls whose gradients must be here, or they were lost; empty: not checked"
    )


class ForwardBackward(Gathering):
    forward_backward_input: ForwardBackwardInput


class OptimStep(Gathering):
    """Apply the gathered gradients and store the session, together with the caller's position and record."""

    adam_params: AdamParams = AdamParams()
    skip: bool = Field(False, description="count a step that had nothing to learn from")
    position: int = Field(0, ge=0, description="where the caller's data goes on")
    record: dict[str, Any] = Field(default_factory=dict, description="kept in the session's history")


class NamedState(SessionRequest):
    name: str = Field(pattern=SESSION_NAME)


class SaveState(NamedState):
    """Store the session as it is also under a name of its own."""


class LoadState(NamedState):
    """Go back to what was stored under a name."""


class Export(SessionRequest):
    kind: Kind = "snapshot"
    probe_prompts: list[list[int]] = Field(default_factory=list, description="needed for a revision")
    probe_tokens: int = Field(24, ge=1)


class ProbeRevision(Request):
    """Make the effect probe of a revision that no session trained, such as an imported one."""

    policy: PolicyName
    digest: str
    directory: str | None = Field(None, description="where the revision lies; without it the store is read")
    prompts: list[list[int]] = Field(min_length=1)
    tokens: int = Field(24, ge=1)


class ForgetPolicy(Request):
    """Remove every session of a policy, from memory and disk; refused while one of them is open.

    With `only_ask` nothing is removed.
    """

    policy: PolicyName
    only_ask: bool = False
