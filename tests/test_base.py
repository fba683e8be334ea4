"""Bases: built the same from the same seed, published whole or not at all, refused with a sentence."""

import shutil
from dataclasses import replace

import pytest

from engine import base as bases
from engine.config import BaseConfig, Example, Paths
from engine.errors import BaseModelError, ConfigError

SMALL = replace(bases.RECIPES["tiny-dense"], steps=3, problems=256, batch=8)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(bases.RECIPES, "tiny-dense", SMALL)


def test_the_same_seed_gives_the_same_base(small, tmp_path):
    one, two, other = (
        bases.ensure_base(BaseConfig(name="tiny-dense", seed=seed), Paths(tmp_path / name))
        for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    assert one.digest == two.digest != other.digest
    assert one.path.name == two.path.name != other.path.name


def test_a_base_is_built_once(small, tmp_path, monkeypatch):
    config, paths = BaseConfig(name="tiny-dense", seed=1), Paths(tmp_path)
    first = bases.ensure_base(config, paths)
    monkeypatch.setattr(bases, "build", lambda *_: pytest.fail("built again"))
    assert bases.ensure_base(config, paths) == first


def test_a_build_that_breaks_off_leaves_nothing(small, tmp_path):
    def interrupt(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    config, paths = BaseConfig(name="tiny-dense", seed=1), Paths(tmp_path)
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
    text = bases.prompt_text(tokenizer, "What is 12 + 34?")
    assert tokenizer.decode(bases.prompt_ids(tokenizer, "What is 12 + 34?")) == text


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
    with pytest.raises(BaseModelError, match="neither a local directory nor"):
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
SHOTS = (Example(question="1 + 1?", answer="2"), Example(question="2 + 2?", answer="4"))


def instructed(tiny_base, template: str | None, **special: str):
    """The tiny base's tokenizer with an instruct model's template and special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    return tokenizer


def test_system_prompt_and_examples_are_turns_of_the_chat(tiny_base):
    found = bases.prompt_text(instructed(tiny_base, CHATML), "3 + 3?", "Be terse.", SHOTS)
    turns = [
        ("system", "Be terse."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"),
        ("assistant", "4"), ("user", "3 + 3?"),
    ]  # fmt: skip
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    assert found == text + "<|im_start|>assistant\n"


def test_the_templates_own_first_token_comes_once(tiny_base):
    tokenizer = instructed(tiny_base, LLAMA, bos_token="<|begin_of_text|>")
    text = bases.prompt_text(tokenizer, "3 + 3?", "Be terse.")
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe terse.<|eot_id|>"
    )
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert bases.prompt_ids(tokenizer, "3 + 3?", "Be terse.").count(tokenizer.bos_token_id) == 1


def test_a_template_that_refuses_a_system_prompt(tiny_base):
    tokenizer = instructed(tiny_base, GEMMA)
    assert bases.prompt_text(tokenizer, "3 + 3?") == "hm"
    with pytest.raises(ConfigError, match=r"System role not supported.*Leave out the policy's `system`"):
        bases.prompt_text(tokenizer, "3 + 3?", "Be terse.")


@pytest.mark.parametrize("adds", [True, False])
def test_a_base_without_a_template_begins_as_its_tokenizer_does(tiny_base, adds):
    from tokenizers.processors import TemplateProcessing

    tokenizer = instructed(tiny_base, None, bos_token="<|begin_of_text|>")
    begin = tokenizer.bos_token_id
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
        )
    ids = bases.prompt_ids(tokenizer, "3 + 3?", "Be terse.", SHOTS)
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
    assert bases.end_tokens(copy) == ends


def test_a_base_that_names_no_end_token_uses_its_tokenizers(tiny_base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_base, copy)
    (copy / "generation_config.json").unlink()
    assert bases.end_tokens(copy) == (1,)


def test_the_plan_of_a_tiny_base_needs_no_build(tiny_base, tmp_path):
    import json

    from engine.base_shape import Shape

    paths = Paths(tmp_path)
    early = bases.base_config(BaseConfig(name="tiny-dense"), paths)
    built = json.loads((tiny_base / "config.json").read_text())
    # Its tokenizer may find fewer tokens than the recipe allows, never more.
    assert built["vocab_size"] <= early["vocab_size"]
    assert Shape.of(early | {"vocab_size": built["vocab_size"]}) == Shape.of(built)
    assert not paths.bases.exists()
