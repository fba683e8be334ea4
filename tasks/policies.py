"""Create a policy from a person's own data and verifier: split, freeze, write, register.

The result is one directory, `eval_suites/NAME/`: training rows, frozen items with lm-eval's YAML, a README
with the change log, and `policy.yaml` with the policy's own settings. It is written atomically. A question
that is held out stays held out when more data is added.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from filelock import FileLock, Timeout

from engine.base.fitting import fitted_policy, fitting_settings
from engine.base.prompts import prompt_text, tokenizer_of
from engine.base.resident import BaseInfo, base_config, ensure_base
from engine.errors import ConfigError, Conflict, NotFound
from engine.problems.general_text import GENERAL
from engine.problems.jsonl import Import, import_file, read_rows, split_hash
from engine.problems.leaks import QuestionLine, refuse_leaks
from engine.problems.procedural import VALIDATION, Problem
from engine.problems.rows import Asked, JsonlRow
from engine.problems.verifiers import Verifier
from engine.services import lifecycle as services
from engine.settings.own_functions import LIKELIHOODS, load_own, refuse_unlisted
from engine.settings.params import POLICY_NAME, Params, policy_file
from engine.settings.policies import TAUGHT, PolicyConfig
from tasks.policy_methods import (
    SCORED_BY,
    check_for,
    kept_settings,
    method_of,
    refuse_start,
    refuse_unread,
    valid_policy,
    with_steps,
)
from tasks.prompt_limits import PromptLimits
from tasks.purge_record import reuse_purged_name
from tasks.suites import Suite, ended, freeze, load_suite, nothing, question_lines

TRAINING = "train.jsonl"
LOCK_S = 60
WRITER = "graftwork policy create"
README = """\
# {name}

Made by `graftwork policy create` from {source}, owner {owner}. `items.jsonl` is frozen; `train.jsonl` is
what is trained on; `policy.yaml` holds the settings. An answer is judged by `{verifier}`.

## Changes
"""


@dataclass(frozen=True)
class Created:
    """A created policy in numbers; `changed` is False when data and settings were there already."""

    policy: str
    suite_version: int
    lines: int
    training: int
    frozen: int
    held_out: int
    duplicates: int
    data_digest: str
    directory: str
    changed: bool
    unused: tuple[str, ...] = ()
    method: str = "grpo"


def create_policy(
    params: Params,
    name: str,
    data: Path,
    verifier: str | None = None,
    owner: str = "local",
    base: str | None = None,
    settings: Mapping[str, Any] | None = None,
    items: int = 200,
    on_progress: Callable[[int], None] = lambda lines: None,
    reuse_name: bool = False,
) -> Created:
    """Create the policy `name` from a file that `readers` takes, or update it with newer data or settings.

    Without a method in `settings` the data suggest one; without a `verifier` a policy of examples is scored
    by the likelihood of its held-out answers, and one of pairs by its preference.

    Raises `ConfigError` for an invalid name, setting, line, loss or verifier, `Conflict` when the name is
    another owner's, or was purged and `reuse_name` is False, and `BaseModelError` when the base's text files
    are not those that the catalog knows.
    """
    _refuse_taken(params, name, owner, base)
    known, settings = _own(params, name), settings or {}
    method = settings.get("method") or (known.get("method", "grpo") if known else None)
    if known and method == known.get("method", "grpo"):
        verifier = verifier or known.get("verifier")
    method, verifier = method_of(data, verifier, method)
    known = kept_settings(known, method)
    config = _settings(params, name, verifier, owner, known, {**settings, "method": method})
    refuse_start(params, config)
    refuse_unlisted("verifier", config.verifier, params.python_modules)
    if config.verifier not in LIKELIHOODS:
        Verifier(config).close()
    reuse_purged_name(params, name, owner, reuse_name)
    params.suites_dir.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=f".{name}-", dir=params.suites_dir, ignore_cleanup_errors=True) as draft,
        _alone(params.suites_dir),
    ):
        _recover(params.suites_dir / name)
        # Another process may have taken the name since.
        _refuse_taken(params, name, owner, base)
        tokenizer = tokenizer_of(_known_base(params).path)
        limits = PromptLimits(params, config, tokenizer, data)
        training, rule = Path(draft) / TRAINING, SCORED_BY.get(method, verifier)
        validation = training.with_name(VALIDATION) if method in TAUGHT else None
        imported = import_file(
            data, training, items, check_for(rule), on_progress, rule, limits.add, validation
        )
        limits.refuse()
        config = with_steps(params, known, config, imported, settings)
        created = _write(params, name, config, imported, Path(draft), data, tokenizer)
    _register(params, name)
    return created


@contextmanager
def _alone(suites: Path) -> Iterator[None]:
    try:
        lock = FileLock(suites / ".lock").acquire(timeout=LOCK_S)
    except Timeout:
        raise Conflict(f"Another policy is being created in {suites}; try again when it is done.") from None
    with lock:
        yield


def _refuse_taken(params: Params, name: str, owner: str, base: str | None) -> None:
    """Raise unless `name` is free, or is this owner's policy of own data already."""
    if not POLICY_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a policy name. Use small letters, digits and hyphens, at most 63."
        )
    if name == GENERAL:
        raise ConfigError(f"{GENERAL!r} is the suite of general text. Choose another name.")
    if name in params.policies:
        raise Conflict(
            f"{params.source or 'params.yaml'} defines the policy {name!r} already. Choose another name."
        )
    if (params.suites_dir / name).exists() and not policy_file(params, name).is_file():
        raise Conflict(f"{params.suites_dir / name} holds the suite of another policy. Choose another name.")
    if base is not None and base != params.base.name:
        raise ConfigError(
            f"The resident base is {params.base.name!r}, not {base!r}. Leave --base out, or set base.name."
        )
    _refuse_other_owner(params, name, owner)


