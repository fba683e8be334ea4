"""What `graftwork init DIR` writes, and the files that a wheel must carry for it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from setuptools import Distribution
from setuptools.command.build_py import build_py

from engine.settings import params as settings_module
from engine.settings.params import Params, load_params
from tasks.starter import write_starter
from tests.helpers.command_line import graftwork
from tests.helpers.repository import ROOT


def test_init_writes_settings_data_and_a_page(tmp_path: Path) -> None:
    began = graftwork("init", str(tmp_path / "new" / "one"))
    assert began.returncode == 0, began.stderr
    here = tmp_path / "new" / "one"
    assert {path.name for path in here.iterdir()} == {"params.yaml", "sums.jsonl", "README.md"}
    assert str(here / "params.yaml") in began.stdout
    params = load_params(here / "params.yaml")
    assert (params.state_dir, params.suites_dir) == (here / ".graftwork", here / "eval_suites")
    assert params.base.name == "tiny-dense"
    rows = [json.loads(line) for line in (here / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 2000
    assert all(
        eval(re.search(r"\d+ \+ \d+", row["question"])[0]) == int(row["answer"])  # type: ignore[index]
        for row in rows
    )
    assert max(path.stat().st_size for path in here.iterdir()) < 200_000
    assert len((here / "README.md").read_text().splitlines()) <= 40


def test_what_stands_behind_a_comment_is_the_default(tmp_path: Path) -> None:
    write_starter(tmp_path)
    file = tmp_path / "params.yaml"
    commented = re.findall(r"(?m)^# (\w+: \{.*\})$", file.read_text())
    assert len(commented) == 7
    given = yaml.safe_load("\n".join(commented))
    file.write_text(file.read_text() + "\n" + "\n".join(commented))
    read, default = load_params(file), Params()
    for section, values in given.items():
        for key in values:
            assert getattr(getattr(read, section), key) == getattr(getattr(default, section), key), key


@pytest.mark.parametrize("name", ["params.yaml", "README.md"])
def test_init_overwrites_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    refused = graftwork("init", str(tmp_path))
    assert refused.returncode == 6
    assert name in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_init_cannot_begin_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    refused = graftwork("init", str(tmp_path / "taken"))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_every_other_command_names_init(tmp_path: Path) -> None:
    missing = graftwork("ls", "--params", str(tmp_path / "params.yaml"))
    assert missing.returncode == 2
    assert "graftwork init DIR" in missing.stderr


def test_an_installed_package_keeps_policies_beside_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").touch()
    assert load_params(tmp_path / "params.yaml").suites_dir == ROOT / "eval_suites"
    monkeypatch.setattr(settings_module, "CHECKOUT_SUITES", tmp_path / "site-packages" / "eval_suites")
    assert load_params(tmp_path / "params.yaml").suites_dir == tmp_path / "eval_suites"


def test_a_wheel_carries_every_file_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As setuptools lists them by pyproject.toml."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    command = build_py(distribution)
    command.finalize_options()
    files = command.get_data_files_without_manifest()
    listed = {f"{folder}/{one}" for _, folder, _, names in files for one in names}
    modules = {path for _, _, path in command.find_all_modules()}
    tracked = subprocess.run(
        ["git", "ls-files", "engine", "kernels", "tasks", "flows"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(tracked.stdout.split()) - listed - modules == set()
    assert "tasks/starter_files/params.yaml" in listed
