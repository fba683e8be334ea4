"""The guards: who counts as one, what each finds, and that no single key decides."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.quality.canary import MOST_SEGMENTS, CanaryAnswer, CanaryJudge, FeedbackCounts
from engine.quality.guards import LARGEST_KEYS, ONE_KEY, WARM_UNITS, Guard, GuardResult
from engine.settings.releases import GUARDS, ReleaseConfig

SETTINGS = ReleaseConfig()


def judge(is_against_base: bool = False, **settings: Any) -> CanaryJudge:
    return CanaryJudge(SETTINGS.model_copy(update=settings), {0: 0.2, 1: 0.2, 2: 0.5}, is_against_base)


def guard(judged: CanaryJudge, name: str) -> GuardResult:
    return next(found for found in judged.result().guards if found.guard == name)


def users(count: int, prefix: str = "u") -> Iterator[tuple[str, bool]]:
    """Users of whom every fifth is on the canary."""
    return ((f"{prefix}{number}", number % 5 == 0) for number in range(count))


def rate(
    judged: CanaryJudge, count: int, canary: float, baseline: float, key: str = "k", step: int = 0
) -> None:
    for unit, is_canary in users(count, f"{key}-"):
        judged.rate(step, key, unit, is_canary, canary if is_canary else baseline)


def test_a_user_who_sends_a_thousand_requests_counts_as_one() -> None:
    judged = judge()
    for _ in range(1000):
        judged.rate(0, "k", "busy", True, 0.0)
        judged.rate(0, "k", "other", False, 1.0)
    result = judged.result()
    assert (result.canary_units, result.baseline_units) == (1, 1)
    assert result.harm is None
    assert (result.lower, result.upper) == (-1.0, 1.0)


def test_a_unit_has_the_mean_of_its_ratings() -> None:
    judged = judge()
    for reward in (1.0, 0.0, 0.5):
        judged.rate(0, "k", "u", True, reward)
    judged.rate(0, "k", "v", True, 1.0)
    assert judged.result().canary_reward == 0.75


@pytest.mark.parametrize("reward", [-0.1, 1.1, math.nan])
def test_rewards_outside_zero_and_one_are_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="Rewards lie in"):
        judge().rate(0, "k", "u", True, reward)


def test_a_bad_and_a_good_canary() -> None:
    bad, good = judge(), judge()
    rate(bad, 60, 0.0, 1.0)
    harm = bad.result().harm
    assert harm is not None
    assert (harm.guard, harm.note) == ("reward", ONE_KEY)
    rate(good, 400, 1.0, 1.0)
    assert good.result().is_clear
    assert good.result().harm is None


@pytest.mark.parametrize("count", [1, 10_000])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_one_key_among_several_neither_promotes_nor_rolls_back(count: int, reward: float) -> None:
    """It sends 10,000 rewards, as one user and as 10,000, and only to the canary's answers."""
    judged = judge()
    for number in range(10_000):
        judged.rate(0, "poison", f"p{number % count}", True, reward)
        if number < 100:
            # Honest users see a canary that is neither clearly worse nor clearly within the margin.
            judged.rate(0, f"honest{number % 2}", f"h{number}", number % 5 == 0, float(number % 4 > 0))
    result = judged.result()
    assert result.harm is None
    assert not result.is_clear


def test_a_verdict_that_hangs_on_one_key_says_so() -> None:
    judged = judge()
    rate(judged, 100, 0.0, 1.0, key="loud")
    rate(judged, 10, 1.0, 1.0, key="quiet")
    found = guard(judged, "reward")
    assert found.state == "open"
    assert found.upper <= 0
    assert "key loud alone" in found.note
    rate(judged, 100, 0.0, 1.0, key="third")
    assert guard(judged, "reward").state == "harm"
    assert guard(judged, "reward").note == ""


def test_the_largest_keys_are_left_out_singly_and_the_others_together() -> None:
    """The smaller keys find harm; it counts only where the largest find it as well."""
    for reward, state in ((0.0, "harm"), (1.0, "open")):
        judged = judge()
        for number in range(LARGEST_KEYS):
            rate(judged, 50, reward, 1.0, key=f"large{number:02}")
        for number in range(30):
            rate(judged, 45, 0.0, 1.0, key=f"small{number:02}")
        found = guard(judged, "reward")
        assert found.upper <= 0
        assert found.state == state
        assert ("30 smaller keys" in found.note) == (state == "open")


def test_ratings_of_an_earlier_step_are_late_and_a_moved_unit_counts_in_its_new_arm() -> None:
    judged = judge()
    judged.rate(1, "k", "moved", False, 1.0)
    judged.rate(2, "k", "moved", True, 0.0)
    judged.rate(1, "k", "late", True, 0.0)
    result = judged.result()
    assert (result.canary_units, result.baseline_units, result.step_units) == (1, 1, 1)
    assert judged.rewards.late == 1


