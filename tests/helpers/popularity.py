"""Popularity mixes: which adapter each row of a batch has."""

MIXES = {
    "identical": [3] * 33,
    "distinct": list(range(8)),
    "reversed": list(range(7, -1, -1)),
    "uniform": [row * 5 % 8 for row in range(64)],
    "zipf": [0] * 40 + [1] * 13 + [2] * 5 + [7] * 2 + [5],
    "with base rows": [-1, 2, -1, 2, 7, -1, 0, 0, -1],
    "one row": [4],
    "one long, many short": [1] * 200 + [2, 3, 4, 5],
}
