"""The dependencies of `evaluate` in dvc.yaml: every file that can change its numbers, by the imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pathspec import PathSpec

from tests.helpers.import_graph import ImportGraph
from tests.helpers.repository import ROOT

# What the engine's process runs is named by strings: to supervisor and vLLM.
STAGE, SERVER = "tasks.stage_evaluate", "engine.serving.server"
# Imported, and yet no number of metrics.json or items.jsonl can depend on it.
EXCLUDED = {
    "engine/__init__.py": "a docstring",
    "engine/errors.py": "texts of errors, after which there are no numbers",
    "engine/file_lock.py": "keeps writers apart",
    "engine/files.py": "forces files to the disk",
    "engine/work_metrics.py": "says how the work in the background goes",
    "engine/state_metrics.py": "says what waits on the disk",
    "engine/logs.py": "configures logging",
    "engine/clocks.py": "says when a key expires",
    "engine/threads.py": "renews the lease under which a refusal is carried out",
    "engine/version.py": "is told to the ledger, which the stage does not write",
    "engine/ports.py": "binds a port",
    "engine/process_reaper.py": "ends processes",
    "engine/shared_cores.py": "sets threads, on which no bit depends",
    "engine/security": "lets callers in or not",
    "engine/metering": "counts the tokens of answers",
    "engine/services": "starts and stops processes; their settings are in repro/engine.json",
    "engine/catalog": "says where bytes lie, which are compared with their checksum",
    "engine/store": "keeps bytes, which are compared with their checksum",
    "engine/publishing/__init__.py": "a docstring",
    "engine/publishing/ownership.py": "refuses a store of another catalog",
    "engine/ledger": "is told of scores, and asked for none",
    "engine/controller": "carries out a refusal, after which there are no numbers",
    "engine/verification": "names the module at fault after a refusal",
    "engine/training": "the trainer's client, which is asked after a refusal alone",
    "tasks/__init__.py": "a docstring",
}


@pytest.mark.parametrize("state", [".graftwork", ".graftwork-other"])
def test_dvc_ignores_every_state_directory_that_git_ignores(state: str) -> None:
    for file in (".dvcignore", ".gitignore"):
        patterns = PathSpec.from_lines("gitignore", (ROOT / file).read_text().splitlines())
        assert patterns.match_file(f"{state}/catalog.db"), file


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph(ROOT)


def named_in(graph: ImportGraph, module: str) -> Iterator[str]:
    """Yield the modules that a module names in strings, as `package.module` or `package.module:attribute`."""
    for node in ast.walk(ast.parse(graph.modules[module].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            yield from (one for one in (name, name.rpartition(".")[0]) if one in graph.modules)


def closure(graph: ImportGraph) -> set[Path]:
    """Return the files that the stage and the engine's process may run, relative to the checkout."""
    plugins = (ROOT / "pyproject.toml").read_text().split("[project.entry-points.")[1:]
    points = {line.split('"')[1].partition(":")[0] for text in plugins for line in text.split("\n")[1:2]}
    waiting, found = [STAGE, SERVER, *points], set()
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        targets = {one.target for one in graph.imports if one.source == module and not one.for_types}
        waiting += targets
        if module.startswith("engine.serving"):
            waiting += named_in(graph, module)
        # A module's packages are run before it.
        waiting += [parent for parent in [module.rpartition(".")[0]] if parent in graph.modules]
    return {graph.modules[module].relative_to(ROOT) for module in found}


def covers(entry: str, path: Path) -> bool:
    return path == Path(entry) or Path(entry) in path.parents


def dependencies() -> list[str]:
    stage = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["evaluate"]
    return [entry for entry in stage["deps"] if not entry.startswith("repro/")]


@pytest.mark.long
def test_whatever_can_change_the_numbers_is_a_dependency(graph: ImportGraph) -> None:
    entries = [*dependencies(), *EXCLUDED]
    assert [str(path) for path in sorted(closure(graph)) if not any(covers(e, path) for e in entries)] == []


def test_each_dependency_and_each_exclusion_is_imported(graph: ImportGraph) -> None:
    files = closure(graph)
    assert [e for e in (*dependencies(), *EXCLUDED) if not any(covers(e, path) for path in files)] == []


def test_nothing_is_both_a_dependency_and_excluded() -> None:
    both = [e for e in EXCLUDED for d in dependencies() if covers(d, Path(e)) or covers(e, Path(d))]
    assert both == []


def test_what_was_once_missing_is_found(graph: ImportGraph) -> None:
    files = {str(path) for path in closure(graph)}
    assert {"engine/problems/procedural.py", "engine/quality/estimate.py", "kernels/experts/cpu.py"} <= files
    assert {"engine/serving/worker/lora_cpu.py", "engine/serving/gateway/gateway.py"} <= files
