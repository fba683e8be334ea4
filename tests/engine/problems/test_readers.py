"""Files and rows that people have: every kind gives the same problems, or says what was seen."""

import csv
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.problems.jsonl import import_file, read_rows
from engine.problems.readers import CHUNK, read_file
from engine.problems.rows import JsonlRow, row_of, unused_columns
from tests.helpers.measured_work import peak_of_reading
from tests.helpers.own_process import in_own_process

# Without the time of the day: its bytes are a part of a test's name.
zipped = partial(gzip.compress, mtime=0)

ROWS = [{"question": f'What is {n}, or "{n};\n{n}"?', "answer": f"{n:03}"} for n in range(120)]


def lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(separator: str, encoding: str = "utf-8") -> Callable[[Path, list[dict]], None]:
    def write(path: Path, rows: list[dict]) -> None:
        with path.open("w", newline="", encoding=encoding) as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
            writer.writeheader()
            writer.writerows(rows)

    return write


def parquet(path: Path, rows: list[dict]) -> None:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pylist(rows), path)


def saved(path: Path, rows: list[dict]) -> None:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(path))


def packed(path: Path, rows: list[dict]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.csv", table(",")),
        ("excel.csv", table(";", "utf-8-sig")),
        ("a.tsv", table("\t")),
        ("a.json", lambda path, rows: path.write_text(json.dumps(rows))),
        ("pretty.jsonl", lambda path, rows: path.write_text("\ufeff" + json.dumps(rows, indent=2))),
        ("a.parquet", parquet),
        ("a.jsonl.gz", packed),
        pytest.param("saved", saved, marks=pytest.mark.long),
    ],
)
def test_every_kind_of_file_gives_the_same_training_rows(tmp_path: Path, name: str, write: Callable) -> None:
    """Quotes, separators and line ends in cells, leading zeros: the digest is that of the JSON lines."""
    lines(tmp_path / "plain.jsonl", ROWS)
    write(tmp_path / name, ROWS)
    known = import_file(tmp_path / "plain.jsonl", tmp_path / "known.jsonl", 50)
    found = import_file(tmp_path / name, tmp_path / "train.jsonl", 50)
    assert found == known
    assert found.training + found.held_out == 120


USER, SYSTEM = {"role": "user", "content": "2 + 2?"}, {"role": "system", "content": "Be terse."}
SAID = {"role": "assistant", "content": "4"}
CHAT = (SYSTEM, USER, SAID, {"role": "user", "content": "And 3 + 3?"})
TURNS = "2 + 2?\n\n4\n\nAnd 3 + 3?"
SHAREGPT = [
    {"from": "system", "value": "Be terse."}, {"from": "human", "value": "2 + 2?"},
    {"from": "gpt", "value": "4"}, {"from": "human", "value": "And 3 + 3?"}, {"from": "gpt", "value": "6"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, SAID]}, JsonlRow("2 + 2?", "4")),
        ({"messages": [SYSTEM, USER, SAID]}, JsonlRow("2 + 2?", "4", (SYSTEM, USER))),
        ({"messages": [*CHAT], "answer": 6}, JsonlRow(TURNS, "6", CHAT)),
        # The column is the answer, and what an assistant said after the question is no prompt.
        ({"messages": [*CHAT, SAID], "answer": "6"}, JsonlRow(TURNS, "6", CHAT)),
        ({"conversations": SHAREGPT}, JsonlRow(TURNS, "6", CHAT)),
        ({"conversations": SHAREGPT[1:], "system": "Be terse."}, JsonlRow(TURNS, "6", CHAT)),
        ({"prompt": [USER], "completion": [SAID]}, JsonlRow("2 + 2?", "4")),
        ({"prompt": "2 + 2?", "completion": "4"}, JsonlRow("2 + 2?", "4")),
        ({"prompt": "first", "messages": [*CHAT, {**SAID, "weight": 1}]}, JsonlRow(TURNS, "4", CHAT)),
        # The union of two schemas, as a table writes it: the columns of the other one are null.
        ({"question": None, "prompt": "q", "answer": "1", "messages": None}, JsonlRow("q", "1")),
        ({"question": None, "answer": None, "messages": [USER, SAID]}, JsonlRow("2 + 2?", "4")),
        # So does one that leaves its lists empty.
        ({"prompt": "q", "completion": "1", "messages": [], "conversations": None}, JsonlRow("q", "1")),
        ({"prompt": "q", "completion": "1", "messages": None, "conversations": []}, JsonlRow("q", "1")),
        ({"question": [], "prompt": "q", "answer": "1"}, JsonlRow("q", "1")),
        ({"messages": [], "conversations": SHAREGPT}, JsonlRow(TURNS, "6", CHAT)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "2?"}]}, SAID | {"name": None}]},
         JsonlRow("2?", "4")),
        # As before.
        ({"question": "q", "answer": [1.5, True], "messages": [USER]}, JsonlRow("q", "[1.5, true]")),
    ],
)  # fmt: skip
def test_rows_of_each_schema(row: dict, expected: JsonlRow) -> None:
    assert row_of(row, "d:1", "exact") == expected
    assert row_of(json.loads(expected.to_json()), "d:1") == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "answer": "1", "messages": [*CHAT]}, {"messages"}),
        ({"prompt": "q", "answer": "1", "conversations": SHAREGPT, "system": "Be terse."},
         {"conversations", "system"}),
        ({"messages": [USER, SAID], "conversations": SHAREGPT}, {"conversations"}),
        ({"messages": [USER, SAID], "conversations": []}, set()),
        ({"conversations": SHAREGPT[1:], "system": "Be terse."}, set()),
        ({"prompt": "first", "completion": "1", "messages": [*CHAT, SAID]}, set()),
        ({"question": None, "prompt": "q", "answer": "1", "messages": []}, set()),
    ],
)  # fmt: skip
def test_a_chat_that_is_not_the_prompt_is_an_unused_column(row: dict, expected: set[str]) -> None:
    assert unused_columns(row, row_of(row, "d:1", "exact")) == expected


