"""What of a base turns messages into tokens and tokens into an answer, beside its config and weights.

The base's digest covers config and weights, and names revisions. Its text digest covers the tokenizer, the
chat template and the defaults of generation, with which the same weights answer otherwise.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from engine.settings.params import content_hash

NAMES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
PATTERNS = ("additional_chat_templates/*.jinja", "*.model", "*.tiktoken")
# Where a file was written, and by which version: saving it again changes no answer.
LEFT_OUT = ("transformers_version", "name_or_path", "_commit_hash", "is_local", "local_files_only")
# A tokenizer may have 30 MB, in which nothing is left out.
PARSED = ("generation_config.json", "tokenizer_config.json")


def text_files(path: Path) -> dict[str, str]:
    """Return the sha256 of each file of a base's directory that its text digest covers, by name."""
    files = {path / name for name in NAMES} | {file for one in PATTERNS for file in path.glob(one)}
    return {str(file.relative_to(path)): _digest(file) for file in sorted(files) if file.is_file()}


def text_digest(files: Mapping[str, str]) -> str:
    """Return the digest of `text_files`."""
    return content_hash(dict(files))


def changed_files(known: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return the names of the files that are not in both, or differ."""
    return sorted(name for name in {*known, *current} if known.get(name) != current.get(name))


def _digest(file: Path) -> str:
    raw = file.read_bytes()
    if file.name in PARSED:
        raw = _without_origin(raw)
    return hashlib.sha256(raw).hexdigest()


def _without_origin(raw: bytes) -> bytes:
    """Return settings without `LEFT_OUT`; what is not a JSON object is returned as it is."""
    try:
        values = dict(json.loads(raw).items())
    except (ValueError, AttributeError):
        return raw
    return json.dumps({name: values[name] for name in values.keys() - LEFT_OUT}, sort_keys=True).encode()
