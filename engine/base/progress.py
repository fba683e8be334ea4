"""Progress of a base's build or conversion: a callback of (step, steps, note)."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