@pytest.mark.parametrize(
    ("answer", "verifier", "expected"),
    [
        ("3 + 4 = <<3+4=7>>7\n#### 7", "numeric", "7"),
        ("Many.\n#### 1,234,567 ", "numeric", "1234567"),
        ("#### -3.5", "exact", "-3.5"),
        ("So $12.\n#### $12", "numeric", "12"),
        ("#### 7", "python:a:b", "#### 7"),
        ("#### Heading\ntext", "exact", "#### Heading\ntext"),
    ],
)
def test_a_worked_answer_counts_as_its_last_line(answer: str, verifier: str, expected: str) -> None:
    assert row_of({"question": "q", "answer": answer}, "d:1", verifier).answer == expected


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": "user: 2?", "answer": "4"}, "str 'user: 2\\?', not a list"),
        ({"messages": {}, "answer": "4"}, "not a list"),
        ({"messages": [], "answer": "4"}, "needs a `question`"),
        ({"prompt": [], "completion": [SAID]}, "needs a `question`"),
        ({"messages": ["2?"], "answer": "4"}, "not an object"),
        ({"messages": [USER]}, "needs an `answer`.*`messages`"),
        ({"messages": [SAID], "answer": "4"}, "no message of the user"),
        ({"messages": [USER, SAID, SAID]}, "no message of the user"),
        ({"messages": [USER, SYSTEM, USER], "answer": "4"}, "system message after"),
        ({"messages": [USER, {"role": "tool", "content": "4"}], "answer": "4"}, "message of 'tool'"),
        ({"messages": [USER, {**SAID, "tool_calls": [{"id": 1}]}], "answer": "4"}, "`tool_calls`"),
        ({"messages": [USER], "tools": [{"name": "add"}], "answer": "4"}, "`tools`"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}], "answer": "4"}, "without text"),
        ({"messages": [{**USER, "content": " "}], "answer": "4"}, "without text"),
        ({"instruction": "q", "output": "1"}, "It has `instruction`, `output`.*rename_columns"),
        ({"question": "q", "answer": float("nan")}, "nan is what a table writes"),
        ({"question": "q", "answer": float("-inf")}, "-inf is what a table writes"),
        ({"question": "q", "answer": b"4"}, "`answer` that is bytes"),
        ({"messages": [{"role": "user", "content": "\ud800"}], "answer": "4"}, "half a character"),
    ],
)
def test_rows_that_are_no_problem_say_what_was_seen(row: dict, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^d:1 .*{fault}"):
        row_of(row, "d:1", "exact")


@pytest.mark.parametrize("row", [{"messages": [USER, SAID]}, {"prompt": "2?", "completion": "4"}])
def test_what_an_assistant_said_is_no_rule(row: dict) -> None:
    with pytest.raises(ConfigError, match="regex takes a rule"):
        row_of(row, "d:1", "regex")
    assert row_of({**row, "answer": r"\d"}, "d:1", "regex").answer == r"\d"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("d.zip", b"PK\x03\x04....", "zip archive"),
        ("d.jsonl", '{"question": "q"}'.encode("utf-16"), "UTF-16.*iconv"),
        ("d.jsonl.zst", b"\x28\xb5\x2f\xfd....", "zstd"),
        ("d.jsonl.gz", zipped(b'{"question": "q", "answer": "1"}\n' * 9)[:-9], "cannot be unpacked"),
        ("d.jsonl.gz", zipped(b"x" * 999)[:12] + b"\xff" * 99, "cannot be unpacked"),
        ("d.parquet", b"PAR1....", "not valid Parquet"),
        ("d.csv", b"Frage;Antwort\n1;2\n", "'Frage, Antwort'|'Frage;Antwort'"),
        ("d.csv", b"question,answer,answer\n1,2,3\n", "`answer` twice"),
        ("d.csv", b'question,answer\n"a\nb",1\nc,2,3\n', r"d\.csv:4 has 3 cells under 2"),
        ("d.csv", b'question,answer\na,1\n"b,2\n', r"d\.csv:3 is not valid CSV"),
        ("d.csv", "question,answer\né,1\n".encode("cp1252"), "not UTF-8.*iconv"),
        ("d.csv", b"question,answer\na,\n", r"d\.csv:2 needs an `answer`"),
        ("d.csv", b"question,answer\n", "is empty"),
        ("d.json", b'[{"question": "q", "answer": "1"}, {"question": }]', "Element 2 .*not valid JSON"),
        ("d.json", b'[{"question": "q", "answer": "1"} {"question": "r"}]', "Element 2 .*between"),
        ("d.json", b'[{"question": "q", "answer": "1"}', "Element 2 .*not valid JSON"),
        ("d.json", b'["q"]', r"d\.json:1 must be an object"),
        ("d.json", b"[]", "is empty"),
        ("d.json", b'[{"question": "q", "answer": "1"}]\n[{"question": "r", "answer": "2"}]',
         r"after the `\]` .*1 element.*'\[\{\"question\": \"r\".*one array, or one object on each line"),
        ("d.json", b'[{"question": "q", "answer": 1}]\n{"question": "r", "answer": "2"}', r"after the `\]` "),
        ("d.json", b'[]\n{"question": "r", "answer": "2"}', r"after the `\]` .*0 elements"),
        ("d.json", b'[{"question": "q", "answer": "1"}]' + b" " * 3 * CHUNK + b"]", r"after the `\]`.*'\]'"),
        # The bracket is the last character of a piece.
        ("d.json", b'[{"question": "q", "answer": "1"}'.ljust(CHUNK - 1) + b"]\n[7]", r"after .*'\[7\]'"),
        ("d.json.gz", zipped(b'[{"question": "q", "answer": "1"}] 7'), r"after the `\]`.*'7'"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_say_why(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=fault):
        list(read_rows(tmp_path / name))


def test_directories_that_are_no_dataset_say_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(ConfigError, match=r"README\.md.*save_to_disk"):
        list(read_file(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"train, test.*/train"):
        list(read_file(tmp_path))


def test_numbers_of_a_table_are_read_as_people_write_them(tmp_path: Path) -> None:
    """A column of whole numbers with a gap is one of floats; a missing one is refused by its row."""
    parquet(tmp_path / "d.parquet", [{"question": "a", "answer": answer} for answer in (7.0, 7.5, None)])
    rows = read_rows(tmp_path / "d.parquet")
    assert [next(rows)[1].answer for _ in range(2)] == ["7", "7.5"]
    with pytest.raises(ConfigError, match=r"d\.parquet:3 needs an `answer`"):
        next(rows)


@pytest.mark.long
@pytest.mark.parametrize("name", ["saved", "d.parquet"])
def test_a_class_is_read_by_its_name(tmp_path: Path, name: str) -> None:
    """`datasets` keeps a class by its number, and nobody answers `1` for `good`."""
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"question": Value("string"), "answer": ClassLabel(names=["bad", "good"])})
    made = Dataset.from_dict({"question": ["a", "b", "c"], "answer": [1, 0, -1]}, features)
    (made.to_parquet if name == "d.parquet" else made.save_to_disk)(str(tmp_path / name))
    rows = read_rows(tmp_path / name)
    assert [next(rows)[1].answer for _ in range(2)] == ["good", "bad"]
    with pytest.raises(ConfigError, match=rf"{name}:3 needs an `answer`"):
        next(rows)


def test_an_array_on_one_line_is_not_held(tmp_path: Path) -> None:
    rows = [{"question": f"{n}" * 300, "answer": str(n)} for n in range(1000, 9000)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    size = (tmp_path / "d.json").stat().st_size
    peak = in_own_process(peak_of_reading, tmp_path / "d.json", len(rows))
    assert peak < 6 * CHUNK < size


def test_an_array_is_read_in_pieces(tmp_path: Path) -> None:
    """Elements over the end of a piece, and one that is longer than a piece."""
    rows = [{"question": f"é\u2028{n}" * (CHUNK // 3000), "answer": str(n)} for n in range(4000)]
    rows[7]["question"] = "x" * (2 * CHUNK)
    path = tmp_path / "d.json"
    path.write_text(json.dumps(rows[:3000:300] + rows[7:8] + rows[:2000:100], ensure_ascii=False))
    assert [row for _, row in read_file(path)] == rows[:3000:300] + rows[7:8] + rows[:2000:100]
