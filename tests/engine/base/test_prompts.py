"""The tokenizer of a base: the one that AutoTokenizer gives, without what AutoTokenizer imports."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.base.families import FAMILIES
from engine.base.prompts import GENERIC, prompt_ids, tokenizer_of

MODEL_TYPES = [name for family in FAMILIES for name in family.model_types]


@pytest.mark.parametrize("named", [GENERIC, "Qwen2TokenizerFast"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_is_the_one_that_transformers_takes(
    tiny_base: Path, tmp_path: Path, model_type: str, named: str
) -> None:
    config = json.loads((tiny_base / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == GENERIC
    shutil.copy(tiny_base / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert type(tokenizer_of(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_it_renders_and_encodes_alike(tiny_base: Path) -> None:
    ours, whole = tokenizer_of(tiny_base), AutoTokenizer.from_pretrained(tiny_base)
    assert prompt_ids(ours, "2 + 3 = ?", "Be terse.") == prompt_ids(whole, "2 + 3 = ?", "Be terse.")
    assert (ours.eos_token_id, ours.pad_token_id) == (whole.eos_token_id, whole.pad_token_id)
    assert ours.decode(ours.encode("2 + 3")) == whole.decode(whole.encode("2 + 3"))


def test_its_imports_are_light(tiny_base: Path) -> None:
    """A command that asks for it takes four seconds less of a core than with AutoTokenizer."""
    code = (
        "import sys; from pathlib import Path; from engine.base.prompts import tokenizer_of;"
        "tokenizer_of(Path(sys.argv[1]));"
        "sys.exit(str({'torch', 'sklearn', 'pandas', 'transformers.models.auto'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tiny_base)], capture_output=True, text=True)
    assert run.stderr.strip() == "set()"
