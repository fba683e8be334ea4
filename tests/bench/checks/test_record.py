"""What benchmarks share: a figure counts only when its check is green, and each bound says what it says."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli.admin import app
from tests.helpers.bench_files import load
from tests.helpers.live import eventually


@pytest.mark.long
def test_the_command_finds_what_a_benchmark_shares_with_the_tests(capfd: pytest.CaptureFixture[str]):
    """Pytest has them on its path; a benchmark that a person runs has what the command gives it."""
    found = CliRunner().invoke(app, ["bench", "storm", "--cold", "many"])
    assert (found.exit_code, "invalid" in capfd.readouterr().err) == (2, True)


def test_a_missed_bound_is_named_and_ends_a_benchmark_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    record, run = (
        load("_record", monkeypatch),
        SimpleNamespace(name="one", is_interrupted=False, is_long=False),
    )
    bounds = {"ratio": record.at_most(1.15), "speed": record.at_least(2), "left_out": record.at_least(1)}
    figures = record.Figures({"ratio.a": 1.1, "ratio.b": 1.2, "speed": 1.5})
    with pytest.raises(SystemExit) as ended:
        record.report(run, figures, bounds, True, tmp_path)
    said = ["ratio.b is 1.2, and its bound is <= 1.15.", "speed is 1.5, and its bound is >= 2."]
    # Python prints a text and exits with 1.
    assert ended.value.code == "\n".join(f"bench one: {sentence}" for sentence in said)
    written = json.loads((tmp_path / "one.json").read_text())
    assert (written["ratio"], written["ratio.a"], written["missed"]) == (1.2, 1.1, said)
    assert "not measured" in capsys.readouterr().out
    pairs = record.Figures({"speed": 2})
    pairs.add_pairs({"ratio": [1.1, 1.2]}, ".a")
    record.report(run, pairs, bounds, True, tmp_path)
    assert "ratio.a" in json.loads((tmp_path / "one.json").read_text())["undecided"][0]
    assert json.loads((tmp_path / "one.json").read_text())["missed"] == []


def test_all_benchmarks_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    every, record = load("_all", monkeypatch), sys.modules["_record"]
    monkeypatch.setattr(record, "commit", lambda: "abc")
    monkeypatch.setattr(every.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    (tmp_path / "p.yaml").write_text(f"state_dir: {tmp_path}")
    (tmp_path / "bench").mkdir()
    known, asked = {"runs": {}, "pages": {}}, []
    monkeypatch.setattr(every, "figures", SimpleNamespace(
        load=lambda: known, write=lambda _: None, take=sys.modules["_figures"].take
    ))  # fmt: skip

    def graftwork(words, params) -> int:
        asked.append(words[1])
        if words[1] == "storm" and asked.count("storm") == 1:
            return every.INTERRUPTED
        row = {"figure": "ratio.a", "bound": "<= 1", "value": "2", "spread": "", "repeats": "", "met": "no"}
        result = {"missed": ["ratio.a is 2."], "undecided": [], "rows": [row], "is_long": False}
        result |= {"commit": "abc", "hardware": "a machine"}
        (tmp_path / "bench" / f"{words[1]}.json").write_text(json.dumps(result))
        return 1

    monkeypatch.setattr(every, "graftwork", graftwork)
    monkeypatch.setattr(sys, "argv", ["all", "load", "storm", "--params", str(tmp_path / "p.yaml")])
    with pytest.raises(SystemExit) as ended:
        every.main()
    assert ended.value.code == every.INTERRUPTED
    with pytest.raises(SystemExit, match="graftwork bench storm: ratio"):
        every.main()
    assert asked == ["load", "storm", "storm"]
    assert known["runs"]["load"] == {"commit": "abc", "form": "short", "says": "missed"}
    (row,) = known["pages"]["load.md"]
    assert (row["figure"], row["commit"], row["met"]) == ("`a`: `ratio`", "abc", "no")


def test_an_undecided_figure_leaves_the_one_that_was_decided(monkeypatch: pytest.MonkeyPatch):
    figures = load("_figures", monkeypatch)
    known: dict = {"runs": {}, "pages": {}}
    whole = {"is_long": True, "hardware": "here", "commit": "c0ffee1"}
    row = dict.fromkeys(figures.COLUMNS, "") | {"figure": "ratio"}
    for met, commit, said in (
        ("yes", "c0ffee1", "1.2"),
        ("undecided", "c0ffee2", "1.1"),
        ("no", "c0ffee3", "1.0"),
    ):
        result = whole | {"commit": commit, "rows": [row | {"value": said, "met": met}]}
        figures.take(known, "toy", "graftwork bench toy", result)
        (kept,) = known["pages"]["toy.md"]
        want = "c0ffee1" if met == "undecided" else commit
        assert (kept["commit"], kept["met"]) == (want, "yes" if met == "undecided" else met)
        assert known["runs"]["toy"]["commit"] == commit


def test_the_tables_are_made_from_the_file_of_figures(monkeypatch: pytest.MonkeyPatch):
    figures = load("_figures", monkeypatch)
    for path, text in figures.pages(figures.load()).items():
        assert path.read_text() == text, f"Run tests/bench/_figures.py: {path.name} differs."


def test_a_red_check_and_ctrl_c_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record, run = load("_record", monkeypatch), SimpleNamespace(name="one", is_interrupted=False)
    with pytest.raises(SystemExit, match="correctness check failed"):
        record.report(run, record.Figures({"a": 1.0}), {}, False, tmp_path)
    run.is_interrupted = True
    with pytest.raises(SystemExit) as ended:
        record.report(run, record.Figures({"a": 1.0}), {}, True, tmp_path)
    assert ended.value.code == load("_run", monkeypatch).INTERRUPTED
    assert list(tmp_path.iterdir()) == []


def test_a_plain_name_holds_the_worst_and_shares_its_bound(monkeypatch: pytest.MonkeyPatch):
    record = load("_record", monkeypatch)
    figures = {"slow.a.n1": 1.0, "slow.b-0.6": 3.0, "fast.a": 4.0, "fast.b": 2.0, "off.a": 0.9, "off.b": 1.3}
    bounds = {
        "slow": record.at_most(2), "slow.b-0.6": record.at_most(), "fast": record.at_least(3),
        "off": record.within(1, 0.2), "other": record.at_least(),
    }  # fmt: skip
    assert record.worst(figures, bounds) == {"slow": 3.0, "fast": 2.0, "off": 1.3}
    assert [one.split()[0] for one in record.sentences(record.Figures(figures), bounds, "missed")] == [
        "fast.b",
        "off.b",
    ]
    # A plain name that was measured is one figure, and its bound is no other's.
    assert record.sentences(record.Figures({"fast": 5.0, "fast.n10": 1.0}), bounds, "missed") == []
    assert record.worst({"fast": 5.0, "fast.n10": 1.0}, bounds) == {}
    texts = [str(bounds[name]) for name in ("slow", "slow.b-0.6", "fast", "off")]
    assert texts == ["<= 2", "reported", ">= 3", ">= 0.8 and <= 1.2"]
    assert str(record.within(0)) == "== 0"
    assert not record.at_most().holds(math.nan)


def test_modes_that_do_other_work_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    rounds, account = load("_rounds", monkeypatch), load("_account", monkeypatch).Account({})

    def of(score: float, digest: str = "a"):
        return rounds.Round(1.0, account, 1, (score,) * 3, (digest,) * 3)

    assert rounds.faults("tiny-dense", [of(0.5)], [of(0.5)]) == []
    changed = rounds.faults("tiny-dense", [of(0.5)], [of(0.5, "b")])
    assert changed == ["tiny-dense, 3 policies: adapters differ between the modes."]
    # Two standard errors of 600 items are 0.058; a mixture of experts may differ by so much.
    assert rounds.faults("tiny-moe", [of(0.5)], [of(0.55, "b")]) == []
    worse = rounds.faults("tiny-moe", [of(0.5)] * 3, [of(0.4, "b")] * 3)
    assert worse == ["tiny-moe, 3 policies: scores differ by 0.100, more than 0.058."]


def test_a_speed_up_is_bounded_where_the_machine_does_not_bound_it(monkeypatch: pytest.MonkeyPatch):
    bench, record = load("concurrency", monkeypatch), load("_record", monkeypatch)
    figures = {"speedup.tiny-dense.n3": 1.2, "speedup.tiny-dense.n9": 1.2}
    figures |= {"share_of_bound.tiny-dense.n3": 0.8, "share_of_bound.tiny-dense.n9": 0.95}
    bounds = bench.bounds_of(figures, [3, 9])
    assert record.sentences(record.Figures(figures), bounds, "missed") == [
        "speedup.tiny-dense.n3 is 1.2, and its bound is >= 1.5."
    ]
    gain = bench.gain_of_many(figures, "tiny-dense", [3, 9])
    assert gain == {"speedup_n9_over_n3.tiny-dense": pytest.approx(1.0)}


def test_looking_at_processes_is_no_work_of_the_flows(monkeypatch: pytest.MonkeyPatch):
    module = load("_account", monkeypatch)
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)
    account = module.Account({module.FLOWS: [psutil.Process()]})
    began = sum(psutil.Process().cpu_times()[:2])

    def used_s() -> float:
        return sum(psutil.Process().cpu_times()[:2]) - began

    with account.sampling():
        # By what it has used: on a busy machine a second passes without a tenth of a core for it.
        assert eventually(lambda: used_s() > 0.5)
    used = used_s()
    # The sampler did nearly all that was done; the kernel counts a process in hundredths of a second.
    assert account.used()[module.FLOWS] < used / 4
