"""Graftwork as a wheel in a fresh environment, away from the checkout: `graftwork init` and its README."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers.document_blocks import PORTS, script_of
from tests.helpers.documents import Page
from tests.helpers.live import free_port, left_behind
from tests.helpers.operated import Operated
from tests.helpers.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(900)]

RULES = """
def judge(question, answer, text):
    return float(text.strip() == answer)
"""


def ended(*command: str, cwd: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel. The other libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    # Not in the checkout, where setuptools leaves a folder `build`.
    source, environment = folder / "source", folder / "environment"
    for name in ("engine", "kernels", "tasks", "flows"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    ended(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source), cwd=folder)
    venv.create(environment)
    python, (wheel,) = environment / "bin" / "python", folder.glob("*.whl")
    ended(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    own = Path(
        ended(
            str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder
        ).strip()
    )
    # After the wheel's own folder, and without the .pth files there, one of which names the checkout.
    (own / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def test_the_page_that_init_writes_is_true(programs: Path, tmp_path: Path) -> None:
    """And runs of Prefect's deployments find a verifier of one's own beside the settings."""
    here, state = tmp_path / "mine", tmp_path / "mine" / ".graftwork"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def bash(script: str, cwd: Path = here) -> str:
        return ended("bash", "-c", script, cwd=cwd, environment=variables)

    assert str(ROOT) not in bash("cd /; python -c 'import flows, sys; print(flows.__file__)'", tmp_path)
    assert "checkout" in bash("graftwork ls 2>&1 || true", tmp_path)
    bash("graftwork init mine", tmp_path)
    assert "source checkout" in bash("graftwork bench handoff 2>&1 || true")
    ports = {name: free_port() for name in PORTS}
    lines = ["python_modules: [rules]", *(f"{name}: {{port: {port}}}" for name, port in ports.items())]
    with (here / "params.yaml").open("a") as file:
        file.write("\n".join(lines) + "\n")
    (here / "rules.py").write_text(RULES)
    bases = ROOT / ".graftwork" / "bases"
    bases.mkdir(parents=True, exist_ok=True)
    state.mkdir(mode=0o700, exist_ok=True)
    (state / "bases").symlink_to(bases)

    *first, last = Page(here / "README.md").blocks
    page = script_of(first).replace("8460", str(ports["engine"]))
    try:
        said = bash(page)
        assert "promote" in said
        assert "sums@" in said
        services = Operated(here / "params.yaml", state)
        entries = {one["entrypoint"] for one in services.prefect.post("/deployments/filter", json={}).json()}
        assert entries >= {"flows.adapt.adapt", "flows.nightly.nightly"}
        services.run("create_policy", name="ruled", data="sums.jsonl", verifier="python:rules:judge", steps=2)
        assert (here / "eval_suites" / "ruled" / "policy.yaml").is_file()
        services.run("adapt", policy="ruled")
        services.run("release", policy="ruled", skip_score="It is short.", skip_canary="It has no users.")
        assert services.answered_by("ruled").startswith("ruled@")
        assert "no commit was recorded" in bash("graftwork why ruled")
    finally:
        bash(script_of([last]))
    assert not left_behind(state)
