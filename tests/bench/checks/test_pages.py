"""docs/benchmarks: every page has its table, its commands can be given, and the summary repeats the pages."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.helpers.bench_files import parsed

ROOT = Path(__file__).parents[3]
SUMMARY = ROOT / "docs" / "benchmarks" / "README.md"
PAGES = sorted(set(SUMMARY.parent.glob("*.md")) - {SUMMARY})
COLUMNS = ["figure", "bound", "value", "spread", "repeats", "command", "hardware", "commit"]


def table(page: Path) -> list[list[str]]:
    """Return the cells of a page's rows, of the header too."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def commands() -> list[str]:
    """Return each command of the pages, in tables and in indented blocks, once; fenced ones are output."""
    texts = [re.sub(r"(?s)```.*?```", "", page.read_text()) for page in [SUMMARY, *PAGES]]
    found = [each for text in texts for each in re.findall(r"(?m)^    (\S.*)$", text)]
    found += [row[5].strip("`") for page in PAGES for row in table(page)[2:] if row[5].startswith("`")]
    return sorted({each.removeprefix(".venv/bin/").removeprefix("python -m ") for each in found})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_one_table_and_says_what_limits_its_figures(page: Path):
    header, _, *rows = table(page)
    assert header == COLUMNS
    assert {len(row) for row in rows} == {len(COLUMNS)}
    for row in rows:
        figure, value = row[0], row[2]
        assert figure
        assert value
        # What was measured says on what machine and by which code.
        assert value.startswith("not measured") or (row[6] and row[7]), figure
    for heading in ("## What limits it", "## How it is measured"):
        assert heading in page.read_text()


def test_the_summary_has_every_page():
    linked = {re.fullmatch(r"\[(.+)\]\((.+)\)", row[0]).groups() for row in table(SUMMARY)[2:]}
    assert linked == {(page.read_text().splitlines()[0].removeprefix("# "), page.name) for page in PAGES}


@pytest.mark.parametrize("command", commands())
def test_a_command_can_be_given(command: str, monkeypatch: pytest.MonkeyPatch):
    program, *words = shlex.split(command)
    if program == "graftwork" and words[0] == "bench":
        parsed(words[1], words[2:], monkeypatch)
    elif program == "graftwork":
        from flows.cli.command import app

        typer.main.get_command(app).commands[words[0]].make_context(words[0], words[1:]).close()
    elif program == "python":
        assert (ROOT / words[0]).exists()
        # A script for a GPU is not loaded.
        if "--help" not in words and not words[0].startswith("tests/gpu/"):
            parsed(words[0].removeprefix("tests/bench/").removesuffix(".py"), words[1:], monkeypatch)
    elif program == "pytest":
        files = [word for word in words if word.startswith("tests/")]
        assert files
        assert all((ROOT / file).exists() for file in files)
    elif program == "make":
        assert re.search(rf"(?m)^{words[0]}:", (ROOT / "Makefile").read_text())
    else:
        assert words == ["repro"]
        assert program == "dvc"
