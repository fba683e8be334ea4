"""What every command and flow starts with: settings, environment variables, early checks.

Only entry points read the environment; the code below gets settings.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from engine.base.names import TOYS, TRAINABLE
from engine.catalog.records import split_served_name
from engine.errors import ConfigError
from engine.security.credentials import LOGIN_VARIABLES, create_credentials
from engine.services.lifecycle import PARAMS_VARIABLE, environment
from engine.settings.forms import Form
from engine.settings.model import Settings, explain
from engine.settings.params import Params, known_policies, load_params
from engine.settings.reproducible import VALUE, VARIABLE

PARAMS = Path("params.yaml")
SAID_EVERY_S = 5.0
DURATION = re.compile(r"(\d{1,9})([smhdw])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
LONGEST_S = 100 * 365 * 86_400
FormModel = TypeVar("FormModel", bound=Form)
ParamsFile = Annotated[
    Path,
    typer.Option("--params", envvar=PARAMS_VARIABLE, help="Read settings from this file.", show_default=True),
]
Revision = Annotated[str, typer.Argument(help="Revision as POLICY@DIGEST; the digest may be shortened.")]
By = Annotated[str, typer.Option(help="Record this name for the decision.")]
Reason = Annotated[str, typer.Option(help="Record this reason for the decision.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReuseName = Annotated[bool, typer.Option("--reuse-name", help="Allow a policy name that was purged before.")]


def option(form: type[Form], name: str, *spelled: str, **more: Any) -> Any:
    """Return the option of a form's field, with the field's own help."""
    return typer.Option(*spelled, help=form.model_fields[name].description, **more)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def print_done(as_json: bool, sentence: str, **said: Any) -> None:
    """Print a sentence, or a JSON object with the sentence and the given fields."""
    typer.echo(json.dumps({"done": sentence, **said}) if as_json else sentence)


def print_result(
    as_json: bool, value: Any, rows: Sequence[Mapping[str, Any]] | None = None, fold: Collection[str] = ()
) -> None:
    """Print a value as JSON, or its `rows` as a table; without `rows`, the value is the rows."""
    if as_json:
        return print_json(value)
    from flows.display import print_rows

    print_rows(value if rows is None else rows, fold)


def seconds_of(text: str, least: float = 0) -> float:
    """Return the seconds of a duration such as 90d, 12h or 30m; raises `ConfigError` for another one."""
    match = DURATION.fullmatch(text)
    if not match or not least <= int(match[1]) * UNITS[match[2]] <= LONGEST_S:
        raise ConfigError(f"{text!r} is not a duration. Write a number and s, m, h, d or w: 30m, 12h or 90d.")
    return int(match[1]) * UNITS[match[2]]


def now_and_then() -> Callable[[Callable[[], str]], None]:
    """Return a function that prints a line to stderr, at most every `SAID_EVERY_S` seconds."""
    said = time.monotonic()

    def say(line: Callable[[], str]) -> None:
        nonlocal said
        if time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            print(line(), file=sys.stderr, flush=True)

    return say


def variables_with(folder: Path) -> dict[str, str]:
    """Return this process's environment for a child that also imports modules from `folder`."""
    search = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search)}


def prefer_equal_bits() -> None:
    """Set the variable of equal bits unless the environment has it; call before torch is imported."""
    os.environ.setdefault(VARIABLE, VALUE)


def enter(
    params: Path, base: str | None = None, starting: bool = False, registry: str | None = None
) -> Params:
    """Read the settings and set this process's environment, before anything heavy is imported.

    `base` replaces the settings' base (see `on_base`). A command that is `starting` the services creates
    their credentials first. Another MLflow server, `registry`, is not sent this installation's password:
    the user's own MLFLOW_TRACKING_* variables stay.
    """
    settings = load_params(params)
    if base:
        settings = on_base(settings, base)
    if starting:
        create_credentials(settings.paths)
    variables = environment(settings)
    if registry and registry.rstrip("/") != settings.url("mlflow"):
        variables = {name: value for name, value in variables.items() if name not in LOGIN_VARIABLES}
    os.environ.update(variables)
    return settings


