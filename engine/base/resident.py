"""Resident bases: the toys that are built here, and any other by GGUF file, directory or hub id.

A base that is made here, built or converted from GGUF, is a Hugging Face directory (config, weights,
tokenizer with chat template, generation config), named by the digest of its recipe or file, written to a
draft and renamed when complete. A base from the hub is taken at a pinned commit, without its own code; the
hub's library reads the token.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.base.gguf_base import GgufBase
from engine.base.names import TOYS, TRAINABLE
from engine.base.progress import Progress
from engine.base.text_files import text_digest, text_files
from engine.errors import BaseModelError, ConfigError
from engine.files import sync
from engine.settings.params import BaseConfig, Paths

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The files to load: no Python, no pickles, no second copy of the weights.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
HUB_LEFT_OUT = ("original/*", "consolidated*")
HUB_HELP = {
    "GatedRepoError": "Accept the terms on its page, and set HF_TOKEN or run `hf auth login`",
    "RepositoryNotFoundError": "Check the id; for a private model set HF_TOKEN or run `hf auth login`",
    "RevisionNotFoundError": "Set base.revision to a commit of this model",
}


@dataclass(frozen=True)
class BaseInfo:
    """A base ready to be loaded; `digest` covers its config and weights.

    `text_files` has the sha256 of its tokenizer, chat template and generation defaults, by file.
    """

    name: str
    path: Path
    digest: str
    text_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def text_digest(self) -> str:
        """Return the digest of its text files."""
        return text_digest(self.text_files)


class MadeBase(Protocol):
    """A base that is made here, in a directory whose name tells what determines it."""

    @property
    def directory(self) -> str:
        """The name of its directory."""

    def config(self) -> dict[str, Any]:
        """Return its `config.json` before it is made."""

    def make(self, directory: Path, progress: Progress) -> None:
        """Make it in an empty directory."""


def ensure_base(config: BaseConfig, paths: Paths, progress: Progress | None = None) -> BaseInfo:
    """Return the base that `config` names; make it first if it is a missing one that is made here.

    `progress(step, steps, note)` is called during a build or a conversion. Raises `ConfigError` for a hub id
    without a commit, `BaseModelError` when a file, directory or hub id is missing, lacks its config, weights
    or tokenizer, needs its own code, or when a GGUF file is not the one of its checksum or not understood.
    """
    if made := _made_here(config):
        path = paths.bases / made.directory
        _make_once(made, path, progress or (lambda step, steps, note: None))
    else:
        path = _local(config.name) or _ask_hub(config)
    _check(config.name, path)
    return BaseInfo(Path(config.name).name, path, base_digest(path), text_files(path))


def made_path(config: BaseConfig, paths: Paths) -> Path | None:
    """Return the directory of a base that is made here, made or not; None for a directory or hub id.

    Raises `BaseModelError` for a GGUF file that is missing or not the one of `base.revision`.
    """
    made = _made_here(config)
    return paths.bases / made.directory if made else None


def _made_here(config: BaseConfig) -> MadeBase | None:
    if config.name in TOYS:
        from engine.base.toys.toy_base import ToyBase

        return ToyBase(config.name)
    return GgufBase(config.name, config.revision) if GgufBase.is_named(config.name) else None


def base_config(config: BaseConfig, paths: Paths) -> dict[str, Any]:
    """Return a base's `config.json` without loading weights; one that is made here need not be made yet.

    Raises the errors of `ensure_base`.
    """
    made = _made_here(config)
    path = paths.bases / made.directory if made else None
    if made and path and (config.name in TOYS or not path.exists()):
        return made.config()
    local = path or _local(config.name)
    file = local / "config.json" if local else _ask_hub(config, "config.json")
    if not file.is_file():
        raise BaseModelError(
            f"The base {config.name!r} at {local} lacks config.json. "
            "Save the model there with save_pretrained."
        )
    _refuse_own_code(config.name, file.parent)
    return dict(json.loads(file.read_text()))


def _local(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path.absolute() if path.is_dir() else None


def _ask_hub(config: BaseConfig, file: str | None = None) -> Path:
    """Return a file or the whole snapshot at the pinned commit, from the local cache if present."""
    name = config.name
    if HUB_ID.fullmatch(name) and config.revision is None:
        raise ConfigError(
            f"The base {name!r} is not a local directory, and a base from the hub needs a pinned commit. "
            "Set base.revision to a commit's 40 digits (on the model's page under Files, History)."
        )
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file:
            return Path(hf_hub_download(name, file, revision=config.revision))
        return Path(
            snapshot_download(
                name,
                revision=config.revision,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=list(HUB_LEFT_OUT),
            )
        )
    except Exception as error:
        # The hub's library raises its own errors, its HTTP client's and the disk's. Only the class is shown:
        # an error's text may quote the request with the token.
        kind = type(error).__name__
        help = HUB_HELP.get(
            kind, f"Set base.name to {' or '.join(TRAINABLE)}, a GGUF file, a directory, or a hub id"
        )
        raise BaseModelError(
            f"The base {name!r} is not a local directory, and the hub did not return it ({kind}). {help}."
        ) from None


def _refuse_own_code(name: str, path: Path) -> None:
    for file in (path / "config.json", path / "tokenizer_config.json"):
        if file.is_file() and json.loads(file.read_text()).get("auto_map"):
            raise BaseModelError(
                f"The base {name!r} needs its own Python code ({file.name} has `auto_map`), which Graftwork "
                "does not run (`trust_remote_code` is off). Choose a base that transformers supports "
                "natively; if it supports this one, save a copy without `auto_map`."
            )


def _check(name: str, path: Path) -> None:
    _refuse_own_code(name, path)
    index = path / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    needed = {
        "config.json": (path / "config.json").is_file(),
        "weights (*.safetensors)": any(path.glob("*.safetensors")),
        "a tokenizer (tokenizer.json or tokenizer_config.json)": any(path.glob("tokenizer*.json")),
        **{shard: (path / shard).is_file() for shard in sorted(shards)},
    }
    missing = [what for what, is_there in needed.items() if not is_there]
    if missing:
        raise BaseModelError(
            f"The base {name!r} at {path} lacks {' and '.join(missing)}. "
            "Save the model and the tokenizer there with save_pretrained."
        )


def base_digest(path: Path) -> str:
    """Return the sha256 of a base's config.json and safetensors files, in name order."""
    state = hashlib.sha256()
    for file in [path / "config.json", *sorted(path.glob("*.safetensors"))]:
        state.update(bytes.fromhex(_sha256(file)))
    return state.hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _make_once(base: MadeBase, path: Path, progress: Progress) -> None:
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / f".{path.name}.lock"):
        if path.exists():
            return
        # What a kill left behind: nobody else writes under this lock.
        for stale in path.parent.glob(f".draft-{path.name}-*"):
            shutil.rmtree(stale)
        draft = Path(tempfile.mkdtemp(prefix=f".draft-{path.name}-", dir=path.parent))
        try:
            base.make(draft, progress)
            os.replace(draft, path)
            sync(path.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
