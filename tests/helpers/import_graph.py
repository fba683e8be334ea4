"""Who imports whom in this checkout, read from the files; prints what docs/architecture.md says of it.

python tests/helpers/import_graph.py [CHECKOUT]
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("kernels", "engine", "tasks", "flows")
# Folders of engine/ whose own folders are rooms too.
HOUSES = ("engine.serving", "engine.training")
# Modules that put a process together from rooms of every place: each is a room of its own, the last of all.
ENTRIES = ("engine.controller.__main__",)
# What an installation can do without, and who alone in the engine may import it: other optional parts, and
# the entries, which put a process together and hand it in. The main rooms know none of it. A task hands in
# what the engine has no entry for.
OPTIONAL: dict[str, set[str]] = {
    # What a base is made of, the table of families, and vLLM's plug-in put other families in.
    "engine.base.converted": {"engine.base.gguf_base"},
    "engine.base.gguf": {"engine.base.converted", "engine.base.gguf_base"},
    "engine.base.gguf_base": {"engine.base.resident"},
    "engine.base.toys": {"engine.base.resident"},
    "engine.base.latent": {"engine.base.families"},
    "engine.backup": {"engine.controller.__main__"},
    "engine.catalog.audit": {"engine.backup", "engine.catalog.opening"},
    "engine.catalog.fleet": {
        "engine.controller.__main__",
        "engine.evaluation",
        "engine.training.several_engines",
    },
    "engine.catalog.suggestions": {"engine.catalog.opening", "engine.serving.gateway.suggesting"},
    "engine.controller.upkeep": {"engine.controller.__main__"},
    "engine.evaluation": {"engine.controller.__main__"},
    "engine.integrations": {"engine.controller.__main__"},
    "engine.metering": {
        "engine.serving.assembly",
        "engine.serving.gateway.meter",
    },
    "engine.notifications": {"engine.controller.__main__", "engine.integrations"},
    # Plans for other models than this base, and for many engines: only commands ask for them.
    "engine.planning.adapters": set(),
    "engine.planning.fleet": set(),
    "engine.publishing.foreign": {"engine.training.service.app"},
    "engine.report": {"engine.controller.__main__"},
    "engine.serving.gateway.membership": {"engine.serving.assembly"},
    "engine.serving.gateway.meter": {"engine.serving.assembly"},
    "engine.serving.gateway.host_tier_upkeep": {"engine.serving.assembly"},
    "engine.serving.gateway.promised_waits": {"engine.serving.assembly"},
    "engine.serving.gateway.suggesting": {"engine.serving.assembly"},
    "engine.serving.worker.mla_cpu": {"engine.serving.vllm_plugin.plugin"},
    "engine.training.model.experts": {"engine.training.service.app"},
    "engine.training.model.ranks": {"engine.training.model.sharded", "engine.training.service.app"},
    "engine.training.model.sharded": {"engine.training.service.app"},
    "engine.training.several_engines": set(),
    "kernels.latent": {"engine.serving.worker.mla_cpu"},
}


@dataclass(frozen=True)
class Import:
    """`source` imports the module `target`: when it is loaded, in a function, or for types alone."""

    source: str
    target: str
    line: int
    deferred: bool
    for_types: bool


@dataclass
class ImportGraph:
    """The modules of a checkout by dotted name, and their imports of each other and of libraries."""

    root: Path
    modules: dict[str, Path] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    libraries: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for package in PACKAGES:
            for path in sorted((self.root / package).rglob("*.py")):
                parts = path.relative_to(self.root).with_suffix("").parts
                self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        for name, path in self.modules.items():
            self._read(name, ast.parse(path.read_text()))

    def _read(self, name: str, tree: ast.Module) -> None:
        libraries = self.libraries[name] = set()
        for node, deferred, for_types in _nodes(tree):
            for target in _targets(node, self.modules):
                if target in self.modules:
                    self.imports.append(Import(name, target, node.lineno, deferred, for_types))
                elif not (deferred or for_types):
                    libraries.add(target.partition(".")[0])

    @cached_property
    def loaded(self) -> Mapping[str, frozenset[str]]:
        """The libraries that each module loads, by itself and by what it imports."""
        targets = defaultdict(set)
        for one in self.imports:
            if not (one.deferred or one.for_types):
                targets[one.source].add(one.target)

        def reach(name: str, seen: set[str]) -> set[str]:
            seen.add(name)
            return self.libraries[name].union(*(reach(t, seen) for t in targets[name] if t not in seen))

        return {name: frozenset(reach(name, set())) for name in self.modules}

    @property
    def arrows(self) -> set[tuple[str, str]]:
        """Which room imports from which other one."""
        pairs = {(room_of(one.source), room_of(one.target)) for one in self.imports}
        return {(source, target) for source, target in pairs if source != target}


def room_of(module: str) -> str:
    """Return a module's folder as a dotted name; one at the root of engine/, or an entry, is its own room."""
    if module in ENTRIES:
        return module
    house = next((house for house in HOUSES if module.startswith(f"{house}.")), "")
    parts = module.split(".")
    if house and len(parts) > 3:
        return ".".join(parts[:3])
    return ".".join(parts[:2]) if parts[0] == "engine" else parts[0]


def is_in(module: str, places: Collection[str]) -> bool:
    """Return whether a module is one of these modules, or in one of these rooms."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


def cycle_in(pairs: Collection[tuple[str, str]]) -> list[str]:
    """Return one cycle of these arrows, or nothing when there is none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for source, target in pairs:
        sorter.add(source, target)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _nodes(
    tree: ast.AST, deferred: bool = False, for_types: bool = False
) -> Iterator[tuple[ast.stmt, bool, bool]]:
    """Yield each import with whether it stands in a function, and whether it is for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, deferred, for_types
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        yield from _nodes(node, deferred or inside, for_types or checking)


def _targets(node: ast.stmt, modules: Collection[str]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    assert isinstance(node, ast.ImportFrom)
    assert node.module
    named = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {full if full in modules else node.module for full in named.values()}


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    graph = ImportGraph(root)
    lines = sum(len(path.read_text().splitlines()) for path in graph.modules.values())
    rooms = {room_of(name) for name in graph.modules}
    module_arrows = {(one.source, one.target) for one in graph.imports}
    deferred = sum(one.deferred for one in graph.imports)
    print(f"{len(graph.modules)} modules, {lines} lines")
    print(f"{len(rooms)} rooms, {len(graph.arrows)} arrows between them")
    print(f"{len(module_arrows)} imports, {deferred} statements deferred")
    print(f"a cycle of modules: {cycle_in(module_arrows) or 'none'}")
    print(f"a cycle of rooms: {cycle_in(graph.arrows) or 'none'}")


if __name__ == "__main__":
    main()
