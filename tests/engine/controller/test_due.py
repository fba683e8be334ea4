"""What the nightly flow adapts, as a table; and that drift needs users, time and a real difference."""

from dataclasses import replace

import pytest

from engine.controller.due import DAY_S, MIN_RATED, Facts, drift, judge
from engine.settings.policies import PolicyConfig

CONFIG = PolicyConfig(task="addition", suite="s", scheduled=True, data_digest="new", max_age_s=7 * DAY_S)
FACTS = Facts("sums", CONFIG, now=100 * DAY_S, newest_at=99 * DAY_S, newest_data="new")
DRIFTING = {
    "config": CONFIG.model_copy(update={"drift_after_s": DAY_S}),
    "champion_s": 2 * DAY_S,
    "offline": (1.0,) * 95 + (0.0,) * 5,
    "online": (1.0,) * 50 + (0.0,) * 50,
}


@pytest.mark.parametrize(
    ("changes", "due", "reason"),
    [
        ({}, False, "1.0 days"),
        ({"config": CONFIG.model_copy(update={"scheduled": False})}, False, "not scheduled"),
        ({"blocked": "Releases are frozen.", "newest_at": None}, False, "Releases are frozen."),
        ({"newest_at": None}, True, "no revision"),
        ({"newest_data": "old"}, True, "data has changed"),
        ({"newest_data": None}, True, "data has changed"),
        ({"newest_at": 90 * DAY_S}, True, "10.0 days"),
        ({"newest_at": 93 * DAY_S}, False, "Nothing has changed"),
        (DRIFTING, True, "users rate its champion"),
    ],
)
def test_what_is_due_and_why(changes: dict, due: bool, reason: str) -> None:
    said = judge(replace(FACTS, **changes))
    assert said.due is due
    assert reason in said.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"config": CONFIG},
        {"champion_s": 0.9 * DAY_S},
        {"online": (0.0,) * (MIN_RATED - 1)},
        {"offline": ()},
        {"online": (1.0,) * 92 + (0.0,) * 8},
    ],
    ids=["not asked for", "a young champion", "few users", "no scores", "within the intervals"],
)
def test_what_is_no_drift(changes: dict) -> None:
    assert drift(replace(FACTS, **(DRIFTING | changes))) is None


def test_drift_names_both_limits() -> None:
    said = drift(replace(FACTS, **DRIFTING)) or ""
    # Clopper and Pearson's intervals of 50 and of 95 successes in 100 trials.
    assert "0.602" in said
    assert "0.887" in said


def test_each_newest_revision_has_another_seed() -> None:
    """Otherwise the finished session of the newest one would be found, and nothing trained."""
    seeds = [replace(FACTS, newest=digest * 32).seed for digest in ("ab", "cd")]
    assert len(set(seeds)) == 2
    assert replace(FACTS, newest=None).seed is None
