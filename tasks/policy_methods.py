"""The method of a policy with a person's own data: which one the data suggest, and what fits it."""

import json
import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.base.fitting import fitting_settings
from engine.base.resident import base_config, ensure_base
from engine.errors import BaseModelError, ConfigError, NotFound
from engine.problems.jsonl import Check, Import
from engine.problems.readers import read_file
from engine.problems.rows import kind_of
from engine.problems.verifiers import foreign_reference
from engine.problems.written_numbers import bare_number
from engine.settings.model import explain
from engine.settings.params import Params
from engine.settings.policies import TAUGHT, Method, PolicyConfig

# What a change of the method does not keep, and what a method does not read.
OF_A_METHOD = ("method", "verifier", "steps", "epochs", "lr", "loss", "loss_config")
UNREAD = {"grpo": ("epochs",), "taught": ("loss", "loss_config", "group_size")}
# How a method without a verifier is scored.
SCORED_BY: dict[str, str] = {"sft": "likelihood", "dpo": "preference"}
# Passes over the data where none are given, and DPO's learning rate over the other methods': it moves away
# from the base much faster.
EPOCHS, DPO_RATE = {"sft": 3, "dpo": 1}, 0.1
NOTHING = (
    "The expected answer is empty, so a text that says nothing would be right. Write it, or drop the line."
)


def method_of(source: Path, verifier: str | None, method: Method | None) -> tuple[Method, str]:
    """Return the method and the verifier of a policy with this data, each as given or as the data suggest.

    Raises `ConfigError` where the data leave it open, or do not fit the method.
    """
    kind = kind_of(next(read_file(source))[1])
    if method == "grpo" and kind == "pairs":
        raise ConfigError(
            f"{source} has pairs of answers, from which the method dpo learns, or sft the better one. Give "
            "--method dpo or sft, or questions with one answer."
        )
    if method == "dpo" or (kind == "pairs" and method is None):
        return "dpo", verifier or "preference"
    if method == "sft" or (method is None and verifier is None and kind == "examples"):
        return "sft", verifier or "likelihood"
    if verifier is None:
        raise ConfigError(
            f"{source} has questions with answers. Give --verifier, such as exact or numeric, to train by "
            "reinforcement learning (grpo), or --method sft to learn the answers as they are written."
        )
    return "grpo", verifier


def with_steps(
    params: Params,
    known: Mapping[str, Any],
    config: PolicyConfig,
    imported: Import,
    settings: Mapping[str, Any],
) -> PolicyConfig:
    """Return the settings with the steps of all epochs, unless steps were given, and with DPO's rate."""
    if config.method not in TAUGHT:
        return config
    more: dict[str, Any] = {}
    has_steps = "steps" in settings or ("steps" in known and "epochs" not in {*known, *settings})
    if has_steps:
        more = {"epochs": None, "steps": config.steps}
    else:
        epochs = config.epochs or EPOCHS[config.method]
        more = {"epochs": epochs, "steps": ceil(epochs * imported.training / config.groups)}
    if config.method == "dpo" and "lr" not in {*known, *settings}:
        fitting = fitting_settings(base_config(params.base, params.paths))
        more["lr"] = fitting.get("lr", config.lr) * DPO_RATE
    return valid_policy(config.model_dump(exclude_unset=True) | more)


def valid_policy(fields: Mapping[str, Any]) -> PolicyConfig:
    try:
        return PolicyConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"The policy is not valid. {explain(error, PolicyConfig)}") from None


def kept_settings(own: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """Return a policy's own settings; with another method not those whose values are of the one before."""
    if method == own.get("method", "grpo"):
        return dict(own)
    return {key: value for key, value in own.items() if key not in OF_A_METHOD}


def refuse_start(params: Params, config: PolicyConfig) -> None:
    """Raise unless the revision at which training starts is one, of this rank on this base.

    Raises `NotFound` for an unknown one, `ConfigError` for another rank, `BaseModelError` for another base.
    """
    from engine.catalog.opening import open_catalog

    if not config.start:
        return
    policy, _, digest = config.start.partition("@")
    if not params.paths.has_catalog:
        raise NotFound(f"There is no revision {config.start}: nothing has been trained here yet.")
    with open_catalog(params.paths) as catalog:
        start = catalog.revisions.get(policy, digest)
    if start.rank != config.rank:
        raise ConfigError(
            f"{config.start} has the rank {start.rank}, and the policy the rank {config.rank}. Give "
            f"--rank {start.rank}."
        )
    if start.base != ensure_base(params.base, params.paths).digest:
        raise BaseModelError(f"{config.start} is of another base than {params.base.name!r}.")


def refuse_unread(config: PolicyConfig, settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a given setting that the method does not read."""
    unread = UNREAD["grpo" if config.method == "grpo" else "taught"]
    if given := sorted(name for name in unread if settings.get(name) is not None):
        raise ConfigError(f"The method {config.method} does not read {', '.join(given)}. Leave it out.")
    if settings.get("epochs") and settings.get("steps"):
        raise ConfigError("Epochs are so many steps, too. Give either --epochs or --steps.")
    if config.method in TAUGHT and config.verifier in ("numeric", "regex", "json-schema"):
        raise ConfigError(
            f"The verifier {config.verifier} compares with a number or a rule, and {config.method} learns "
            "the answers as they are written. Choose exact, python:MODULE:FUNC, or none."
        )


def check_for(verifier: str) -> Check:
    """Return a function that says why an expected answer does not fit the verifier; None when it fits."""

    def exact(answer: str) -> str | None:
        return None if answer.strip() else NOTHING

    def numeric(answer: str) -> str | None:
        if bare_number(answer) is not None:
            return None
        return (
            f"The verifier numeric needs one number as answer, not {answer[:40]!r}. Write it without unit or "
            "percent sign, and with a point before its decimals: 1234.5, -7, 1/2 or 1.5e-3."
        )

    def regex(answer: str) -> str | None:
        if not answer.strip():
            return NOTHING
        try:
            re.compile(answer)
        except re.error as error:
            return f"The answer is not a regular expression: {error}."
        return None

    def json_schema(answer: str) -> str | None:
        from jsonschema import SchemaError, validators

        try:
            schema = json.loads(answer)
            validators.validator_for(schema).check_schema(schema)
        except (ValueError, SchemaError, AttributeError) as error:
            return f"The answer is not a JSON schema: {str(error).splitlines()[0]}."
        if (reference := foreign_reference(schema)) is not None:
            return f"The schema refers to {reference!r}. Nothing is fetched: put it into the schema's $defs."
        return None

    checks: dict[str, Check] = {
        "exact": exact, "likelihood": exact, "preference": exact, "numeric": numeric, "regex": regex,
        "json-schema": json_schema,
    }  # fmt: skip
    return checks.get(verifier, lambda answer: None)