def answers(judged: CanaryJudge, count: int, canary: dict[str, Any], baseline: dict[str, Any]) -> None:
    for unit, is_canary in users(count):
        judged.observe(CanaryAnswer(0, "k", unit, is_canary, **(canary if is_canary else baseline)))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("errors", {"status": 500}),
        ("invalid", {"outcome": "invalid"}),
        ("refused", {"outcome": "refused"}),
        ("truncated", {"outcome": "truncated"}),
    ],
)
def test_faults_of_the_canary_alone_roll_back_within_eight_of_its_units(name: str, fault: dict) -> None:
    judged = judge()
    answers(judged, 40, fault, {"outcome": "ok"})
    assert guard(judged, name).state == "harm"
    for other in set(GUARDS) - {name}:
        assert guard(judged, other).state == "open"


def test_faults_of_both_arms_and_the_users_own_are_no_harm() -> None:
    for fault in ({"status": 503, "outcome": None}, {"status": 404}):
        judged = judge()
        answers(judged, 2000, fault, fault)
        assert judged.result().harm is None
    assert guard(judged, "errors").canary_units == 400


def test_a_unit_counts_with_its_first_fault_only() -> None:
    judged = judge()
    for _ in range(1000):
        judged.observe(CanaryAnswer(0, "k", "u", True, status=500))
    assert guard(judged, "errors").state == "open"


def test_faults_that_one_key_alone_meets_do_not_decide() -> None:
    judged = judge()
    for number in range(50):
        judged.observe(CanaryAnswer(0, "crash", f"c{number}", True, status=500))
        judged.observe(CanaryAnswer(0, "honest", f"h{number}", number % 5 == 0))
    found = guard(judged, "errors")
    assert found.state == "open"
    assert "key crash alone" in found.note


def times(judged: CanaryJudge, slower: float, count: int = 1500) -> None:
    chance = np.random.default_rng(1)
    for unit, is_canary in users(count):
        seconds = chance.lognormal(-3, 0.5) * (slower if is_canary else 1.0)
        judged.observe(CanaryAnswer(0, "k", unit, is_canary, ttft_s=seconds, token_s=seconds / 10))


def test_a_slow_canary_is_rolled_back_and_an_equal_one_is_not() -> None:
    slow, equal, on_base = judge(), judge(), judge(is_against_base=True)
    times(slow, 3.0)
    times(equal, 1.0)
    times(on_base, 3.0)
    for name in ("ttft", "token_time"):
        assert guard(slow, name).state == "harm"
        assert guard(slow, name).lower > 1.5
        assert guard(equal, name).state != "harm"
        assert guard(on_base, name).state == "open"
        assert "reported only" in guard(on_base, name).rule


def test_the_canarys_first_answers_are_not_timed() -> None:
    judged = judge()
    for number in range(WARM_UNITS):
        judged.observe(CanaryAnswer(0, "k", f"cold{number}", True, ttft_s=60.0))
    times(judged, 1.0)
    assert guard(judged, "ttft").upper < 10


def test_without_feedback_all_other_guards_must_be_clear() -> None:
    judged = judge(feedback="none", guards=("errors", "invalid", "ttft"))
    for unit, is_canary in users(1000):
        judged.observe(CanaryAnswer(0, "k", unit, is_canary, outcome="ok"))
    result = judged.result()
    assert [found.state for found in result.required] == ["clear", "clear", "open"]
    assert not result.is_clear
    assert result.canary_units == 200
    times(judged, 1.0, 6000)
    assert judged.result().is_clear


def test_the_level_is_split_so_that_all_guards_together_keep_alpha() -> None:
    """The reward's lower side has half of it; each other guard's rule names its share."""
    shares = [found.share for found in judge().others.values()]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(0.025)
    assert sum(found.share for found in judge(feedback="none").others.values()) == pytest.approx(0.05)
    ramped = [found.share for name, found in judge(ramp=(0.01,)).others.items() if name == "ttft"]
    assert ramped == [pytest.approx(0.025 / 8 / 2)]


def test_longer_and_costlier_answers_are_harm() -> None:
    for name in ("length", "cost"):
        judged, cheap = judge(), judge()
        for unit, is_canary in users(1500):
            for one, size in ((judged, 30.0 if is_canary else 10.0), (cheap, 3.0 if is_canary else 10.0)):
                one.observe(CanaryAnswer(0, "k", unit, is_canary, **{name: size}))
        assert guard(judged, name).state == "harm"
        assert guard(judged, name).sentence().startswith(f"{name}: canary / baseline lies between +3.000")
        assert cheap.is_open