def on_base(settings: Params, name: str) -> Params:
    """Return the settings for another built-in base, with a state directory of its own.

    Revisions, routes and scores belong to one base, so bases do not share a state directory. Flows and
    services read these settings from its params.json. A file `params.NAME.yaml` beside the settings' own file
    replaces what it sets, such as the policies. Raises `ConfigError` for a base that cannot be trained.
    """
    known = ", ".join(TRAINABLE)
    if name in TOYS and name not in TRAINABLE:
        raise ConfigError(
            f"The base {name!r} cannot be trained: its weights are random, for benchmarks. "
            f"Choose one of {known}."
        )
    if name not in TRAINABLE:
        raise ConfigError(
            f"--base takes one of {known}. For a base of your own, set base.name in params.yaml."
        )
    if name == settings.base.name:
        return settings
    changed: dict[str, Any] = {}
    file = (settings.source or PARAMS).with_name(f"params.{name}.yaml")
    if file.is_file():
        changed = merged(settings, load_params(file))
    base = settings.base.model_copy(update={"name": name, "revision": None})
    changed |= {"base": base, "state_dir": settings.state_dir / name, "source": None}
    if settings.store.url and not settings.catalog.url:
        # The state directory has a catalog of its own, so the store must be its own too.
        url = f"{settings.store.url.rstrip('/')}/{name}"
        changed["store"] = settings.store.model_copy(update={"url": url})
    return settings.model_copy(update=changed)


def merged(settings: Settings, own: Settings) -> dict[str, Any]:
    """Return what `own` sets, as fields for `settings`: a section keeps what `own` does not set in it."""
    changed = {}
    for field in own.model_fields_set:
        before, value = getattr(settings, field), getattr(own, field)
        if isinstance(value, Settings):
            value = before.model_copy(update=merged(before, value))
        changed[field] = value
    return changed


def flow_settings() -> Params:
    """Return a flow's settings: those of the command that called it, or of the worker."""
    return load_params(os.environ.get(PARAMS_VARIABLE, PARAMS))


def filled(model: type[FormModel], **fields: Any) -> FormModel:
    """Return a form with these fields; raises `ConfigError` that names each invalid one."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"The form is not valid. {explain(error, model)}") from None


def check(settings: Params, policies: list[str]) -> None:
    """Raise `ConfigError` or `NotFound` for an unknown policy, task or suite, before anything starts."""
    from engine.problems.procedural import check_task
    from tasks.suites import load_suite

    for name in policies:
        if is_in_catalog_alone(settings, name):
            raise ConfigError(
                f"The policy {name!r} is in the catalog alone, as an import leaves it, and has no suite to "
                "score on. Release it with --skip-score and a reason, or import the adapter into a policy "
                "that has a suite (`graftwork policy create`)."
            )
        policy = settings.policy(name)
        check_task(policy.task)
        for suite in filter(None, (policy.suite, policy.keeps)):
            load_suite(suite, settings.suites_dir)


def is_in_catalog_alone(settings: Params, policy: str) -> bool:
    """Say whether a policy has a catalog row but no settings, and so no suite: an import makes such a one."""
    if policy in known_policies(settings) or not settings.paths.has_catalog:
        return False
    from engine.catalog.opening import open_catalog

    with open_catalog(settings.paths) as index:
        return bool(index.policies.owners([policy]))


def catalog(params: Path) -> Any:
    """Return the open catalog of a settings file, created and migrated if needed."""
    settings = enter(params)
    from engine.catalog.opening import open_catalog

    settings.state_dir.mkdir(parents=True, exist_ok=True)
    return open_catalog(settings.paths, migrated=True)


def pinned(revision: str) -> tuple[str, str]:
    """Split POLICY@DIGEST; raises `ConfigError` when the digest is missing."""
    policy, digest = split_served_name(revision)
    if not digest:
        raise ConfigError(
            f"{revision!r} has no digest. Write a revision as POLICY@DIGEST; `graftwork ls {policy}` lists "
            "them."
        )
    return policy, digest
