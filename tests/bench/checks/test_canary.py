"""What `bench canary` simulates: when it asks the code that decides, its traffic, and other rules."""

import numpy as np
import pytest

from tests.helpers.bench_files import load


def test_asking_while_no_guard_finds_anything_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("canary", monkeypatch)
    chance = np.random.default_rng(5)
    for kind, effect in (("plain", -0.3), ("all", 0.0), ("all", -0.2)):
        traffic = bench.requests(chance, 600, effect, bench.KINDS[kind])
        assert bench.ours(traffic, 0.2, 0.3) == bench.ours(traffic, 0.2, 0.3, is_thorough=True)


@pytest.mark.long
def test_the_traffic_has_the_effect_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("canary", monkeypatch)
    for kinds in bench.KINDS.values():
        traffic = bench.requests(np.random.default_rng(3), 200_000, -0.1, kinds)
        users, first = np.unique(traffic.user_N, return_index=True)
        arm, reward = traffic.canary_N[first], traffic.reward_N[first]
        spread = 4 * 0.5 / np.sqrt(arm.sum())
        assert reward[arm].mean() - reward[~arm].mean() == pytest.approx(-0.1, abs=spread)
        rated = bench.events(traffic)
        late = "feedback" in kinds
        assert (sum(is_rating for _, is_rating in rated) < 0.72 * 200_000) == late
        assert (len(users) < 100_000) == ("clusters" in kinds)


def test_the_other_rules_promote_a_better_and_roll_back_a_worse_canary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = load("canary", monkeypatch)
    chance = np.random.default_rng(4)
    for rule in (bench.fixed_sample, bench.bonferroni):
        for effect, verdict in ((0.1, "promote"), (-0.4, "rollback")):
            traffic = bench.requests(chance, 3000, effect, frozenset())
            assert rule(traffic, 0.05, 0.1)[0] == verdict
