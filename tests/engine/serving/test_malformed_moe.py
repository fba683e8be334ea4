"""Malformed adapters against a live engine on a mixture of experts: each is refused by a sentence.

They come in all six layouts, and the importer refuses each before the engine sees it; packed ones are refused
by the engine. The same process serves a good adapter before and after every one of them.
"""

from pathlib import Path

import pytest

from engine.adapters.layouts import LAYOUTS
from engine.base.families import BaseShapes
from engine.errors import AdapterError
from engine.publishing.foreign import inspect, publish
from engine.settings.params import Params
from tests.helpers.live import RunningEngine, free_port
from tests.helpers.malformed import CORPUS, good
from tests.helpers.parity import QUESTION, healthy, random_adapter
from tests.helpers.planted import PLANTED_EXPERTS, plant


@pytest.fixture(scope="module")
def engine(moe_engine: RunningEngine) -> RunningEngine:
    """Experts have another width than the hidden state."""
    return moe_engine


@pytest.fixture(scope="module")
def params(engine: RunningEngine) -> Params:
    return Params(state_dir=engine.state, base={"name": str(engine.base_path)}, trainer={"port": free_port()})


@pytest.fixture(scope="module")
def base(engine: RunningEngine):
    return BaseShapes.read(engine.base_path)


@pytest.fixture(scope="module")
def tensors(base):
    return random_adapter(base.modules(), 71)


@pytest.fixture(scope="module")
def serves(engine: RunningEngine, tensors):
    return healthy(engine, tensors)


def files(engine: RunningEngine) -> list[tuple[str, int]]:
    """Return what lies in the store, with the bytes of each file."""
    return sorted((path.name, path.stat().st_size) for path in engine.store.root.iterdir())


def bring_in(params: Params, directory: Path) -> None:
    foreign, base = inspect(params, directory)
    publish(params, directory, foreign, base, "bad", "local", lambda *_: pytest.fail("asked for a probe"))


@pytest.mark.parametrize("name", CORPUS)
def test_an_import_beside_a_live_engine_is_refused(engine, params, base, serves, tmp_path, name):
    build, words = CORPUS[name]
    build(tmp_path / "adapter", base)
    serves()
    before = files(engine)
    with pytest.raises(AdapterError) as caught:
        bring_in(params, tmp_path / "adapter")
    serves()
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")
    assert files(engine) == before
    assert "bad" not in [policy.name for policy in engine.catalog.policies.page()]


@pytest.mark.parametrize("name", PLANTED_EXPERTS)
def test_a_malformed_packed_adapter_of_experts_is_refused_by_the_engine(engine, serves, tensors, name):
    change, words = PLANTED_EXPERTS[name]
    serves()
    model = plant(engine, tensors, change)
    with engine.client() as client:
        response = client.post("/v1/completions", json={"model": model, **QUESTION})
    serves()
    assert response.status_code == 422, response.text
    message = response.json()["error"]["message"]
    assert words in message
    assert message.endswith(".")
    assert len(message) < 1000


@pytest.mark.parametrize("layout", [layout.name for layout in LAYOUTS])
def test_what_the_corpus_breaks_is_imported_when_it_is_whole(
    engine, params, base, tmp_path, layout, monkeypatch
):
    """In each layout: the revision is one and the same, and the engine serves it. Its probe is made up."""
    monkeypatch.setattr("engine.publishing.foreign.left_out_reason", lambda *_: "the probe is made up")
    from engine.quality.probe import Probe, ProbeRow

    def make_probe(manifest, directory) -> Probe:
        return Probe(manifest.digest, manifest.base_digest, "float32", (ProbeRow((1, 2), (-1.0,), (-2.0,)),))

    directory = good(tmp_path / "adapter", base, layout)
    foreign, info = inspect(params, directory)
    made = publish(params, directory, foreign, info, "whole", "local", make_probe)
    with engine.client() as client:
        model = f"whole@{made.digest[:12]}"
        response = client.post("/v1/completions", json={"model": model, **QUESTION})
    assert response.status_code == 200, response.text
    rows = engine.catalog.listing.exported("whole", 10)
    assert [row.digest for row in rows] == [made.digest]
