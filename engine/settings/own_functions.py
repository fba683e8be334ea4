"""User-defined functions, named `python:MODULE:FUNC` in settings: the pattern of a name and its import."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from engine.errors import ConfigError

OWN = r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*"
# Verifiers of a user's own problems; generated ones have their contract too.
OWN_RULES = rf"exact|numeric|regex|json-schema|{OWN}"
# How a suite scores without a verifier, and what its score is then.
LIKELIHOODS = {
    "likelihood": "The likelihood of held-out answers",
    "preference": "The share of held-out pairs whose better answer is likelier",
}


def refuse_unlisted(kind: str, name: str, modules: Collection[str]) -> None:
    """Raise `ConfigError` if `name` is a user's own function in a module outside `modules`.

    An entry of `modules` also allows its submodules. Other names, such as `exact`, pass.
    """
    if not re.fullmatch(OWN, name):
        return
    _, module, _ = name.split(":")
    if not any(f"{module}.".startswith(f"{listed}.") for listed in modules):
        raise ConfigError(
            f"The {kind} {name!r} is in the module {module!r}, which python_modules does not list. Its code "
            "runs as the services' user. If you trust it, add it to python_modules in params.yaml."
        )


def load_own(kind: str, name: str, parameters: str) -> Callable[..., Any]:
    """Import the function `name`; the working directory comes first on the module path.

    Raises `ConfigError` when the import fails or the name is not callable. Its text names the `kind` ("loss",
    "verifier") and the `parameters` that the function must have.
    """
    _, module, function = name.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        attribute = getattr(importlib.import_module(module), function)
    except Exception as error:
        # A module may raise anything while it is imported.
        raise ConfigError(
            f"The {kind} {name!r} cannot be loaded ({type(error).__name__}: {error}). Check the names of "
            f"module "
            "and function; a module in the working directory is found too."
        ) from None
    if not callable(attribute):
        raise ConfigError(
            f"The {kind} {name!r} is not a function. Name one with the parameters ({parameters})."
        )
    return attribute