def _known_base(params: Params) -> BaseInfo:
    """Return the base; `BaseModelError` where its text files are not those that the services have."""
    from engine.catalog.opening import open_catalog

    info = ensure_base(params.base, params.paths)
    if params.paths.has_catalog:
        with open_catalog(params.paths) as catalog:
            catalog.bases.check_text(info)
    return info


def _settings(
    params: Params, name: str, verifier: str, owner: str, own: Mapping[str, Any], settings: Mapping[str, Any]
) -> PolicyConfig:
    """Return the policy's settings: its own file's (`own`), then those of `settings`."""
    if verifier == "contract":
        raise ConfigError("The verifier `contract` is for generated tasks. Use exact, numeric or another.")
    fields = {**own, "task": TRAINING, "suite": name, "verifier": verifier, "owner": owner, **settings}
    if "loss_config" in fields:
        fields["loss_config"] = own.get("loss_config", {}) | settings.get("loss_config", {})
    config = valid_policy(fields)
    refuse_unread(config, settings)
    if config.rank > params.engine.max_rank:
        raise ConfigError(
            f"The rank is {config.rank}, and the engine serves up to {params.engine.max_rank}. Lower it, or "
            "set engine.max_rank and start the services anew."
        )
    if config.loss.startswith("python:"):
        refuse_unlisted("loss", config.loss, params.python_modules)
        load_own("loss", config.loss, "tokens, options")
    return config


def worked_examples(source: Path) -> list[dict[str, str]]:
    """Return the questions and answers of a file, in its order; `ConfigError` for a chat."""
    shown = []
    for number, row in read_rows(source):
        if row.messages:
            raise ConfigError(
                f"{source}:{number} is a chat. A worked example is one question and its answer."
            )
        shown.append({"question": row.question, "answer": row.answer})
    return shown


def _refuse_other_owner(params: Params, name: str, owner: str) -> None:
    from engine.catalog.opening import open_catalog

    known = _own(params, name).get("owner", "local") if policy_file(params, name).is_file() else None
    if known is None and params.paths.has_catalog:
        with open_catalog(params.paths) as catalog:
            known, _ = catalog.policies.owners([name]).get(name, (None, ""))
    if known not in (None, owner):
        raise Conflict(
            f"The policy {name!r} belongs to {known!r}. Choose another name, or give --owner {known}."
        )


def _own(params: Params, name: str) -> dict[str, Any]:
    file = policy_file(params, name)
    return dict(yaml.safe_load(file.read_text()) or {}) if file.is_file() else {}


def _write(
    params: Params,
    name: str,
    config: PolicyConfig,
    imported: Import,
    draft: Path,
    source: Path,
    tokenizer: Any,
) -> Created:
    target = params.suites_dir / name
    before = _suite_before(name, params.suites_dir)
    suite = _freeze(tokenizer, name, config, imported, draft, before)
    _refuse_leaks(draft / TRAINING, suite, before, config.method in TAUGHT)
    own = config.model_dump(mode="json", exclude_defaults=True) | {"data_digest": imported.digest}
    # A default that was given stands against what fits the base.
    fitting = set(fitting_settings(base_config(params.base, params.paths)))
    # So do steps that were given: else the next data's would be counted anew.
    named = {*fitting, *({"steps"} if config.method in TAUGHT else ())}
    own |= config.model_dump(mode="json", include=named, exclude_unset=True)
    (draft / "policy.yaml").write_text(yaml.safe_dump(own, sort_keys=True))
    version = suite.items_version
    files = [file for file in (TRAINING, VALIDATION, "policy.yaml") if (draft / file).is_file()]
    changed = not _same(target, draft, suite, before, files)
    if changed:
        _write_readme(target, draft / name, name, config, source, imported, version)
        for file in files:
            (draft / file).rename(draft / name / file)
        _swap(draft / name, target)
    return Created(
        name, version, imported.lines, imported.training, len(imported.frozen), imported.held_out,
        imported.duplicates, imported.digest, str(target), changed, imported.unused, config.method,
    )  # fmt: skip


