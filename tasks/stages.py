"""The stages `base`, `suites`, `adapt` and `revision` of `dvc repro`, as plain functions on files.

`evaluate` and `report` have modules of their own, since DVC reruns a stage when a module that it imports
changes. No stage writes to the ledger or the registry.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.base.fitting import fitted_policy
from engine.base.progress import Progress
from engine.base.prompts import prompt_text, tokenizer_of
from engine.base.resident import ensure_base, made_path
from engine.catalog.records import served_name
from engine.errors import ConfigError, NotFound, ServiceError
from engine.problems.procedural import VALIDATION, check_task, is_generated
from engine.services.lifecycle import mkl_cbwr
from engine.serving.vllm_plugin.plugin import vllm_version
from engine.settings.params import DIGEST12, Params, content_hash
from engine.settings.policies import PolicyConfig
from engine.settings.reproducible import VARIABLE
from engine.settings.services import ServiceConfig
from tasks.stage_files import (
    Files,
    Report,
    files_of,
    home_params,
    own_services,
    read_json,
    renew,
    resident,
    write_json,
)
from tasks.suites import ITEMS, Suite, load_suite

OnStep = Callable[[Mapping[str, Any]], None]
PINNED = "evaluate.revision is a digest: nothing is trained."
# The reproducible columns of a training step; its seconds differ from run to run.
CURVE = (
    "step", "reward", "reward_std", "zero_spread", "importance_ratio", "kl", "entropy", "clip_fraction",
    "loss", "grad_norm", "length_mean", "truncated", "tokens", "kept",
)  # fmt: skip


def build_base(params: Params, progress: Progress) -> None:
    """Write `base/`: the files of a base that is made here, or only name and digest of a base of one's own.

    The files are copied from the checkout's state directory, where the base is made if it is missing.
    """
    files = files_of(params)
    info = ensure_base(params.base, home_params(params).paths, progress)
    renew(files.base)
    if made_path(params.base, params.paths):
        shutil.copytree(info.path, files.base, dirs_exist_ok=True)
    named = {"name": params.base.name, "digest": info.digest, "text_digest": info.text_digest}
    write_json(files.base / "base.json", named)


def prepare_suites(params: Params) -> None:
    """Write `policy/`, `suite/` and `engine.json`: the inputs of training, scoring and serving.

    Verifies that the frozen items match their version, and their prompts this policy and base. Raises
    `ConfigError` otherwise, and for an unknown policy or task.
    """
    files, name = files_of(params), params.evaluate.policy
    config = fitted_policy(params, name).config
    check_task(config.task)
    suite = load_suite(config.suite, params.suites_dir)
    _check_prompts(params, config, suite)
    renew(files.suite)
    shutil.copytree(suite.directory, files.suite / suite.name, ignore=_all_but(ITEMS, f"{suite.name}.yaml"))
    scoring = {"lm_eval": version("lm_eval"), "batch": params.evaluate.batch}
    write_json(files.suite / "scoring.json", scoring)
    renew(files.policy)
    if not is_generated(config.task):
        config = _copy_data(config, suite, files)
    trained = {"policy": name, "config": config.model_dump(mode="json"), "base": params.base.name}
    trained |= {"trainer": params.trainer.model_dump(mode="json", exclude={*ServiceConfig.model_fields})}
    write_json(files.policy / "policy.json", trained | {"reasoning_gym": version("reasoning-gym")})
    write_json(files.engine, engine_version(params))


def engine_version(params: Params) -> dict[str, Any]:
    """Return the settings, package versions and environment variable that an engine's answers depend on."""
    from engine.publishing.importing import serving_dtype

    versions = {name: version(name) for name in ("graftwork", "torch", "transformers")}
    settings = params.engine.answering()
    settings["dtype"] = serving_dtype(params)
    versions |= {"vllm": vllm_version()}
    return {"settings": settings, "versions": versions, "environment": {VARIABLE: mkl_cbwr()}}


def _check_prompts(params: Params, config: PolicyConfig, suite: Suite) -> None:
    with resident(params, "suites") as stage:
        tokenizer = tokenizer_of(ensure_base(stage.base, stage.paths).path)
    for item in suite.items:
        if prompt_text(tokenizer, item.asked, config.system, config.few_shot) != item.prompt:
            raise ConfigError(
                f"Item {item.id} of the suite {suite.name} was frozen with a chat template, system prompt or "
                f"examples other than those of {params.evaluate.policy!r} on this base. Freeze a new version."
            )


def _copy_data(config: PolicyConfig, suite: Suite, files: Files) -> PolicyConfig:
    """Copy training data and frozen items to `policy/`; return the settings that name the copy.

    Raises `ConfigError` for a policy that starts at a revision: that has been trained elsewhere.
    """
    if config.start:
        raise ConfigError(
            f"The policy starts at {config.start}, which `dvc repro` does not train. Set evaluate.revision "
            "to the digest of a revision of the policy."
        )
    state = hashlib.sha256()
    trained, validated = Path(config.task), Path(config.task).with_name(VALIDATION)
    for source, name in ((trained, "train.jsonl"), (validated, VALIDATION)):
        if source is trained or source.is_file():
            shutil.copyfile(source, files.policy / name)
            state.update(source.read_bytes())
    shutil.copyfile(suite.directory / ITEMS, files.policy / ITEMS)
    digest = state.hexdigest()
    # A digest and a relative path, so that the checkout's location has no effect.
    return config.model_copy(update={"task": "repro/policy/train.jsonl", "data_digest": digest})


