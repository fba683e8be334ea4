"""The fewest engines that hold: found among made-up outcomes, and refused where none does."""

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.planning.fleet.assumptions import EngineModel, FleetOutcome, Scenario, StoreModel
from engine.planning.fleet.search import capacity, fewest
from engine.planning.fleet.simulation import simulate

MODEL = EngineModel(step_s=0.02, token_s=0.0001, adapter_s=0.0005, rows=32, prompt=100, answer=50)
TRAFFIC = Scenario(policies=100, rate=100.0, host=100, kill=1, seconds=60.0)


def outcome(engines: int, p95: float, left: int = 0) -> FleetOutcome:
    return FleetOutcome(engines, True, 100.0, 1000, 0.1, 0, p95, 0, 0, 0, 0, 0, 0, 0, left)


@pytest.mark.parametrize("enough", [6, 7, 8, 9, 13, 40, 100])
def test_the_fewest_is_found_with_one_less(enough: int) -> None:
    asked: list[int] = []

    def simulated(count: int) -> FleetOutcome:
        asked.append(count)
        return outcome(count, 1.0 if count >= enough else 9.0)

    count, outcomes = fewest(TRAFFIC, MODEL, 2.0, simulated)
    assert count == enough
    assert outcomes[enough - 1].first_token_p95_s == 9.0
    assert len(asked) == len(set(asked)) <= 14


@pytest.mark.parametrize("enough", [2, 3, 4])
def test_fewer_than_throughput_needs_are_found_where_they_hold(enough: int) -> None:
    # Throughput needs four, and one that is down.
    count, outcomes = fewest(
        TRAFFIC, MODEL, 2.0, lambda count: outcome(count, 1.0 if count >= enough else 9.0)
    )
    assert count == enough
    assert enough == 2 or outcomes[enough - 1].first_token_p95_s == 9.0


def test_more_engines_than_can_be_simulated_are_refused_at_once() -> None:
    def simulated(count: int) -> FleetOutcome:
        raise AssertionError(count)

    with pytest.raises(ConfigError, match="at most 4096 are simulated"):
        fewest(TRAFFIC, replace(MODEL, answer=100_000), 2.0, simulated)


def test_without_a_first_token_no_time_is_told() -> None:
    with pytest.raises(ConfigError, match="--seconds") as refused:
        fewest(TRAFFIC, MODEL, 2.0, lambda count: outcome(count, float("nan")))
    assert "nan" not in str(refused.value)


def test_engines_on_which_requests_pile_up_do_not_hold() -> None:
    count, _ = fewest(TRAFFIC, MODEL, 2.0, lambda count: outcome(count, 1.0, left=900 if count < 9 else 0))
    assert count == 9


def test_one_engine_down_leaves_one_at_least() -> None:
    count, outcomes = fewest(replace(TRAFFIC, rate=0.5), MODEL, 2.0, lambda count: outcome(count, 0.1))
    assert (count, list(outcomes)) == (2, [2])
    whole = replace(TRAFFIC, rate=0.5, kill=0)
    assert fewest(whole, MODEL, 2.0, lambda count: outcome(count, 0.1))[0] == 1


def test_a_wish_that_no_number_of_engines_grants_is_refused() -> None:
    with pytest.raises(ConfigError, match="alone on an idle engine"):
        fewest(TRAFFIC, MODEL, 0.02, lambda count: outcome(count, 0.01))
    with pytest.raises(ConfigError, match="host_bytes"):
        fewest(TRAFFIC, MODEL, 2.0, lambda count: outcome(count, 9.0))


def test_capacity_and_idle_wait_are_those_of_the_simulation() -> None:
    one = replace(TRAFFIC, policies=1, engines=1, kill=0, seconds=100.0)
    most, quick = capacity(MODEL), StoreModel(fetch_s=0.0, faults=0.0)
    full = simulate(replace(one, rate=0.9 * most), MODEL, quick)
    assert full.keeps_up
    assert full.rows > 0.6
    assert not simulate(replace(one, rate=1.3 * most), MODEL, quick).keeps_up
    idle = simulate(replace(one, rate=0.1), MODEL, quick)
    assert idle.first_token_p50_s == pytest.approx(0.02 + 0.0005 + 100 * 0.0001)


def test_a_prompt_beyond_the_budget_is_computed_in_parts() -> None:
    model = replace(MODEL, prompt=5000, answer=4)
    idle = simulate(
        replace(TRAFFIC, policies=1, engines=1, kill=0, rate=0.05, seconds=400.0), model, StoreModel()
    )
    # Only the last part's step has an adapter's row.
    assert idle.first_token_p50_s == pytest.approx(3 * 0.02 + 0.0005 + 0.5)
