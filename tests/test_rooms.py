"""The rooms of engine/: which may import from which, no cycle, no import deferred without a reason."""

import ast
import sys

import pytest

from tests.helpers.import_graph import OPTIONAL, PACKAGES, ImportGraph, cycle_in, is_in, room_of
from tests.helpers.repository import ROOT

# Each room may import from itself and from those before it. docs/architecture.md says what lives in each.
ROOMS = (
    "engine",
    "engine.version",
    "engine.errors",
    "engine.files",
    "engine.file_lock",
    "engine.clocks",
    "engine.lean_imports",
    "engine.clients",
    "engine.process_reaper",
    "engine.threads",
    "engine.work_metrics",
    "engine.logs",
    "engine.shared_cores",
    "engine.settings",
    "engine.ports",
    "engine.security",
    "engine.quality",
    "engine.problems",
    "engine.base",
    "engine.adapters",
    "engine.store",
    "engine.planning",
    "engine.catalog",
    "engine.publishing",
    "engine.ledger",
    "engine.metering",
    "engine.state_metrics",
    "engine.backup",
    "engine.training.loss",
    "engine.training.model",
    "engine.training.service",
    "engine.training",
    "engine.verification",
    "engine.controller",
    "engine.report",
    "engine.notifications",
    "engine.integrations",
    "engine.serving.worker",
    "engine.serving.vllm_plugin",
    "engine.serving.residency",
    "engine.serving.gateway",
    "engine.serving",
    "engine.services",
    "engine.tinker",
    "engine.evaluation",
    "engine.controller.__main__",
)
# What loads in no time, so that nobody waits for it.
LIGHT = {*sys.stdlib_module_names, "filelock", "orjson", "psutil", "pydantic", "tenacity", "typer", "yaml"}


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph(ROOT)


@pytest.mark.long
def test_every_folder_of_the_engine_is_a_room(graph: ImportGraph) -> None:
    assert {room_of(name) for name in graph.modules} - set(PACKAGES) == set(ROOMS) - {"engine"}


def test_rooms_import_one_way(graph: ImportGraph) -> None:
    place = {room: index for index, room in enumerate(ROOMS)}
    wrong = [
        f"{one.source}:{one.line} imports {one.target}"
        for one in graph.imports
        if one.target.startswith("engine.")
        and one.source.startswith("engine.")
        and place[room_of(one.target)] > place[room_of(one.source)]
    ]
    assert wrong == []


def test_what_is_optional_is_imported_where_a_process_is_put_together(graph: ImportGraph) -> None:
    woven = [
        f"{one.source}:{one.line} imports {one.target}"
        for part, entries in OPTIONAL.items()
        for one in graph.imports
        if is_in(one.target, {part})
        and one.source.startswith(("engine.", "kernels."))
        and not is_in(one.source, {part, *entries})
    ]
    assert woven == []


def test_the_optional_parts_and_their_entries_exist(graph: ImportGraph) -> None:
    named = set(OPTIONAL).union(*OPTIONAL.values())
    assert {name for name in named if not any(is_in(module, {name}) for module in graph.modules)} == set()


def test_no_module_imports_what_imports_it(graph: ImportGraph) -> None:
    assert cycle_in({(one.source, one.target) for one in graph.imports}) == []


def test_a_cycle_is_found() -> None:
    assert cycle_in({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")})


def test_an_import_is_deferred_only_from_what_takes_time_to_load(graph: ImportGraph) -> None:
    needless = [
        f"{one.source}:{one.line} imports {one.target} in a function"
        for one in graph.imports
        if one.deferred and not graph.loaded[one.target] - LIGHT - set(PACKAGES) - graph.loaded[one.source]
    ]
    assert needless == []


def test_who_writes_to_a_catalog_opens_it_with_its_audit_log(graph: ImportGraph) -> None:
    """A bare `Catalog` records nothing: these only read."""
    found = {
        str(path.relative_to(graph.root))
        for path in graph.modules.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Catalog"
    }
    assert found == {
        "engine/catalog/catalog.py",
        "engine/catalog/opening.py",
        "engine/training/line_of_training.py",
        "engine/training/run.py",
        "flows/cli/backup.py",
        "tasks/restore_backup.py",
        "tasks/restore_undone.py",
    }
