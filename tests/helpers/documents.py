"""The project's Markdown pages: their blocks, links, repository paths and commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token

from flows.cli.command import app
from tests.helpers.repository import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    ROOT / "llms.txt",
    ROOT / "tasks" / "starter_files" / "README.md",
    *sorted(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
]
SHELLS = ("bash", "sh", "shell", "console")
FOLDERS = ("kernels", "engine", "tasks", "flows", "tests", "docs", "eval_suites", "examples", "deploy", ".ci")
PLACEHOLDER = re.compile(r"[A-Z*]|\.\.\.")


@dataclass(frozen=True)
class Block:
    """A code block; `language` is empty for an indented one."""

    line: int
    language: str
    marks: tuple[str, ...]
    text: str


class Page:
    """A parsed Markdown page."""

    def __init__(self, path: Path):
        self.path = path
        self.tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())

    @property
    def blocks(self) -> list[Block]:
        found = [one for one in self.tokens if one.type in ("fence", "code_block")]
        return [Block(line_of(one), *language_and_marks(one.info), one.content) for one in found]

    @property
    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub and MyST make them."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        titles = [text_of(after) for one, after in pairs if one.type == "heading_open"]
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        return {f"{slug}-{n}" if (n := slugs[:i].count(slug)) else slug for i, slug in enumerate(slugs)}

    def inline(self, kind: str) -> Iterator[tuple[int, Token]]:
        """Yield the inline tokens of a kind, each with the line of its paragraph."""
        for token in self.tokens:
            yield from ((line_of(token), child) for child in token.children or () if child.type == kind)


@cache
def page(path: Path) -> Page:
    return Page(path)


def line_of(token: Token) -> int:
    return (token.map or [0])[0] + 1


def text_of(token: Token) -> str:
    return "".join(child.content for child in token.children or ())


def language_and_marks(info: str) -> tuple[str, tuple[str, ...]]:
    language, *marks = info.split() or [""]
    return language, tuple(marks)


def toctree() -> list[str]:
    """Return the entries of docs/index.md, in reading order."""
    trees = [block.text for block in page(ROOT / "docs" / "index.md").blocks if block.language == "{toctree}"]
    return [line for text in trees for line in text.splitlines() if line and not line.startswith(":")]


def reading_order() -> list[Path]:
    """Return README.md and the pages that docs/index.md names."""
    paths = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in toctree())]
    return [path for path in paths if path.exists()]


# Links and paths


def broken_links(path: Path) -> list[str]:
    """Return the links and images of a page whose file or anchor does not exist."""
    faults, given = [], page(path)
    links = [(line, str(one.attrs["href"])) for line, one in given.inline("link_open")]
    links += [(line, str(one.attrs["src"])) for line, one in given.inline("image")]
    for line, target in links:
        file, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        found = path.parent / file if file else path
        is_page = found.suffix == ".md" and found.is_file()
        if not found.exists() or (anchor and is_page and anchor not in page(found).anchors):
            faults.append(f"{path.name}:{line} {target}")
    return faults


def missing_paths(path: Path) -> list[str]:
    """Return the repository paths, in inline code and in shell blocks, that do not exist."""
    given = page(path)
    words = [(line, one.content) for line, one in given.inline("code_inline")]
    for block in given.blocks:
        if block.language in ("", *SHELLS):
            words += [(block.line, word) for command in commands(block.text) for word in command]
    return [f"{path.name}:{line} {word}" for line, word in words if not path_exists(word)]


def path_exists(word: str) -> bool:
    """Whether a word is an existing path of the repository, or none at all."""
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)*/?", word) or "/" not in word:
        return True
    if PLACEHOLDER.search(re.sub("README|CONTRIBUTING|LICENSE", "", word)):
        return True
    first, *rest = word.split("/")
    if first in FOLDERS:
        return (ROOT / word).exists() or (first == "eval_suites" and rest[0] in created_policies())
    # A module's path may begin at its room, such as `gateway/routing.py`.
    return not word.endswith(".py") or any(f"/{module}".endswith(f"/{word}") for module in modules())


@cache
def created_policies() -> set[str]:
    """Return the policies that commands of the pages create, each with its suite."""
    return {
        name for path in PAGES for name in re.findall(r"graftwork policy create ([\w-]+)", path.read_text())
    }


@cache
def modules() -> list[Path]:
    """Return every Python file of the repository."""
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


# Commands


def commands(text: str) -> list[list[str]]:
    """Split shell text into the words of its commands, those of `$(...)` too; comments and heredocs are "
    "left out."""
    text = re.sub(r"(?ms)<<-?\s*(['\"]?)(\w+)\1(.*?)$.*?^\s*\2\s*$", r"\3", text.replace("\\\n", " "))
    text = re.sub(r"(?m)(?<!\S)#.*$|^[$%] ", "", text)
    inner = re.findall(r"\$\(([^()]*)\)", text)
    lexer = shlex.shlex(
        re.sub(r"\$\([^()]*\)", "SUBSTITUTED", text), posix=True, punctuation_chars=";&|()<>\n"
    )
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|()<>\n"):
            found.append([])
        elif found[-1] or not re.match(r"\w+=", word):
            found[-1].append(word)
    return [one for one in found if one] + [each for one in inner for each in commands(one)]


