"""Every command that shows something can show it as JSON, and prints nothing else on its standard output."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import app
from tests.helpers.command_line import graftwork
from tests.helpers.operated import write_sums

# Commands without `--json`, each with its reason.
WITHOUT = {
    "chat": "streams answers to what is typed",
    "start": "becomes the service, whose output is its log",
    "serve": "serves until Ctrl-C",
    "haproxy": "prints a file of another program",
    "bench": "passes its options to the benchmark, which has its own",
}


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command that is no group, with its whole name."""
    if groups := getattr(command, "commands", None):
        for part, one in groups.items():
            yield from leaves(one, f"{name} {part}".strip())
    else:
        yield name, command


def test_every_command_that_shows_something_has_json() -> None:
    found = dict(leaves(typer.main.get_command(app)))
    assert len(found) > 40
    lacking = {
        name for name, one in found.items() if not any("--json" in option.opts for option in one.params)
    }
    assert lacking == set(WITHOUT)


@pytest.mark.parametrize(
    "command", ["init {0}/new", "down", "policy create sums --data {0}/sums.jsonl --verifier exact"]
)
def test_json_is_all_that_is_printed(command: str, tmp_path: Path, tiny_base: Path) -> None:
    settings = tmp_path / "settings.yaml"
    paths = f"state_dir: {tmp_path / 'state'}\nsuites_dir: {tmp_path / 'suites'}\n"
    settings.write_text(f"{paths}base: {{name: {tiny_base}}}\n")
    write_sums(tmp_path / "sums.jsonl", 200)
    given = [] if command.startswith("init") else ["--params", str(settings)]
    done = graftwork(*command.format(tmp_path).split(), "--json", *given)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


def test_json_of_a_tenants_life(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"state_dir: {tmp_path / 'state'}\n")

    def told(command: str) -> dict[str, Any]:
        done = graftwork(*command.split(), "--json", "--params", str(settings))
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return answer[0] if isinstance(answer, list) else answer

    key, id = told("key create acme")["key"], told("key ls")["id"]
    assert told(f"key limits {id} --limit requests_per_minute=5")["limits"] == {"requests_per_minute": 5}
    assert told("key limits acme --tenant --limit tokens_per_day=9")["limits"] == {"tokens_per_day": 9}
    assert told("tenant suspend acme --reason late")["reason"] == "late."
    assert told("tenant resume acme")["tenant"] == "acme"
    assert told(f"key rotate {id}")["key"] not in (None, key)
    assert told(f"key revoke {id}")["tenant"] == "acme"
