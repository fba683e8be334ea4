"""Every malformed adapter is refused by one sentence, cheaply; what is good beside it is read."""

import resource
import time

import pytest
import torch

from engine.adapters.layouts import LAYOUTS
from engine.errors import AdapterError
from engine.publishing.foreign import read_adapter
from tests.helpers.made_adapters import canonical, write
from tests.helpers.malformed import BASE, CORPUS, good


@pytest.mark.parametrize("name", CORPUS)
def test_a_malformed_adapter_is_refused_by_a_sentence_that_names_its_fault(tmp_path, name):
    build, words = CORPUS[name]
    directory = tmp_path / "adapter"
    build(directory, BASE)
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(AdapterError) as caught:
        read_adapter(directory, BASE)
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")
    assert len(message) < 1000
    assert message.isprintable()
    assert "lora_" in message or str(directory) in message or "tensor" in message
    assert time.process_time() - before < 1.0
    # In KiB: no more than 64 MiB on top, whatever the file announces.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10


def test_the_corpus_is_large_and_breaks_every_layout():
    assert len(CORPUS) >= 80
    for layout in LAYOUTS:
        assert sum(name.startswith(f"{layout.name}: ") for name in CORPUS) >= 7


@pytest.mark.parametrize("layout", [layout.name for layout in LAYOUTS])
def test_the_adapter_that_the_corpus_breaks_is_good(tmp_path, layout):
    found = read_adapter(good(tmp_path, BASE, layout), BASE)
    assert found.found.layout == layout
    assert found.found.experts == 3


def test_the_shape_that_is_needed_is_said(tmp_path):
    build, _ = CORPUS["peft-fused: transposed"]
    build(tmp_path, BASE)
    with pytest.raises(
        AdapterError, match=r"experts\.lora_A.* has the shape \(7, 6\); the base needs \(rank, 7\)"
    ):
        read_adapter(tmp_path, BASE)


def test_a_value_that_the_serving_dtype_cannot_hold_is_refused(tmp_path):
    tensors = canonical(BASE)
    tensors["model.layers.0.self_attn.q_proj.lora_A"][0, 0] = 1e6
    write(tmp_path, tensors, "per-expert", BASE)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_A holds NaN or Inf"):
        read_adapter(tmp_path, BASE, torch.float16)
