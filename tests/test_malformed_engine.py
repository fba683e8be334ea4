"""Malformed adapters against a live engine: each refused by a sentence, the same process serving on."""

import time

import pytest
from live import RunningEngine
from planted import PLANTED, plant
from test_engine import RANK, random_adapter

QUESTION = {"prompt": [7, 8, 9, 10], "max_tokens": 4, "temperature": 0, "logprobs": 1}


@pytest.fixture(scope="module")
def tensors(engine: RunningEngine):
    from engine.adapters.families import BaseShapes

    return random_adapter(BaseShapes.read(engine.base_path).modules(), 71)


@pytest.fixture(scope="module")
def good(engine: RunningEngine, tensors):
    """Return how a good adapter is asked; what it answers first is what it must answer ever after."""
    name = engine.publish("healthy", tensors, RANK)
    with engine.client() as client:

        def ask() -> tuple:
            response = client.post("/v1/completions", json={"model": name, **QUESTION})
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            return choice["text"], tuple(choice["logprobs"]["token_logprobs"])

        first = ask()
        yield lambda: (ask(), first, engine.process.pid, engine.process.poll())


def serves_on(good) -> None:
    answer, first, _, ended = good()
    assert answer == first
    assert ended is None


@pytest.mark.parametrize("name", PLANTED)
def test_a_malformed_packed_adapter_is_refused_by_the_engine_that_serves_on(engine, good, tensors, name):
    change, words = PLANTED[name]
    serves_on(good)
    model = plant(engine, tensors, change)
    started = time.monotonic()
    with engine.client() as client:
        response = client.post("/v1/completions", json={"model": model, **QUESTION})
    serves_on(good)
    assert response.status_code in (404, 422), response.text
    message = response.json()["error"]["message"]
    assert words in message
    assert message.endswith(".")
    assert len(message) < 1000
    assert message.isprintable()
    # It was refused for what it says, not for the time that it took.
    assert time.monotonic() - started < 20


def test_the_adapter_that_is_broken_is_good(engine, good, tensors):
    serves_on(good)
    model = plant(engine, tensors, lambda made: None)
    with engine.client() as client:
        response = client.post("/v1/completions", json={"model": model, **QUESTION})
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    assert (choice["text"], tuple(choice["logprobs"]["token_logprobs"])) == good()[1]
