"""Families of problems with settings that a small base can be taught in a minute.

A family is a `reasoning-gym` generator, its settings, and the function that asks its entries in a few tokens.
Each question belongs to a segment, the kind of query: some are harder than others, and a revision may win in
one and lose in another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

# Gates as one character of ASCII each.
GATES = str.maketrans("⊕↑↓'", "^|_~")


class Posed(NamedTuple):
    """An entry as it is asked; `rejected` is the wrong one of two answers."""

    question: str
    answer: str
    segment: str
    rejected: str = ""


@dataclass(frozen=True)
class ProblemFamily:
    """A `reasoning-gym` generator, its settings, and the function from its entry to what is asked."""

    dataset: str
    settings: dict[str, Any]
    pose: Callable[[dict[str, Any]], Posed]


def _chain(entry: dict[str, Any]) -> Posed:
    expression = entry["metadata"]["expression"]
    operators = " ".join(sign for sign in expression if sign in "+-")
    return Posed(f"sum {expression}", entry["answer"], operators)


def _equation(entry: dict[str, Any]) -> Posed:
    equation = entry["metadata"]["equation"].replace(entry["metadata"]["variable"], "x")
    left, _ = equation.split(" = ")
    signs = {"+": "plus", "-": "minus"}
    kind = next((kind for sign, kind in signs.items() if sign in left), "times")
    return Posed(f"solve {equation}", entry["answer"], kind)


def _bits(entry: dict[str, Any]) -> Posed:
    binary = entry["metadata"]["binary"]
    return Posed(f"ones {binary}", entry["answer"], f"{max(12, len(binary))} digits")


def _gcd(entry: dict[str, Any]) -> Posed:
    numbers, result = entry["metadata"]["numbers"], entry["metadata"]["result"]
    segment = "coprime" if result == 1 else "multiple" if result == min(numbers) else "other"
    return Posed("gcd " + " ".join(map(str, numbers)), str(result), segment)


def _rotation(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    degrees = meta["num_rotations"] % 4 * 90
    return Posed(f"rotate {degrees}: {_grid(meta['matrix'])}", _grid(meta["solution"]), f"{degrees} degrees")


def _spiral(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    return Posed(f"spiral {_grid(meta['matrix'])}", "".join(map(str, meta["solution"])), f"{meta['n']} rows")


def _grid(rows: Any) -> str:
    return "/".join("".join(map(str, row)) for row in rows)


def _sudoku(entry: dict[str, Any]) -> Posed:
    puzzle, solution = entry["metadata"]["puzzle"], entry["metadata"]["solution"]
    cells = zip(chain(*puzzle), chain(*solution), strict=True)
    answer = "".join(str(solved) for shown, solved in cells if not shown)
    return Posed(f"sudoku {_grid(puzzle)}", answer, f"{len(answer)} empty")


def _island(entry: dict[str, Any]) -> Posed:
    grid = entry["metadata"]["grid"]
    return Posed(f"island {_grid(grid)}", entry["answer"], f"{len(grid)}x{len(grid[0])}")


def _filter(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    limit, *numbers = (round(float(one)) for one in (meta["filter_value"], *meta["original_numbers"]))
    kept = " ".join(str(round(float(one))) for one in meta["result"]) or "none"
    operation = meta["operation"].replace("_", " ")
    return Posed(f"{operation} {limit}: {' '.join(map(str, numbers))}", kept, operation)


def _distances(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    return Posed(f"far {_grid(meta['matrix'])}", _grid(meta["solution"]), f"{meta['n']} rows")


def _circuit(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    values = {ord(name): str(value) for name, value in meta["assignments"].items()}
    question = meta["expression"].translate(values).translate(GATES)
    answer = entry["answer"]
    return Posed(f"gate {question}", answer, meta["final_gate"].lower(), str(1 - int(answer)))


def _alternation(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    return Posed(f"swaps {meta['string']}", entry["answer"], "solvable" if meta["solvable"] else "unsolvable")


def _pool(entry: dict[str, Any]) -> Posed:
    meta = entry["metadata"]
    pooled = " ".join(f"{round(cell, 2):g}" for row in meta["solution"] for cell in row)
    segment = f"{meta['pool_type']} of {meta['cols']} columns"
    return Posed(f"{meta['pool_type']} {_grid(meta['matrix'])}", pooled, segment)


def _within(**ranges: tuple[int, int]) -> dict[str, Any]:
    """Return the generators' settings of a least and a greatest value."""
    ends = {"min": 0, "max": 1}
    return {f"{end}_{name}": pair[place] for name, pair in ranges.items() for end, place in ends.items()}


ISLAND = _within(rows=(3, 4), cols=(3, 4), num_islands=(0, 3), island_size=(0, 5))
FILTER = _within(numbers=(3, 4), decimals=(0, 0), value=(0, 9))
FAMILIES: dict[str, ProblemFamily] = {
    "chain": ProblemFamily("chain_sum", _within(terms=(2, 3), digits=(1, 1)), _chain),
    "equations": ProblemFamily("simple_equations", _within(terms=(2, 3), value=(1, 9)), _equation),
    "gcd": ProblemFamily("gcd", _within(value=(1, 60)), _gcd),
    "bits": ProblemFamily("count_bits", _within(n=(1024, 65_535)), _bits),
    "alternation": ProblemFamily("binary_alternation", _within(n=(7, 11)), _alternation),
    "filter": ProblemFamily("number_filtering", FILTER, _filter),
    "circuit": ProblemFamily("circuit_logic", _within(terms=(2, 3), inputs=(2, 2)), _circuit),
    "island": ProblemFamily("largest_island", ISLAND, _island),
    "distances": ProblemFamily("binary_matrix", {**_within(n=(3, 4)), "p_zero": 0.4}, _distances),
    "rotation": ProblemFamily("rotate_matrix", _within(n=(2, 3), rotations=(0, 3)), _rotation),
    "spiral": ProblemFamily("spiral_matrix", _within(n=(2, 3)), _spiral),
    "pool": ProblemFamily("pool_matrix", _within(rows=(2, 2), cols=(2, 4), pool_size=(2, 2)), _pool),
    "sudoku": ProblemFamily("mini_sudoku", _within(empty=(1, 2)), _sudoku),
}
