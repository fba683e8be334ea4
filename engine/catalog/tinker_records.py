"""The rows of the Tinker API: a frozen dataclass for each table. Times are seconds since the epoch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TinkerSession:
    """A client of the Tinker API, from its start to its end; `finished` is the reason of the end."""

    id: str
    tenant: str
    user_metadata: dict[str, Any]
    created_at: float
    finished: str | None = None


@dataclass(frozen=True)
class TinkerModel:
    """A training client's model: one policy.

    `next_seq` is the number of the call that takes effect next, `gathered` counts the calls whose gradients
    no step has applied. A `corrupted` model has lost such gradients.
    """

    id: str
    session: str
    tenant: str
    policy: str
    rank: int
    targets: list[str]
    user_metadata: dict[str, Any]
    next_seq: int
    gathered: int
    corrupted: bool
    created_at: float
    used_at: float


@dataclass(frozen=True)
class TinkerCheckpoint:
    """A saved state (`kind` weights) or revision (sampler_weights) of a model.

    `stored` is the state's name in the trainer, or the revision's digest.
    """

    model: str
    kind: str
    name: str
    tenant: str
    stored: str
    bytes: int | None
    public: bool
    user_metadata: dict[str, Any]
    created_at: float
    expires_at: float | None

    @property
    def path(self) -> str:
        """The checkpoint's name in the Tinker API."""
        return f"tinker://{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class TinkerSampler:
    """A sampling client: `served` is the base's name or a revision's, as the engine knows it."""

    id: str
    session: str
    tenant: str
    served: str
    path: str | None
    created_at: float


@dataclass(frozen=True)
class TinkerResult:
    """What a call that changed something has answered, for a client that asks again."""

    id: str
    tenant: str
    body: dict[str, Any]
    created_at: float
