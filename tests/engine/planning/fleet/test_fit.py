"""The fit of one engine's times: what is put into a simulated engine comes out of how it answers loads."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine.planning.fleet.assumptions import EngineModel, StoreModel
from engine.planning.fleet.engine_process import SimulatedEngine
from engine.planning.fleet.fit import COLD_LOAD, LOADS, LoadSize, answers_of, closed_loop, fitted, simulated
from engine.planning.fleet.simulation import simpy_module

STEPS = EngineModel(
    step_s=0.02, token_s=0.0004, adapter_s=0.003, load_s=0.01, request_s=0.005, prompt=32, answer=16
)
GATEWAY = replace(STEPS, step_s=0.003, token_s=0.0001, request_s=0.03, prompt=192, answer=8)
ALL = (*LOADS, COLD_LOAD)
STORE = StoreModel(fetch_s=0.1, spread=0.0, faults=0.0)


@pytest.mark.long
def test_the_times_of_a_simulated_engine_are_found_again() -> None:
    found = fitted([simulated(size, STEPS, STORE) for size in ALL], STEPS)
    for name in ("step_s", "token_s", "adapter_s", "request_s", "load_s"):
        assert found[name] == pytest.approx(getattr(STEPS, name), rel=0.1)
    assert found["fetch_s"] == pytest.approx(STORE.fetch_s, rel=0.1)
    assert found["step_spread"] == 0
    assert (found["prompt"], found["answer"]) == (32, 16)
    assert (found["rows"], found["budget"]) == (STEPS.rows, STEPS.budget)


@pytest.mark.long
def test_the_spread_of_steps_is_found_again_and_leaves_the_means() -> None:
    varied = replace(STEPS, step_spread=0.3)
    # Of random numbers that the fit does not use; few requests show a spread, so each load is taken thrice.
    found = fitted([simulated(size, varied, STORE, seed) for size in ALL for seed in (11, 12, 13)], STEPS)
    assert 0.2 < found["step_spread"] < 0.4
    assert found["step_s"] == pytest.approx(STEPS.step_s, rel=0.1)


@pytest.mark.long
def test_an_engine_of_few_rows_is_fitted_with_its_rows() -> None:
    few = replace(STEPS, rows=4, budget=64)
    found = fitted([simulated(size, few, STORE) for size in LOADS], few)
    assert (found["rows"], found["budget"]) == (4, 64)
    for name in ("step_s", "token_s", "adapter_s", "request_s"):
        assert found[name] == pytest.approx(getattr(few, name), rel=0.1)


@pytest.mark.long
def test_an_engine_whose_gateway_is_slow_is_answered_for() -> None:
    wanted = [simulated(size, GATEWAY, STORE) for size in ALL]
    found = fitted(wanted, GATEWAY)
    assert found["request_s"] > 0.6 * GATEWAY.request_s
    store = replace(STORE, fetch_s=found.pop("fetch_s"))
    for one in wanted:
        got = simulated(one.size, replace(GATEWAY, **found), store)
        assert (got.wait_s, got.rest_s) == pytest.approx((one.wait_s, one.rest_s), rel=0.15)


@pytest.mark.long
def test_without_cold_requests_nothing_is_said_of_loads() -> None:
    found = fitted([simulated(size, STEPS, STORE) for size in LOADS], STEPS)
    assert not {"load_s", "fetch_s"} & found.keys()
    assert found["adapter_s"] == pytest.approx(STEPS.adapter_s, rel=0.1)


def test_the_gateway_takes_one_request_at_a_time() -> None:
    slow = replace(STEPS, request_s=0.5)
    assert simulated(LOADS[0], slow, STORE).wait_s == pytest.approx(0.5 + 0.02 + 32 * 0.0004 + 0.003)
    # Eight under way wait for each other.
    assert simulated(LOADS[1], slow, STORE).wait_s > 3.0


def test_the_answers_that_begin_a_loop_are_not_measured() -> None:
    model = replace(STEPS, request_s=0.0)
    alone = model.step_s + model.token_s + model.adapter_s
    # The first one has one token, and no time after it.
    assert simulated(LOADS[0], model, STORE).rest_s == pytest.approx(15 * alone)


@pytest.mark.parametrize(("are_spread", "most"), [(True, 1), (False, 8)])
def test_what_a_loop_measures_begins_one_by_one(are_spread: bool, most: int) -> None:
    size = LoadSize(8, 1, 32)
    answers = answers_of(size, 16) if are_spread else [16] * size.requests
    env, model = simpy_module().Environment(), replace(STEPS, request_s=0.0)
    engine = SimulatedEngine(env, model, STORE, 1, np.random.default_rng(0), lambda _: None)
    engine.tier[0] = None
    asked = closed_loop(env, engine.take, size.under_way, [(0, answer) for answer in answers])
    assert [one.answer for one in asked[size.under_way :]] == [16] * 24
    assert max(Counter(one.first for one in asked[size.under_way :]).values()) == most
