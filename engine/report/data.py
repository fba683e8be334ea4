"""The data classes of a report.

Times are epoch seconds. Scores and rewards are in [0, 1]. A digest of None is the base.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.controller.advance import Wait
from engine.quality.guards import GuardResult
from engine.training.service.train_step import TrainStep

# Rows of `train_steps` with something to draw: a reward, or the loss of a method without rewards.
HAS_CURVE = "(reward IS NOT NULL OR loss_fn IN ('cross_entropy', 'dpo'))"


@dataclass(frozen=True)
class Curve:
    """One training session of a policy, in the order of its steps.

    `digest` is the newest revision exported from it, None when unknown.
    """

    policy: str
    digest: str | None
    steps: tuple[TrainStep, ...]
    session: str = ""


@dataclass(frozen=True)
class SuiteScore:
    """Mean score and 95% interval on a suite, in [0, 1]; `at`, epoch seconds, is its newest item's."""

    suite: str
    items: int
    mean: float
    ci_low: float
    ci_high: float
    at: float


@dataclass(frozen=True)
class CanaryPoint:
    """A canary's evidence `seconds` after its start; the bounds are of canary - baseline, in [-1, 1]."""

    seconds: float
    canary_units: int
    baseline_units: int
    canary_reward: float | None
    baseline_reward: float | None
    lower: float
    upper: float


@dataclass(frozen=True)
class ReleaseResult:
    """One release with its scores, its canary's timeline and its outcome.

    `state` is `running`, `promoted`, `rolled_back` or `held`. `canary_s` is from the canary's start to the
    release's last change, None without a canary. `skipped` are (gate, who and why). `weights` are (seconds
    since the canary's start, its share of users from then on). `guards` are what they said at the verdict, or
    say now, and `observed` those that decide nothing; `feedback` is the counts of the canary's feedback in
    words. `fallbacks` are requests that were answered in the canary's place. `by` is the person who ended it,
    if one did. `waits` is what it waits for, while it runs and where that is known.
    """

    policy: str
    revision: str
    baseline: str | None
    state: str
    reason: str
    margin: float
    base_score: SuiteScore | None
    score: SuiteScore | None
    skipped: tuple[tuple[str, str], ...] = ()
    canary_s: float | None = None
    timeline: tuple[CanaryPoint, ...] = ()
    id: str = ""
    created_at: float = 0.0
    weights: tuple[tuple[float, float], ...] = ()
    guards: tuple[GuardResult, ...] = ()
    observed: tuple[GuardResult, ...] = ()
    feedback: str = ""
    fallbacks: int = 0
    by: str = ""
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True)
class RevisionRow:
    """An exported revision; `role` is champion, canary, previous, buried (it has a tombstone) or empty.

    `online` is the mean reward of `units` users. `accepted` is the effect probe's result, None until it has
    run. `verdict` is the newest one, `reason` its reason, else the tombstone's. `named_base` is the
    other base that an imported adapter names as its own.
    """

    policy: str
    digest: str
    parent: str | None
    step: int
    rank: int
    bytes: int
    created_at: float
    role: str = ""
    score: SuiteScore | None = None
    online: float | None = None
    units: int = 0
    accepted: bool | None = None
    verdict: str = ""
    reason: str = ""
    named_base: str = ""


@dataclass(frozen=True)
class QualityTable:
    """A policy's lines of `graftwork quality`, and what is known of its past intervals."""

    policy: str
    lines: tuple[Mapping[str, str], ...]
    calibration: str


@dataclass(frozen=True)
class AnswerPair:
    """A frozen question with the base's answer and a revision's, and their scores in [0, 1]."""

    question: str
    before: str
    before_score: float
    after: str
    after_score: float


@dataclass(frozen=True)
class SampleAnswers:
    """Answers of the base (before) and of a policy's revision (after) to the same questions."""

    policy: str
    digest: str
    pairs: tuple[AnswerPair, ...]


@dataclass(frozen=True)
class PolicyRow:
    """A policy and its route; `weight` is the share of users on the canary.

    `champion_score` is the base's score while there is no champion. `running` is the step of the running
    release, or empty.
    """

    name: str
    owner: str
    base: str
    task: str
    contract: str
    suite: str
    champion: str | None
    canary: str | None
    previous: str | None
    weight: float
    revisions: int
    newest: RevisionRow | None
    base_score: SuiteScore | None
    champion_score: SuiteScore | None
    running: str = ""


@dataclass(frozen=True)
class Event:
    """A notice or a tombstone."""

    at: float
    kind: str
    policy: str
    revision: str | None
    reason: str
    by: str = ""


@dataclass(frozen=True)
class ReportData:
    """A whole report. `stages` are (name, seconds) of the run in order; `links` are (text, URL).

    The page omits empty parts, so a report can be written at any time during a run. `left_out` names what
    the page limits cut; `alarms` are the current faults.
    """

    title: str
    created_at: float
    base: str = ""
    policies: tuple[PolicyRow, ...] = ()
    curves: tuple[Curve, ...] = ()
    releases: tuple[ReleaseResult, ...] = ()
    revisions: tuple[RevisionRow, ...] = ()
    answers: tuple[SampleAnswers, ...] = ()
    quality: tuple[QualityTable, ...] = ()
    notices: tuple[Event, ...] = ()
    tombstones: tuple[Event, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
