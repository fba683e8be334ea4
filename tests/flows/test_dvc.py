"""`dvc repro` as a researcher runs it: in a clean clone, with DVC itself, on real services."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.helpers.repository import ROOT

pytestmark = pytest.mark.heavy(minutes=4)
IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@localhost")
# Enough steps that the revision answers otherwise than the base.
STEPS = 4


class Clone:
    """A clean clone of what is committed here; a base that this checkout has built already is used."""

    def __init__(self, root: Path):
        self.root = root
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
        # As `make` leaves it, but installed once: the stages find it, PATH does not name it.
        (root / ".venv").symlink_to(sys.prefix)
        bases = ROOT / ".graftwork" / "bases"
        bases.mkdir(parents=True, exist_ok=True)
        (root / ".graftwork").mkdir()
        (root / ".graftwork" / "bases").symlink_to(bases)
        elsewhere = [part for part in os.environ["PATH"].split(":") if not part.startswith(sys.prefix)]
        self.environment = os.environ | {
            "PATH": ":".join(elsewhere),
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(root.parent / "site"),
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdout=pipe, stderr=pipe, text=True
        )

    def dvc(self, *arguments: str) -> str:
        """Run DVC, which must end well; return what it printed."""
        process = self.start(str(self.root / ".venv" / "bin" / "dvc"), *arguments)
        output, errors = process.communicate()
        assert process.returncode == 0, (output + errors)[-6000:]
        return output

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *IDENTITY, *arguments], cwd=self.root, check=True, capture_output=True)

    def set(self, section: str, **changes: Any) -> None:
        data = yaml.safe_load((self.root / "params.yaml").read_text())
        data[section] |= changes
        (self.root / "params.yaml").write_text(yaml.safe_dump(data, sort_keys=False))

    def evaluation(self) -> tuple[bytes, bytes]:
        return (self.root / "metrics.json").read_bytes(), (self.root / "items.jsonl").read_bytes()

    def metrics(self) -> dict[str, Any]:
        return json.loads((self.root / "metrics.json").read_text())


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    clone = Clone(tmp_path_factory.mktemp("dvc") / "clone")
    arithmetic = yaml.safe_load((ROOT / "params.yaml").read_text())["policies"]["arithmetic"]
    clone.set("policies", arithmetic=arithmetic | {"steps": STEPS})
    clone.set("evaluate", policy="arithmetic", revision="adapt")
    clone.git("commit", "--all", "--message", "few steps", "--allow-empty")
    clone.dvc("repro")
    yield clone
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(clone.root) in " ".join(line or []) for line in left)


@pytest.mark.timeout(900)
def test_a_clean_clone_reproduces_scores_and_report(clone: Clone) -> None:
    metrics = clone.metrics()
    assert metrics["base"]["items"] == metrics["revision"]["items"] == 200
    assert 0.1 < metrics["base"]["score"] < 0.9
    assert metrics["revision"]["score"] > metrics["base"]["score"]
    assert (clone.root / "repro" / "report" / "report.html").is_file()
    # No ledger, no registry, no catalog: the checkout's state directory has only the base.
    assert [path.name for path in (clone.root / ".graftwork").iterdir()] == ["bases"]
    assert list((clone.root / "repro" / "services").iterdir()) == []


@pytest.mark.timeout(900)
def test_a_second_repro_has_nothing_to_do(clone: Clone) -> None:
    assert json.loads(clone.dvc("status", "--json")) == {}
    before = {path: path.stat().st_mtime_ns for path in (clone.root / "repro").rglob("*")}
    clone.dvc("repro")
    assert {path: path.stat().st_mtime_ns for path in (clone.root / "repro").rglob("*")} == before


@pytest.mark.timeout(900)
def test_evaluating_again_gives_the_same_bytes(clone: Clone) -> None:
    before = clone.evaluation()
    # What is compared must have been written anew.
    times = {name: (clone.root / name).stat().st_mtime_ns for name in ("metrics.json", "items.jsonl")}
    clone.dvc("repro", "--force", "--single-item", "evaluate")
    assert all((clone.root / name).stat().st_mtime_ns > time for name, time in times.items())
    assert clone.evaluation() == before


@pytest.mark.timeout(900)
def test_metrics_and_plots_are_shown(clone: Clone) -> None:
    found = json.loads(clone.dvc("metrics", "diff", "--json"))["metrics.json"]
    assert found["revision.score"]["new"] == clone.metrics()["revision"]["score"]
    page = clone.root.parent / "plots" / "index.html"
    clone.dvc("plots", "show", "--out", str(page.parent))
    text = page.read_text()
    for title in ("Score on the frozen items", "Each item under base", "Mean reward of each training step"):
        assert title in text


@pytest.mark.timeout(900)
def test_pinning_the_same_revision_trains_and_scores_nothing_again(clone: Clone) -> None:
    from engine.publishing.importing import import_revision
    from engine.settings.params import load_params

    digest = json.loads((clone.root / "repro" / "adapt" / "adapt.json").read_text())["digest"]
    times = (clone.root / "metrics.json").stat().st_mtime_ns
    import_revision(load_params(clone.root / "params.yaml"), clone.root / "repro" / "adapt" / "revision")
    clone.set("evaluate", revision=digest)
    clone.dvc("repro")
    assert json.loads((clone.root / "repro" / "adapt" / "adapt.json").read_text())["digest"] is None
    assert json.loads((clone.root / "repro" / "revision" / "manifest.json").read_text())["digest"] == digest
    assert (clone.root / "metrics.json").stat().st_mtime_ns == times


@pytest.mark.slow
def test_what_a_backup_restores_elsewhere_gives_the_same_bytes(clone: Clone, tmp_path: Path) -> None:
    from engine.publishing.importing import import_revision
    from engine.settings.params import load_params
    from tasks.backup import backup
    from tasks.restore_backup import restore_backup

    params = load_params(clone.root / "params.yaml")
    digest = import_revision(params, clone.root / "repro" / "adapt" / "revision").digest
    backup(params, str(tmp_path / "kept"))
    other = Clone(tmp_path / "other")
    settings = yaml.safe_load((clone.root / "params.yaml").read_text())
    settings |= {"state_dir": "restored", "evaluate": {"policy": "arithmetic", "revision": digest}}
    (other.root / "params.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    # Its suites are those of the clone, which the backup has as well.
    restore_backup(load_params(other.root / "params.yaml"), str(tmp_path / "kept"))
    (other.root / "restored" / "bases").symlink_to(ROOT / ".graftwork" / "bases")
    other.dvc("repro")
    assert other.evaluation() == clone.evaluation()


def test_a_stage_that_fails_says_why_and_dvc_fails_with_it(clone: Clone) -> None:
    settings = (clone.root / "params.yaml").read_text()
    clone.set("evaluate", revision="0" * 64)
    process = clone.start(str(clone.root / ".venv" / "bin" / "dvc"), "repro")
    output, errors = process.communicate()
    (clone.root / "params.yaml").write_text(settings)
    assert process.returncode != 0
    assert "no revision 000000000000" in output + errors
    assert "Traceback" not in output + errors


@pytest.mark.slow
def test_two_experiments_at_once_do_not_meet(clone: Clone) -> None:
    clone.set("evaluate", policy="arithmetic", revision="adapt")
    dvc = str(clone.root / ".venv" / "bin" / "dvc")
    runs = [
        clone.start(
            dvc, "exp", "run", "--temp", "--name", name, "--set-param", f"++policies.arithmetic.lr={lr}"
        )
        for name, lr in (("slower", 5e-4), ("faster", 4e-3))
    ]
    for process in runs:
        output, errors = process.communicate()
        assert process.returncode == 0, (output + errors)[-6000:]
    found = json.loads(clone.dvc("metrics", "diff", "slower", "faster", "--json"))["metrics.json"]
    assert found["revision.score"]["old"] != found["revision.score"]["new"]
    assert "base.score" not in found


@pytest.mark.slow
def test_a_persons_own_data_needs_only_its_name_in_the_settings(clone: Clone) -> None:
    from engine.settings.params import load_params
    from tasks.policies import create_policy

    data = clone.root.parent / "mine.jsonl"
    rows = [{"question": f"Double {number}.", "answer": str(2 * number)} for number in range(10, 160)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    create_policy(load_params(clone.root / "params.yaml"), "doubling", data, "numeric", settings={"steps": 2})
    clone.set("evaluate", policy="doubling", revision="adapt")
    clone.dvc("repro")
    metrics = clone.metrics()
    assert metrics["revision"]["items"] == len(
        (clone.root / "eval_suites/doubling/items.jsonl").open().readlines()
    )
    assert json.loads((clone.root / "repro/revision/manifest.json").read_text())["policy"] == "doubling"
