"""The stages of `dvc repro`: base, suites, adapt, revision, evaluate, report, as plain functions on files.

Knows what each stage reads and writes under the checkout, and that adapt and evaluate bring services of
their own, at free ports and with a state directory inside the checkout, so that experiments side by side
never meet. Writes to no ledger and no registry. Knows nothing of DVC itself.
"""

import hashlib
import json
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config import DIGEST12, Params, PolicyConfig, content_hash, load_params
from engine.errors import BaseModelError, ConfigError, EffectError, NotFound
from tasks.suites import ITEMS, Suite, load_suite

Report = Callable[[str, str], None]
OnStep = Callable[[Mapping[str, Any]], None]
PINNED = "evaluate.revision is a digest: nothing is trained."
# What of a training step can be drawn; its seconds would differ each time.
CURVE = ("step", "reward", "importance_ratio", "loss", "grad_norm", "tokens", "kept")


@dataclass(frozen=True)
class Files:
    """Where the stages of one checkout read and write; `root` holds params.yaml."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "repro" / "base"

    @property
    def policy(self) -> Path:
        return self.root / "repro" / "policy"

    @property
    def suite(self) -> Path:
        return self.root / "repro" / "suite"

    @property
    def engine(self) -> Path:
        return self.root / "repro" / "engine.json"

    @property
    def adapt(self) -> Path:
        return self.root / "repro" / "adapt"

    @property
    def revision(self) -> Path:
        return self.root / "repro" / "revision"

    @property
    def report(self) -> Path:
        return self.root / "repro" / "report"

    @property
    def services(self) -> Path:
        return self.root / "repro" / "services"

    @property
    def home(self) -> Path:
        """The checkout that an experiment was started from; DVC copies it to HOME/.dvc/tmp/exps/NAME."""
        above = [parent.parent for parent in self.root.parents if parent.name == ".dvc"]
        return above[-1] if above else self.root


def files_of(params: Params) -> Files:
    assert params.source, "stages run on a file of settings"
    return Files(params.source.parent)


def build_base(params: Params, progress: Callable[[int, int, float], None]) -> None:
    """Write `base/`: a built base with its files, or only the name and digest of a person's own.

    A base that the checkout's state directory has already, or gets now, is copied from there.
    """
    from engine.base import RECIPES, ensure_base

    files = files_of(params)
    shared = load_params(files.home / params.source.name) if params.source else params
    info = ensure_base(params.base, shared.paths, progress)
    _renew(files.base)
    if params.base.name in RECIPES:
        shutil.copytree(info.path, files.base, dirs_exist_ok=True)
    _write_json(files.base / "base.json", {"name": params.base.name, "digest": info.digest})


def prepare_suites(params: Params) -> None:
    """Write `policy/`, `suite/` and `engine.json`: what is trained on, scored with, and run on.

    Frozen items are proven to be those of their version, and their prompts those that this policy asks
    on this base. Raises `ConfigError` otherwise, and for an unknown policy or task.
    """
    from engine.training.problems import TASKS, check_task

    files, name = files_of(params), params.evaluate.policy
    config = params.policy(name)
    check_task(config.task)
    suite = load_suite(config.suite, params.suites_dir)
    _check_prompts(params, config, suite)
    _renew(files.suite)
    shutil.copytree(suite.directory, files.suite / suite.name, ignore=_all_but(ITEMS, f"{suite.name}.yaml"))
    scoring = {"lm_eval": version("lm_eval"), "batch": params.evaluate.batch}
    _write_json(files.suite / "scoring.json", scoring)
    _renew(files.policy)
    if config.task not in TASKS:
        config = _copy_data(config, suite, files)
    trained = {"policy": name, "config": config.model_dump(mode="json"), "base": params.base.name}
    trained |= {"trainer": params.trainer.model_dump(mode="json", exclude={"port"})}
    _write_json(files.policy / "policy.json", trained | {"reasoning_gym": version("reasoning-gym")})
    _write_json(files.engine, engine_version(params))


def engine_version(params: Params) -> dict[str, Any]:
    """Return the settings and package versions that an engine's answers depend on."""
    from engine.serving.plugin import vllm_version

    versions = {name: version(name) for name in ("graftwork", "torch", "transformers")}
    settings = params.engine.model_dump(mode="json", exclude={"port", "start_timeout_s"})
    return {"settings": settings, "versions": versions | {"vllm": vllm_version()}}


def opened_suite(files: Files) -> Suite:
    """Return the one suite in `suite/`, proven; `NotFound` when the stage has not run."""
    names = [path.parent.name for path in files.suite.glob(f"*/{ITEMS}")]
    if not names:
        raise NotFound(f"There is no suite in {files.suite}; the stage suites writes it. Run `dvc repro`.")
    return load_suite(names[0], files.suite)


