"""Bases: built the same from the same seed, published whole or not at all, refused with a sentence."""

import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.base import prompts
from engine.base import resident as bases
from engine.base.names import TOYS, TRAINABLE
from engine.base.toys import build as building
from engine.base.toys import toy_base
from engine.base.toys.recipes import RECIPES
from engine.base.toys.toy_base import recipe_digest
from engine.errors import BaseModelError, ConfigError
from engine.settings.params import BaseConfig, Paths
from engine.settings.policies import FewShotExample

SMALL = replace(RECIPES["tiny-dense"], steps=3, problems=256, batch=8)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny-dense", SMALL)


def test_the_same_seed_gives_the_same_base(small, tmp_path, monkeypatch):
    def built(seed, name):
        monkeypatch.setattr(toy_base, "SEED", seed)
        return bases.ensure_base(BaseConfig(name="tiny-dense"), Paths(tmp_path / name))

    one, two, other = (built(seed, name) for seed, name in ((1, "a"), (1, "b"), (2, "c")))
    assert one.digest == two.digest != other.digest
    assert one.path.name == two.path.name != other.path.name


def test_a_dense_recipe_keeps_its_name():
    """Nobody builds tiny-dense again because another family got a field."""
    assert recipe_digest(RECIPES["tiny-dense"], toy_base.SEED)[:12] == "1678de545535"


def test_each_recipe_has_a_name_of_its_own():
    names = {recipe_digest(recipe, 1) for recipe in RECIPES.values()}
    assert len(names) == len(RECIPES)
    assert list(RECIPES) == list(TOYS)
    assert [name for name, recipe in RECIPES.items() if recipe.learns] == [
        name for name in TRAINABLE if name in TOYS
    ]


