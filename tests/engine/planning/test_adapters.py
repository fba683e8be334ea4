"""Adapters of any model's config, planned: against packed files, against slots as tensors, at the command."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.adapters import packed
from engine.adapters.adapter_sizes import packed_blocks, slot_bytes
from engine.base.families import BaseShapes
from engine.base.model_config import language_model, read_config
from engine.base.sizes import Shape
from engine.base.toys.recipes import RECIPES
from engine.errors import BaseModelError, ConfigError
from engine.planning.adapters import AdapterPlan, Rates, Wanted, plan_adapters
from engine.planning.memory import GIB
from engine.planning.tiers import slot_rank
from engine.serving.worker.slot_copy import SlotCopyPlan
from engine.serving.worker.slots import slots_of
from engine.settings.services import EngineConfig
from flows.cli import app
from tests.helpers.base_layers import adapter, layers_of
from tests.helpers.made_adapters import CONFIGS, canonical, shapes
from tests.helpers.model_configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA3_8B, QWEN3_30B_A3B
from tests.helpers.repository import ROOT

KIMI_K2 = ROOT / "tests/helpers/kimi_k2.json"
BFLOAT16 = EngineConfig(dtype="bfloat16")
TINY = ("tiny-dense", "tiny-moe", "tiny-mla")


def plan(config, rank: int = 1, gib: float = 80, engine: EngineConfig = BFLOAT16, **wanted) -> AdapterPlan:
    return plan_adapters(language_model(config), engine, Wanted(rank, int(gib * GIB), **wanted))


def tensors_of(layers) -> list[torch.Tensor]:
    """Return every slot tensor of ours behind these layers."""
    found = []
    for name, layer in layers.items():
        for slots in slots_of(name, layer).values():
            pairs = (("a_SMRI", "b_SRO"), ("a_SEMRI", "b_SEMRO"))
            found += [getattr(slots, side) for pair in pairs for side in pair if hasattr(slots, side)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY)
def test_the_planned_bytes_are_the_packed_files_and_the_slots(name, dtype):
    config = RECIPES[name].config()
    base = BaseShapes.of(config)
    engine = EngineConfig(dtype=str(dtype).removeprefix("torch."), slots=3, max_rank=8)
    found = plan(config, 8, engine=engine)
    whole = packed.pack(adapter(base, 8, dtype)[0], dtype, base.fused)
    assert found.adapter_bytes == whole.layout.nbytes == whole.payload.nbytes
    assert found.adapter_blocks == len(whole.layout.blocks)
    assert found.adapter_tensors == 2 * len(base.modules())
    tensors = tensors_of(layers_of(config, 3, 8, dtype))
    assert found.engine_slots == 3 * found.slot_bytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", TINY)
def test_what_each_of_two_devices_holds_and_copies(name):
    """By the engine's own plan of copies, on either rank."""
    config = RECIPES[name].config()
    base = BaseShapes.of(config)
    found = plan(config, 8, devices=2)
    whole = packed.pack(adapter(base, 8, torch.bfloat16)[0], torch.bfloat16, base.fused)
    for rank in (0, 1):
        layers = layers_of(config, 1, 8, torch.bfloat16, (rank, 2))
        slots = {}
        for module, layer in layers.items():
            slots |= slots_of(module, layer)
        assert found.load_bytes == SlotCopyPlan(whole.layout, slots).bytes
        assert found.slot_bytes == sum(tensor.nbytes for tensor in tensors_of(layers))
    assert found.load_s == found.load_bytes / Rates().load


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("family", CONFIGS)
def test_padding_is_counted_where_sizes_are_odd(family, rank):
    base = shapes(family)
    whole = packed.pack(canonical(base, default=rank), torch.float32, base.fused)
    blocks = packed_blocks(base, rank, 4, None)
    assert sum(blocks) == whole.layout.nbytes
    assert len(blocks) == len(whole.layout.blocks)
    for targets in (("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("up_proj",)):
        kept = {key: value for key, value in canonical(base, default=rank).items() if leaf(key) in targets}
        if kept:
            layout = packed.pack(kept, torch.float32, base.fused).layout
            assert sum(packed_blocks(base, rank, 4, targets)) == layout.nbytes


def leaf(key: str) -> str:
    return key.rpartition(".lora_")[0].rpartition(".")[2]


def test_qwen3_30b_a3b_is_what_was_measured():
    """105.5 MB at rank 1 (MinT's 30B, and `bench load`'s floor of 5.7 ms and load of 6.9 ms)."""
    found = plan(QWEN3_30B_A3B)
    assert round(found.adapter_bytes / 1e6, 1) == 105.5
    assert found.adapter_tensors == 37_248
    assert found.slot_bytes == found.adapter_bytes == found.host_bytes
    assert found.tensor_parallel == 1
    assert found.adapter_share < 0.01
    assert 6.7e-3 < found.load_s < 7.2e-3
    assert 0.085 < found.cold_load_s < 0.1
    # Slots of rank 8 are eight times as large, and 30B in 24 GiB devices need four of them.
    assert plan(QWEN3_30B_A3B, 8).slot_bytes == 8 * found.slot_bytes
    assert plan(QWEN3_30B_A3B, gib=24).tensor_parallel == 4


def test_experts_in_three_axes_take_twice_the_rank():
    """GPT-OSS on CUDA: vLLM's own tensors of its 3-D layer are the second route."""
    from tests.helpers import vllm_layers as made

    found = plan(GPT_OSS_20B, 4)
    assert found.slot_rank == 8
    small = GPT_OSS_20B | {"num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 64}
    base = BaseShapes.of(small)
    layer = made.experts(4, 64, 2880, made.lora_config(1, 8, torch.bfloat16), fused=True)
    stacked = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
    experts = sum(tensor.nbytes for name in stacked for tensor in getattr(layer, name))
    only = slot_bytes(base, 8, 2, targets=("gate_proj", "up_proj", "down_proj"), fused_experts=True)
    assert only == 2 * experts
    with pytest.raises(ConfigError, match=r"rank 320.*640"):
        plan(GPT_OSS_20B, 320)


def test_kimi_k2():
    """1T parameters; an adapter on every expert at rank 1 is over a gigabyte, in few blocks."""
    config = read_config(KIMI_K2)
    found = plan(config, gib=139)
    assert round(found.parameters / 1e12, 2) == 1.03
    counted = config | {"model_type": "deepseek_v3"}
    assert Shape.of(config).parameters == Shape.of(counted).parameters
    assert round(found.adapter_bytes / 1e9, 2) == 1.29
    assert found.adapter_tensors == 2 * (60 * (384 * 3 + 3) + 3 + 61 * 5)
    assert found.adapter_blocks == 2 * (61 * 4 + 2 + 60 * 4)
    # FP8 weights as its file says, and on eight H200 with their slots.
    assert found.tensor_parallel == 8
    assert found.slot_bytes < found.adapter_bytes
    assert found.dropped_on_cuda == ("kv_b_proj",)
    assert plan(config, gib=139, weight_bits=16).tensor_parallel == 16
    assert plan({"text_config": config, "model_type": "kimi_k25"}, gib=139) == found


@pytest.mark.parametrize("config", [LLAMA3_8B, QWEN3_30B_A3B, DEEPSEEK_V3], ids=["dense", "moe", "latent"])
def test_more_devices_hold_less_each_and_the_fewest_are_chosen(config):
    before = None
    for devices in (1, 2, 4, 8):
        found = plan(config, 8, gib=4096, devices=devices)
        assert found.needed == sum(getattr(found, name) for name in vars(found) if name.startswith("engine_"))
        if before:
            assert found.engine_base < before.engine_base
            assert found.slot_bytes < before.slot_bytes
            assert found.adapter_bytes == before.adapter_bytes
            least = before.needed / GIB
            assert plan(config, 8, gib=least).tensor_parallel == before.tensor_parallel
            assert plan(config, 8, gib=least - 0.01).tensor_parallel > before.tensor_parallel
        before = found


def test_faster_links_and_disks_are_given_as_rates():
    slow, fast = (plan(LLAMA3_8B, rates=Rates(load=rate)) for rate in (1e9, 50e9))
    assert slow.load_s == pytest.approx(50 * fast.load_s)
    assert slow.cold_load_s > fast.cold_load_s > fast.load_s


def test_small_adapters_have_a_copy_in_each_process():
    found = plan(RECIPES["tiny-dense"].config(), devices=2)
    assert found.host_bytes == 2 * found.adapter_bytes
    assert found.host_adapters is None
    known = plan(RECIPES["tiny-dense"].config(), engine=EngineConfig(host_bytes=1 << 30), devices=2)
    assert known.host_adapters == (1 << 30) // known.host_bytes


def test_slots_are_of_ranks_that_vllm_has():
    assert [slot_rank(rank) for rank in (1, 2, 8, 9, 65, 129, 257, 512)] == [1, 8, 8, 16, 128, 256, 320, 512]
    for rank in (0, 513):
        with pytest.raises(ConfigError, match=f"rank {rank}"):
            slot_rank(rank)


@pytest.mark.parametrize(
    ("config", "kind", "sentence"),
    [
        ({}, ConfigError, "has no model_type"),
        ({"model_type": "mamba"}, BaseModelError, "type 'mamba'"),
        ({"model_type": "llama", "num_hidden_layers": 2}, ConfigError, "lacks 'hidden_size'"),
        (LLAMA3_8B | {"hidden_size": "4096"}, ConfigError, "hidden_size.*'4096'"),
        (LLAMA3_8B | {"num_hidden_layers": 10**9}, ConfigError, "num_hidden_layers.*1 to 4096"),
        (LLAMA3_8B | {"num_attention_heads": 0}, ConfigError, "num_attention_heads.*is 0"),
        (QWEN3_30B_A3B | {"mlp_only_layers": 3}, ConfigError, "mlp_only_layers"),
        (LLAMA3_8B | {"quantization_config": {"quant_method": "odd"}}, ConfigError, "Give --weight-bits"),
    ],
)
def test_a_config_that_is_none_is_refused_with_what_is_wrong(config, kind, sentence):
    with pytest.raises(kind, match=sentence):
        plan(config)


def test_what_fits_nowhere_or_cannot_be_cut_is_refused_with_numbers():
    with pytest.raises(ConfigError, match=r"64 devices.*base in the engine"):
        plan(read_config(KIMI_K2), gib=4)
    with pytest.raises(ConfigError, match=r"3 devices.*32 attention heads"):
        plan(LLAMA3_8B, devices=3)
    with pytest.raises(ConfigError, match=r"'c_attn'.*down_proj"):
        plan(LLAMA3_8B, targets=("c_attn",))


def ask(tmp_path: Path, *arguments: str):
    settings = tmp_path / "params.yaml"
    settings.write_text("{}")
    return CliRunner().invoke(app, ["plan", "adapters", *arguments, "--params", str(settings)])


def test_the_command_shows_the_plan_and_changes_nothing(tmp_path):
    said = ask(
        tmp_path, str(KIMI_K2), "--memory-gib", "139", "--rank", "1", "--slots", "4",
        "--dtype", "bfloat16", "--json",
    )  # fmt: skip
    found = json.loads(said.output)
    assert found["adapter_bytes"] == plan(read_config(KIMI_K2), gib=139).adapter_bytes
    assert found["slots"] == 4
    assert found["needed"] <= found["available"]
    shown = ask(tmp_path, str(KIMI_K2), "--memory-gib", "139", "--rank", "1").output
    for part in ("1,285.1 MB", "tensor-parallel degree", "load, host to slot", "kv_b_proj"):
        assert part in shown, shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.yaml"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_the_plan_says_what_one_device_needs(tmp_path):
    known = json.loads(ask(tmp_path, str(KIMI_K2), "--memory-gib", "2200", "--rank", "1", "--json").output)
    found = json.loads(ask(tmp_path, str(KIMI_K2), "--rank", "1", "--json").output)
    assert (known["tensor_parallel"], known["available"]) == (1, 2200 << 30)
    assert found == known | {"available": None}
    shown = ask(tmp_path, str(KIMI_K2), "--rank", "1").output
    assert "each device needs" in shown
    assert "each device has" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.json", "--memory-gib", "24"], "No such file"),
        ([__file__, "--memory-gib", "24"], "is not JSON"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, arguments, sentence):
    error = ask(tmp_path, *arguments).exception
    assert isinstance(error, ConfigError)
    assert sentence in str(error)


def test_another_dtype_is_refused(tmp_path):
    assert ask(tmp_path, str(KIMI_K2), "--memory-gib", "24", "--dtype", "int3").exit_code == 2


def test_the_pages_plan_is_what_the_command_says(tmp_path):
    import re
    import shlex

    from tests.helpers.real_model_page import DOC, doc_settings

    line = re.search(r"^ {4}\.venv/bin/graftwork (plan adapters .+)$", DOC, re.MULTILINE)
    shown = re.search(r"<!-- plan adapters -->\n```text\n(.*?)\n```", DOC, re.DOTALL)
    assert line is not None
    assert shown is not None
    words = shlex.split(line[1].replace("tests/helpers/kimi_k2.json", str(KIMI_K2)))[:-1]
    said = CliRunner().invoke(app, [*words, str(doc_settings(tmp_path))])
    assert [line.rstrip() for line in said.output.rstrip().splitlines()] == shown[1].splitlines()