def _check_prompts(params: Params, config: PolicyConfig, suite: Suite) -> None:
    from transformers import AutoTokenizer

    from engine.base import prompt_text

    with _resident(params, "suites") as stage:
        tokenizer = AutoTokenizer.from_pretrained(_base_path(stage))
    for item in suite.items:
        if prompt_text(tokenizer, item.question, config.system, config.few_shot) != item.prompt:
            raise ConfigError(
                f"The item {item.id} of the suite {suite.name} was frozen with another chat template, system "
                f"prompt or examples than {params.evaluate.policy!r} has on this base. Freeze the suite anew."
            )


def _copy_data(config: PolicyConfig, suite: Suite, files: Files) -> PolicyConfig:
    """Put training data and frozen items beside each other; return the settings that name the copy."""
    shutil.copyfile(config.task, files.policy / "train.jsonl")
    shutil.copyfile(suite.directory / ITEMS, files.policy / ITEMS)
    digest = hashlib.sha256((files.policy / "train.jsonl").read_bytes()).hexdigest()
    # By its content and a relative path: where the checkout lies decides nothing.
    return config.model_copy(update={"task": "repro/policy/train.jsonl", "data_digest": digest})


def adapt(params: Params, report: Report, on_step: Callable[[str, int], OnStep]) -> None:
    """Train the policy and write `adapt/`: its revision and learning curve. Nothing is trained for a digest.

    A run that was cut off goes on from its last step; a finished one leaves nothing but its output.
    """
    from tasks.train import train

    files = files_of(params)
    if params.evaluate.revision != "adapt":
        report("adapt", PINNED)
        _write_adapted(files, {"digest": None, "note": PINNED}, ())
        return
    known = _read_json(files.policy / "policy.json", "suites")
    policy, config = known["policy"], PolicyConfig.model_validate(known["config"])
    params = params.model_copy(update={"policies": {policy: config}, "suites_dir": files.suite})
    key = content_hash(
        [known, _read_json(files.engine, "suites"), _read_json(files.base / "base.json", "base")]
    )
    with _services(params, f"adapt-{key[:DIGEST12]}", ("engine", "trainer"), report) as (stage, local_key):
        trained = train(stage, policy, config, local_key, on_step(policy, config.steps))
        _write_adapted(files, {"digest": trained.digest, "step": trained.step}, trained.curve)
        shutil.copytree(trained.directory, files.adapt / "revision")


def _write_adapted(files: Files, note: Mapping[str, Any], curve: Collection[Mapping[str, Any]]) -> None:
    _renew(files.adapt)
    _write_json(files.adapt / "adapt.json", note)
    rows = [",".join(str(row.get(name, "")) for name in CURVE) for row in curve]
    (files.adapt / "curve.csv").write_text("\n".join([",".join(CURVE), *rows]) + "\n")


def take_revision(params: Params) -> None:
    """Write `revision/`, the revision that `evaluate.revision` names, proven by its digest.

    Raises `NotFound` when no place has it, `AdapterError` when its files are not what they say,
    `BaseModelError` and `ConfigError` when it is another base's or another policy's.
    """
    from engine.adapters.revision import read_revision

    files, wanted = files_of(params), params.evaluate
    if wanted.revision == "adapt":
        digest = _read_json(files.adapt / "adapt.json", "adapt")["digest"]
        shutil.rmtree(files.revision, ignore_errors=True)
        shutil.copytree(files.adapt / "revision", files.revision)
    else:
        digest = wanted.revision
        shutil.rmtree(files.revision, ignore_errors=True)
        find_revision(load_params(files.home / "params.yaml"), wanted.policy, digest, files.revision)
    base = _read_json(files.base / "base.json", "base")["digest"]
    _, manifest = read_revision(files.revision, base)
    if manifest.digest != digest:
        raise NotFound(f"{files.revision} holds {manifest.digest[:12]}, not {digest[:12]}. Run `dvc repro`.")
    if manifest.policy != wanted.policy:
        raise ConfigError(
            f"The revision {digest[:12]} belongs to the policy {manifest.policy!r}, not to {wanted.policy!r}."
        )


def find_revision(params: Params, policy: str, digest: str, target: Path) -> Path:
    """Write a revision's directory to `target`, from the state directory, its store or MLflow's registry."""
    from engine.adapters.importing import directory_from_store
    from tasks import flavor

    known = params.paths.revisions / policy / digest[:DIGEST12]
    if known.is_dir():
        return Path(shutil.copytree(known, target))
    if params.paths.catalog.is_file():
        try:
            return directory_from_store(params, policy, digest, target)
        except NotFound:
            pass
    found = _registered(params, policy, digest)
    if found is None:
        raise NotFound(
            f"There is no revision {digest[:12]} of {policy!r} in {params.state_dir} or in MLflow at "
            f"{params.url('mlflow')}. Set evaluate.revision to adapt, or run `graftwork pin {policy}`."
        )
    return flavor.load_model(policy, found, target.parent / "services", params.url("mlflow")).rename(target)


