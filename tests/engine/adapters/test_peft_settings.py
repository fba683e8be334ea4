"""Every field of the installed peft's LoraConfig is known, and one that changes the meaning is refused."""

import json
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from peft import LoraConfig

from engine.adapters.foreign_files import RANK_LIMIT, read_scaling
from engine.adapters.peft_settings import HARMLESS, PLAIN, REMEDIES, refuse_unserved
from engine.errors import AdapterError
from engine.publishing.foreign import read_adapter
from engine.settings.services import EngineConfig
from tests.helpers.malformed import BASE, CONFIG, TENSORS, good

# A value that changes what the factors mean, and what the refusal says to do.
CHANGES = {
    "peft_type": ("LOHA", "LoRA"),
    "task_type": ("SEQ_CLS", "CAUSAL_LM"),
    "init_lora_weights": ("pissa", "path_initial_model_for_weight_conversion"),
    "alora_invocation_tokens": ([5, 6, 7], "always on"),
    "bias": ("lora_only", "none"),
    "lora_bias": (True, "biases"),
    "use_dora": (True, "merge_and_unload"),
    "modules_to_save": (["lm_head"], "merge_and_unload"),
    "trainable_token_indices": ([1], "embeddings"),
    "layer_replication": ([[0, 2], [1, 3]], "layers once"),
    "use_qalora": (True, "quantized"),
    "megatron_config": ({"tp": 1}, "peft's own form"),
    "velora_config": ({"num_groups": 64}, "merge_and_unload"),
    "monteclora_config": ({"x": 1}, "merge_and_unload"),
    "use_bdlora": ({"nblocks": 2}, "merge_and_unload"),
    "arrow_config": ({"top_k": 3}, "merge_and_unload"),
    "kasa_config": ({"beta": 1e-4}, "merge_and_unload"),
}


def test_each_field_of_the_installed_peft_is_known():
    """A new version's new field fails here; decide what it means before a user does."""
    known = HARMLESS | PLAIN.keys() | REMEDIES.keys()
    assert {field.name for field in fields(LoraConfig)} == known
    assert not HARMLESS & (PLAIN.keys() | REMEDIES.keys())
    assert known - HARMLESS == CHANGES.keys()


def test_the_defaults_of_the_installed_peft_are_plain():
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    refuse_unserved("it", {**config.to_dict(), "peft_type": "LORA"})


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_the_meaning_is_refused_by_name_with_what_to_do(tmp_path, name):
    value, advice = CHANGES[name]
    path = good(tmp_path, BASE) / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(AdapterError, match=f"sets {name} to .*{re.escape(advice)}"):
        read_scaling(tmp_path)


@pytest.mark.parametrize("value", ["olora", "corda", "loftq", "lora_ga", "pissa_niter_4", "of_next_year"])
def test_an_initialization_that_moves_the_base_is_refused(value):
    with pytest.raises(AdapterError, match="path_initial_model"):
        refuse_unserved("it", {"init_lora_weights": value})


def test_an_unknown_field_is_refused_unless_it_is_unset():
    unset = {
        "enable_lora": None,
        "merge_weights": False,
        "a": "",
        "b": [],
        "c": {},
        "eva_config": {"rho": 2.0},
    }
    refuse_unserved("it", unset)
    with pytest.raises(AdapterError, match="sets gated_lora to True"):
        refuse_unserved("it", unset | {"gated_lora": True})


def test_a_rank_is_served_as_far_as_vllm_serves_it():
    source = Path(find_spec("vllm").origin).with_name("config") / "lora.py"
    served = re.search(r"MaxLoRARanks = Literal\[([\d, ]+)\]", source.read_text())[1]
    ours = get_args(EngineConfig.model_fields["max_rank"].annotation)
    assert ours == tuple(map(int, served.split(",")))
    assert max(ours) == RANK_LIMIT


# Hugging Face's cache


def cached(root: Path) -> Path:
    """Lay an adapter out as a snapshot, its files links to blobs of its repository."""
    repository = root / "models--ann--sums"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / ("a" * 40)
    good(snapshot, BASE)
    for i, name in enumerate((CONFIG, TENSORS)):
        (snapshot / name).rename(repository / "blobs" / f"{i}")
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    return snapshot


def test_a_snapshot_of_the_cache_is_read(tmp_path):
    assert read_adapter(cached(tmp_path), BASE).found.tensors > 0


@pytest.mark.parametrize("place", ["models--bob--other/blobs/0", "models--ann--sums/refs/0", "0"])
def test_a_snapshot_links_into_its_own_blobs_alone(tmp_path, place):
    snapshot = cached(tmp_path)
    target = tmp_path / place
    target.parent.mkdir(parents=True, exist_ok=True)
    (snapshot / CONFIG).resolve().rename(target)
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(target)
    with pytest.raises(AdapterError, match="link out of its directory"):
        read_adapter(snapshot, BASE)


def test_blobs_that_are_a_link_themselves_are_not_followed(tmp_path):
    snapshot = cached(tmp_path)
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="link out of its directory"):
        read_adapter(snapshot, BASE)
