"""Resident bases: those of `engine/base/recipes.py`, built here, and any other by directory or hub id.

A built base is a real Hugging Face directory (config, weights, tokenizer with chat template, generation
config), named by the digest of its recipe, and written to a draft that is renamed when it is whole. One
from the hub is taken at a pinned commit, without code of its own; the hub's library reads the token.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.base.progress import Progress
from engine.base.recipes import RECIPES, Recipe
from engine.errors import BaseModelError, ConfigError
from engine.problems.procedural import PHRASINGS, TASKS
from engine.settings.params import BaseConfig, Paths, content_hash

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What is loaded, and nothing that runs: no Python, no pickles, no second copy of the weights.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
HUB_LEFT_OUT = ("original/*", "consolidated*")
HUB_HELP = {
    "GatedRepoError": "Accept its terms on its page, and give a token by HF_TOKEN or `hf auth login`",
    "RepositoryNotFoundError": "Check the id; a private model needs a token by HF_TOKEN or `hf auth login`",
    "RevisionNotFoundError": "Set base.revision to a commit of this model",
}


@dataclass(frozen=True)
class BaseInfo:
    """A base that is ready to be loaded: `digest` covers its config and weights."""

    name: str
    path: Path
    digest: str


def ensure_base(config: BaseConfig, paths: Paths, progress: Progress | None = None) -> BaseInfo:
    """Return the base that `config` names, building one of `RECIPES` when it is not there yet.

    `progress(step, steps, loss)` is called while one is built. Raises `ConfigError` for a hub id without
    a commit, `BaseModelError` when a directory or hub id is missing, lacks its config, weights or tokenizer,
    or wants to run code of its own.
    """
    if config.name in RECIPES:
        path = built_path(config, paths)
        _build_once(RECIPES[config.name], config.seed, path, progress or (lambda step, steps, loss: None))
    else:
        path = _find(config)
    _check(config.name, path)
    return BaseInfo(Path(config.name).name, path, base_digest(path))


def built_path(config: BaseConfig, paths: Paths) -> Path:
    """Return where a base of `RECIPES` is, or will be built."""
    return paths.bases / f"{config.name}-{recipe_digest(RECIPES[config.name], config.seed)[:12]}"


def recipe_digest(recipe: Recipe, seed: int) -> str:
    """Name what decides a built base: its recipe, its seed and the problems that it learns from."""
    tasks = {name: [task.dataset, task.settings] for name, task in TASKS.items()}
    return content_hash([asdict(recipe), seed, tasks, PHRASINGS])


def base_config(config: BaseConfig, paths: Paths) -> dict[str, Any]:
    """Return a base's `config.json` without its weights, of a built base also before it is built.

    Raises as `ensure_base`.
    """
    if config.name in RECIPES:
        return RECIPES[config.name].config()
    local = _local(config.name)
    file = local / "config.json" if local else _ask_hub(config, "config.json")
    if not file.is_file():
        raise BaseModelError(f"The base {config.name!r} at {local} lacks config.json.")
    _refuse_own_code(config.name, file.parent)
    return dict(json.loads(file.read_text()))


def _find(config: BaseConfig) -> Path:
    return _local(config.name) or _ask_hub(config)


def _local(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path.absolute() if path.is_dir() else None


def _ask_hub(config: BaseConfig, file: str | None = None) -> Path:
    """Return a file, or the whole snapshot, at the pinned commit, from the local cache if it is there."""
    name = config.name
    if HUB_ID.fullmatch(name) and config.revision is None:
        raise ConfigError(
            f"The base {name!r} is no local directory, and from the hub it needs a pinned commit. Set "
            "base.revision to the 40 digits of one (its page shows them under Files, History)."
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
        # The hub's library raises its own errors, its HTTP client's and the disk's. Only the kind is told: an
        # error's own text may quote the request, and with it the token.
        kind = type(error).__name__
        help = HUB_HELP.get(kind, f"Set base.name to {' or '.join(RECIPES)}, a directory, or a hub id")
        raise BaseModelError(
            f"The base {name!r} is neither a local directory nor a model that the hub could give "
            f"({kind}). {help}."
        ) from None


def _refuse_own_code(name: str, path: Path) -> None:
    for file in (path / "config.json", path / "tokenizer_config.json"):
        if file.is_file() and json.loads(file.read_text()).get("auto_map"):
            raise BaseModelError(
                f"The base {name!r} wants to run Python code of its own ({file.name} has `auto_map`), "
                "and Graftwork runs none (`trust_remote_code` is off). Choose a base that transformers "
                "knows by itself; if it knows this one, save a copy without `auto_map`."
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
            "Save model and tokenizer there with save_pretrained."
        )


def base_digest(path: Path) -> str:
    """Return the sha256 over a base's config.json and safetensors files, in the order of their names."""
    state = hashlib.sha256()
    for file in [path / "config.json", *sorted(path.glob("*.safetensors"))]:
        with file.open("rb") as handle:
            state.update(hashlib.file_digest(handle, "sha256").digest())
    return state.hexdigest()


def _build_once(recipe: Recipe, seed: int, path: Path, progress: Progress) -> None:
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / f".{path.name}.lock"):
        if path.exists():
            return
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=path.parent))
        try:
            # Only whoever builds one needs torch.
            from engine.base.build import build

            build(recipe, seed, draft, progress)
            os.replace(draft, path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
