"""Rows of numbers that are close to others."""


def close(left, right, tolerance=2e-5) -> bool:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return max(abs(a - b) for a, b in pairs) < tolerance
