"""How `make test-all` divides the long tests and records what they proved."""

import json
from types import SimpleNamespace

import pytest

from tests.helpers import parts
from tests.helpers.parts import Recorder, divided, read_part
from tests.helpers.shared_services import SHARED

FILES = {f"tests/test_{letter}.py" for letter in "abcdefg"}


def test_every_file_is_in_one_part_and_the_parts_take_the_same_time():
    known = {file: float(10 * number) for number, file in enumerate(sorted(FILES), start=1)}
    found = divided(FILES, known, 3)
    assert sorted(file for part in found for file in part) == sorted(FILES)
    times = [sum(known[file] for file in part) for part in found]
    assert max(times) - min(times) <= 10


def test_files_that_share_an_engine_stay_together():
    shared = SHARED["crowded"]
    assert [part for part in divided(FILES | shared, {}, 4) if part & shared] == [
        part for part in divided(FILES | shared, {}, 4) if shared <= part
    ]


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "a/b", "1/0"])
def test_what_is_no_part_is_refused(text: str):
    with pytest.raises(pytest.UsageError, match="K/N"):
        read_part(text)


def test_a_run_replaces_the_rows_of_its_files_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "PROVEN", tmp_path / "proven.json")
    monkeypatch.setattr(parts, "written_commit", lambda: "c0ffee1")
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).touch()
    row = {"commit": "0ld", "passed": 1, "failed": 0, "seconds": 9.0}
    (tmp_path / "proven.json").write_text(json.dumps({"test_a.py": row, "test_b.py": row, "gone.py": row}))
    recorder = Recorder()
    phases = (("setup", "passed"), ("call", "passed"), ("call", "failed"), ("teardown", "failed"))
    for when, outcome in phases:
        report = SimpleNamespace(nodeid="test_b.py::test", when=when, outcome=outcome, duration=1.5)
        report.failed = outcome == "failed"
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    new = {"commit": "c0ffee1", "passed": 1, "failed": 2, "seconds": 6.0}
    assert json.loads((tmp_path / "proven.json").read_text()) == {"test_a.py": row, "test_b.py": new}


def test_a_part_that_has_run_moves_no_file_into_another(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "PROVEN", tmp_path / "proven.json")
    (tmp_path / "proven.json").write_text(json.dumps({"test_a.py": {"seconds": 9.0}}))
    parts.git("init", "--quiet")
    parts.git("add", "proven.json")
    parts.git("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "a")
    (tmp_path / "proven.json").write_text(json.dumps({"test_a.py": {"seconds": 900.0}}))
    assert parts.seconds() == {"test_a.py": 9.0}
