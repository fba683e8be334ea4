"""The command as a newcomer meets it: fast help, one clear sentence for each fault, its exit code."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from engine.errors import ServiceError
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import Metered
from engine.settings.forms import AdaptForm
from engine.settings.params import load_params
from engine.settings.reproducible import VARIABLE
from engine.version import code_version
from flows.cli import admin
from tests.helpers.command_line import graftwork
from tests.helpers.live import free_port
from tests.helpers.repository import ROOT
from tests.helpers.state_of_265b009 import leave_catalog_of_265b009


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [str(Path(sys.executable).parent / "graftwork"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


# What the help may not wait for.
LARGE = {
    "duckdb", "fastapi", "httpx", "mlflow", "numpy", "prefect", "sqlalchemy", "torch", "transformers", "vllm"
}  # fmt: skip


@pytest.fixture
def params(tmp_path: Path) -> Path:
    """Settings with a state directory and ports of their own."""
    names = ("engine", "trainer", "controller", "mlflow", "prefect")
    data = yaml.safe_load((ROOT / "params.yaml").read_text()) | {"state_dir": str(tmp_path / "state")}
    data |= {name: {"port": free_port()} for name in names}
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def change(params: Path, **values: object) -> Path:
    params.write_text(yaml.safe_dump(yaml.safe_load(params.read_text()) | values))
    return params


def core_seconds(*command: str) -> float:
    """Run a command; return its seconds of a core: what else the machine does is not the command's."""
    before = psutil.Process().cpu_times()
    subprocess.run(command, capture_output=True, cwd=ROOT, timeout=120, check=True)
    after = psutil.Process().cpu_times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.long
def test_help_takes_half_a_second_and_loads_no_large_library() -> None:
    """On a machine that imports the libraries alone in 0.18 s, as two quiet EPYC cores do."""
    libraries = "import typer.main, pydantic, rich.console, rich.panel, psutil, filelock, yaml"
    commands = {"help": ("-m", "flows.cli", "--help"), "libraries": ("-c", libraries)}
    took: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(3):
        for name, words in commands.items():
            took[name].append(core_seconds(sys.executable, *words))
    assert min(took["help"]) < 0.5 * min(took["libraries"]) / 0.18
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "flows.cli", "--help"],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "flows.cli.command" in loaded
    assert not LARGE & loaded


def test_help_lists_the_commands() -> None:
    result = process("--help")
    assert result.returncode == 0
    for command in (
        "run",
        "up",
        "down",
        "status",
        "adapt",
        "score",
        "release",
        "rollback",
        "decide",
        "key",
    ):
        assert f" {command} " in result.stdout


FAULTS = {
    "no settings file": (["run", "--params", "nowhere.yaml"], {}, 2, "nowhere.yaml"),
    "extra key": (["status"], {"wings": 2}, 2, "`wings`; allowed here: base,"),
    "extra nested key": (
        ["status"],
        {"engine": {"prot": 1}},
        2,
        "`engine.prot`; allowed here: at, dtype",
    ),
    "bad value": (["status"], {"engine": {"port": "x"}}, 2, "`engine.port`"),
    "unknown benchmark": (["bench", "nothing"], {}, 2, "benchmark 'nothing'"),
    "unknown scope": (["key", "create", "me", "--scope", "root"], {}, 2, "user, score"),
    "unknown role": (["key", "create", "me", "--role", "root"], {}, 2, "infer, pin"),
    "unknown limit": (["key", "create", "me", "--limit", "tokens=5"], {}, 2, "not a limit"),
    "wrong time": (["key", "create", "me", "--expires", "soon"], {}, 2, "30m, 12h or 90d"),
    "wrong subject": (["usage", "--by", "colour"], {}, 2, "tenant, key, policy, revision"),
    "unknown key": (["key", "revoke", "123456"], {}, 5, "key"),
    "no services": (["adapt", "arithmetic"], {}, 7, "graftwork up"),
    "no digest": (
        ["decide", "promote", "arithmetic", "--reason", "x"],
        {},
        2,
        "`graftwork ls arithmetic` lists",
    ),
    "nothing to hold": (["decide", "hold", "--reason", "x"], {}, 2, "Name a policy"),
    "something to thaw": (["decide", "thaw", "arithmetic", "--reason", "x"], {}, 2, "take none"),
    "nobody lifts": (["rollback", "arithmetic@ab12", "--lift", "--reason", "x"], {}, 2, "--by"),
    "nothing to purge": (["purge", "--by", "me", "--reason", "x"], {}, 2, "--tenant"),
    "nobody to suspend": (["tenant", "suspend", "--reason", "x"], {}, 2, "tenant suspend NAME"),
    "wrong learning rate": (["adapt", "arithmetic", "--lr", "-1"], {}, 2, "`lr`"),
    "unknown task": (
        ["run"],
        {"policies": {"p": {"task": "flying", "contract": "terse", "suite": "addition-terse"}}},
        2,
        "no task 'flying'",
    ),
    "unknown suite": (
        ["run"],
        {"policies": {"p": {"task": "addition", "contract": "terse", "suite": "poems"}}},
        5,
        "no suite 'poems'",
    ),
    "unknown policy": (
        ["adapt", "poetry"],
        {},
        2,
        "no policy 'poetry'. Known policies: arithmetic",
    ),
    "no policy": (["adapt"], {}, 2, "graftwork adapt POLICY"),
    "one unknown policy of two": (
        ["adapt", "arithmetic", "poetry"],
        {},
        2,
        "no policy 'poetry'. Known policies: arithmetic",
    ),
    "random base": (["run", "--base", "wide-moe"], {}, 2, "'wide-moe'"),
    "base of one's own": (["run", "--base", "Qwen/Qwen3-0.6B"], {}, 2, "--base takes"),
    "base for a GPU": (["run", "--base", "tiny-dsa"], {}, 2, "on a CPU"),
    "base without files": (["up"], {"base": {"name": "."}}, 3, "lacks config.json"),
}


