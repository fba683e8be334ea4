"""The figures of docs/benchmarks: the tracked file figures.json there, and the tables made from it.

    python tests/bench/_figures.py        writes every table anew

`runs` says of each benchmark which commit was measured and in which form; `pages` holds each page's rows, a
row a line. A row with `met` is in the summary of README.md. `key` is the figure's name in a benchmark's
results; a row without one was written by hand and stays as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _verdicts import UNDECIDED

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
FILE = DOCS / "figures.json"
COLUMNS = ("figure", "bound", "value", "spread", "repeats", "command", "hardware", "commit")
DECIDED = ("yes", "no")
SUMMARY = ("figure", "bound", "value")
Row = dict[str, str]
BEGIN, END = "<!-- Written by tests/bench/_figures.py from figures.json -->", "<!-- end -->"


def load(file: Path = FILE) -> dict[str, Any]:
    """Return runs and pages."""
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def save(known: Mapping[str, Any], file: Path = FILE) -> None:
    """Write runs and pages, a run and a row a line, so that two changes seldom meet."""
    runs = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(known["runs"].items())]
    pages = [
        f"{json.dumps(page)}: [\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]"
        for page, rows in known["pages"].items()
    ]
    parts = ('"runs": {', *_commas(runs), '},\n"pages": {', *_commas(pages), "}")
    file.write_text("{\n" + "\n".join(parts) + "\n}\n")


def _commas(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"  {line}{',' if i < len(lines) - 1 else ''}" for i, line in enumerate(lines))


def take(known: dict[str, Any], name: str, command: str, result: Mapping[str, Any]) -> None:
    """Take the result of a whole run of a benchmark: its commit, and its rows instead of older ones."""
    form = "long" if result["is_long"] else "short"
    said = [row["met"] for row in result["rows"]]
    says = "missed" if "no" in said else "undecided" if "undecided" in said else "met" if said else "reported"
    known["runs"][name] = {"commit": result["commit"], "form": form, "says": says}
    for new in result["rows"]:
        row = {**new, "command": f"`{command}`", "hardware": result["hardware"], "commit": result["commit"]}
        _place(known["pages"], f"{name}:{row['figure']}", row)


def _place(pages: dict[str, list[Row]], key: str, row: Row) -> None:
    for rows in pages.values():
        for old in rows:
            if old.get("key") == key:
                # What was decided stays, with its commit, until another run decides.
                if row["met"] == UNDECIDED and old.get("met", "").partition(",")[0] in DECIDED:
                    return
                # The page's own words for the figure stay.
                old.update({name: value for name, value in row.items() if name != "figure"})
                return
    plain, _, suffix = row["figure"].partition(".")
    said = f"`{suffix}`: `{plain}`" if suffix else f"`{plain}`"
    pages.setdefault(f"{key.partition(':')[0]}.md", []).append({**row, "figure": said, "key": key})


def table(rows: Sequence[Row], columns: Sequence[str] = COLUMNS) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = (f" {row[name]} " if row[name] else " " for name in columns)
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def with_table(text: str, rows: Sequence[Row]) -> str:
    """Return a page with its table made from rows."""
    return re.sub(r"(?m)^\|.*(?:\n\|.*)*", lambda _: table(rows), text, count=1)


def summary(known: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Return the table of README.md, and what is not met below it."""
    chosen = [
        {**row, "benchmark": f"[{titles[page]}]({page})"}
        for page, rows in known["pages"].items()
        for row in rows
        if "met" in row
    ]
    short = [f"{row['benchmark']}: {row['figure']}" for row in chosen if row["met"].startswith("no,")]
    short += [f"{row['benchmark']}: {row['figure']}" for row in chosen if row["met"] == "no"]
    whole = table(chosen, ("benchmark", *SUMMARY, "met"))
    return f"{whole}\n\n**Not met:**\n\n" + "\n".join(f"- {each}" for each in short)


def title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def pages(known: Mapping[str, Any], docs: Path = DOCS) -> dict[Path, str]:
    """Return the text of README.md and of each page with its table."""
    rows = known["pages"]
    found = {docs / name: with_table((docs / name).read_text(), rows[name]) for name in rows}
    titles = {name: title(docs / name) for name in known["pages"]}
    readme = docs / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return found | {readme: f"{head}{BEGIN}\n\n{summary(known, titles)}\n\n{END}{tail}"}


def write(known: Mapping[str, Any]) -> None:
    """Write figures.json, and the tables from it."""
    save(known)
    for path, text in pages(known).items():
        path.write_text(text)


if __name__ == "__main__":
    write(load())