def _suite_before(name: str, root: Path) -> Suite | None:
    with suppress(NotFound):
        return load_suite(name, root)
    return None


def _freeze(
    tokenizer: Any, name: str, config: PolicyConfig, imported: Import, draft: Path, before: Suite | None
) -> Suite:
    def prompt(question: Asked) -> str:
        return prompt_text(tokenizer, question, config.system, config.few_shot)

    rule = {key: getattr(config, key) for key in ("verifier", "verifier_timeout_s", "max_tokens")}
    problems = [
        Problem(name, row.question, row.answer, messages=row.messages, rejected=row.rejected)
        for row in imported.frozen
    ]
    version = before.items_version if before else 1
    target = partial(ended, tokenizer) if config.verifier in LIKELIHOODS else nothing
    rest = (config.max_tokens, draft, WRITER, target)
    suite = freeze(name, name, rule, problems, prompt, version, *rest)
    if before and (suite.digest, dict(suite.rule)) != (before.digest, dict(before.rule)):
        # Scores of other items, or by another rule, cannot be compared: a new version.
        shutil.rmtree(draft / name)
        suite = freeze(name, name, rule, problems, prompt, version + 1, *rest)
    return suite


def _refuse_leaks(training: Path, suite: Suite, before: Suite | None, are_examples: bool) -> None:
    items = (*suite.items, *(before.items if before else ()))
    frozen = {split_hash(JsonlRow(item.question, "", item.messages), are_examples): item.id for item in items}

    def lines() -> Iterator[QuestionLine]:
        for number, row in read_rows(training):
            if item := frozen.get(split_hash(row, are_examples)):
                raise ConfigError(
                    f"Training line {number} has the question of the frozen item {item}: "
                    f"{row.question[:80]!r}. Remove the line: a score on a trained question means nothing."
                )
            yield QuestionLine(f"Training line {number}", row.question, row.answer)

    refuse_leaks(lines(), question_lines(items))


def _same(target: Path, draft: Path, suite: Suite, before: Suite | None, files: Sequence[str]) -> bool:
    if before is None or suite.version != before.version:
        return False
    return all(
        (target / file).is_file() and (target / file).read_bytes() == (draft / file).read_bytes()
        for file in files
    )


def _write_readme(
    target: Path, draft: Path, name: str, config: PolicyConfig, source: Path, imported: Import, version: int
) -> None:
    readme = target / "README.md"
    head = README.format(name=name, source=source.name, owner=config.owner, verifier=config.verifier)
    text = readme.read_text() if readme.is_file() else head
    day = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d")
    counts = f"{len(imported.frozen)} frozen items, {imported.training} training rows"
    line = f"- {day}: version {version}, {counts}.\n"
    (draft / "README.md").write_text(text + line)


def _swap(draft: Path, target: Path) -> None:
    """Replace a directory; a crash in between leaves the old one beside it, for `_recover`."""
    old = _aside(target)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _recover(target: Path) -> None:
    """Restore the old directory if `_swap` crashed between its two renames; remove it otherwise."""
    old = _aside(target)
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _register(params: Params, name: str) -> None:
    """Register the policy with the controller; if none runs, the first training run does it."""
    from tasks.release import controller

    if not services.is_running(params):
        return
    config = fitted_policy(params, name).config
    base = ensure_base(params.base, params.paths).digest
    with controller(params) as client:
        client.add_policy(name, base, config.model_dump(mode="json"), config.owner)


def describe(created: Created) -> str:
    """Return one sentence on what was created."""
    columns = ", ".join(f"`{name[:40]}`" for name in created.unused[:6])
    left = f" No prompt shows {columns}: write into the question what an answer needs." if columns else ""
    if not created.changed:
        return f"{created.policy} has this data and these settings already; nothing has changed.{left}"
    return (
        f"{created.policy}: {created.method}, {created.training} training rows, {created.frozen} frozen "
        f"items (suite version {created.suite_version}), {created.duplicates} duplicates dropped, in "
        f"{_here(created.directory)}.{left}"
    )


def _here(directory: str) -> Path:
    """Return a directory relative to the working directory when it lies below it."""
    path, here = Path(directory), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
