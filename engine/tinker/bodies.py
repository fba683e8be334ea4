"""Bodies of the Tinker API as its SDK 0.38.0 sends them. Fields that nothing here reads are ignored."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Id = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9:._-]+$")]
# A part of a path: free text without a slash.
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\x00-\x1f]+$")]
Path = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^tinker://[^\x00-\x1f]+$")]
Seq = Annotated[int, Field(ge=0, lt=1 << 63)]
# The SDK numbers a model's calls from 1, in 32 bits on the wire.
ModelSeq = Annotated[int, Field(ge=1, lt=1 << 31)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
MOST_METADATA = 64 << 10


def _storable(value: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        written = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError("must be JSON: valid text, and no NaN or infinite numbers") from None
    if len(written) > MOST_METADATA:
        raise ValueError(f"must be at most {MOST_METADATA} bytes of JSON")
    return value


# What clients write into it comes back to them as JSON.
Metadata = Annotated[dict[str, Any] | None, AfterValidator(_storable)]


class Sent(BaseModel):
    """Base of all bodies: immutable, unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, protected_namespaces=())


class SessionSent(Sent):
    """A new client."""

    user_metadata: Metadata = None


class HeartbeatSent(Sent):
    """A client's sign of life."""

    session_id: Id


class FinishReason(Sent):
    """Why a client ends."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSent(Sent):
    """The end of a client."""

    reason: FinishReason = FinishReason()


class LoraSent(Sent):
    """The shape of a new adapter."""

    rank: int = Field(ge=1, le=1 << 20)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerSent(Sent):
    """The optimizer of a new model."""

    type: Annotated[str, Field(max_length=64)] = "adamw"


class CreateModelSent(Sent):
    """A new model of a session."""

    session_id: Id
    model_seq_id: Seq
    base_model: Annotated[str, Field(max_length=512)]
    lora_config: LoraSent | None = None
    optimizer_config: OptimizerSent = OptimizerSent()
    user_metadata: Metadata = None


class LoadWeightsSent(Sent):
    """A checkpoint to load: into a new model of a session, or into an existing one."""

    path: Path
    optimizer: bool = False
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    user_metadata: Metadata = None
    model_id: Id | None = None
    seq_id: ModelSeq | None = None


class ModelSent(Sent):
    """A question about a model."""

    model_id: Id


class NumberedSent(ModelSent):
    """A call in a model's order."""

    seq_id: ModelSeq


class AdamSent(Sent):
    """Settings of an AdamW step; the SDK's defaults."""

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimizerParamsSent(AdamSent):
    """Settings of a step that name their optimizer."""

    type: Annotated[str, Field(max_length=64)] = "adamw"


class OptimStepSent(NumberedSent):
    """A step of a model's optimizer."""

    adam_params: AdamSent | None = None
    optimizer_params: OptimizerParamsSent | None = None


class SaveSent(NumberedSent):
    """A checkpoint to save."""

    path: Name | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Annotated[str, Field(max_length=32)] | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SamplingSessionSent(Sent):
    """A new sampling client, of the base or of a checkpoint."""

    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Annotated[str, Field(max_length=512)] | None = None
    model_path: Path | None = None


class TextChunk(Sent):
    """Token ids of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class Prompt(Sent):
    """A prompt, chunk after chunk."""

    chunks: list[TextChunk]


class SamplingParamsSent(Sent):
    """How to sample; `stop` empty disables the end token too, absent it ends."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, lt=1 << 31)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleSent(Sent):
    """Samples of one prompt."""

    sampling_session_id: Id
    seq_id: Seq
    num_samples: int = Field(1, ge=1, le=1 << 14)
    prompt: Prompt
    sampling_params: SamplingParamsSent = SamplingParamsSent()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=20)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int | None = None
    record_stability_info: bool | None = None


class RetrieveSent(Sent):
    """A question about a call's result."""

    request_id: Annotated[str, Field(max_length=300)]


class WeightsInfoSent(Sent):
    """A question about a checkpoint."""

    tinker_path: Path


class TtlSent(Sent):
    """A checkpoint's time to live in seconds from now; None keeps it."""

    ttl_seconds: Ttl | None = None
