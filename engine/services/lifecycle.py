"""The services: what they are, how they start, when they are healthy.

Knows each service's command, address and health check; knows nothing of what they say to each
other. `up` leaves the services running; a `session` uses those or owns its own, which then die
with it, also when it is killed.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from engine.base.recipes import RECIPES
from engine.errors import ConfigError, Conflict, PortInUse, ServiceError
from engine.services.supervisor import Supervisor, undisturbed
from engine.settings.params import Params, Paths, content_hash
from engine.settings.reproducible import VARIABLE, equal_bits

Report = Callable[[str, str], None]
# Runs what Prefect schedules; the main job calls its flows itself and does without.
WORKER = "worker"
RESIDENT = ("engine", "trainer", "mlflow", "prefect", "controller")
# Where a flow that the worker started finds the settings; read by flows/entry.py.
PARAMS_VARIABLE = "GRAFTWORK_PARAMS"


@dataclass(frozen=True)
class Service:
    """One program: how it starts, where it answers, how long it may take.

    One without an address for its `health` is well while it runs, and starts when the others are well.
    """

    name: str
    command: tuple[str, ...]
    health: str | None
    start_timeout_s: float
    needs_base: bool = False


@dataclass(frozen=True)
class State:
    """What `graftwork status` shows of a service."""

    name: str
    url: str
    state: str
    pid: int | None
    seconds: float


def settings_hash(params: Params) -> str:
    """Name the settings that the services start with; what flows read anew at each run is not among them."""
    return content_hash(params.model_dump(mode="json", exclude={"policies", "demo", "nightly", "evaluate"}))


def services(params: Params) -> tuple[Service, ...]:
    """Return the services in the order in which they start."""
    paths = params.paths
    backend = params.mlflow.backend or f"sqlite:///{paths.mlflow_db}"
    bind = ("--host", "127.0.0.1", "--port")
    mlflow = ("-m", "mlflow", "server", "--backend-store-uri", backend, "--serve-artifacts", "--workers", "1",
              "--artifacts-destination", str(paths.mlartifacts), *bind, str(params.mlflow.port))  # fmt: skip
    prefect = ("-m", "prefect", "server", "start", "--analytics-off", *bind, str(params.prefect.port))
    worker = ("-m", "prefect", "worker", "start", "--type", "process", "--pool", params.prefect.work_pool)
    ours = ("--params", str(paths.root / "params.json"))
    base_s = params.engine.start_timeout_s
    return (
        Service("engine", ("-m", "engine.serving.server", *ours), "/health", base_s, needs_base=True),
        Service("trainer", ("-m", "engine.training.service.app", *ours), "/health", base_s, needs_base=True),
        Service("mlflow", mlflow, "/health", 180),
        Service("prefect", prefect, "/api/health", 180),
        Service("controller", ("-m", "engine.controller", *ours), "/health", 120),
        Service(WORKER, (*worker, "--name", "graftwork"), None, 60),
    )


def environment(params: Params) -> dict[str, str]:
    """Return the variables for our processes: where the servers are, equal bits, no telemetry, no network.

    The only place that sets variables; entry points apply it to themselves before heavy imports. Raises
    `ConfigError` when a variable of the user's own breaks equal bits.
    """
    quiet = {
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
        "GIT_PYTHON_REFRESH": "quiet",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Ours is the patience; its client's own retries would run for minutes past it.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        # Its webhook goes to the controller, on this machine.
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        # Seven idle job processes, 250 MB each, for features that the loop does not use.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # A fault is told once, as a sentence; Prefect's own page keeps every line.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        # By these an automation tells a dead run from a long one.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # SQLite takes one writer: on a busy machine the others wait longer than the default of 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # Somebody who pressed Run is waiting; the default is 10 s.
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Our own progress is shown; the libraries' bars would tear it apart.
        "TQDM_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    places = {
        "MLFLOW_TRACKING_URI": params.url("mlflow"),
        "NO_PROXY": "127.0.0.1",
        "PREFECT_API_URL": f"{params.url('prefect')}/api",
        "PREFECT_HOME": str(params.paths.prefect),
        # Its default is under the user's home, whatever PREFECT_HOME says.
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(params.paths.prefect / "storage"),
        PARAMS_VARIABLE: str(params.source or params.paths.root / "params.json"),
    }
    # Only a hub id may need the network, and only until it is in the local cache.
    local = params.base.name in RECIPES or Path(params.base.name).expanduser().exists()
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE") if local else ()
    return quiet | places | dict.fromkeys(offline, "1") | equal_bits(os.environ)


def mkl_cbwr() -> str:
    """Return what this process, and so the services that it starts, asks MKL for; for a run's record."""
    return os.environ.get(VARIABLE, "unset")