def test_against_the_base_a_promotion_does_not_wait_for_times_and_sizes() -> None:
    judged = judge(is_against_base=True, feedback="none", guards=("errors", "ttft", "cost"))
    for unit, is_canary in users(1000):
        judged.observe(CanaryAnswer(0, "k", unit, is_canary, ttft_s=1.0, cost=2.0 if is_canary else 1.0))
    assert [found.guard for found in judged.result().required] == ["errors"]
    assert judged.result().is_clear


def in_segments(judged: CanaryJudge) -> None:
    """A canary that is better, but bad for the few who ask in German."""
    for number, (unit, is_canary) in enumerate(users(4000)):
        segment = "de" if number % 100 in (3, 5) else None
        is_good = segment is None if is_canary else number % 7 > 0
        judged.rate(0, "k", unit, is_canary, float(is_good), segment)


def test_a_segment_is_reported_and_rolls_back_where_the_policy_asks() -> None:
    reporting, judging = judge(), judge(segments=("de", "fr"))
    in_segments(reporting)
    in_segments(judging)
    (found,) = reporting.result().segments
    assert (found.guard, found.state) == ("reward in de", "harm")
    assert (found.canary_units, found.baseline_units) == (40, 40)
    assert reporting.result().harm is None
    assert [one.guard for one in judging.result().guards[:3]] == ["reward", "reward in de", "reward in fr"]
    harm = judging.result().harm
    assert harm is not None
    assert harm.guard == "reward in de"
    assert judging.result().segments == ()
    assert guard(judging, "reward").rule.startswith(f"betting confidence sequence at level {0.05 / 3:g}")


def test_a_promotion_does_not_wait_for_a_segment() -> None:
    judged = judge(segments=("fr",))
    rate(judged, 1000, 1.0, 1.0)
    assert judged.result().is_clear


def test_many_segments_are_put_together() -> None:
    judged = judge()
    for number in range(3 * MOST_SEGMENTS):
        judged.rate(0, "k", f"u{number}", number % 2 == 0, 1.0, f"s{number}")
    found = judged.result().segments
    assert len(found) == MOST_SEGMENTS + 1
    assert found[-1].guard == "reward in (others)"
    assert found[-1].canary_units + found[-1].baseline_units == 2 * MOST_SEGMENTS


def test_bounds_that_are_not_known_are_none_in_a_row() -> None:
    rows = judge().result().summary()["guards"]
    assert [row["upper"] for row in rows if row["guard"] == "ttft"] == [None]


def test_the_counts_of_feedback_are_a_sentence() -> None:
    assert FeedbackCounts().sentence() == "0 of 0 answers were rated."
    said = FeedbackCounts(200, 50, late=3, foreign=1).sentence()
    assert said == "50 of 200 answers were rated (25%); ignored: 3 late, 1 foreign."


values = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 1]),
        st.sampled_from("kkklm"),
        st.integers(0, 200),
        st.floats(0, 1) | st.sampled_from([0.0, 1.0]),
    ),
    min_size=20,
    max_size=300,
)


@pytest.mark.long
@given(values, st.integers(1, 40), st.sampled_from([0.0, 1.0]))
def test_looking_at_any_moments_gives_what_one_look_from_scratch_gives(
    drawn: list[tuple[int, str, int, float]], every: int, on_canary: float
) -> None:
    """Also where only some keys' values count: the twins equal guards that never saw the other keys."""
    for name in ("reward", "errors", "ttft"):
        looked, once = (_found(judge(margin=0.5), name) for _ in range(2))
        kept: dict[str, Guard] = {key: _found(judge(margin=0.5), name) for key in "klm"}
        step, keys = 0, set()
        for number, (more, key, unit, value) in enumerate(drawn):
            step = min(2, step + more)
            is_canary = unit % 2 == 0
            seen = step, key, f"u{unit}", is_canary, on_canary if is_canary else value
            for one in (looked, once, *(kept[other] for other in "klm" if other != key)):
                one.add(*seen)
            keys.add(key)
            if number % every == 0:
                looked.judge()
        assert looked.judge() == once.judge()
        everyone = {kept[key].found for key in keys} | {once.found}
        assert once.judge().state == (once.found if len(keys) == 1 or len(everyone) == 1 else "open")


def _found(judged: CanaryJudge, name: str) -> Guard:
    return judged.rewards if name == "reward" else judged.others[name]


def test_a_judge_is_open_until_a_guard_finds_something() -> None:
    judged = judge()
    for unit, is_canary in users(400):
        judged.rate(0, "k", unit, is_canary, float(not is_canary))
        assert judged.is_open == all(found.state == "open" for found in judged.result().guards)
    assert not judged.is_open
