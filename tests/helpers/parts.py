"""`make test-all PART=3/9`: divide the long tests into parts of equal time, and record what each one proved.

A pytest plugin (`-p tests.helpers.parts --part 3/9`). Files are divided by the seconds in the commit's
`tests/proven.json`, so that the parts of one commit hold each file once, although each run writes the rows of
its files anew: commit, tests passed and failed, seconds.
"""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.repository import ROOT
from tests.helpers.shared_services import group_of

PROVEN = ROOT / "tests" / "proven.json"
# For a file that has not run yet.
UNKNOWN_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run part K of N of the selected tests, such as 3/9")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = read_part(config.getoption("part"))
    chosen = divided({file_of(item.nodeid) for item in items}, seconds(), count)[number - 1]
    config.hook.pytest_deselected(items=[item for item in items if file_of(item.nodeid) not in chosen])
    items[:] = [item for item in items if file_of(item.nodeid) in chosen]


def read_part(text: str) -> tuple[int, int]:
    """Return K and N of `K/N`; `UsageError` if it is no part."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"{text!r} is no part. Give K/N with K from 1 to N, such as 3/9.")
    return int(found[1]), int(found[2])


def divided(files: set[str], known: Mapping[str, float], count: int) -> list[set[str]]:
    """Divide files into parts, the longest first into the shortest part; a shared engine stays whole."""
    groups: dict[str, set[str]] = {}
    for file in files:
        groups.setdefault(group_of(file), set()).add(file)
    weights = {name: sum(known.get(file, UNKNOWN_S) for file in group) for name, group in groups.items()}
    parts: list[set[str]] = [set() for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(groups, key=lambda name: (-weights[name], name)):
        least = loads.index(min(loads))
        parts[least] |= groups[name]
        loads[least] += weights[name]
    return parts


def proven() -> dict[str, dict[str, Any]]:
    return json.loads(PROVEN.read_text()) if PROVEN.exists() else {}


def seconds() -> dict[str, float]:
    """Return what each file took, as the commit that is checked out says."""
    committed = json.loads(git("show", f"HEAD:{PROVEN.relative_to(ROOT)}"))
    return {file: row["seconds"] for file, row in committed.items()}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Recorder:
    """Writes a row for each file that ran."""

    def __init__(self) -> None:
        self.results: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self.seconds[file] += report.duration
        if report.when == "call" or report.failed:
            self.results.setdefault(file, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        if not self.results:
            return
        commit = written_commit()
        rows = {
            file: {
                "commit": commit, "passed": found["passed"], "failed": found["failed"],
                "seconds": round(self.seconds[file], 1),
            }
            for file, found in self.results.items()
        }  # fmt: skip
        kept = {file: row for file, row in proven().items() if (ROOT / file).exists()}
        draft = PROVEN.with_suffix(".draft")
        lines = [f"{json.dumps(file)}: {json.dumps(row)}" for file, row in sorted((kept | rows).items())]
        draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        draft.rename(PROVEN)


def written_commit() -> str:
    """Return the commit that is checked out, with `+` if another tracked file than the record has changed."""
    commit = git("rev-parse", "--short", "HEAD").strip()
    changed = [line[3:] for line in git("status", "--porcelain", "--untracked-files=no").splitlines()]
    return commit + "+" * any(ROOT / path != PROVEN for path in changed)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
