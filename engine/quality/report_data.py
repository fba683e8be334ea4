"""What a report shows, as values. Knows neither where they come from nor how they look.

Times are epoch seconds, scores and rewards lie in [0, 1], a digest of None is the base itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One training step; seconds spent in rollout, update and handoff, None where not recorded."""

    step: int
    reward: float
    importance_ratio: float | None = None
    rollout_s: float | None = None
    update_s: float | None = None
    handoff_s: float | None = None


@dataclass(frozen=True)
class Curve:
    """One training session of a policy, in the order of its steps; `digest` is of its last adapter."""

    policy: str
    digest: str | None
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class SuiteScore:
    """Mean and 95% interval of the base (digest None) or a revision on a suite."""

    policy: str
    digest: str | None
    suite: str
    items: int
    mean: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class CanaryPoint:
    """A canary's evidence `seconds` after its start; bounds are of canary minus baseline, in [-1, 1]."""

    seconds: float
    canary_units: int
    baseline_units: int
    canary_reward: float | None
    baseline_reward: float | None
    lower: float
    upper: float


@dataclass(frozen=True)
class ReleaseResult:
    """One release with its scores, its canary's timeline and how it ended.

    `state` is `running`, `promoted`, `rolled_back` or `held`; `canary_s` is from the canary's start to
    the release's last change, None when no user ever saw it.
    """

    policy: str
    revision: str
    baseline: str | None
    state: str
    reason: str
    margin: float
    base_score: SuiteScore | None
    score: SuiteScore | None
    skipped: Mapping[str, str] = field(default_factory=dict)
    canary_s: float | None = None
    timeline: tuple[CanaryPoint, ...] = ()


@dataclass(frozen=True)
class RevisionRow:
    """An exported revision; `role` is champion, canary, previous, buried or empty."""

    policy: str
    digest: str
    parent: str | None
    step: int
    rank: int
    bytes: int
    created_at: float
    role: str = ""


@dataclass(frozen=True)
class ReportData:
    """A whole report. `stages` are (name, seconds) of the run in order; `links` are (text, URL).

    Empty parts are left out of the page, so a report can be written at any moment of a run.
    """

    title: str
    created_at: float
    base: str = ""
    curves: tuple[Curve, ...] = ()
    releases: tuple[ReleaseResult, ...] = ()
    revisions: tuple[RevisionRow, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
