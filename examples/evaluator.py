"""An evaluator that works a sum out of the question: 1 for an answer that ends with it, else 0.

    python examples/evaluator.py

It is named in `params.yaml`, and scores users' live answers while a release runs:

    releases:
      arithmetic:
        evaluators:
          sums: {kind: "python:examples.evaluator:sums", decides: both}
"""

import re
from typing import Any

SUM = re.compile(r"(\d+) \+ (\d+)")


def sums(question: str, answers: list[str], context: dict[str, Any]) -> list[float]:
    """Return a score in [0, 1] for each answer; `context` has the `messages` before them."""
    terms = SUM.search(question)
    if terms is None:
        raise ValueError("the question has no sum")
    expected = str(int(terms[1]) + int(terms[2]))
    return [float(answer.split()[-1:] == [expected]) for answer in answers]


if __name__ == "__main__":
    print(sums("What is 12 + 7?", ["19", "The answer is 91", ""], {}))
