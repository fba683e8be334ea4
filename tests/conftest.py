"""What several test files share: a small base, and an engine on it."""

import atexit
import gc
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, cast

import certifi
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from sqlalchemy import Connection, inspect, text

from engine.catalog import catalog as catalog_module
from engine.catalog.catalog import Catalog, Policy, migrate
from engine.catalog.opening import whole_catalog
from engine.errors import Conflict
from engine.ledger.ledger import Ledger
from engine.settings.reproducible import equal_bits
from tests.helpers.live import CROWDED, RunningEngine, start_engine, stop_engine
from tests.helpers.machine_lock import HELD, machine_lock
from tests.helpers.postgres import copied_catalog, fresh_database, own_identity, postgres
from tests.helpers.shared_services import SHARED, group_of

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Of the server that a flow starts for itself. Its default of 20 is too short on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
}
# Tests ask for equal bits: as in every process of ours, before torch is imported.
os.environ.update(OFFLINE | equal_bits(os.environ))

# Property tests draw the same cases in every run, however slow the machine is; `--hypothesis-profile explore`
# draws new ones. Neither keeps a case for the next run: what is found becomes an `@example`.
settings.register_profile(
    "repeat", derandomize=True, database=None, deadline=None, max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "explore", settings.get_profile("repeat"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("repeat")

# Fixtures that start a service, here or in a file; a test that starts one itself is marked `services`.
SERVED = {
    "chromium", "clone", "crowded", "engine", "finished", "gate", "halves", "moe_engine", "people",
    "postgres_server", "running", "s3", "server", "service", "supervisor",
}  # fmt: skip
# Programs that only a test marked `services` may start.
SERVERS = re.compile(
    r"engine\.(serving\.server|training\.service\.app|controller) |tasks\.(prefect|mlflow)_server "
    r"|vllm\.entrypoints|supervisord|(mlflow|prefect) server|bin/postgres "
)
# The test that runs now, while it is one that may start none of them.
fast: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine-lock", action="store_true", help="run beside no other run and no benchmark")


def pytest_configure(config: pytest.Config) -> None:
    """Hold the machine's lock for the whole run if asked to; else nothing that a test starts waits for it."""
    # Until all tests are collected, which imports a great deal.
    gc.disable()
    if not hasattr(config, "workerinput"):
        trust_one_root(config)
    if not config.getoption("--machine-lock") or hasattr(config, "workerinput"):
        os.environ.setdefault(HELD, "")
        return
    lock = ExitStack()
    try:
        lock.enter_context(machine_lock())
    except Conflict as error:
        pytest.exit(str(error), 1)
    config.add_cleanup(lock.close)


def trust_one_root(config: pytest.Config) -> None:
    """Let HTTP clients and their children's read one root certificate: certifi's many take each 30 ms."""
    folder, end = TemporaryDirectory(prefix="graftwork-root-"), "-----END CERTIFICATE-----\n"
    config.add_cleanup(folder.cleanup)
    file = Path(folder.name) / "root.pem"
    file.write_text(certifi.contents().partition(end)[0] + end)
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs services, and start the longest first; `--dist loadfile` keeps a file on one worker."""
    for item in items:
        assert isinstance(item, pytest.Function)
        if SERVED & set(item.fixturenames) or "postgresql" in item.name:
            item.add_marker("services")
        file = item.nodeid.partition("::")[0]
        for name, files in SHARED.items():
            if name in item.fixturenames and not hasattr(item.module, name):
                assert file in files, f"{file} uses the fixture {name}; add it to SHARED[{name!r}]."
    items.sort(key=lambda item: (-minutes_of(item), item.get_closest_marker("services") is None))


def pytest_collection_finish() -> None:
    """Leave what imports have made out of garbage collection: it lives as long as the process."""
    gc.freeze()
    gc.enable()


def minutes_of(item: pytest.Item) -> float:
    """Return the minutes that a heavy test's file takes, 1 unless it says; 0 for others."""
    heavy = item.get_closest_marker("heavy")
    return heavy.kwargs.get("minutes", 1) if heavy else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule whole files, those that share an engine as if they were one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_fast = not any(item.get_closest_marker(name) for name in ("services", "slow"))
    fast[:] = [item.nodeid] if is_fast else []


def refuse_servers(event: str, arguments: tuple) -> None:
    """Refuse to start a service in a test that `make test-fast` runs."""
    if event == "subprocess.Popen" and fast:
        line = " ".join(map(str, arguments[1])) + " "
        assert not SERVERS.search(line), f"{fast[0]} starts {line}; mark it: pytest.mark.services."


sys.addaudithook(refuse_servers)

# Why tests were left out that a person would want to hear of, for the very last line.
LEFT_OUT = pytest.StashKey[str]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say after everything else what was not tested."""
    if LEFT_OUT in config.stash and not hasattr(config, "workeroutput"):
        atexit.register(say_last, config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker left out."""
    if missing := getattr(node, "workeroutput", {}).get("left out"):
        note_left_out(node.config, missing)


def say_last(sentence: str) -> None:
    print(sentence, flush=True)
    # At the interpreter's end DuckDB's binding complains of what torch keeps alive; not after this.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Leave the other cores to the other workers: threads that wait for one that does not run spin."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def schema_once() -> Iterator[None]:
    """Migrate one empty SQLite catalog of a process; give the others its tables, an own id and an own secret.

    To create it takes forty milliseconds, a thousand times. That runs once in a process for each database,
    and each time where a test asks for `empty_catalog_url`.
    """
    migrations, statements = catalog_module.upgrade, list[str]()

    def upgrade(connection: Connection, migrates: bool = True) -> None:
        if connection.dialect.name != "sqlite" or inspect(connection).get_table_names():
            return migrations(connection, migrates)
        if not statements:
            migrations(connection)
            raw = cast(sqlite3.Connection, connection.connection.driver_connection)
            # Without BEGIN and COMMIT.
            statements.extend(list(raw.iterdump())[1:-1])
            return None
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.execute(text("UPDATE catalog SET id = :id, secret = :secret"), own_identity())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_module, "upgrade", upgrade)
        yield


@pytest.fixture(scope="session", autouse=True)
def ledger_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Migrate one empty ledger of a process; each new one is a copy of its file, which takes no time."""
    make, template = Ledger.__init__, tmp_path_factory.mktemp("ledger") / "empty.duckdb"

    def copied(ledger: Ledger, path: Path | str) -> None:
        if not template.exists():
            made = Ledger.__new__(Ledger)
            make(made, template)
            made.close()
        if not Path(path).exists():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(template, path)
        make(ledger, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "__init__", copied)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state: whether it passes must not be a matter of luck."""
    import torch

    torch.manual_seed(0)


def leave_out(request: pytest.FixtureRequest, missing: str) -> NoReturn:
    """Skip what needs a program that is not there, and say so in the last line."""
    note_left_out(request.config, missing)
    getattr(request.config, "workeroutput", {})["left out"] = request.config.stash[LEFT_OUT]
    pytest.skip(missing)


def note_left_out(config: pytest.Config, missing: str) -> None:
    known = config.stash.get(LEFT_OUT, "")
    if missing not in known:
        config.stash[LEFT_OUT] = f"{known} {missing}".strip()


@pytest.fixture(scope="session")
def chromium(request: pytest.FixtureRequest) -> str:
    """Return the path of a Chromium; without one what needs it is skipped, and the last line says so."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next((path for name in names if (path := shutil.which(name))), None)
    missing = "The pages were NOT tested in a browser: no Chromium is on the PATH (apt install chromium)."
    return found or leave_out(request, missing)


@pytest.fixture(scope="session")
def promtool(request: pytest.FixtureRequest) -> str:
    """Return the path of Prometheus' checker; without it what needs it is skipped, as with `chromium`."""
    missing = "The alerts were NOT checked: no promtool is on the PATH (apt install prometheus)."
    return shutil.which("promtool") or leave_out(request, missing)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A base of the real recipe's shape, trained for seconds only: it talks, but badly.

    One worker builds it for all; none may write into it.
    """
    from engine.base.toys.build import build
    from engine.base.toys.recipes import RECIPES

    mine = tmp_path_factory.getbasetemp()
    directory = (mine if worker_id == "master" else mine.parent) / "bases" / "tiny"
    directory.parent.mkdir(exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):
        if not directory.exists():
            recipe = replace(RECIPES["tiny-dense"], steps=20, problems=2048)
            draft = directory.with_suffix(".draft")
            draft.mkdir()
            build(recipe, seed=1, directory=draft, progress=lambda step, steps, loss: None)
            draft.rename(directory)
    return directory


@pytest.fixture(scope="session")
def engine(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    running = start_engine(tiny_base, tmp_path_factory.mktemp("engine"), wait_s=600, slots=4, max_num_seqs=64)
    yield running
    stop_engine(running)


@pytest.fixture(scope="session")
def moe_engine(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine on a small mixture of experts, with a slot for an adapter on each target and on all."""
    from tests.helpers.moe_bases import qwen3_moe
    from tests.helpers.parity import kinds_of

    base = qwen3_moe(tmp_path_factory.mktemp("bases") / "moe", tiny_base)
    state = tmp_path_factory.mktemp("moe-engine")
    slots = len(kinds_of(base))
    running = start_engine(base, state, slots=slots, max_num_seqs=64, dtype="float32", routed_experts=True)
    yield running
    stop_engine(running)


@pytest.fixture(scope="session")
def crowded(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine with few slots and a host tier of few adapters, on a base with two end tokens.

    It logs for a collector.
    """
    from tests.helpers.end_tokens import add_end_token

    base = tmp_path_factory.mktemp("bases") / "two-ends"
    shutil.copytree(tiny_base, base)
    add_end_token(base)
    state = tmp_path_factory.mktemp("crowded")
    running = start_engine(base, state, log_format="json", max_num_seqs=16, **CROWDED)
    yield running
    stop_engine(running)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    """Serve S3 on a free port for this process and its children."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    # A client of an earlier server would be used again: its options are the same.
    S3FileSystem.clear_instance_cache()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        yield
    server.stop()


@pytest.fixture
def sqlite_catalog_url(tmp_path: Path) -> str:
    """The address of a catalog without rows."""
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of what is not a catalog yet, in each database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/catalog.db"
    return fresh_database(request.getfixturevalue("postgres_server"))


@pytest.fixture(scope="session")
def postgres_catalog(postgres_server: str) -> str:
    """The address of a catalog on Postgres that others are copies of; it stays without rows."""
    url = fresh_database(postgres_server)
    migrate(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a catalog without rows, in each database."""
    if request.param == "postgresql":
        return copied_catalog(request.getfixturevalue("postgres_catalog"))
    url = f"sqlite:///{tmp_path}/new/catalog.db"
    migrate(url)
    return url


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    """A catalog with one policy, in each database."""
    with closing(whole_catalog(catalog_url)) as catalog:
        catalog.policies.add(Policy("sorting", "base", {"rank": 8}, "me", 1.0))
        yield catalog


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB; skipped where nobody may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
