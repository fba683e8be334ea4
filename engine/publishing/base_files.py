"""What an adapter says of the base it was trained on: a name in its settings, files of the base beside it.

Only the base of this installation is served. A name is a warning; a token that this base does not have is an
error; copies of its tokenizer and template are ignored.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from engine.adapters.foreign_files import own_file
from engine.base.prompts import tokenizer_of
from engine.base.resident import BaseInfo
from engine.errors import AdapterError

TOKENS = ("added_tokens.json", "tokenizer.json", "tokenizer_config.json", "vocab.json")
TEMPLATE = "chat_template.jinja"
BASE_FILES = (*TOKENS, TEMPLATE, "special_tokens_map.json", "merges.txt", "tokenizer.model")
SIZE_LIMIT = 64 << 20
# A directory of Hugging Face's cache names its repository so: models--ORG--NAME.
CACHED = "models--"


@dataclass(frozen=True)
class BaseClaims:
    """What an adapter says of its base: another base's name or nothing, files that are ignored, warnings."""

    other_base: str = ""
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a person should read, in sentences."""
        if not self.ignored:
            return self.warnings
        files = ", ".join(self.ignored)
        return (*self.warnings, f"Ignored beside the adapter, for the base has its own: {files}.")


def read_claims(directory: Path, named: str, base: BaseInfo) -> BaseClaims:
    """Compare what stands beside an adapter with the base; `AdapterError` for tokens that it lacks."""
    other = named if named and not _is_name_of(named, base) else ""
    warnings = []
    if other:
        warnings.append(
            f"Warning: the adapter's settings name the base {other}; it is served on {base.name}. Its "
            "tensors fit, but on another base than its own an adapter computes something else."
        )
    ignored = tuple(name for name in BASE_FILES if (directory / name).exists())
    others = [name for name in ignored if not _is_copy(directory / name, base.path / name)]
    if set(others) & {*TOKENS, TEMPLATE}:
        tokenizer = tokenizer_of(base.path)
        vocabulary = tokenizer.get_vocab()
        for name in others:
            for token, number in _tokens(directory, name):
                if vocabulary.get(token) != number:
                    raise AdapterError(
                        f"{directory / name} has the token {token[:60]!r} with the id {str(number)[:20]}, "
                        f"which the base {base.name} does not have. Train on this base's own tokens, or "
                        "remove the file if the adapter uses none of its own."
                    )
        template = _template(directory)
        if template is not None and template != tokenizer.chat_template:
            warnings.append(
                "Warning: the chat template beside the adapter is not the base's; prompts are rendered by "
                "the base's."
            )
    return BaseClaims(other, ignored, tuple(warnings))


def _is_name_of(named: str, base: BaseInfo) -> bool:
    names = {base.name, base.path.name, _last(str(base.path))}
    return _last(named).casefold() in {name.casefold() for name in names}


def _last(name: str) -> str:
    """Return the model's own name in a hub id, a path, or a path of Hugging Face's cache."""
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    cached = [part.rpartition("--")[2] for part in parts if part.startswith(CACHED)]
    return (cached or parts or [""])[-1]


def _is_copy(file: Path, of: Path) -> bool:
    return of.is_file() and file.is_file() and cmp(file, of, shallow=False)


def _tokens(directory: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the (token, id) pairs of one file."""
    if name not in TOKENS:
        return
    values = _json(directory, name)
    if name in ("added_tokens.json", "vocab.json"):
        yield from values.items()
    elif name == "tokenizer_config.json":
        for number, token in _object(values.get("added_tokens_decoder")).items():
            yield str(_object(token).get("content")), int(number) if number.isdecimal() else number
    else:
        vocabulary = _object(values.get("model")).get("vocab")
        # A unigram model lists [token, score] in the order of the ids.
        if isinstance(vocabulary, list):
            yield from ((str(one[0]), i) for i, one in enumerate(vocabulary) if isinstance(one, list) and one)
        yield from _object(vocabulary).items()
        for token in values.get("added_tokens") or []:
            yield str(_object(token).get("content")), _object(token).get("id")


def _template(directory: Path) -> Any:
    if (directory / TEMPLATE).exists():
        return own_file(directory, TEMPLATE, SIZE_LIMIT).read_text()
    if (directory / "tokenizer_config.json").exists():
        return _json(directory, "tokenizer_config.json").get("chat_template")
    return None


def _json(directory: Path, name: str) -> dict[str, Any]:
    path = own_file(directory, name, SIZE_LIMIT)
    try:
        return _object(json.loads(path.read_text()))
    except (ValueError, RecursionError):
        raise AdapterError(f"{path} is not JSON. Remove it: the base's own tokens are served.") from None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
