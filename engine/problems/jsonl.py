"""A person's own problems: one JSON object a line, `question` (or `prompt`) and `answer`.

Knows how such a file is imported in bounded memory (checked, freed of duplicates, split for ever by the
hash of each question) and read again by line without holding it. An answer that is not text is kept as JSON.
"""

import hashlib
import heapq
import json
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError

HELD_OUT = 0.2
MINIMUM = 8
EVERY = 20_000
Check = Callable[[str], str | None]  # an answer -> what is wrong with it


@dataclass(frozen=True)
class JsonlRow:
    """One problem as it is kept."""

    question: str
    answer: str

    def to_json(self) -> str:
        return json.dumps({"question": self.question, "answer": self.answer}, ensure_ascii=False)


@dataclass(frozen=True)
class Import:
    """What an import found: counts of lines, and the items to freeze, smallest hash first."""

    lines: int
    training: int
    held_out: int
    duplicates: int
    frozen: tuple[JsonlRow, ...]
    digest: str


def prompt_hash(question: str) -> bytes:
    """Return 16 bytes that name a question, whatever its case and white space."""
    return hashlib.sha256(" ".join(question.casefold().split()).encode()).digest()[:16]


def _exactly(question: str) -> bytes:
    return hashlib.sha256(question.strip().encode()).digest()[:16]


def is_held_out(digest: bytes) -> bool:
    """Say whether a question is never trained on; it follows from the question alone, for ever."""
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT


def import_file(
    source: Path,
    training: Path,
    items: int,
    check: Check = lambda answer: None,
    on_line: Callable[[int], None] = lambda lines: None,
) -> Import:
    """Split `source` into the training file `training` and at most `items` frozen rows.

    Raises `ConfigError` with file and line for what cannot be read, contradicts an earlier line, or has
    an answer that `check` refuses; also when either side would be left with fewer than MINIMUM rows.
    """
    smallest: list[tuple[int, int, JsonlRow]] = []
    lines = kept = held_out = duplicates = 0
    state = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=training.parent) as scratch, training.open("wb") as output:
        seen = _SeenQuestions(Path(scratch) / "seen.db", source)
        for number, row in read_rows(source, check):
            lines = number
            if number % EVERY == 0:
                on_line(number)
            digest = prompt_hash(row.question)
            # The same up to case may be another question; it is on the same side of the split, though.
            if not seen.add(_exactly(row.question), number, row.answer):
                duplicates += 1
            elif is_held_out(digest):
                held_out += 1
                # A heap of the largest of the smallest: the negated hash comes first.
                heapq.heappush(smallest, (-int.from_bytes(digest, "big"), number, row))
                if len(smallest) > items:
                    heapq.heappop(smallest)
            else:
                kept += 1
                line = row.to_json().encode() + b"\n"
                state.update(line)
                output.write(line)
        seen.close()
    on_line(lines)
    if min(kept, len(smallest)) < MINIMUM:
        raise ConfigError(
            f"{source} gives {kept} training and {len(smallest)} frozen items; each side needs {MINIMUM}. "
            f"About {HELD_OUT:.0%} of the questions are held out, so bring at least 100 different ones."
        )
    frozen = tuple(row for _, _, row in sorted(smallest, reverse=True))
    return Import(lines, kept, held_out, duplicates, frozen, state.hexdigest())


def read_rows(source: Path, check: Check = lambda answer: None) -> Iterator[tuple[int, JsonlRow]]:
    """Yield (line number, row); `ConfigError` with file and line for what is no problem."""
    if not source.is_file():
        raise ConfigError(f"There is no file {source}.")
    found = False
    with source.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                found = True
                row = _row(line, f"{source}:{number}")
                if fault := check(row.answer):
                    raise ConfigError(f"{source}:{number}: {fault}")
                yield number, row
    if not found:
        raise ConfigError(f"{source} is empty. Give one JSON object a line: question and answer.")


def _row(line: bytes, where: str) -> JsonlRow:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be an object with question and answer, not {type(data).__name__}.")
    question = data.get("question", data.get("prompt"))
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{where} needs a `question` (or `prompt`) that is not empty text.")
    if data.get("answer") is None:
        raise ConfigError(f"{where} needs an `answer`.")
    answer = data["answer"] if isinstance(data["answer"], str) else json.dumps(data["answer"])
    try:
        (question + answer).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half of a character (a lone surrogate); mend the text.") from None
    return JsonlRow(question, answer)


class _SeenQuestions:
    """Which questions came already, on disk: a million of them stay out of memory."""

    def __init__(self, path: Path, source: Path):
        self._source = source
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.execute("PRAGMA journal_mode=OFF")
        table = "CREATE TABLE seen (question BLOB PRIMARY KEY, line INTEGER, answer BLOB) WITHOUT ROWID"
        self._database.execute(table)
        self._database.execute("BEGIN")

    def add(self, question: bytes, line: int, answer: str) -> bool:
        """Say whether a question is new; raises when it came with another answer."""
        digest = hashlib.sha256(answer.encode()).digest()[:16]
        row = "INSERT OR IGNORE INTO seen VALUES (?, ?, ?)"
        if self._database.execute(row, (question, line, digest)).rowcount:
            return True
        query = "SELECT line, answer FROM seen WHERE question = ?"
        first, known = self._database.execute(query, (question,)).fetchone()
        if known != digest:
            raise ConfigError(
                f"{self._source}:{line} contradicts line {first}: the same question has another answer. "
                "Keep one of them."
            )
        return False

    def close(self) -> None:
        self._database.close()


class JsonlFile:
    """The rows of an imported file, read one by one: only where each line begins is held."""

    def __init__(self, path: Path):
        self.path = path
        self._starts, at = array("q"), 0
        with path.open("rb") as handle:
            for line in handle:
                if line.strip():
                    self._starts.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> JsonlRow:
        with self.path.open("rb") as handle:
            handle.seek(self._starts[number])
            return _row(handle.readline(), f"{self.path}:{number + 1}")


@cache
def open_jsonl(path: Path, _changed_ns: int) -> JsonlFile:
    return JsonlFile(path)


def rows_of(path: Path) -> JsonlFile:
    """Return the rows of a file, as they are now."""
    if not path.is_file():
        raise ConfigError(f"There is no data at {path}; create the policy again from its file.")
    return open_jsonl(path, path.stat().st_mtime_ns)


@cache
def order(count: int, seed: int, epoch: int) -> Any:
    """Return the order in which `count` rows are drawn in an epoch; it follows from the arguments."""
    return np.random.default_rng([seed, epoch]).permutation(count)
