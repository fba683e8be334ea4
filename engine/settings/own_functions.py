"""A user's own functions, named `python:MODULE:FUNC` in settings: how a name is written and loaded."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError

OWN = r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*"
# Verifiers of a user's own problems; generated ones have their contract too.
OWN_RULES = rf"exact|numeric|regex|json-schema|{OWN}"


def load_own(kind: str, name: str, parameters: str) -> Callable[..., Any]:
    """Return the function that `name` stands for; its module is looked for in the working directory first.

    Raises `ConfigError` when there is none; `kind` and `parameters` say in it what it was to be.
    """
    _, module, function = name.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        # A module may raise anything while it is imported.
        raise ConfigError(
            f"The {kind} {name!r} cannot be loaded ({type(error).__name__}: {error}). Check the module and "
            "the function's name; the module is looked for in the working directory too."
        ) from None
    if not callable(found):
        raise ConfigError(f"The {kind} {name!r} is not a function of ({parameters}).")
    return found
