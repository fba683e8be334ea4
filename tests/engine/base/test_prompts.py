"""The tokenizer of a base: the one that AutoTokenizer gives, without what AutoTokenizer imports."""

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.base.families import FAMILIES
from engine.base.prompts import GENERIC, prompt_ids, tokenizer_of
from engine.threads import in_parallel

MODEL_TYPES = [name for family in FAMILIES for name in family.model_types]


def write(base: Path, to: Path, model_type: str, named: str) -> None:
    """Write the base's tokenizer with another class, for another type of model."""
    config = json.loads((base / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == GENERIC
    shutil.copy(base / "tokenizer.json", to)
    (to / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    (to / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize("named", [GENERIC, "Qwen2TokenizerFast"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_is_the_one_that_transformers_takes(
    tiny_base: Path, tmp_path: Path, model_type: str, named: str
) -> None:
    write(tiny_base, tmp_path, model_type, named)
    assert type(tokenizer_of(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_it_renders_and_encodes_alike(tiny_base: Path) -> None:
    ours, whole = tokenizer_of(tiny_base), AutoTokenizer.from_pretrained(tiny_base)
    assert prompt_ids(ours, "2 + 3 = ?", "Be terse.") == prompt_ids(whole, "2 + 3 = ?", "Be terse.")
    assert (ours.eos_token_id, ours.pad_token_id) == (whole.eos_token_id, whole.pad_token_id)
    assert ours.decode(ours.encode("2 + 3")) == whole.decode(whole.encode("2 + 3"))


class Lazy:
    """As transformers: a name is imported when it is first asked for, by one thread at a time or badly."""

    inside, most = 0, 0

    def __getattr__(self, name: str) -> Any:
        if name != "AutoTokenizer":
            raise AttributeError(name)
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.2)
        self.inside -= 1
        return SimpleNamespace(from_pretrained=str)


def test_policies_that_begin_at_once_import_it_one_by_one(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each policy of `graftwork adapt` has a thread."""
    write(tiny_base, tmp_path, "qwen3", "Qwen2Tokenizer")
    lazy = Lazy()
    monkeypatch.setitem(sys.modules, "transformers", lazy)
    assert in_parallel(*[partial(tokenizer_of, tmp_path)] * 3) == [str(tmp_path)] * 3
    assert lazy.most == 1


@pytest.mark.long
def test_its_imports_are_light(tiny_base: Path) -> None:
    """A command that asks for it takes four seconds less of a core than with AutoTokenizer."""
    code = (
        "import sys; from pathlib import Path; from engine.base.prompts import tokenizer_of;"
        "tokenizer_of(Path(sys.argv[1]));"
        "sys.exit(str({'torch', 'sklearn', 'pandas', 'transformers.models.auto'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tiny_base)], capture_output=True, text=True)
    assert run.stderr.strip() == "set()"