# The sizes of a recipe, with experts few and narrow enough for a test.
SHORT = {"steps": 3, "problems": 256, "batch": 8, "warmup": 1}
FAMILIES = {
    "tiny-moe": ("Qwen3MoeForCausalLM", torch.float32, SHORT | {"expert_inner": 32}),
    "tiny-mla": ("DeepseekV3ForCausalLM", torch.float32, SHORT | {"expert_inner": 32}),
    "tiny-dsa": ("DeepseekV32ForCausalLM", torch.float32, SHORT | {"expert_inner": 32}),
    "wide-moe": ("Qwen3MoeForCausalLM", torch.bfloat16, {"problems": 256, "hidden": 64, "expert_inner": 32}),
    "many-moe": ("Qwen3MoeForCausalLM", torch.bfloat16, {"problems": 256, "hidden": 32, "expert_inner": 32}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two builds of each family by the same recipe and seed, made when they are asked for."""

    @cache
    def build(name):
        directories = [tmp_path_factory.mktemp(name) for _ in range(2)]
        for directory in directories:
            building.build(replace(RECIPES[name], **FAMILIES[name][2]), 1, directory, lambda *_: None)
        return directories

    return build


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_built_the_same_and_opens_in_transformers(name, built):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one, two = built(name)
    assert bases.base_digest(one) == bases.base_digest(two)
    model, found = AutoModelForCausalLM.from_pretrained(one, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    architecture, dtype, _ = FAMILIES[name]
    assert (model.config.architectures, model.dtype) == ([architecture], dtype)
    assert prompts.end_tokens(one) == (1,)
    tokenizer = AutoTokenizer.from_pretrained(one)
    assert tokenizer.decode(prompts.prompt_ids(tokenizer, "12?")) == "<|user|>12?<|assistant|>"


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla", "tiny-dsa"])
def test_experts_and_router_learn(name, built):
    """A few steps move every matrix; a parameter that no optimizer has would stay where it was."""
    from transformers import AutoModelForCausalLM

    recipe = replace(RECIPES[name], **FAMILIES[name][2])
    start = built(name)[0].parent / f"{name}-start"
    building.build(replace(recipe, steps=0), 1, start, lambda *_: None)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (start, built(name)[0])
    )
    # Stored in bfloat16 without steps: closer than that is not moved.
    moved = {
        key: ((value - after.state_dict()[key]).norm() / value.norm()).item()
        for key, value in before.state_dict().items()
        # The indexer's choice passes no gradient.
        if value.dim() > 1 and ".indexer." not in key
    }
    assert min(moved.values()) > 0.02, min(moved, key=moved.get)


def test_the_update_of_every_matrix_is_orthogonal():
    """Against torch's own iteration, an expert at a time: tall and wide, and of another scale each."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    from engine.base.toys.build import QUINTIC, orthogonal

    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((24, 8), (8, 24), (16, 16)):
        gradient = (
            torch.randn(3, outputs, inputs, generator=generator)
            * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
        )
        found = orthogonal(gradient)
        for expert in range(3):
            # Sums may be in another order, and so round to the next value of bfloat16.
            assert torch.allclose(found[expert], orthogonal(gradient[expert]), atol=2**-6)
            wanted = _zeropower_via_newtonschulz(gradient[expert], QUINTIC, 5, 1e-7).float()
            # Both round to bfloat16, at other places: 0.06 apart at most over 270 matrices.
            assert torch.allclose(found[expert], wanted, atol=0.08)
            values = torch.linalg.svdvals(found[expert])
            assert 0.3 < values.min() < values.max() < 1.3


def test_a_base_is_built_once(small, tmp_path, monkeypatch):
    config, paths = BaseConfig(name="tiny-dense"), Paths(tmp_path)
    first = bases.ensure_base(config, paths)
    monkeypatch.setattr(building, "build", lambda *_: pytest.fail("built again"))
    assert bases.ensure_base(config, paths) == first


def test_a_build_that_breaks_off_leaves_nothing(small, tmp_path):
    def interrupt(step: int, steps: int, note: str) -> None:
        raise KeyboardInterrupt

    config, paths = BaseConfig(name="tiny-dense"), Paths(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bases.ensure_base(config, paths, interrupt)
    assert [path for path in paths.bases.iterdir() if path.is_dir()] == []
    assert bases.ensure_base(config, paths).path.is_dir()


def test_a_tiny_base_is_a_real_one(tiny_base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 1e6
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    text = prompts.prompt_text(tokenizer, "What is 12 + 34?")
    assert tokenizer.decode(prompts.prompt_ids(tokenizer, "What is 12 + 34?")) == text


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer"])
def test_an_incomplete_directory_names_what_it_lacks(missing, tiny_base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    for file in copy.glob(f"{missing}*"):
        file.unlink()
    wanted = {"model.safetensors": "weights"}.get(missing, missing)
    with pytest.raises(BaseModelError, match=wanted):
        bases.ensure_base(BaseConfig(name=str(copy)), Paths(tmp_path))


def test_a_base_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BaseModelError, match=r"local directory.*hub"):
        bases.ensure_base(BaseConfig(name=str(tmp_path / "gone")), Paths(tmp_path))


# As Qwen's and Llama's instruct models write it, and Gemma's refusal of system prompts.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}hm"
SHOTS = (FewShotExample(question="1 + 1?", answer="2"), FewShotExample(question="2 + 2?", answer="4"))


def instructed(tiny_base, template: str | None, **special: str):
    """The tiny base's tokenizer with an instruct model's template and special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    return tokenizer


def test_system_prompt_and_examples_are_turns_of_the_chat(tiny_base):
    found = prompts.prompt_text(instructed(tiny_base, CHATML), "3 + 3?", "Be terse.", SHOTS)
    turns = [
        ("system", "Be terse."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"),
        ("assistant", "4"), ("user", "3 + 3?"),
    ]  # fmt: skip
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    assert found == text + "<|im_start|>assistant\n"


def test_the_templates_own_first_token_comes_once(tiny_base):
    tokenizer = instructed(tiny_base, LLAMA, bos_token="<|begin_of_text|>")
    text = prompts.prompt_text(tokenizer, "3 + 3?", "Be terse.")
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe terse.<|eot_id|>"
    )
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert prompts.prompt_ids(tokenizer, "3 + 3?", "Be terse.").count(tokenizer.bos_token_id) == 1


def test_a_template_that_refuses_a_system_prompt(tiny_base):
    tokenizer = instructed(tiny_base, GEMMA)
    assert prompts.prompt_text(tokenizer, "3 + 3?") == "hm"
    with pytest.raises(ConfigError, match=r"System role.*`system`"):
        prompts.prompt_text(tokenizer, "3 + 3?", "Be terse.")


@pytest.mark.parametrize("adds", [True, False])
def test_a_base_without_a_template_begins_as_its_tokenizer_does(tiny_base, adds):
    from tokenizers.processors import TemplateProcessing

    tokenizer = instructed(tiny_base, None, bos_token="<|begin_of_text|>")
    begin = tokenizer.bos_token_id
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
        )
    ids = prompts.prompt_ids(tokenizer, "3 + 3?", "Be terse.", SHOTS)
    assert ids.count(begin) == int(adds)
    assert tokenizer.decode(ids, skip_special_tokens=True) == (
        "Be terse.\n\n1 + 1?\n\n2\n\n2 + 2?\n\n4\n\n3 + 3?\n"
    )


@pytest.mark.parametrize(
    ("found", "ends"), [([128001, 128008, 128009], (128001, 128008, 128009)), (7, (7,)), (None, (1,))]
)
def test_end_tokens_are_those_of_the_generation_config(tiny_base, tmp_path, found, ends):
    import json

    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    assert prompts.end_tokens(copy) == ends


def test_a_base_that_names_no_end_token_uses_its_tokenizers(tiny_base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    (copy / "generation_config.json").unlink()
    assert prompts.end_tokens(copy) == (1,)


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "tiny-mla", "tiny-dsa"])
def test_the_plan_of_a_built_base_needs_no_build(name, tiny_base, built, tmp_path, monkeypatch):
    import json

    from engine.base.sizes import Shape

    if name != "tiny-dense":
        monkeypatch.setitem(RECIPES, name, replace(RECIPES[name], **FAMILIES[name][2]))
    paths = Paths(tmp_path)
    early = bases.base_config(BaseConfig(name=name), paths)
    directory = tiny_base if name == "tiny-dense" else built(name)[0]
    found = json.loads((directory / "config.json").read_text())
    # Its tokenizer may find fewer tokens than the recipe allows, never more.
    assert found["vocab_size"] <= early["vocab_size"]
    assert Shape.of(early | {"vocab_size": found["vocab_size"]}) == Shape.of(found)
    assert not paths.bases.exists()