def _registered(params: Params, policy: str, digest: str) -> int | None:
    import httpx

    from engine.registry import Registry

    with httpx.Client(base_url=params.url("mlflow"), trust_env=False) as client:
        try:
            found = Registry(client).version(policy, digest)
        except httpx.HTTPError:
            # No server: the registry has nothing to offer.
            return None
    return int(found) if found else None


def evaluate(params: Params, report: Report) -> None:
    """Import the revision into an engine of its own, score it and the base, write metrics and items.

    Items go out in their frozen order, `evaluate.batch` at a time. Raises `EffectError` when the engine
    does not reproduce the revision's effect probe: its scores would be another model's.
    """
    from engine.adapters.importing import import_revision
    from engine.adapters.revision import read_revision
    from tasks.evaluation import write_evaluation
    from tasks.score import score
    from tasks.verify import verify

    files = files_of(params)
    _, manifest = read_revision(files.revision)
    suite = opened_suite(files)
    engine = params.engine.model_copy(update={"max_num_seqs": params.evaluate.batch})
    params = params.model_copy(update={"engine": engine})
    shutil.rmtree(files.services / "evaluate", ignore_errors=True)
    with _services(
        params, "evaluate", ("engine",), report, lambda stage: import_revision(stage, files.revision)
    ) as (stage, key):
        if (stage.paths.revisions / manifest.policy / manifest.digest[:DIGEST12]).is_dir():
            probe = verify(stage, manifest.policy, manifest.digest, key)
            if not probe["accepted"]:
                raise EffectError(f"{probe['reason']} It is not scored.")
        scores = [
            score(stage, manifest.policy, digest, suite.name, key, reuse=False, root=files.suite)
            for digest in (None, manifest.digest)
        ]
    write_evaluation(files.root, suite, *scores)


@contextmanager
def _services(
    params: Params,
    name: str,
    only: Collection[str],
    report: Report,
    prepare: Callable[[Params], object] = lambda stage: None,
) -> Iterator[tuple[Params, str]]:
    """Own services in a state directory of their own, which goes when the block succeeds."""
    from engine import services
    from engine.adapters.catalog import Catalog, ensure_local_key, migrate

    with _resident(params, name) as stage:
        migrate(stage.paths.catalog_url)
        catalog = Catalog(stage.paths.catalog_url)
        key = ensure_local_key(catalog, stage.paths.local_key)
        catalog.close()
        prepare(stage)
        with services.session(stage, lambda: None, report, only):
            yield stage, key


@contextmanager
def _resident(params: Params, name: str) -> Iterator[Params]:
    """Give settings with free ports and an own state directory on the base of stage `base`.

    It goes when the block succeeds. Raises `BaseModelError` when the base has changed since.
    """
    from engine.base import ensure_base

    files = files_of(params)
    known = _read_json(files.base / "base.json", "base")
    state = files.services / name
    state.mkdir(parents=True, exist_ok=True)
    # One thread unless told otherwise: sums then do not depend on the machine's cores.
    engine = {"port": _free_port(), "threads": params.engine.threads or 1}
    trainer = {"port": _free_port(), "threads": params.trainer.threads or 1}
    stage = params.model_copy(
        update={
            "state_dir": state,
            "engine": params.engine.model_copy(update=engine),
            "trainer": params.trainer.model_copy(update=trainer),
        }
    )
    _link_base(stage, files)
    if ensure_base(stage.base, stage.paths).digest != known["digest"]:
        raise BaseModelError(
            f"The base {params.base.name!r} is not the one that stage base saw. Run `dvc repro -f -s base`."
        )
    yield stage
    shutil.rmtree(state)


def _link_base(stage: Params, files: Files) -> None:
    """Let a built base be found in a stage's state directory."""
    from engine.base import RECIPES, recipe_digest

    if stage.base.name in RECIPES:
        name = f"{stage.base.name}-{recipe_digest(RECIPES[stage.base.name], stage.base.seed)[:12]}"
        stage.paths.bases.mkdir(exist_ok=True)
        (stage.paths.bases / name).unlink(missing_ok=True)
        (stage.paths.bases / name).symlink_to(files.base)


def _base_path(stage: Params) -> Path:
    from engine.base import ensure_base

    return ensure_base(stage.base, stage.paths).path.resolve()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _all_but(*names: str) -> Callable[[str, list[str]], set[str]]:
    return lambda directory, found: set(found) - set(names)


def _renew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _read_json(path: Path, stage: str) -> dict[str, Any]:
    if not path.is_file():
        raise NotFound(f"There is no {path}; the stage {stage} writes it. Run `dvc repro`.")
    return dict(json.loads(path.read_text()))
