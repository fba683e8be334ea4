"""Notes which files of engine/ and kernels/ run; Python imports this at its start from PYTHONPATH.

Each function of these packages is compiled with a call of `ran` as its first statement. While the file
$EXECUTED_FILES exists, `ran` adds a line to it: the path, and the functions of these packages that led to it.
"""

import ast
import builtins
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDERS = tuple(f"{ROOT / package}{os.sep}" for package in ("engine", "kernels"))
get_code = SourceFileLoader.get_code


def ran(path: str) -> None:
    try:
        # One write to a file opened for appending: processes and threads do not mix their lines.
        out = os.open(os.environ["EXECUTED_FILES"], os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    if (calls := calls_to(sys._getframe(1))) is not None:
        os.write(out, f"{path}\t{' '.join(calls)}\n".encode())
    os.close(out)


def calls_to(frame: FrameType | None) -> list[str] | None:
    """Return the functions from this frame outwards; None when an import made the call, as a decorator's."""
    found = []
    while frame:
        name = frame.f_code.co_filename
        if name == "<frozen importlib._bootstrap>":
            return None
        if name.startswith(FOLDERS):
            found.append(f"{os.path.relpath(name, ROOT)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def get_watched_code(loader: SourceFileLoader, name: str) -> Any:
    path = loader.get_filename(name)
    if not path.startswith(FOLDERS):
        return get_code(loader, name)
    tree = ast.parse(loader.get_data(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            call = ast.parse(f"__ran__({os.path.relpath(path, ROOT)!r})").body[0]
            node.body.insert(1 if ast.get_docstring(node) else 0, ast.copy_location(call, node.body[0]))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


builtins.__ran__ = ran  # type: ignore[attr-defined]
SourceFileLoader.get_code = get_watched_code  # type: ignore[method-assign]
