"""Malformed adapters against a live engine: each refused by a sentence, the same process serving on."""

import time

import pytest

from tests.helpers.live import RunningEngine
from tests.helpers.parity import QUESTION, healthy, random_adapter
from tests.helpers.planted import PLANTED, plant


@pytest.fixture(scope="module")
def tensors(engine: RunningEngine):
    from engine.base.families import BaseShapes

    return random_adapter(BaseShapes.read(engine.base_path).modules(), 71)


@pytest.fixture(scope="module")
def serves(engine: RunningEngine, tensors):
    return healthy(engine, tensors)


@pytest.mark.parametrize("name", PLANTED)
def test_a_malformed_packed_adapter_is_refused_by_the_engine_that_serves_on(engine, serves, tensors, name):
    change, words = PLANTED[name]
    serves()
    model = plant(engine, tensors, change)
    started = time.monotonic()
    with engine.client() as client:
        response = client.post("/v1/completions", json={"model": model, **QUESTION})
    serves()
    # Bytes that are not where the row says may come back; everything else is for good.
    missing = words in ("are not in", "not a regular file", "missing or not a regular file")
    assert response.status_code in ((503,) if missing else (404, 422)), response.text
    message = response.json()["error"]["message"]
    assert words in message
    assert message.endswith(".")
    assert len(message) < 1000
    assert message.isprintable()
    # It was refused for what it says, not for the time that it took.
    assert time.monotonic() - started < 20


def test_the_adapter_that_is_broken_is_good(engine, serves, tensors):
    serves()
    model = plant(engine, tensors, lambda made: None)
    serves(model)
