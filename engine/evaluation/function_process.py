"""The process of an evaluator's function: `python -m engine.evaluation.function_process KIND DESCRIPTOR`.

Its messages are those of a verifier's process; what it is asked is (question, answers, context).
"""

from collections.abc import Callable, Iterable
from typing import Any

from engine.problems.verifier_process import serve
from engine.problems.verifiers import number
from engine.settings.own_functions import load_own


def load(kind: str) -> Callable[..., Any]:
    """Return an evaluator's function by name; `ConfigError` when there is none."""
    return load_own("evaluator", kind, "question, answers, context")


def scores_of(values: Any) -> tuple[list[float], str | None]:
    """Return the scores that a function has returned, and its fault or None."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return [], f"returned {type(values).__name__}"
    read = [number(value) for value in values]
    fault = next((fault for _, fault in read if fault), None)
    return [score for score, _ in read], fault


if __name__ == "__main__":
    serve(load, scores_of)
