"""A user's problems: imported from any file that `readers` takes, stored as JSON lines.

An import runs in bounded memory: it checks the rows, removes duplicates, and splits them permanently by the
hash of each question. `JsonlFile` reads rows by line without holding the file. An answer that is not text is
kept as JSON.
"""

import hashlib
import heapq
import json
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.problems.readers import json_line, read_file
from engine.problems.rows import JsonlRow, row_of, stored_item, unused_columns

HELD_OUT = 0.2
# Of all questions: neither trained on nor frozen, but for validation while a policy is trained.
VALIDATED = 0.05
MINIMUM = 8
EVERY = 20_000
# Columns that an import names, so that rows with keys of their own take no memory.
NOTED = 20
Check = Callable[[str], str | None]  # an answer -> its fault, or None


@dataclass(frozen=True)
class Import:
    """The result of an import: counts of lines, and the frozen items, smallest hash first.

    `unused` are columns of the file that no problem has.
    """

    lines: int
    training: int
    held_out: int
    duplicates: int
    frozen: tuple[JsonlRow, ...]
    digest: str
    unused: tuple[str, ...]


def prompt_hash(question: str) -> bytes:
    """Return a 16-byte hash of a question, ignoring case and white space."""
    return hashlib.sha256(" ".join(question.casefold().split()).encode()).digest()[:16]


def _exactly(row: JsonlRow, with_answers: bool) -> bytes:
    # A chat's system message tells it from another one, though not for the split.
    asked = json.dumps(row.messages) if row.messages else row.question.strip()
    if with_answers:
        asked = json.dumps([asked, row.answer, row.rejected])
    return hashlib.sha256(asked.encode()).digest()[:16]


def split_hash(row: JsonlRow, are_examples: bool = False) -> bytes:
    """Return the hash that a row is split by: of its question, of an example chat's first one.

    Every answer of an example is learned, so chats that begin alike stay on one side.
    """
    asked = [one["content"] for one in row.messages if one["role"] == "user"]
    return prompt_hash(asked[0] if are_examples and asked else row.question)


def is_held_out(digest: bytes, share: float = HELD_OUT) -> bool:
    """Say whether a question is held out from training, which depends on the question alone."""
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def import_file(
    source: Path,
    training: Path,
    items: int,
    check: Check = lambda answer: None,
    on_line: Callable[[int], None] = lambda lines: None,
    verifier: str = "",
    on_row: Callable[[int, JsonlRow], None] = lambda number, row: None,
    validation: Path | None = None,
) -> Import:
    """Split `source` into the training file `training` and at most `items` frozen rows.

    With `validation`, a file for a twentieth of the questions, rows are examples: a question may have several
    answers, which stay on one side.

    Raises `ConfigError` with file and line for a row that is invalid, contradicts an earlier line, or has an
    answer that `check` or the verifier refuses, and when either side would have fewer than MINIMUM rows.
    """
    smallest: list[tuple[int, int, JsonlRow]] = []
    lines = kept = held_out = duplicates = 0
    unused: set[str] = set()
    state = hashlib.sha256()

    def note(columns: set[str]) -> None:
        if len(unused) < NOTED:
            unused.update(columns)

    with (
        tempfile.TemporaryDirectory(dir=training.parent) as scratch,
        training.open("wb") as output,
        validation.open("wb") if validation else nullcontext() as validated,
    ):
        seen = _SeenQuestions(Path(scratch) / "seen.db", source)
        for number, row in read_rows(source, check, verifier, note):
            lines += 1
            if lines % EVERY == 0:
                on_line(lines)
            on_row(number, row)
            digest = split_hash(row, validation is not None)
            # Questions that differ only in case are different, but on the same side of the split.
            if not seen.add(_exactly(row, validation is not None), number, row.answer):
                duplicates += 1
            elif is_held_out(digest):
                held_out += 1
                # A max-heap of the smallest hashes, by negation.
                heapq.heappush(smallest, (-int.from_bytes(digest, "big"), number, row))
                if len(smallest) > items:
                    heapq.heappop(smallest)
            elif validated and is_held_out(digest, HELD_OUT + VALIDATED):
                line = row.to_json().encode() + b"\n"
                state.update(line)
                validated.write(line)
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
            f"About {HELD_OUT:.0%} of the questions are held out. Provide at least 100 different ones; a "
            "chat's system message makes no other question."
        )
    frozen = tuple(row for _, _, row in sorted(smallest, reverse=True))
    return Import(lines, kept, held_out, duplicates, frozen, state.hexdigest(), tuple(sorted(unused)))


def read_rows(
    source: Path,
    check: Check = lambda answer: None,
    verifier: str = "",
    on_unused: Callable[[set[str]], object] = lambda columns: None,
) -> Iterator[tuple[int, JsonlRow]]:
    """Yield (line number, row); `ConfigError` with file and line for an invalid row."""
    for number, data in read_file(source):
        row = row_of(data, f"{source}:{number}", verifier)
        on_unused(unused_columns(data, row))
        if fault := check(row.answer):
            raise ConfigError(f"{source}:{number}: {fault}")
        yield number, row


class _SeenQuestions:
    """The set of questions seen so far, on disk to keep a million of them out of memory."""

    def __init__(self, path: Path, source: Path):
        self._source = source
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.execute("PRAGMA journal_mode=OFF")
        table = "CREATE TABLE seen (question BLOB PRIMARY KEY, line INTEGER, answer BLOB) WITHOUT ROWID"
        self._database.execute(table)
        self._database.execute("BEGIN")

    def add(self, question: bytes, line: int, answer: str) -> bool:
        """Say whether a question is new; `ConfigError` when it was seen with another answer."""
        digest = hashlib.sha256(answer.encode()).digest()[:16]
        row = "INSERT OR IGNORE INTO seen VALUES (?, ?, ?)"
        if self._database.execute(row, (question, line, digest)).rowcount:
            return True
        query = "SELECT line, answer FROM seen WHERE question = ?"
        first, known = self._database.execute(query, (question,)).fetchone()
        if known != digest:
            raise ConfigError(
                f"{self._source}:{line} contradicts line {first}: the same question has another answer. "
                "Keep one of the two lines."
            )
        return False

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class JsonlFile:
    """The rows of an imported file, read one by one; only the line offsets are in memory."""

    def __init__(self, path: Path, parse: Callable[[Any, str], JsonlRow] = row_of):
        self.path, self._parse = path, parse
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
            where = f"{self.path}:{number + 1}"
            return self._parse(json_line(handle.readline(), where), where)


@cache
def open_jsonl(path: Path, are_frozen: bool, _changed_ns: int) -> JsonlFile:
    """Open a file's rows; the modification time in the key makes a changed file a new entry."""
    return JsonlFile(path, stored_item if are_frozen else row_of)


def rows_of(path: Path, are_frozen: bool = False) -> JsonlFile:
    """Return the rows of a file in its current version, or its frozen items."""
    if not path.is_file():
        raise ConfigError(f"There is no data at {path}. Create the policy again from its file.")
    return open_jsonl(path, are_frozen, path.stat().st_mtime_ns)


@cache
def order(count: int, seed: int, epoch: int) -> Any:
    """Return the permutation of `count` rows in an epoch; deterministic in its arguments."""
    return np.random.default_rng([seed, epoch]).permutation(count)
