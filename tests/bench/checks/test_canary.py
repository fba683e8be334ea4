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


def test_a_releases_end_is_what_its_judges_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead revision meets nobody where there is a shadow, and few users where an evaluator judges them."""
    parts = load("canary", monkeypatch).evaluated
    for settings, means, verdicts in (
        (parts.SHADOW, (1.0, 0.0), {"shadow"}),
        (parts.SHADOW, (1.0, 1.0), {"promote"}),
        (parts.EVALUATOR, (1.0, 0.0), {"rollback"}),
        (parts.RATINGS, (1.0, 0.0), {"rollback"}),
    ):
        part = parts.Part(settings, *means, (), rated=0.1)
        ends = [part.release(np.random.default_rng(seed)) for seed in range(5)]
        assert {end.verdict for end in ends} == verdicts
        assert all((end.pairs == 0) == (settings is not parts.SHADOW) for end in ends)
        assert all((end.exposed == 0) == (end.verdict == "shadow") for end in ends)
    silent = parts.Part(parts.RATINGS, 1.0, 0.0, ())
    assert silent.release(np.random.default_rng(1)).verdict == "hold"


def test_a_part_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = load("canary", monkeypatch).evaluated
    monkeypatch.setattr(parts, "CHUNK", 2)
    part = parts.Part(parts.SHADOW, 0.9, 0.8, ("shadow",))
    assert part.judge("a", 1, 0) == part.judge("a", 1, 0) != part.judge("a", 1, 1)


def test_the_shadows_rates_complement_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("canary", monkeypatch)
    parts, figures = bench.evaluated, bench.record.Figures()
    name = "evaluated_false_end_rate.shadow-90"
    ends = [parts.End("hold" if number % 100 else "shadow", 0, 200) for number in range(1, 501)]
    parts.add_rate(figures, name, parts.PARTS[name], ends)
    assert figures.values[name] == 0.01
    assert figures.values["shadow_goes_on_equal.90"] == 0.99
    assert figures.values["shadow_pairs.equal-90"] == 200
    says = bench.record.verdicts(figures, bench.BOUNDS)
    assert says == {name: "met", "shadow_goes_on_equal.90": "met"}
