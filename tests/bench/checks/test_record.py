"""Every benchmark takes what `graftwork bench` gives it, and a figure counts only when its check is green."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest
from bench_files import BENCH, load, parsed
from typer.testing import CliRunner

from flows.cli.admin import app


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("[a-z]*.py")))
def test_every_benchmark_takes_settings_and_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = parsed(name, ["--params", str(tmp_path / "p.yaml"), "--out", str(tmp_path)], monkeypatch)
    assert (str(given["params"]), given["out"]) == (str(tmp_path / "p.yaml"), tmp_path)


def test_the_command_finds_what_a_benchmark_shares_with_the_tests(capfd: pytest.CaptureFixture[str]):
    """Pytest has them on its path; a benchmark that a person runs has what the command gives it."""
    found = CliRunner().invoke(app, ["bench", "storm", "--cold", "many"])
    assert (found.exit_code, "invalid" in capfd.readouterr().err) == (2, True)


def test_a_result_says_what_mkl_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load("_record", monkeypatch).report("one", {"a": 1.0}, {}, {}, True, tmp_path)
    assert json.loads((tmp_path / "one.json").read_text())["MKL_CBWR"] == os.environ["MKL_CBWR"]


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


def test_every_other_round_begins_with_the_other_mode(monkeypatch: pytest.MonkeyPatch):
    bench = load("concurrency", monkeypatch)
    modes = {"one": 1, "other": 2}
    assert [bench.in_turn(modes, n) for n in range(3)] == [
        ["one", "other"],
        ["other", "one"],
        ["one", "other"],
    ]
    figures = {"speedup.b.n3": 1.5, "speedup.b.n9": 1.8}
    figures |= {f"share_of_bound.b.n{n}": n / 10 for n in (3, 9)}
    assert bench.overall(figures, "b", [3, 9]) == {
        "speedup": 1.5,
        "share_of_bound": 0.3,
        "speedup_n9_over_n3": pytest.approx(1.2),
    }


def test_looking_at_processes_is_no_work_of_the_flows(monkeypatch: pytest.MonkeyPatch):
    module = load("_account", monkeypatch)
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)
    account = module.Account({module.FLOWS: [psutil.Process()]})
    began = sum(psutil.Process().cpu_times()[:2])
    with account.sampling():
        time.sleep(1)
    used = sum(psutil.Process().cpu_times()[:2]) - began
    # The sampler did nearly all that was done; the kernel counts a process in hundredths of a second.
    assert used > 0.1
    assert account.used()[module.FLOWS] < used / 4
