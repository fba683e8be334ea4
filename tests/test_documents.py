"""The pages, those for machines too: links, paths and commands exist, marked blocks run."""

import importlib.util
import re
import subprocess
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from engine import errors
from tests.helpers.asked_ledger import asked_ledger
from tests.helpers.bench_files import parsed
from tests.helpers.document_blocks import PORTS, RUN, marked, run, scratch, wrong_marks
from tests.helpers.documents import (
    PAGES,
    SHELLS,
    Page,
    broken_links,
    commands,
    fault_of,
    missing_paths,
    page,
    program_of,
    toctree,
    unknown_in,
    wrong_commands,
)
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT

DOCS = ROOT / "docs"
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_and_anchors_exist(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_paths_of_the_repository_exist(path: Path) -> None:
    assert missing_paths(path) == []


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_can_be_given(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_commands(path) == []
    for block in page(path).blocks:
        for words in commands(block.text) if block.language in SHELLS else ():
            if program_of(words) == "graftwork" and words[1:2] == ["bench"] and "--help" not in words:
                parsed(words[2], words[3:], monkeypatch)


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("operations.md", "## What a release survives"),
        ("security.md", "## Attacks, protections and their tests"),
    ],
)
def test_every_row_of_a_table_names_tests_that_exist(name: str, heading: str) -> None:
    section = (DOCS / name).read_text().partition(heading)[2].partition("\n## ")[0]
    _, _, *rows = [row for row in section.splitlines() if row.startswith("|")]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", row)
        assert named, row
        for file, names in named:
            text = (ROOT / file).read_text()
            assert [one for one in re.findall(r"test_\w+", names) if f"def {one}(" not in text] == []


def test_the_toctree_names_every_page_in_reading_order() -> None:
    pages = {path.relative_to(DOCS) for path in DOCS.rglob("*.md")} - {Path("index.md")}
    *named, rest = toctree()
    assert rest == "benchmarks/[!R]*"
    assert {path for path in pages if not path.match(rest)} == {Path(f"{name}.md") for name in named}
    links = [str(one.attrs["href"]) for _, one in page(DOCS / "index.md").inline("link_open")]
    assert links == [f"{name}.md" for name in named]


def test_llms_txt_names_every_page() -> None:
    links = {str(one.attrs["href"]) for _, one in page(ROOT / "llms.txt").inline("link_open")}
    pages = {f"docs/{name}.md" for name in toctree()[:-1]}
    assert links == pages | {"README.md", "CONTRIBUTING.md", "examples/README.md"}


@pytest.mark.parametrize("name", ["AGENTS.md", "llms.txt"])
def test_a_page_for_machines_is_short(name: str) -> None:
    assert len((ROOT / name).read_text().split()) < 500


@pytest.mark.parametrize("name", ["cli.md", "configuration.md"])
def test_generated_pages_are_those_of_the_code(generate: ModuleType, name: str) -> None:
    """`python docs/generate.py` writes them."""
    assert (DOCS / name).read_text() == generate.pages()[name] + "\n"


def test_every_setting_has_a_meaning(generate: ModuleType) -> None:
    rows = re.findall(r"(?m)^\| `([\w.]+)` .* \| (.*) \|$", generate.configuration_page())
    assert len(rows) > 80
    assert [name for name, meaning in rows if not meaning] == []


def test_the_exit_codes_are_those_of_the_errors(generate: ModuleType) -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    raised = {one.exit_code for one in kinds if issubclass(one, errors.GraftworkError)}
    assert raised == set(generate.EXIT_CODES) - {0, 130, 143}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_marks_of_blocks_are_known(path: Path) -> None:
    assert wrong_marks(path) == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory that looks like this one, with a state and ports of its own."""
    settings, state, suites = tmp_path / "settings.yaml", tmp_path / "state", tmp_path / "suites"
    ports = {name: {"port": free_port()} for name in PORTS}
    settings.write_text(yaml.safe_dump(yaml.safe_load((ROOT / "params.yaml").read_text()) | ports))
    return scratch(tmp_path / "checkout", settings, state, suites)


@pytest.mark.parametrize("path", [path for path in PAGES if marked(path, RUN)])
def test_marked_blocks_run(path: Path, checkout: Path) -> None:
    run(marked(path, RUN), checkout, {}, timeout_s=120)


def test_every_query_of_the_page_finds_something(tmp_path: Path) -> None:
    queries = [block.text for block in page(DOCS / "queries.md").blocks if block.language == "sql"]
    assert len(queries) >= 8
    with closing(asked_ledger(tmp_path)) as ledger:
        found = {query: ledger.connection.execute(query).fetchall() for query in queries}
        named = ledger.connection.execute(
            "SELECT view_name FROM duckdb_views() WHERE NOT internal"
        ).fetchall()
    assert [query for query, rows in found.items() if not rows] == []
    assert [name for (name,) in named if f"| `{name}` |" not in (DOCS / "queries.md").read_text()] == []


# What the checks themselves find


def written(directory: Path, text: str) -> Path:
    path = directory / "page.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("target", "last"),
    [
        ("run", "graftwork run"),
        ("run-real", "graftwork run --base smollm2-135m"),
        ("repro", "dvc repro"),
        ("real", "touch .venv/.graftwork-real-installed"),
        ("cookbook", "touch .venv/.graftwork-cookbook-installed"),
    ],
)
def test_a_target_ends_with_what_it_is_for(target: str, last: str) -> None:
    # `make test` runs this, and a make below another one names its directory.
    command = ["make", "--no-print-directory", "--always-make", "--dry-run", target]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.splitlines()[-1].endswith(last)


def test_a_broken_link_and_a_missing_path_are_found(tmp_path: Path) -> None:
    text = """# One `two`, three
