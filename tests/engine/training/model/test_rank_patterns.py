"""Ranks, alphas and targets that differ within one adapter: by PEFT's own patterns, and through a session."""

import pytest
import torch

from engine.adapters import packed
from engine.adapters.revision import make_manifest, read_revision, write_revision
from engine.errors import AdapterError, ConfigError
from engine.training.model.lora import ResidentBase
from engine.training.service.session import CURRENT, Session
from tests.helpers.moe_bases import qwen3_moe
from tests.helpers.packed_rows import ROWS
from tests.helpers.resident_bases import resident
from tests.helpers.training_sessions import BASE, factors, opening, same, train_one

TARGETS = ("q_proj", "layers.2.self_attn.v_proj", "down_proj", "layers.0.mlp.up_proj")
RANKS = {"layers.1.self_attn.q_proj": 1, "layers.2.mlp.experts.down_proj": 2, "up_proj": 6}
ALPHAS = {"q_proj": 2.0, "layers.2.mlp.experts.down_proj": 5.0}


@pytest.fixture(scope="module")
def base(tiny_base, tmp_path_factory) -> ResidentBase:
    return resident(qwen3_moe(tmp_path_factory.mktemp("patterns") / "moe", tiny_base), 1, 4096)


def mixed(base: ResidentBase, targets=TARGETS, ranks=RANKS):
    generator = torch.Generator().manual_seed(1)
    adapter = base.new_adapter(4, 8.0, targets, generator, ranks, ALPHAS)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return adapter


def test_each_site_has_its_own_rank_and_scale_and_only_the_named_layers_have_factors(base):
    adapter = mixed(base)
    shapes = {name: adapter.factors[f"{name}.lora_A"].shape[-2] for name in adapter.sites}
    layer = "model.layers"
    assert shapes == {
        f"{layer}.0.self_attn.q_proj": 4, f"{layer}.1.self_attn.q_proj": 1, f"{layer}.2.self_attn.q_proj": 4,
        f"{layer}.2.self_attn.v_proj": 4, f"{layer}.0.mlp.up_proj": 6, f"{layer}.0.mlp.down_proj": 4,
        f"{layer}.1.mlp.experts.down_proj": 4, f"{layer}.2.mlp.experts.down_proj": 2,
    }  # fmt: skip
    assert adapter.rank == 6
    wanted = {f"{layer}.1.self_attn.q_proj": 2.0, f"{layer}.2.self_attn.q_proj": 0.5}
    wanted |= {f"{layer}.2.mlp.experts.down_proj": 2.5, f"{layer}.0.mlp.up_proj": 8 / 6}
    assert {name: adapter.scales[name] for name in wanted} == pytest.approx(wanted)
    elements = sum(factor.numel() for factor in adapter.factors.values())
    sites = adapter.sites.items()
    assert elements == sum(
        shapes[name] * (site.inputs + site.outputs) * max(1, site.experts) for name, site in sites
    )


def test_ranks_and_scales_are_those_that_peft_reads_from_the_same_patterns(tiny_base):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dense = resident(tiny_base, 1, 4096)
    ranks, alphas = (
        {"layers.1.self_attn.q_proj": 1, "up_proj": 6},
        {"q_proj": 2.0, "^model.layers.0.mlp.up_proj": 3},
    )
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "layers.0.mlp.up_proj"],
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), config).base_model.model
    adapter = dense.new_adapter(4, 8.0, config.target_modules, torch.Generator(), ranks, alphas)
    theirs = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert theirs.keys() == adapter.sites.keys()
    for name, module in theirs.items():
        assert module.scaling["default"] == pytest.approx(adapter.scales[name])
        assert module.r["default"] == len(adapter.factors[f"{name}.lora_A"])


def test_peft_opens_the_revision_and_the_packed_form_keeps_every_rank(base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # peft holds a layer's experts in one parameter: of one rank in all layers, and no up without its gate.
    adapter = mixed(base, TARGETS[:3], {"layers.1.self_attn.q_proj": 1, "v_proj": 2})
    tensors = adapter.canonical(torch.float32)
    manifest = make_manifest(
        tensors, policy="sums", base_digest="b" * 64, rank=adapter.rank, targets=adapter.targets, step=1
    )
    directory = write_revision(tmp_path / "revision", tensors, manifest, {})
    assert same(read_revision(directory, "b" * 64)[0], tensors)
    assert same(packed.unpack(packed.pack(tensors, torch.float32, base.shapes.fused)), tensors)
    plain = AutoModelForCausalLM.from_pretrained(base.model.name_or_path, experts_implementation="eager")
    model = PeftModel.from_pretrained(plain, str(directory)).eval()
    wanted = []
    with torch.no_grad():
        for row in ROWS:
            logprobs = model(torch.tensor([row.tokens])).logits.log_softmax(-1)[0]
            wanted += [logprobs[i - 1, row.tokens[i]].item() for i in range(row.start, len(row.tokens))]
    found = [value for row in base.score(adapter, ROWS) for value in row]
    assert found == pytest.approx(wanted, abs=3e-5)
    assert found != pytest.approx([value for row in base.score(None, ROWS) for value in row], abs=1e-2)
    held = base.hold(tensors)
    assert {name: held.factors[f"{name}.lora_A"].shape for name in held.sites} == {
        name: adapter.factors[f"{name}.lora_A"].shape for name in adapter.sites
    }
    assert [value for row in base.score(held, ROWS) for value in row] == pytest.approx(found, abs=1e-5)


def test_a_parent_is_continued_and_a_larger_one_is_refused(base):
    tensors = mixed(base).canonical(torch.float32)
    child = base.new_adapter(4, 8.0, TARGETS, torch.Generator().manual_seed(3), RANKS, ALPHAS)
    child.place(tensors)
    assert all(torch.equal(value, tensors[key]) for key, value in child.canonical(torch.float32).items())
    small = base.new_adapter(4, 8.0, TARGETS, torch.Generator())
    with pytest.raises(AdapterError, match=r"up_proj\.lora_A.*rank 6"):
        small.place(tensors)


def test_a_session_with_patterns_goes_on_bit_for_bit(base, tmp_path):
    changes = {"targets": list(TARGETS), "ranks": RANKS, "alphas": ALPHAS}
    whole = Session(tmp_path / "whole", base, BASE, opening(**changes))
    for number in range(2):
        train_one(whole, number)
    cut = Session(tmp_path / "cut", base, BASE, opening(**changes))
    train_one(cut, 0)
    again = Session(tmp_path / "cut", base, BASE, opening(**changes))
    again.load(CURRENT)
    train_one(again, 1)
    assert same(factors(whole), factors(again))


def test_patterns_and_targets_that_name_nothing_are_refused(base):
    with pytest.raises(ConfigError, match=r"no projections layers\.9\.mlp\.up_proj"):
        base.new_adapter(4, 8.0, ("layers.9.mlp.up_proj",), torch.Generator())
    with pytest.raises(ConfigError, match="'o_proj'"):
        base.new_adapter(4, 8.0, ("q_proj",), torch.Generator(), {"o_proj": 2})
    with pytest.raises(ConfigError, match="cannot be read"):
        base.new_adapter(4, 8.0, ("q_proj",), torch.Generator(), {"(?=q)q_proj": 2})
