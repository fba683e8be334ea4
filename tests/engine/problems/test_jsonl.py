"""A person's JSONL: what is refused by file and line, how it is split for ever, that memory stays bounded."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.problems.jsonl import HELD_OUT, JsonlFile, import_file, is_held_out, prompt_hash, read_rows
from engine.problems.procedural import stream
from tests.helpers.repository import ROOT


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int) -> list[dict]:
    return [{"question": f"What is {number}?", "answer": str(number)} for number in range(count)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{not json", "valid JSON"),
        ("question,answer", '{"question": '),
        ('["a"]', "not list"),
        ('{"answer": "1"}', "needs a `question`"),
        ('{"question": "  ", "answer": "1"}', "needs a `question`"),
        ('{"question": 3, "answer": "1"}', "needs a `question`"),
        ('{"question": "q"}', "needs an `answer`"),
        ('{"instruction": "q", "output": "1"}', "`instruction`, `output`"),
        ('{"prompt": "q", "response": "1"}', "needs an `answer`. It has `prompt`, `response`."),
        ('{"question": "q", "answer": NaN}', "missing"),
        ('{"question": "What is 3?", "answer": "4"}', "line 4"),
        ('{"question": " What is 3? ", "answer": "4"}', "line 4"),
        ('{"question": "half \\ud800", "answer": "4"}', "half a character"),
        ('{"question": "q", "answer": ' + "[" * 100_000 + "}", "valid JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: str, fault: str) -> None:
    source = write(tmp_path / "data.jsonl", questions(200))
    source.write_text(source.read_text() + line + "\n")
    with pytest.raises(ConfigError) as refused:
        import_file(source, tmp_path / "train.jsonl", 50)
    assert str(refused.value).startswith(f"{source}:201 ")
    assert fault in str(refused.value)


@pytest.mark.parametrize(("text", "fault"), [("", "is empty"), ("\n\n", "is empty")])
def test_an_empty_file_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=fault):
        list(read_rows(tmp_path / "data.jsonl"))


def test_too_few_lines_are_refused_with_the_counts(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", questions(9))
    with pytest.raises(ConfigError, match=r"frozen items.*\b8\b"):
        import_file(source, tmp_path / "train.jsonl", 50)


def test_the_split_follows_from_the_question_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", questions(1000))
    found = import_file(source, tmp_path / "train.jsonl", 100)
    trained = {row.question for _, row in read_rows(tmp_path / "train.jsonl")}
    frozen = {row.question for row in found.frozen}
    assert not trained & frozen
    assert len(frozen) == 100
    assert all(is_held_out(prompt_hash(question)) for question in frozen)
    assert not any(is_held_out(prompt_hash(question)) for question in trained)
    assert found.training + found.held_out == 1000
    assert found.held_out == pytest.approx(1000 * HELD_OUT, abs=50)
    # Another order, and more data: nothing changes sides.
    more = write(tmp_path / "more.jsonl", [*reversed(questions(1000)), *questions(1500)[1000:]])
    again = import_file(more, tmp_path / "train2.jsonl", 100)
    later = {row.question for _, row in read_rows(tmp_path / "train2.jsonl")}
    assert trained < later
    assert not later & ({row.question for row in again.frozen} | frozen)


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", [*questions(300), *questions(40)])
    found = import_file(source, tmp_path / "train.jsonl", 50)
    assert (found.lines, found.duplicates, found.training + found.held_out) == (340, 40, 300)


def test_questions_that_differ_in_case_are_two_on_one_side(tmp_path: Path) -> None:
    upper = [{"question": row["question"].upper(), "answer": "other"} for row in questions(300)]
    source = write(tmp_path / "data.jsonl", [*questions(300), *upper])
    found = import_file(source, tmp_path / "train.jsonl", 1000)
    trained = [row.question for _, row in read_rows(tmp_path / "train.jsonl")]
    assert (found.duplicates, len(trained) + len(found.frozen)) == (0, 600)
    sides = {question.upper() for question in trained}, {row.question.upper() for row in found.frozen}
    assert not sides[0] & sides[1]


def test_prompt_is_another_name_of_question_and_an_answer_may_be_json(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [{"prompt": "p", "answer": {"a": [1]}}])
    ((_, row),) = read_rows(tmp_path / "data.jsonl")
    assert (row.question, row.answer) == ("p", '{"a": [1]}')


def test_rows_are_read_by_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", questions(50))
    path.write_text(path.read_text().replace('{"question": "What is 7?"', '\n{"question": "What is 7?"'))
    rows = JsonlFile(path)
    assert len(rows) == 50
    assert [rows[at].answer for at in (0, 7, 8, 49)] == ["0", "7", "8", "49"]


def test_the_stream_draws_each_row_once_an_epoch_and_resumes_anywhere(tmp_path: Path) -> None:
    path = str(write(tmp_path / "data.jsonl", questions(20)))
    drawn = [
        problem.answer for _, (_, problem) in zip(range(60), stream(path, "train", seed=3), strict=False)
    ]
    for epoch in (drawn[:20], drawn[20:40], drawn[40:]):
        assert sorted(epoch, key=int) == [str(number) for number in range(20)]
    assert drawn[:20] != drawn[20:40]
    resumed = stream(path, "train", seed=3, start=33)
    assert [next(resumed)[1].answer for _ in range(5)] == drawn[33:38]


IMPORT = """
import resource, sys
from pathlib import Path
from engine.problems.jsonl import import_file
source, training = map(Path, sys.argv[1:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = import_file(source, training, 200)
print(found.lines, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("lines", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_stays_bounded(tmp_path: Path, lines: int) -> None:
    """The file of 10^6 lines is 64 MB; the import grows by less than a third of that, and not with it."""
    with (tmp_path / "data.jsonl").open("w") as output:
        for number in range(lines):
            output.write(f'{{"question": "What is {number} plus {number}?", "answer": "{2 * number}"}}\n')
    arguments = [sys.executable, "-c", IMPORT, tmp_path / "data.jsonl", tmp_path / "train.jsonl"]
    said = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=600).stdout
    found, grown_kib = map(int, said.split())
    assert found == lines
    assert grown_kib < 20 * 1024


def test_question_and_answer_keep_their_bytes(tmp_path: Path) -> None:
    """The digests of 265b009: a policy of an earlier version is created again with nothing changed."""
    found = import_file(ROOT / "examples" / "sums.jsonl", tmp_path / "train.jsonl", 200)
    assert found.digest == "e96edd076f9e16bf72a64d6ee59c66bb383707328aad55e254e21a3657eed980"
    frozen = hashlib.sha256("".join(row.to_json() for row in found.frozen).encode()).hexdigest()
    assert frozen == "c5d46078f99c302c7c2825922d92bf48e329d7083fc63b8deb15089deee57cdb"