def wrong_commands(path: Path) -> list[str]:
    """Return the `graftwork` and `make` commands of a page that its programs would not accept.

    A command in a shell block must parse; one in an indented block or in inline code may leave out arguments.
    """
    faults = []
    for block in page(path).blocks:
        if block.language in SHELLS:
            given = [(words, fault_of(words)) for words in commands(block.text)]
        elif not block.language:
            given = [(words, unknown_in(words)) for words in commands(block.text)]
        else:
            continue
        faults += [f"{path.name}:{block.line} {' '.join(words)}: {fault}" for words, fault in given if fault]
    for line, one in page(path).inline("code_inline"):
        if re.match(r"(\.venv/bin/)?(graftwork|make) ", one.content) and (
            fault := unknown_in(one.content.split())
        ):
            faults.append(f"{path.name}:{line} {one.content}: {fault}")
    return faults


def fault_of(words: list[str]) -> str | None:
    """Return why a command line would be refused; None where it parses, or is another program's."""
    if (fault := unknown_in(words)) or program_of(words) != "graftwork" or "--help" in words:
        return fault
    name, command, rest = resolve(words[1:])
    if hasattr(command, "commands") or name == "bench":
        return None
    try:
        command.make_context(name, rest).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def unknown_in(words: list[str]) -> str | None:
    """Return the first unknown command, option, target or benchmark of a command line."""
    if program_of(words) == "make":
        targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"there is no target {unknown[0]}" if unknown else None
    if program_of(words) != "graftwork":
        return None
    name, command, rest = resolve(words[1:])
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if hasattr(command, "commands"):
        unknown = [word for word in rest[:1] if word[0] not in "-|[" and not PLACEHOLDER.search(word)]
        return f"there is no command {unknown[0]}" if unknown else None
    if name == "bench":
        benchmarks = [one.stem for one in (ROOT / "tests" / "bench").glob("[a-z]*.py")]
        known = not rest or PLACEHOLDER.search(rest[0]) or rest[0] in [*benchmarks, "--help"]
        return None if known else f"there is no benchmark {rest[0]}"
    # The words of a first argument such as [verify|gc].
    argument = next((one.metavar or "" for one in command.params if one.param_type_name == "argument"), "")
    choices = re.findall(r"[a-z]+", argument) if "|" in argument else []
    if choices and rest and rest[0].islower() and rest[0][0] not in "-|[" and rest[0] not in choices:
        return f"there is no choice {rest[0]}"
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    unknown = [option for option in given if option not in options]
    return f"there is no option {unknown[0]}" if unknown else None


def program_of(words: list[str]) -> str:
    return words[0].removeprefix(".venv/bin/")


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


def resolve(words: list[str]) -> tuple[str, Any, list[str]]:
    """Return the command that words name, with its last name and the words that follow it."""
    name, command = "graftwork", root_command()
    while words and words[0] in getattr(command, "commands", {}):
        name, *words = words
        command = command.commands[name]
    return name, command, words
