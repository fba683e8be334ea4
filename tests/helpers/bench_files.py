"""The benchmarks' files as modules, for tests of what they compute."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

BENCH = Path(__file__).parents[1] / "bench"


class Parsed(Exception):
    """Stops a benchmark once it has read its arguments."""


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a file of tests/bench under another name: one is called as the library that it measures."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def parsed(name: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a benchmark reads from its arguments; `SystemExit` when it refuses them."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, _: object = None) -> NoReturn:
        raise Parsed(vars(parse(parser)))

    module = load(name, monkeypatch)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed) as stopped:
        module.main()
    (given,) = stopped.value.args
    return dict(given)
