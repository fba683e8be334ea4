"""The command in this process: what a process of its own costs is two seconds of imports."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from subprocess import CompletedProcess
from typing import NoReturn
from unittest.mock import patch

from typer import Typer


class Left(BaseException):
    """Stands for the end of the process."""


def graftwork(*arguments: str) -> CompletedProcess[str]:
    """Run `graftwork` with these arguments; return its exit code and what it wrote.

    For what a command says and does. A start, a signal or a peak of memory needs a process of its own.
    """
    from flows.cli import app

    return _ended(app, arguments)


def stage(*arguments: str) -> CompletedProcess[str]:
    """Run a stage of dvc.yaml as `.dvc/stage` does; return its exit code and what it wrote."""
    from flows.cli.stage import app

    return _ended(app, arguments)


def _ended(app: Typer, arguments: Sequence[str]) -> CompletedProcess[str]:
    from flows.cli import command

    codes: list[int] = []

    def leave(code: int) -> NoReturn:
        codes.append(code)
        raise Left

    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        patch.dict(os.environ),
        patch.object(sys, "argv", ["graftwork", *arguments]),
        # Else, under `python -m pytest`, its name would be that.
        patch.object(sys.modules["__main__"], "__package__", ""),
        patch.object(sys, "unraisablehook"),
        patch.object(signal, "signal"),
        patch.object(command, "leave", leave),
        contextlib.suppress(Left),
    ):
        command.main(app)
    return CompletedProcess(arguments, codes[0], output.getvalue(), errors.getvalue())
