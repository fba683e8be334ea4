"""`bench canary` in short: the rates of wrong verdicts, the rules beside ours, and the traffic itself."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.bench_files import load

KINDS = frozenset({"drift", "feedback"})


def test_the_decision_code_decides_and_is_seldom_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("canary", monkeypatch)
    chance = np.random.default_rng(1)
    equal = [bench.ours(bench.requests(chance, 1000, 0.0, KINDS), 0.05, 0.1)[0] for _ in range(20)]
    worse = [bench.ours(bench.requests(chance, 1000, -0.1, KINDS), 0.05, 0.1)[0] for _ in range(20)]
    assert equal.count("rollback") + worse.count("promote") <= 2
    assert equal.count("promote") > 0
    assert worse.count("rollback") > 0


def test_asking_while_no_guard_finds_anything_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("canary", monkeypatch)
    chance = np.random.default_rng(5)
    for kind, effect in (("plain", -0.3), ("all", 0.0), ("all", -0.2)):
        traffic = bench.requests(chance, 600, effect, bench.KINDS[kind])
        assert bench.ours(traffic, 0.2, 0.3) == bench.ours(traffic, 0.2, 0.3, is_thorough=True)


def test_a_dead_canary_is_rolled_back_within_a_hundred_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("canary", monkeypatch)
    chance = np.random.default_rng(2)
    found = [bench.ours(bench.requests(chance, 400, -0.9, frozenset()), 0.05, 0.1) for _ in range(10)]
    assert {verdict for verdict, _ in found} == {"rollback"}
    assert max(asked for _, asked in found) <= 100


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


def test_the_plot_shows_every_rule_and_effect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = load("canary", monkeypatch)
    assert set(bench.TITLES) == set(bench.RULES)
    figures = {
        name: value
        for effect in bench.EFFECTS
        for name, value in bench.effect_figures(
            effect, {rule: bench.RuleVerdicts(["rollback"], [10 * effect], [effect]) for rule in bench.RULES}
        )
    }
    bench.draw(figures, tmp_path / "canary.png")
    assert 10_000 < (tmp_path / "canary.png").stat().st_size < 200_000


def test_the_other_rules_promote_a_better_and_roll_back_a_worse_canary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = load("canary", monkeypatch)
    chance = np.random.default_rng(4)
    for rule in (bench.fixed_sample, bench.bonferroni):
        for effect, verdict in ((0.1, "promote"), (-0.4, "rollback")):
            traffic = bench.requests(chance, 3000, effect, frozenset())
            assert rule(traffic, 0.05, 0.1)[0] == verdict
