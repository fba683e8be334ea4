"""Decides which policies the nightly flow adapts: pure rules over the facts about each policy.

A policy is due when it has no revision, when its data is new, when its newest revision is too old, or when
users rate its champion lower than its offline score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.quality.estimate import interval
from engine.settings.own_functions import LIKELIHOODS
from engine.settings.policies import PolicyConfig

DAY_S = 86_400.0
MIN_RATED = 20


@dataclass(frozen=True)
class Facts:
    """The facts about one policy at `now` (epoch seconds).

    `blocked` is why it must not be adapted now. `newest`, `newest_at` and `newest_data` are digest, time and
    data digest of its newest exported revision. `offline` are the champion's item scores, `online` its users'
    rewards of the last `drift_after_s`, and `champion_s` is how long it has been champion.
    """

    policy: str
    config: PolicyConfig
    now: float
    blocked: str | None = None
    newest_at: float | None = None
    newest_data: str | None = None
    newest: str | None = None
    champion_s: float = 0.0
    offline: Sequence[float] = ()
    online: Sequence[float] = ()

    @property
    def seed(self) -> int | None:
        """Return a seed for the revision after the newest one; None for the first."""
        return int(self.newest[:7], 16) if self.newest else None


@dataclass(frozen=True)
class Due:
    """Whether a policy is due now, and the reason."""

    policy: str
    due: bool
    reason: str


def judge(facts: Facts) -> Due:
    """Return whether a policy is due. Pure: the same facts give the same answer."""
    config = facts.config
    if not config.scheduled:
        return Due(facts.policy, False, "It is not scheduled (`scheduled: true` in its settings).")
    if facts.blocked:
        return Due(facts.policy, False, facts.blocked)
    if facts.newest_at is None:
        return Due(facts.policy, True, "It has no revision yet.")
    if config.data_digest and config.data_digest != facts.newest_data:
        return Due(facts.policy, True, "Its data has changed since its newest revision.")
    age_s = facts.now - facts.newest_at
    if config.max_age_s and age_s > config.max_age_s:
        return Due(
            facts.policy,
            True,
            f"Its newest revision is {days(age_s)} old, more than {days(config.max_age_s)}.",
        )
    if why := drift(facts):
        return Due(facts.policy, True, why)
    return Due(facts.policy, False, f"Nothing has changed; its newest revision is {days(age_s)} old.")


def drift(facts: Facts) -> str | None:
    """Return a sentence when users rate the champion below its offline score, else None.

    It has drifted when the upper limit of the online mean's 95% interval over the last `drift_after_s` lies
    below the lower limit of the offline mean's. A champion younger than that window is not judged, nor one
    whose offline score is a likelihood: users do not rate that.
    """
    window_s = facts.config.drift_after_s
    if facts.config.verifier in LIKELIHOODS:
        return None
    if not window_s or facts.champion_s < window_s or len(facts.online) < MIN_RATED or not facts.offline:
        return None
    (_, online_high), (offline_low, _) = interval(list(facts.online)), interval(list(facts.offline))
    if online_high >= offline_low:
        return None
    return (
        f"Over the last {days(window_s)} users rate its champion {online_high:.3f} at most, below the "
        f"{offline_low:.3f} of its offline score ({len(facts.online)} ratings)."
    )


def days(seconds: float) -> str:
    """Return a time in days, or in hours where it is shorter than a day."""
    return f"{seconds / DAY_S:.1f} days" if seconds >= DAY_S else f"{seconds / 3600:.1f} hours"
