"""The terminal: a bar for each policy that fits 100 columns, and few lines where there is none."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from flows import display
from tests.helpers.history import step_row


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """Return what gives the display a screen of 100 columns of its own, which is a terminal or is not."""

    def give(terminal: bool, width: int = 100) -> io.StringIO:
        written = io.StringIO()
        console = Console(
            file=written, force_terminal=terminal, width=width, highlight=False, color_system=None
        )
        monkeypatch.setattr(display, "console", console)
        monkeypatch.setattr(display, "steps", Progress(*display.steps.columns, console=console))
        return written

    return give


def row(step: int, **changes: Any) -> dict[str, Any]:
    return step_row(step, reward=0.75, tokens_per_s=12345.6, **changes)


def test_a_step_is_told_in_one_note() -> None:
    assert display.step_note(row(1, staleness=0, wait_s=10.0)) == (
        "reward 0.75  ratio 1.00000  12,346 tokens/s  12.1 s"
    )
    assert "  stale 2  " in display.step_note(row(1, staleness=2))
    # What a step of before these metrics has.
    old = {"step": 1, "reward": 0.5, "importance_ratio": 1.0, "rollout_s": 1.0, "update_s": 0.5}
    assert display.step_note(old) == "reward 0.50  ratio 1.00000  1.5 s"
    # Where nothing was sampled there is no ratio.
    assert display.step_note(old | {"importance_ratio": None}) == "reward 0.50  1.5 s"
    # Where every verifier failed there is no reward.
    assert display.step_note(old | {"reward": None}) == "no reward  ratio 1.00000  1.5 s"


def test_nine_policies_have_a_bar_each_in_a_hundred_columns(screen) -> None:
    written = screen(True)
    names = [f"a-policy-of-length-{number}" for number in range(9)]
    with display.live():
        bars = [display.training_bar(name, 300) for name in names]
        for step in (1, 2, 213):
            for bar in bars:
                bar(row(step, staleness=1, wait_s=100.0))
    plain = re.sub(r"\x1b\[[\d?]*[A-Za-z]", "", written.getvalue())
    drawn = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    for name, line in zip(names, drawn[-9:], strict=True):
        assert line.strip().startswith(f"{name} ")
        assert "213/300" in line
        assert line.rstrip().endswith("reward 0.75  ratio 1.00021  12,346 tokens/s  stale 1  102.1 s")
        assert len(line) <= 100


def test_a_bar_of_the_main_job_fits_eighty_columns(screen) -> None:
    written = screen(True, 80)
    last = row(20, staleness=0, wait_s=10.0)
    with display.live():
        display.training_bar("arithmetic", 20)(last)
    assert f"20/20 {display.step_note(last)}" in written.getvalue()


@pytest.mark.parametrize(("total", "told"), [(1, [1]), (5, [1, 2, 3, 4, 5]), (300, [1, *range(30, 301, 30)])])
def test_without_a_terminal_a_long_training_is_a_few_lines(screen, total: int, told: list[int]) -> None:
    written = screen(False)
    with display.live():
        one, other = display.training_bar("sorting", total), display.training_bar("sums", total)
        for step in range(1, total + 1):
            one(row(step))
        other(row(total))
    lines = written.getvalue().splitlines()
    assert [int(line.split()[2]) for line in lines if line.startswith("  sorting ")] == told
    assert [line for line in lines if line.startswith("  sums ")] == [
        f"  sums         step {total} of {total}  {display.step_note(row(total))}"
    ]
    assert "\x1b" not in written.getvalue()


def test_a_training_that_goes_on_tells_its_first_step_there(screen) -> None:
    written = screen(False)
    show = display.training_bar("sorting", 300)
    for step in (124, 125, 126):
        show(row(step))
    assert [line.split()[2] for line in written.getvalue().splitlines()] == ["124"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_of_a_collapse_is_a_line_of_its_own_at_any_step(screen, terminal: bool) -> None:
    written = screen(terminal, width=200)
    with display.live():
        show = display.training_bar("sums", 300)
        for step in range(1, 5):
            show(row(step, collapse="It repeats '[b]me[/b]'." if step == 2 else None))
    plain = re.sub(r"\x1b\[[\d?]*[A-Za-z]", "", written.getvalue())
    assert plain.count("sums, step 2: It repeats '[b]me[/b]'.") == 1
    assert plain.count("It repeats") == 1


def test_beside_json_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with display.progress_apart(True):
        display.print_service("engine", "starting")
    display.print_service("engine", "ready")
    said, apart = capsys.readouterr()
    assert ("starting" in apart, "starting" in said, "ready" in said) == (True, False, True)