@contextlib.contextmanager
def session(
    params: Params, build_base: Callable[[], object], report: Report, only: Collection[str] = RESIDENT
) -> Iterator[None]:
    """Use the services that `up` started with these settings, or own those of `only` until the block ends."""
    if _usable(params):
        wait_healthy(params, report)
        yield
        return
    start(params, build_base, report, os.getpid(), only)
    try:
        yield
    finally:
        with undisturbed():
            down(params)


def up(
    params: Params,
    build_base: Callable[[], object],
    report: Report,
    only: Collection[str] = (*RESIDENT, WORKER),
) -> bool:
    """Start the services of `only` and leave them running; False when some already ran with these settings.

    Raises `ConfigError` for a service that there is not.
    """
    if unknown := sorted(set(only) - {*RESIDENT, WORKER}):
        raise ConfigError(f"There is no service {unknown[0]!r}. Known: {', '.join((*RESIDENT, WORKER))}.")
    if _usable(params):
        wait_healthy(params, report)
        return False
    start(params, build_base, report, None, only)
    return True


def start(
    params: Params,
    build_base: Callable[[], object],
    report: Report,
    owner: int | None,
    only: Collection[str],
) -> None:
    """Start the services of `only`, those on the base once it is built; stop all of them if one fails.

    Raises `PortInUse` before anything has started, `Conflict` when another start is under way,
    `ServiceError` with the end of the log when a service ends or is not healthy in time.
    """
    paths = params.paths
    for directory in (paths.logs, paths.mlartifacts, paths.prefect, paths.runs):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(paths.root / "services.lock").acquire(timeout=2)
    except Timeout:
        raise Conflict(f"Another command is starting the services in {paths.root}; wait for it.") from None
    with lock:
        supervisor = _supervisor(params)
        supervisor.stop()
        chosen = [service for service in services(params) if service.name in only]
        _check_ports(params, chosen)
        _check_base(params, chosen)
        _set_aside_unfinished(paths)
        try:
            _start_programs(params, chosen, supervisor, build_base, report, owner)
            wait_healthy(params, report)
            for service in chosen:
                if service.health is None:
                    supervisor.start(service.name)
            for database in _databases(paths):
                if database.exists():
                    _finished(database).touch()
        except BaseException:
            # Also after Ctrl-C: nothing of a start that failed goes on.
            with undisturbed():
                supervisor.stop()
            raise


def down(params: Params) -> bool:
    """Stop every service and wait until it is gone; False when nothing was running. Idempotent."""
    return _supervisor(params).stop()


def is_running(params: Params) -> bool:
    """Say whether the services run, here or as part of another run."""
    return _supervisor(params).running() is not None


def require_running(params: Params) -> None:
    """Raise `ServiceError` unless the services run."""
    if not is_running(params):
        raise ServiceError("The services are not running; start them with `graftwork up`.")


def status(params: Params) -> list[State]:
    """Return every service's state as its supervisor sees it; `stopped` when none runs."""
    supervisor = _supervisor(params)
    known = supervisor.programs() if supervisor.running() else {}
    states = []
    for service in services(params):
        info = known.get(service.name, {"statename": "STOPPED", "pid": 0, "now": 0, "start": 0})
        running_s = info["now"] - info["start"] if info["pid"] else 0
        state = str(info["statename"]).lower()
        url = params.url(service.name) if service.health else ""
        states.append(State(service.name, url, state, info["pid"] or None, running_s))
    return states