def adapt(params: Params, report: Report, on_step: Callable[[str, int], OnStep]) -> None:
    """Train the policy and write `adapt/`: its revision and learning curve; for a digest, train nothing.

    An interrupted run continues from its last step. A finished run leaves only its output.
    """
    from engine.training.loop import train
    from engine.training.several_engines import Engines

    files = files_of(params)
    if params.evaluate.revision != "adapt":
        report("adapt", PINNED)
        write_adapted(files, {"digest": None, "note": PINNED}, ())
        return
    known = read_json(files.policy / "policy.json", "suites")
    policy, config = known["policy"], PolicyConfig.model_validate(known["config"])
    params = params.model_copy(update={"policies": {policy: config}, "suites_dir": files.suite})
    key = content_hash(
        [known, read_json(files.engine, "suites"), read_json(files.base / "base.json", "base")]
    )
    with own_services(params, f"adapt-{key[:DIGEST12]}", ("engine", "trainer"), report) as (stage, local_key):
        trained = train(stage, policy, config, local_key, on_step(policy, config.steps), Engines.of)
        write_adapted(files, {"digest": trained.digest, "step": trained.step}, trained.curve)
        shutil.copytree(trained.directory, files.adapt / "revision")


def write_adapted(files: Files, note: Mapping[str, Any], curve: Collection[Mapping[str, Any]]) -> None:
    """Write `adapt.json`, and the learning curve as `curve.csv`: a row a step, without its seconds."""
    renew(files.adapt)
    write_json(files.adapt / "adapt.json", note)
    columns = [*CURVE, *(["held_out_loss"] if any(row.get("held_out_loss") for row in curve) else [])]
    values = [["" if row.get(name) is None else str(row[name]) for name in columns] for row in curve]
    (files.adapt / "curve.csv").write_text("".join(",".join(row) + "\n" for row in [columns, *values]))


def take_revision(params: Params) -> None:
    """Write `revision/`, the revision that `evaluate.revision` names, verified by its digest.

    Its manifest's time is set to 0, so that the same revision gives the same files. Raises `NotFound` when
    the revision is nowhere, `AdapterError` when its files do not match its digest, `BaseModelError` for
    another base and `ConfigError` for another policy.
    """
    from engine.adapters.revision import PROBE, read_revision, write_revision

    files, wanted = files_of(params), params.evaluate
    base = read_json(files.base / "base.json", "base")["digest"]
    files.services.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=files.services) as scratch:
        if wanted.revision == "adapt":
            digest = read_json(files.adapt / "adapt.json", "adapt")["digest"]
            source = files.adapt / "revision"
        else:
            digest = wanted.revision
            source = find_revision(home_params(params), wanted.policy, digest, Path(scratch))
        tensors, manifest = read_revision(source, base)
        if (manifest.policy, manifest.digest) != (wanted.policy, digest):
            raise ConfigError(
                f"{source} contains {served_name(manifest.policy, manifest.digest)}, not "
                f"{served_name(wanted.policy, digest)}. Run `dvc repro` to run the earlier stages."
            )
        probe = read_json(source / PROBE, "adapt")
        shutil.rmtree(files.revision, ignore_errors=True)
        write_revision(files.revision, tensors, replace(manifest, created_at=0.0), probe)


def find_revision(params: Params, policy: str, digest: str, scratch: Path) -> Path:
    """Return a revision's directory: the state directory's, or one written to `scratch`.

    The latter comes from the store's packed bytes, without an effect probe, or from MLflow's registry.
    Raises `NotFound` when no place has the revision.
    """
    from engine.publishing.importing import directory_from_store
    from tasks import flavor

    known = params.paths.revision(policy, digest)
    if known.is_dir():
        return known
    if params.paths.has_catalog:
        with suppress(NotFound):
            return directory_from_store(params, policy, digest, scratch / digest[:DIGEST12])
    if version_number := _registered(params, policy, digest):
        return flavor.load_model(policy, version_number, scratch, params.url("mlflow"))
    raise NotFound(
        f"There is no revision {digest[:12]} of {policy!r} in {params.state_dir} or in MLflow at "
        f"{params.url('mlflow')}. Set evaluate.revision to adapt, or run `graftwork repro --pin {policy}`."
    )


def _registered(params: Params, policy: str, digest: str) -> int:
    """Return a revision's version in MLflow, 0 for none."""
    from engine.integrations.mlflow_registry import registered

    # A server that is down counts as one without the revision.
    with suppress(ServiceError):
        return int(registered(params, policy, digest) or 0)
    return 0


def _all_but(*names: str) -> Callable[[str, list[str]], set[str]]:
    return lambda directory, names_there: set(names_there) - set(names)
