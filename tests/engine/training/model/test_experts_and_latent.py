"""Training on mixtures of experts and latent attention: by merged weights, by PEFT, by finite differences."""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from engine.adapters import packed
from engine.adapters.revision import make_manifest, validate, write_revision
from engine.errors import AdapterError, BaseModelError
from engine.training.model.experts import ExpertMatmul
from engine.training.model.lora import ResidentBase
from engine.training.service.session import CURRENT, Session
from kernels.routed import group
from tests.helpers.close_rows import close
from tests.helpers.parity import merge
from tests.helpers.real_model_page import DATA, ROWS, flat
from tests.helpers.resident_bases import resident
from tests.helpers.training_pass import one_pass
from tests.helpers.training_sessions import BASE, factors, opening, same, train_one

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
# One dense layer and two with experts; every width is another.
QWEN3_MOE = {
    **SMALL, "moe_intermediate_size": 24, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 12,
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip
DEEPSEEK_V3 = {
    **SMALL, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2, "q_lora_rank": 20,
    "kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_shared_experts": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
NARROW_QUERY = {**DEEPSEEK_V3, "q_lora_rank": None}
DEEPSEEK_V32 = {**DEEPSEEK_V3, "index_topk": 3, "index_n_heads": 16, "index_head_dim": 8}
KINDS = {
    "moe": ("qwen3_moe", QWEN3_MOE),
    "mla": ("deepseek_v3", DEEPSEEK_V3),
    "mla-q": ("deepseek_v3", NARROW_QUERY),
    "dsa": ("deepseek_v32", DEEPSEEK_V32),
}
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def build(model_type: str, values: dict, directory):
    """Save a random base whose weights are large enough for every module to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {kind: build(*args, root / kind) for kind, args in KINDS.items()}


@pytest.fixture(scope="module")
def bases(paths):
    return {kind: resident(path, 1, 64) for kind, path in paths.items()}


def moved(base: ResidentBase, targets, seed: int = 3, rank: int = 4):
    """An adapter whose B is not zero any more; gate and up get different sizes."""
    generator = torch.Generator().manual_seed(seed)
    adapter = base.new_adapter(rank, 2.0 * rank, targets, generator)
    with torch.no_grad():
        for key, factor in adapter.factors.items():
            if key.endswith("lora_B"):
                size = 0.3 if "up_proj" in key else 0.1
                factor.copy_(torch.randn(factor.shape, generator=generator) * size)
    return adapter


def plain(path):
    """transformers' own model with its eager loop over experts."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()


@torch.no_grad()
def scores(model) -> list[list[float]]:
    found = []
    for row in ROWS:
        logprobs = model(torch.tensor([row.tokens])).logits.log_softmax(-1)[0]
        found.append([logprobs[i - 1, row.tokens[i]].item() for i in range(row.start, len(row.tokens))])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_adapter_it_is_transformers_own_loop(bases, paths, kind):
    assert close(bases[kind].score(None, ROWS), scores(plain(paths[kind])), 3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_target_alone_and_all_together_equal_the_merged_weights(bases, paths, kind):
    base = bases[kind]
    for targets in (*((name,) for name in base.shapes.targets), base.shapes.targets):
        adapter = moved(base, targets)
        model = plain(paths[kind])
        tensors = adapter.canonical(torch.float32)
        validate(tensors, 4, base.modules)
        merge(model, tensors)
        found = base.score(adapter, ROWS)
        assert close(found, scores(model), 3e-5), targets
        assert not close(found, base.score(None, ROWS), 1e-2), targets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", ["all", EXPERTS, ("gate_proj", "up_proj"), ("down_proj",), "attention"])
def test_peft_opens_what_is_exported_and_computes_the_same(bases, paths, kind, chosen, tmp_path, recwarn):
    from peft import PeftModel

    base = bases[kind]
    attention = tuple(name for name in base.shapes.targets if name not in EXPERTS)
    targets = {"all": base.shapes.targets, "attention": attention}.get(chosen, chosen)
    adapter = moved(base, targets)
    tensors = adapter.canonical(torch.float32)
    manifest = make_manifest(
        tensors, policy="sums", base_digest="b" * 64, rank=4, targets=tuple(sorted(targets)), step=1
    )
    directory = write_revision(tmp_path / "revision", tensors, manifest, {})
    model = PeftModel.from_pretrained(plain(paths[kind]), str(directory)).eval()
    assert close(base.score(adapter, ROWS), scores(model), 3e-5)
    missing = [str(found.message) for found in recwarn if "missing adapter keys" in str(found.message)]
    # peft wraps gate and up of experts inside a wrapper of down, which has no tensors here.
    assert bool(missing) == (chosen == ("gate_proj", "up_proj"))


def gradients(base: ResidentBase, targets, loss: str = "dapo"):
    adapter = moved(base, targets)
    found = one_pass(base, adapter, DATA, loss, {})
    grads = {key: factor.grad.clone() for key, factor in adapter.factors.items()}
    adapter.clear_gradients()
    return adapter, found, grads


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences(bases, kind):
    base = bases[kind]
    adapter, _, grads = gradients(base, base.shapes.targets, "importance_sampling")
    for key, factor in adapter.factors.items():
        direction = grads[key] / grads[key].norm()
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                factor += sign * 3e-3 * direction
            losses.append(one_pass(base, adapter, DATA, "importance_sampling", {}).metrics.loss)
            adapter.clear_gradients()
            with torch.no_grad():
                factor -= sign * 3e-3 * direction
        slope = (losses[0] - losses[1]) / 6e-3
        assert slope == pytest.approx(grads[key].norm().item(), rel=0.03, abs=1e-4), key


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_through_the_merged_weights(bases, paths, kind):
    """The second route to every gradient: B @ A added to transformers' weights, under its own autograd."""
    base = bases[kind]
    adapter, _, ours = gradients(base, base.shapes.targets)
    model = plain(paths[kind]).requires_grad_(False)
    tensors = {key: value.requires_grad_() for key, value in adapter.canonical(torch.float32).items()}
    weights = dict(model.named_parameters())
    for module in {key.rpartition(".")[0] for key in tensors}:
        delta = tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
        place(weights, module, delta)
    new = []
    for row in ROWS:
        output = functional_call(model, weights, (torch.tensor([row.tokens]),))
        logprobs = output.logits.log_softmax(-1)[0]
        new += [logprobs[i - 1, row.tokens[i]] for i in range(row.start, len(row.tokens))]
    old = torch.tensor([value for example in DATA for value in example.old_logprobs])
    advantages = torch.tensor([value for example in DATA for value in example.advantages])
    ratio = torch.exp(torch.stack(new) - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    (-surrogate.mean()).backward()
    theirs = {key: value.grad for key, value in tensors.items()}
    for name, site in adapter.sites.items():
        for side in ("lora_A", "lora_B"):
            found = ours[f"{name}.{side}"]
            if site.experts and side == "lora_B":
                found = found.transpose(1, 2)
            # The canonical B is twice the factor (alpha is 2 R): so is the factor's gradient.
            scale = adapter.scales[name] if side == "lora_B" else 1.0
            want = torch.stack([theirs[key] for key in site.keys(side)]) * scale
            torch.testing.assert_close(found, want.view_as(found), rtol=1e-4, atol=1e-6)
            assert want.abs().max() > 1e-5, name


def place(weights: dict, module: str, delta: torch.Tensor) -> None:
    """Add a delta to the weight of a canonical module, keeping its graph."""
    parent, _, rest = module.partition(".experts.")
    if not rest:
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + delta
        return
    number, leaf = rest.split(".")
    name = f"{parent}.experts.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
    whole = torch.zeros_like(weights[name])
    inner = whole.shape[1] // 2
    rows = {"gate_proj": slice(0, inner), "up_proj": slice(inner, None), "down_proj": slice(None)}[leaf]
    mask = torch.zeros(len(whole), 1, 1)
    mask[int(number)] = 1
    padded = torch.zeros(whole.shape[1], whole.shape[2]).index_add(
        0, torch.arange(whole.shape[1])[rows], delta
    )
    weights[name] = weights[name] + mask * padded


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_gives_the_same_gradients(bases, paths, kind):
    again = resident(paths[kind], 1, 64, checkpointing=True)
    _, want, wanted = gradients(bases[kind], again.shapes.targets)
    _, found, grads = gradients(again, again.shapes.targets)
    assert flat(found.logprobs) == pytest.approx(flat(want.logprobs), abs=1e-6)
    for key, value in wanted.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in again.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_base_trains_float32_adapters_and_sees_what_it_exports(bases, paths, kind):
    narrow = resident(paths[kind], 1, 64, dtype=torch.bfloat16)
    targets = narrow.shapes.targets
    adapter, _, grads = gradients(narrow, targets)
    assert {value.dtype for value in grads.values()} == {torch.float32}
    exported = narrow.new_adapter(4, 8.0, targets, torch.Generator().manual_seed(0))
    exported.place(adapter.canonical(torch.bfloat16))
    assert any(not torch.equal(adapter.factors[key], exported.factors[key]) for key in adapter.factors)
    assert narrow.score(exported, ROWS) == narrow.score(adapter, ROWS) != narrow.score(None, ROWS)


def test_on_policy_the_ratio_is_one(bases):
    for base in bases.values():
        adapter = moved(base, base.shapes.targets)
        old = base.score(adapter, ROWS)
        data = [replace(example, old_logprobs=tuple(row)) for example, row in zip(DATA, old, strict=True)]
        assert one_pass(base, adapter, data, "dapo", {}).metrics.importance_ratio == pytest.approx(
            1.0, abs=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_is_the_base_and_a_parent_is_continued(bases, kind):
    base = bases[kind]
    fresh = base.new_adapter(4, 8.0, base.shapes.targets, torch.Generator().manual_seed(0))
    assert close(base.score(fresh, ROWS), base.score(None, ROWS), 1e-6)
    parent = moved(base, base.shapes.targets)
    tensors = parent.canonical(torch.float32)
    fresh.place(tensors)
    assert same(tensors, fresh.canonical(torch.float32))
    assert base.score(fresh, ROWS) == base.score(parent, ROWS)
    stored = packed.unpack(packed.pack(tensors, torch.float32, base.shapes.fused))
    assert same(stored, tensors)
    with pytest.raises(AdapterError, match=r"down_proj\.lora_A.*rank 2"):
        base.new_adapter(2, 8.0, ("down_proj",), torch.Generator()).place(tensors)


def test_a_row_of_experts_and_its_gradient_do_not_depend_on_their_batch():
    generator = torch.Generator().manual_seed(1)
    experts_TK = torch.rand(64, 8, generator=generator).argsort(1)[:, :2]
    weight_EOD = torch.randn(8, 96, 64, generator=generator)
    x_TD, dy_PO = torch.randn(64, 64, generator=generator), torch.randn(128, 96, generator=generator)

    def both(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = x_TD[:tokens].clone().requires_grad_()
        y_PO = ExpertMatmul.apply(x, weight_EOD, group(experts_TK[:tokens], 8))
        return y_PO.detach(), torch.autograd.grad(y_PO, x, dy_PO[: 2 * tokens])[0]

    y_PO, dx_TD = both(64)
    assert dx_TD.abs().max() > 1
    for tokens in (1, 2, 3, 5, 20):
        y, dx = both(tokens)
        assert torch.equal(y, y_PO[: 2 * tokens])
        assert torch.equal(dx, dx_TD[:tokens])


def test_factors_of_a_layers_experts_are_two_parameters_a_projection(bases):
    adapter = bases["moe"].new_adapter(4, 8.0, EXPERTS, torch.Generator().manual_seed(0))
    # Two layers of experts and a dense one.
    assert len(adapter.factors) == 3 * 3 * 2
    assert adapter.factors["model.layers.2.mlp.experts.up_proj.lora_B"].shape == (6, 4, 24)
    assert len(adapter.canonical(torch.float32)) == 2 * 6 * 6 + 6


def test_an_adapter_of_several_ranks_and_few_experts_is_held(bases, paths):
    base, generator = bases["moe"], torch.Generator().manual_seed(1)
    tensors, model = {}, plain(paths["moe"])
    chosen = {
        "model.layers.0.mlp.experts.5.up_proj": 3,
        "model.layers.0.mlp.experts.2.down_proj": 1,
        "model.layers.1.mlp.up_proj": 2,
        "model.layers.2.mlp.experts.0.gate_proj": 2,
        "model.layers.2.self_attn.q_proj": 1,
    }
    for module, rank in chosen.items():
        inputs, outputs = base.modules[module]
        tensors[f"{module}.lora_A"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{module}.lora_B"] = torch.randn(outputs, rank, generator=generator) * 0.3
    merge(model, tensors)
    found = base.score(base.hold(tensors), ROWS)
    assert close(found, scores(model), 3e-5)
    assert not close(found, base.score(None, ROWS), 1e-2)
    with pytest.raises(AdapterError, match=r"module \S*experts\.6"):
        base.hold({key.replace("experts.5", "experts.6"): value for key, value in tensors.items()})


def test_a_session_on_experts_goes_on_bit_for_bit(bases, tmp_path):
    changes = {"targets": ["q_a_proj", "kv_b_proj", "up_proj", "down_proj"]}
    whole = Session(tmp_path / "whole", bases["mla"], BASE, opening(**changes))
    for number in range(4):
        train_one(whole, number, vocabulary=64)
    first = Session(tmp_path / "cut", bases["mla"], BASE, opening(**changes))
    for number in range(2):
        train_one(first, number, vocabulary=64)
    again = Session(tmp_path / "cut", bases["mla"], BASE, opening(**changes))
    again.load(CURRENT)
    for number in range(2, 4):
        train_one(again, number, vocabulary=64)
    assert same(factors(whole), factors(again))
    assert not same(
        factors(whole), factors(Session(tmp_path / "new", bases["mla"], BASE, opening(**changes)))
    )


def test_experts_laid_out_in_another_way_are_refused(tmp_path):
    values = {
        **SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    with pytest.raises(BaseModelError, match="GptOssExperts"):
        resident(build("gpt_oss", values, tmp_path), 1, 64)
