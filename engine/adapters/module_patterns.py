"""peft's `rank_pattern` and `alpha_pattern`: values by module, chosen by regular expressions.

The expressions come from strangers, and `re` takes exponential time for some. Here an expression maps sets of
positions in a module's path to sets of positions, so its time is bounded by their lengths.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

# Python's own parser of regular expressions; it has no public name since 3.11.
from re import _parser  # type: ignore[attr-defined]
from typing import Any

# A path alone, as most tools write it, is looked up and not searched.
LITERAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")
# A pattern's most letters, and how deep its repetitions may be nested: each level costs a factor of time.
LONGEST, DEEPEST = 300, 2
Ends = Callable[[str, frozenset[int]], frozenset[int]]


class Patterns:
    """Values by module; the first pattern that covers the end of a module's path counts."""

    def __init__(self, values: Mapping[str, Any]):
        """Compile the patterns; `ValueError` for one that is not a plain regular expression."""
        self.paths: dict[str, tuple[int, Any]] = {}
        self.searched: list[tuple[int, Ends, Any]] = []
        for i, (pattern, value) in enumerate(values.items()):
            # peft wraps a linear module's weight under the name of the parameter.
            plain = pattern.removesuffix(".weight")
            anchored, bare = plain.startswith("^"), plain.strip("^$").replace("\\.", ".")
            if LITERAL.issuperset(bare):
                self.paths.setdefault("^" * anchored + bare, (i, value))
            else:
                self.searched.append((i, compiled(plain), value))

    def get(self, module: str, default: Any) -> Any:
        """Return the value for a module: a pattern covers the end of its path, from a dot or the start."""
        parts = module.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts))]
        matches = [self.paths[end] for end in ("^" + module, *ends) if end in self.paths]
        starts = frozenset([0, *(i + 1 for i, letter in enumerate(module) if letter == ".")])
        matches += [(i, value) for i, search, value in self.searched if len(module) in search(module, starts)]
        return min(matches, key=lambda item: item[0])[1] if matches else default


def compiled(pattern: str) -> Ends:
    """Return a function from (text, starts) to the positions where matches of `pattern` end.

    Raises `ValueError` for an expression that is malformed, long, or looks around or back.
    """
    if len(pattern) > LONGEST:
        raise ValueError(f"it has {len(pattern)} characters, over {LONGEST}")
    try:
        return _sequence(_parser.parse(pattern))
    except (_parser.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _sequence(items: Iterable[tuple[Any, Any]], depth: int = 0) -> Ends:
    runs = groupby(((str(kind), value) for kind, value in items), key=lambda item: item[0] == "LITERAL")
    steps: list[Ends] = []
    for are_letters, run in runs:
        if are_letters:
            steps.append(_word("".join(chr(value) for _, value in run)))
        else:
            steps += [_step(kind, value, depth) for kind, value in run]

    def search(text: str, starts: frozenset[int]) -> frozenset[int]:
        for step in steps:
            starts = step(text, starts)
        return starts

    return search


def _word(word: str) -> Ends:
    return lambda text, starts: frozenset(i + len(word) for i in starts if text.startswith(word, i))


def _step(kind: str, value: Any, depth: int) -> Ends:
    match kind:
        case "SUBPATTERN":
            _, added, removed, inner = value
            if added or removed:
                raise ValueError("it changes the flags of a group")
            return _sequence(inner, depth)
        case "BRANCH":
            branches = [_sequence(branch, depth) for branch in value[1]]
            return lambda text, starts: frozenset().union(*(branch(text, starts) for branch in branches))
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, inner = value
            if depth == DEEPEST:
                raise ValueError(f"it repeats what repeats, more than {DEEPEST} deep")
            if [str(kind) for kind, _ in inner] == ["ANY"] and int(least) == 0 and int(most) > LONGEST:
                return lambda text, starts: frozenset(
                    range(min(starts, default=len(text) + 1), len(text) + 1)
                )
            return _repeat(int(least), int(most), _sequence(inner, depth + 1))
        case "AT" if str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return lambda text, starts: starts & {0}
        case "AT" if str(value) in ("AT_END", "AT_END_STRING"):
            return lambda text, starts: starts & {len(text)}
    fits = _letter(kind, value)
    return lambda text, starts: frozenset(i + 1 for i in starts if i < len(text) and fits(text[i]))


def _repeat(least: int, most: int, inner: Ends) -> Ends:
    def search(text: str, starts: frozenset[int]) -> frozenset[int]:
        # Positions only grow, so what more than len(text) + 1 rounds reach is reached by then.
        rounds = len(text) + 1
        now, reached = starts, starts if least == 0 else frozenset()
        for i in range(1, min(most, least + rounds) + 1):
            before, now = now, inner(text, now)
            if i >= least:
                reached |= now
            if not now or (now == before and i < least):
                return reached | now
        return reached

    return search


def _letter(kind: str, value: Any) -> Callable[[str], bool]:
    match kind:
        case "LITERAL":
            return lambda letter: ord(letter) == value
        case "NOT_LITERAL":
            return lambda letter: ord(letter) != value
        case "ANY":
            return lambda letter: letter != "\n"
        case "RANGE":
            low, high = value
            return lambda letter: low <= ord(letter) <= high
        case "CATEGORY" if str(value) in CATEGORIES:
            return CATEGORIES[str(value)]
        case "IN":
            negated = bool(value) and str(value[0][0]) == "NEGATE"
            fits = [_letter(str(one), what) for one, what in value[negated:]]
            return lambda letter: any(fit(letter) for fit in fits) != negated
    raise ValueError(f"it uses {kind.lower().replace('_', ' ')}")


CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda letter: not letter.isdecimal(),
    "CATEGORY_WORD": lambda letter: letter.isalnum() or letter == "_",
    "CATEGORY_NOT_WORD": lambda letter: not (letter.isalnum() or letter == "_"),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda letter: not letter.isspace(),
}