[here](#one-two-three) [gone](#gone) [page](nowhere.md) [far](https://example.org/x)
`engine/errors.py`, `gateway/gateway.py`, `engine/nowhere.py`, `gateway/nowhere.py`, `eval_suites/NAME/x`
"""
    path = written(tmp_path, text)
    assert broken_links(path) == ["page.md:2 #gone", "page.md:2 nowhere.md"]
    assert missing_paths(path) == ["page.md:2 engine/nowhere.py", "page.md:2 gateway/nowhere.py"]


def test_shell_text_is_split_into_commands() -> None:
    text = """KEY=$(graftwork key ls | head -1) graftwork ls --json > out.json  # a comment
$ .venv/bin/graftwork release "sums@$(cat digest)" \\
    --by me && make up
cat > data.jsonl <<'DATA'
graftwork in a file
DATA
make lint
"""
    found = commands(text)
    assert ["graftwork", "key", "ls"] in found
    assert [".venv/bin/graftwork", "release", "sums@SUBSTITUTED", "--by", "me"] in found
    assert ["make", "up"] in found
    assert ["make", "lint"] in found
    assert not [one for one in found if "in" in one]


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("graftwork fly", "there is no command fly"),
        ("graftwork adapters fly", "there is no command fly"),
        ("graftwork store fly", "there is no choice fly"),
        ("graftwork ls --wings", "there is no option --wings"),
        ("graftwork ls --limit many", "a valid integer"),
        ("graftwork purge sums --yes", "Missing parameter: by"),
        ("graftwork bench nothing", "there is no benchmark nothing"),
        ("make wings", "there is no target wings"),
        ("make test WORKERS=1", None),
        ("graftwork adapters --help", None),
        ("graftwork bench storm --base tiny-dense", None),
        (".venv/bin/graftwork rollback sums@3f9c --reason 'It is bad.'", None),
        ("curl --wings", None),
    ],
)
def test_a_command_that_cannot_be_given_is_found(command: str, fault: str | None) -> None:
    (words,) = commands(command)
    found = fault_of(words)
    assert (found is None) == (fault is None), found
    assert (fault or "") in str(found)


def test_inline_commands_may_be_short() -> None:
    assert unknown_in(["graftwork", "purge", "POLICY"]) is None
    assert unknown_in(["graftwork", "plan", "memory", "|", "engines"]) is None
    assert unknown_in(["graftwork", "purge", "--wings"]) == "there is no option --wings"


def test_marked_blocks_share_a_shell_and_a_failure_names_its_line(tmp_path: Path, checkout: Path) -> None:
    text = """
```bash run
NAME=sums
echo "$NAME" > name.txt
```

```python run
assert open("name.txt").read() == "sums\\n"
```

```bash run
test "$NAME" = sums
false
```
"""
    blocks = Page(written(tmp_path, text)).blocks
    run(blocks[:2], checkout, {}, timeout_s=20)
    assert (checkout / "name.txt").read_text() == "sums\n"
    with pytest.raises(AssertionError, match=r"(?s)--- line 7.*--- line 11"):
        run(blocks, checkout, {}, timeout_s=20)


def test_a_block_runs_with_the_ports_of_its_services(tmp_path: Path, checkout: Path) -> None:
    path = written(tmp_path, "```bash run up\necho http://127.0.0.1:8460/v1 8460 > url.txt\n```\n")
    run(Page(path).blocks, checkout, {"engine": 9999}, timeout_s=20)
    assert (checkout / "url.txt").read_text() == "http://127.0.0.1:9999/v1 8460\n"


def test_an_unknown_mark_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, "```bash runs\nls\n```\n\n```yaml run\na: 1\n```\n\n```{toctree} run\n```\n")
    assert [fault.partition(" ")[2] for fault in wrong_marks(path)] == ["bash runs", "yaml run"]