def wait_healthy(params: Params, report: Report) -> None:
    """Wait until every service answers; the engine must also show our plugin's marker."""
    from engine.clients.engine import EngineClient
    from engine.clients.http import ServiceClient

    begun = time.monotonic()
    first_start: dict[str, int] = {}
    programs = _supervisor(params).programs()
    waiting = {service.name: service for service in services(params) if service.name in programs}
    waiting = {name: service for name, service in waiting.items() if service.health}
    while waiting:
        programs = _supervisor(params).programs()
        for name, service in list(waiting.items()):
            info = programs[name]
            # A service that ends while it starts is at fault: show why at once, not after its retries.
            again = info["start"] and first_start.setdefault(name, info["start"]) != info["start"]
            if again or info["statename"] in ("BACKOFF", "EXITED", "FATAL"):
                raise ServiceError(_with_log(params.paths, name, f"The {name} service ended while starting."))
            if time.monotonic() - begun > service.start_timeout_s:
                late = f"The {name} service was not healthy within {service.start_timeout_s:.0f} s."
                raise ServiceError(_with_log(params.paths, name, late))
            with ServiceClient(name, params.url(name), timeout_s=5) as client:
                if client.is_healthy(str(service.health)):
                    del waiting[name]
                    report(name, f"ready after {time.monotonic() - begun:.1f} s")
        time.sleep(0.1)
    if "engine" in programs:
        with EngineClient(params.url("engine")) as engine:
            try:
                engine.marker()
            except ServiceError as error:
                raise ServiceError(_with_log(params.paths, "engine", str(error))) from None


def _supervisor(params: Params) -> Supervisor:
    return Supervisor(params.paths.root, params.paths.logs)


def _usable(params: Params) -> bool:
    running = _supervisor(params).running()
    if running is None:
        return False
    if running.owner is not None:
        if not psutil.pid_exists(running.owner):
            return False
        raise Conflict(
            f"Another run (pid {running.owner}) uses {params.state_dir}; wait for it, or set `state_dir`."
        )
    if running.settings != settings_hash(params):
        raise Conflict("The services run with other settings; run `graftwork down` first.")
    return True


def _check_ports(params: Params, chosen: Sequence[Service]) -> None:
    for service in chosen:
        if service.health is None:
            continue
        port = getattr(params, service.name).port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise PortInUse(
                    f"Port {port} of the {service.name} service is in use by another program. "
                    f"Stop that program, or set `{service.name}.port` in params.yaml."
                ) from None


def _check_base(params: Params, chosen: Sequence[Service]) -> None:
    """Print the plan of a GPU that trainer and engine would share.

    Raises `ConfigError` when it does not fit, or when the engine cannot serve the base on this machine.
    """
    if any(service.needs_base for service in chosen):
        from engine.planning.gpu import planned, refuse_unless_served

        if any(service.name == "engine" for service in chosen):
            refuse_unless_served(params)
        planned(params)


def _databases(paths: Paths) -> tuple[Path, ...]:
    """Databases that other projects' servers create, in steps that a kill can cut in half."""
    return (paths.mlflow_db, paths.prefect / "prefect.db")


def _finished(database: Path) -> Path:
    return database.with_name(f"{database.name}.finished")


def _set_aside_unfinished(paths: Paths) -> None:
    """Move a database away whose server was stopped before it was ever healthy: it holds nothing.

    MLflow refuses to start on tables without a schema version, and would do so for ever.
    """
    for database in _databases(paths):
        if not _finished(database).exists():
            for file in database.parent.glob(f"{database.name}*"):
                file.rename(file.with_name(f"unfinished-{file.name}"))


def _start_programs(
    params: Params,
    chosen: Sequence[Service],
    supervisor: Supervisor,
    build_base: Callable[[], object],
    report: Report,
    owner: int | None,
) -> None:
    settings = json.dumps(params.model_dump(mode="json"), indent=2)
    (params.paths.root / "params.json").write_text(settings)
    programs = {service.name: service.command for service in chosen}
    supervisor.spawn(programs, os.environ | environment(params), owner, settings_hash(params))
    for service in chosen:
        if service.health and not service.needs_base:
            supervisor.start(service.name)
            report(service.name, "starting")
    build_base()
    for service in chosen:
        if service.needs_base:
            supervisor.start(service.name)
            report(service.name, "starting")


def _with_log(paths: Paths, name: str, sentence: str) -> str:
    log = paths.logs / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.is_file() else []
    return "\n".join([f"{sentence} The end of {log}:", *lines])
