"""The files with which somebody begins outside a checkout: settings, an example's data, a page to follow."""

import json
import random
from pathlib import Path

from engine.errors import ConfigError, Conflict

FILES = Path(__file__).with_name("starter_files")
PHRASINGS = ("{} =", "Calculate {} for me.", "What is {}?", "Find {}.")
ROWS = 2000


def write_starter(directory: Path) -> list[Path]:
    """Write the files into a directory, which is made; return them.

    Raises `Conflict` if one of them is there already, `ConfigError` if there can be no such directory.
    """
    texts = {path.name: path.read_text() for path in sorted(FILES.iterdir())} | {"sums.jsonl": sums()}
    try:
        if there := [name for name in texts if (directory / name).exists()]:
            raise Conflict(
                f"{directory} has a file {there[0]} already, and nothing is overwritten. Name another "
                "directory."
            )
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror}. Name another directory."
        ) from None
    return [directory / name for name in texts]


def sums() -> str:
    """Return sums of two numbers in words, each with its answer, as JSON lines."""
    draw = random.Random(5)
    rows: dict[tuple[int, int], dict[str, str]] = {}
    while len(rows) < ROWS:
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        rows[a, b] = {"question": draw.choice(PHRASINGS).format(f"{a} + {b}"), "answer": str(a + b)}
    return "".join(json.dumps(row) + "\n" for row in rows.values())