@pytest.mark.parametrize(("arguments", "values", "code", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault_is_one_sentence_and_an_exit_code(
    params: Path,
    arguments: list[str],
    values: dict[str, object],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(params.parent)
    change(params, **values)
    given = [] if "--params" in arguments else ["--params", str(params)]
    result = graftwork(*arguments, *given)
    assert sentence in result.stderr
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_help_of_a_benchmark_is_its_own(params: Path) -> None:
    shown = process("bench", "fused", "--help", "--params", str(params))
    assert shown.returncode == 0, shown.stderr
    assert "--repeats" in shown.stdout
    general = graftwork("bench", "--help")
    assert general.returncode == 0
    assert "NAME" in general.stdout


def test_a_benchmark_needs_a_checkout(params: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(admin, "__file__", str(tmp_path / "site-packages" / "flows" / "cli" / "admin.py"))
    refused = graftwork("bench", "handoff", "--params", str(params))
    assert refused.returncode == 2
    assert "source checkout" in refused.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [("graftwork ini", "init"), ("graftwork policy create --verif", "--verifier")],
)
def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, words: str, completed: str
) -> None:
    """As bash asks, with what `graftwork --install-completion` installs."""
    monkeypatch.setenv("_GRAFTWORK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert graftwork().stdout.split() == [completed]


def test_a_variable_that_breaks_equal_bits_is_refused(params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    result = graftwork("status", "--params", str(params))
    assert result.returncode == 2
    assert result.stderr.startswith("MKL_CBWR is 'AVX2' in the environment.")
    assert "Traceback" not in result.stderr


def test_keys_are_created_listed_and_revoked(params: Path) -> None:
    given = ("--params", str(params))
    created = graftwork("key", "create", "ada", "--scope", "score", *given)
    plaintext = created.stdout.strip()
    assert plaintext.startswith("gw-")
    listed = graftwork("key", "ls", *given).stdout
    assert "ada" in listed
    assert plaintext not in listed
    from engine.catalog.records import hash_key

    prefix = hash_key(plaintext)[:12]
    assert prefix in listed
    assert graftwork("key", "revoke", prefix, *given).returncode == 0
    assert "revoked" in graftwork("key", "ls", *given).stdout


def test_a_tenants_keys_are_limited_and_rotated(params: Path) -> None:
    given = ("--params", str(params))
    created = graftwork(
        "key", "create", "acme", "--policy", "acme-*", "--role", "infer", "--limit", "tokens_per_day=500",
        "--expires", "90d", *given,
    )  # fmt: skip
    assert created.returncode == 0, created.stderr
    (row,) = json.loads(graftwork("key", "ls", "--json", *given).stdout)
    assert (row["tenant"], row["roles"], row["policies"]) == ("acme", "infer", "acme-*")
    assert row["limits"] == "tokens_per_day=500"
    assert row["expires"]
    overlapping = graftwork("key", "create", "umbrella", "--policy", "acme-sums", *given)
    assert overlapping.returncode == 6
    assert "'acme-*' of tenant" in overlapping.stderr
    limited = graftwork("key", "limits", row["id"], "--limit", "concurrency=2", *given)
    assert "has concurrency=2" in limited.stdout
    tenant = (
        "key",
        "limits",
        "acme",
        "--tenant",
        "--limit",
        "tokens_per_month=9000",
        "--weight",
        "2",
        *given,
    )
    assert "tokens_per_month=9000" in graftwork(*tenant).stdout
    rotated = graftwork("key", "rotate", row["id"], "--overlap", "30m", *given).stdout.strip()
    assert rotated.startswith("gw-")
    rows = json.loads(graftwork("key", "ls", "--json", *given).stdout)
    assert [one["state"] for one in rows] == ["active", "active"]
    assert {one["id"] for one in rows} == {row["id"]}
    assert graftwork("key", "revoke", row["id"], *given).returncode == 0
    rows = json.loads(graftwork("key", "ls", "--json", *given).stdout)
    assert {one["state"] for one in rows} == {"revoked"}


def test_usage_is_shown_by_tenant(params: Path) -> None:
    given = ("--params", str(params))
    assert graftwork("usage", *given).stdout == "None.\n"
    log = UsageLog(load_params(params).paths.usage)
    asked = Metered("r1", "acme", "k1", "acme-sums", "a" * 64, "user", 1_790_000_000.0, 50)
    log.settle(log.admit(asked), 200, (7, 5))
    log.close()
    (row,) = json.loads(graftwork("usage", "--json", *given).stdout)
    assert (row["tenant"], row["requests"], row["tokens"]) == ("acme", 1, 12)
    table = graftwork("usage", "--by", "key", "--csv", "--from", "2026-09-01", "--to", "2026-10-01", *given)
    assert table.stdout.splitlines()[1].startswith("k1,user,1,7,5,0,12,")
    assert graftwork("usage", "--to", "2026-09-01", *given).stdout == "None.\n"


def test_the_version_names_the_commit() -> None:
    said = process("--version").stdout
    assert said == f"graftwork {code_version()}\n"


def test_a_variable_names_the_settings(params: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For scripts, and from any directory; the option comes first."""
    monkeypatch.setenv("GRAFTWORK_PARAMS", str(params))
    monkeypatch.chdir(tmp_path)
    graftwork("key", "create", "ada")
    assert "ada" in graftwork("key", "ls").stdout
    refused = graftwork("key", "ls", "--params", "nowhere.yaml")
    assert "nowhere.yaml" in refused.stderr


@pytest.mark.long
def test_down_and_status_without_services(params: Path) -> None:
    given = ("--params", str(params))
    assert "No services" in process("down", *given).stdout
    shown = process("status", *given)
    assert shown.returncode == 0
    assert shown.stdout.count("stopped") == 6


def test_a_policy_that_fails_leaves_the_others_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], params: Path
) -> None:
    import flows.adapt
    from flows.cli import command as cli

    def adapt(form: AdaptForm) -> SimpleNamespace:
        if form.policy == "arithmetic":
            raise ServiceError("The trainer is away.")
        return SimpleNamespace(row=lambda: {"revision": f"{form.policy}@123456789abc"})

    monkeypatch.setattr(flows.adapt, "adapt", adapt)
    monkeypatch.setattr(cli, "enter", lambda params: load_params(params))
    monkeypatch.setattr(cli.services, "require_running", lambda settings: None)
    monkeypatch.setattr("tasks.steps.preload", lambda: None)
    settings = load_params(params)
    # As an older version has left it; whoever comes first brings it to the newest schema.
    settings.state_dir.mkdir()
    assert settings.paths.catalog_url == f"sqlite:///{params.parent}/state/catalog.db"
    leave_catalog_of_265b009(settings.paths.catalog_url)
    with pytest.raises(ServiceError, match="trainer is away"):
        cli.adapt(["arithmetic", "sorting"], params=params)
    assert "sorting@123456789abc" in capsys.readouterr().out
    cli.adapt(["sorting"], params=params)
    assert "sorting@123456789abc" in capsys.readouterr().out


def test_adapt_takes_a_recipe_for_this_time(monkeypatch: pytest.MonkeyPatch, params: Path) -> None:
    import flows.adapt
    from flows.cli import command as cli

    asked: list[AdaptForm] = []

    def adapt(form: AdaptForm) -> SimpleNamespace:
        asked.append(form)
        return SimpleNamespace(row=lambda: {"revision": "sorting@123456789abc"})

    monkeypatch.setattr(flows.adapt, "adapt", adapt)
    monkeypatch.setattr(cli.services, "require_running", lambda settings: None)
    monkeypatch.setattr("tasks.steps.preload", lambda: None)
    recipe = ("--steps", "2", "--lr", "0.001", "--rank", "4", "--loss", "grpo", "--seed", "7")
    done = graftwork("adapt", "sorting", *recipe, "--params", str(params))
    assert done.returncode == 0, done.stderr
    changed = {"steps": 2, "lr": 0.001, "rank": 4, "loss": "grpo", "seed": 7}
    assert [form.changes() for form in asked] == [changed]


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_a_destructor_still_ends_the_command(number: str, code: int) -> None:
    """Python drops what is raised there, so the command would go on as if nobody had asked it to end."""
    program = f"""
import os, signal, time
from flows.cli import command as cli
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.{number})
        time.sleep(0.1)
def app():
    Dying()
    time.sleep(30)
cli.main(app)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120)
    assert ended.returncode == code, ended.stderr


@pytest.mark.long
def test_a_command_sets_the_variable_of_equal_bits_before_it_imports_torch(
    params: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    done = process("store", "verify", "--json", "--params", str(params))
    assert "no catalog" in done.stderr
    assert done.returncode == 5
