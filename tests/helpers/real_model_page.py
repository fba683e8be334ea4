"""The settings of docs/real-model.md, and rows for what it promises."""

import json
import re
from pathlib import Path

import yaml

from engine.training.model.packing import Example, TokenRow
from tests.helpers.repository import ROOT

ROWS = [TokenRow((5, 9, 30, 31, 32), 2), TokenRow((7, 8, 40), 1), TokenRow((11, 12, 13, 14, 15, 16, 17), 3)]

DATA = [
    Example(row, (-2.0,) * (len(row.tokens) - row.start), (advantage,) * (len(row.tokens) - row.start))
    for row, advantage in zip(ROWS, (1.0, -0.5, 2.0), strict=True)
]


def flat(rows) -> list[float]:
    return [value for row in rows for value in row]


QWEN3_06B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28,
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip

DOC = (ROOT / "docs" / "real-model.md").read_text()


def doc_settings(tmp_path: Path, sequences: int = 48) -> Path:
    """The page's settings, with the shape of its model in a directory in place of the hub."""
    text = next(block for block in re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL) if "base:" in block)
    settings = yaml.safe_load(text.replace("max_num_seqs: 48", f"max_num_seqs: {sequences}"))
    assert re.fullmatch(r"[0-9a-f]{40}", settings["base"].pop("revision"))
    (tmp_path / "base").mkdir(exist_ok=True)
    (tmp_path / "base" / "config.json").write_text(json.dumps(QWEN3_06B))
    settings["base"]["name"] = str(tmp_path / "base")
    file = tmp_path / "real.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file
