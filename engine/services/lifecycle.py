"""The services' commands, environment, start, health checks and stop.

`up` leaves the services running. A `session` uses running ones, or starts its own, which end with it even
when it is killed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from engine.base.names import PACKAGED, TOYS
from engine.errors import ConfigError, Conflict, PortInUse, ServiceError
from engine.files import write_whole
from engine.planning.gpu import refuse_unless_room, refuse_unless_served
from engine.ports import bind
from engine.security.credentials import LOGIN_VARIABLES, logins
from engine.services.own_environments import own_environments
from engine.services.supervisor import Supervisor, undisturbed
from engine.settings.params import Params, Paths, content_hash
from engine.settings.reproducible import VARIABLE, equal_bits

Report = Callable[[str, str], None]
# The worker's pool in Prefect, as in tasks/prefect.yaml.
WORK_POOL = "graftwork"
# Prefect's worker, for scheduled runs; `graftwork run` calls its flows directly and needs none.
WORKER = "worker"
RESIDENT = ("engine", "trainer", "mlflow", "prefect", "controller", "tinker")
# Tells a flow that the worker started where the settings are; read by flows/entry.py.
PARAMS_VARIABLE = "GRAFTWORK_PARAMS"


@dataclass(frozen=True)
class Service:
    """A service: its command, the path of its health check, and its time limit to start in seconds.

    A service without a health check starts after the others are healthy, and counts as healthy while it runs.
    """

    name: str
    command: tuple[str, ...]
    health: str | None
    start_timeout_s: float
    needs_base: bool = False


@dataclass(frozen=True)
class State:
    """A row of `graftwork status`; `seconds` is how long the service has been running."""

    name: str
    url: str
    state: str
    pid: int | None
    seconds: float


def settings_hash(params: Params) -> str:
    """Return a hash of the settings that services read at start, without those that flow runs read anew."""
    return content_hash(params.model_dump(mode="json", exclude={"policies", "nightly", "evaluate"}))


def services(params: Params) -> tuple[Service, ...]:
    """Return the services of this machine in the order in which they start.

    One with `at` runs elsewhere, and `tinker` runs only when it is enabled.
    """
    off = set() if params.tinker.enabled else {"tinker"}
    return tuple(
        one
        for one in every_service(params)
        if one.name not in off and (one.name == WORKER or params.listener(one.name).at is None)
    )


def every_service(params: Params) -> tuple[Service, ...]:
    """Return the services of an installation, wherever they run, in the order in which they start."""
    worker = ("-m", "prefect", "worker", "start", "--type", "process", "--pool", WORK_POOL)
    ours = ("--params", str(params.paths.root / "params.json"))
    base_s = params.engine.start_timeout_s
    return (
        Service("engine", ("-m", "engine.serving.server", *ours), "/health", base_s, needs_base=True),
        Service("trainer", ("-m", "engine.training.service.app", *ours), "/health", base_s, needs_base=True),
        Service("mlflow", ("-m", "tasks.mlflow_server", *ours), "/health", 300),
        Service("prefect", ("-m", "tasks.prefect_server", *ours), "/api/health", 180),
        Service("controller", ("-m", "engine.controller", *ours), "/health", 120),
        Service("tinker", ("-m", "engine.tinker.service", *ours), "/health", 60),
        Service(WORKER, (*worker, "--name", "graftwork"), None, 60),
    )


def environment(params: Params) -> dict[str, str]:
    """Return the environment variables of our processes: addresses, logins, equal bits, no telemetry.

    Entry points also apply them to themselves, before heavy imports. Raises `ConfigError` when a variable
    that the user has set prevents equal bits.
    """
    quiet = {
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
        "GIT_PYTHON_REFRESH": "quiet",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # We retry ourselves; MLflow's own retries would go on for minutes after our time limits.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        # Avoids seven idle job processes of 250 MB each, for features that we do not use.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # We print errors once, ourselves; Prefect's UI keeps every log line.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        # Lets an automation tell a crashed run from a long one.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Runs, and with them their logs, go 90 days after their end; by default they stay.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        # SQLite allows one writer: on a busy machine others wait longer than the default of 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # The default is 10 s, too long for someone who pressed Run.
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Libraries' progress bars would garble our own.
        "TQDM_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    places = {
        "MLFLOW_TRACKING_URI": params.url("mlflow"),
        "NO_PROXY": ",".join(sorted({"127.0.0.1", *(params.listener(name).host for name in RESIDENT)})),
        "PREFECT_API_URL": f"{params.url('prefect')}/api",
        "PREFECT_HOME": str(params.paths.prefect),
        # The default is in the user's home directory even if PREFECT_HOME is set.
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(params.paths.prefect / "storage"),
        PARAMS_VARIABLE: str(params.source or params.paths.root / "params.json"),
    }
    # Only a hub id may need the network, until the base is in the local cache.
    local = params.base.name in (*TOYS, *PACKAGED) or Path(params.base.name).expanduser().exists()
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE") if local else ()
    return quiet | places | logins(params.paths) | dict.fromkeys(offline, "1") | equal_bits(os.environ)


def mkl_cbwr() -> str:
    """Return MKL_CBWR of this process, and so of the services that it starts, for a run's record."""
    return os.environ.get(VARIABLE, "unset")


@contextlib.contextmanager
def session(
    params: Params, build_base: Callable[[], object], report: Report, only: Collection[str] = RESIDENT
) -> Iterator[None]:
    """Use the services that `up` started with these settings, or run those in `only` until the block ends.

    Raises `Conflict` when services run with other settings or belong to another run, and as `start` does.
    """
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
    """Start the services in `only` and leave them running; False when services already ran.

    Raises `ConfigError` for an unknown service, `Conflict` when services run with other settings or belong
    to another run, and what `start` raises.
    """
    if unknown := sorted(set(only) - {*RESIDENT, WORKER}):
        raise ConfigError(
            f"Unknown service {unknown[0]!r}. Known services: {', '.join((*RESIDENT, WORKER))}."
        )
    if _usable(params):
        wait_healthy(params, report)
        return False
    start(params, build_base, report, None, only)
    return True


def start(
    params: Params, build_base: Callable[[], object], report: Report, owner: int | None, only: Collection[str]
) -> None:
    """Start the services in `only`, those that need the base after it is built; stop all if one fails.

    Raises `PortInUse` before anything has started, `Conflict` while another command starts services, and
    `ServiceError` with the end of the log when a service ends or is not healthy in time.
    """
    paths = params.paths
    for directory in (paths.logs, paths.mlartifacts, paths.prefect, paths.runs):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(paths.root / "services.lock").acquire(timeout=2)
    except Timeout:
        raise Conflict(
            f"Another command is starting the services in {paths.root}. Wait until it has finished."
        ) from None
    with lock:
        supervisor = supervisor_of(params)
        supervisor.stop()
        chosen = [service for service in services(params) if service.name in only]
        _check_ports(params, chosen)
        check_base(params, chosen)
        _set_aside_unfinished(paths)
        if params.catalog.url and any(service.name == "controller" for service in chosen):
            from engine.catalog.catalog import migrate

            # Whoever runs the controller migrates what is shared, before an engine of this version looks.
            migrate(params.paths.catalog_url)
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
            # BaseException includes Ctrl-C: a failed start leaves nothing running.
            with undisturbed():
                supervisor.stop()
            raise


def foreground(params: Params, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of one service, to run it in this process's place.

    Its settings are written to the state directory, as `up` does. Raises `ConfigError` for an unknown one.
    """
    by_name = {service.name: service for service in every_service(params)}
    if name not in by_name:
        raise ConfigError(f"Unknown service {name!r}. Known services: {', '.join(by_name)}.")
    params.paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_settings(params)
    # Engine, trainer and controller read the credentials that they need; others may not be here.
    own = own_environments(params, [name]) if name in ("mlflow", "prefect") else {}
    own |= {WORKER: logins(params.paths)}
    return [sys.executable, *by_name[name].command], _shared_environment(params) | own.get(name, {})


def down(params: Params) -> bool:
    """Stop all services and wait until they have ended; False when none was running. Idempotent."""
    return supervisor_of(params).stop()


def is_running(params: Params) -> bool:
    """Return whether services run in this state directory, whoever started them."""
    return supervisor_of(params).running() is not None


def require_running(params: Params) -> None:
    """Raise `ServiceError` unless the services run."""
    if not is_running(params):
        raise ServiceError("The services are not running. Start them with `graftwork up`.")


def status(params: Params) -> list[State]:
    """Return each service's state as the supervisor reports it; all `stopped` when none runs."""
    supervisor = supervisor_of(params)
    programs = supervisor.programs() if supervisor.running() else {}
    states = []
    for service in services(params):
        info = programs.get(service.name, {"statename": "STOPPED", "pid": 0, "now": 0, "start": 0})
        running_s = info["now"] - info["start"] if info["pid"] else 0
        state = str(info["statename"]).lower()
        url = params.url(service.name) if service.health else ""
        states.append(State(service.name, url, state, info["pid"] or None, running_s))
    return states


def wait_healthy(params: Params, report: Report) -> None:
    """Wait until every started service is healthy, and the engine shows our plugin's marker.

    Raises `ServiceError` with the end of the log when a service ends or is not healthy in time.
    """
    from engine.clients.engine import EngineClient
    from engine.clients.http_client import ServiceClient

    begun = time.monotonic()
    first_start: dict[str, int] = {}
    programs = supervisor_of(params).programs()
    waiting = {service.name: service for service in services(params) if service.name in programs}
    waiting = {name: service for name, service in waiting.items() if service.health}
    while waiting:
        programs = supervisor_of(params).programs()
        for name, service in list(waiting.items()):
            info = programs[name]
            # Report a service that ends while starting at once, not after the supervisor's retries.
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


def supervisor_of(params: Params) -> Supervisor:
    """Return the supervisor of the services in the state directory."""
    return Supervisor(params.paths.root, params.paths.logs)


def _usable(params: Params) -> bool:
    running = supervisor_of(params).running()
    if running is None:
        return False
    if running.owner is not None:
        if not psutil.pid_exists(running.owner):
            return False
        raise Conflict(
            f"Another run (pid {running.owner}) uses the state directory {params.state_dir}. Wait until it "
            "has finished, or set another `state_dir`."
        )
    if running.settings != settings_hash(params):
        raise Conflict("The services run with other settings. Stop them with `graftwork down` first.")
    return True


def held_ports(params: Params, names: Collection[str]) -> dict[str, int]:
    """Return the ports that other programs hold, by service."""
    held = {}
    for name in names:
        listener = params.listener(name)
        try:
            bind(listener, name).close()
        except PortInUse:
            held[name] = listener.port
    return held


def _check_ports(params: Params, chosen: Sequence[Service]) -> None:
    for service in chosen:
        if service.health:
            bind(params.listener(service.name), service.name).close()


def check_base(params: Params, chosen: Sequence[Service]) -> None:
    """Print the memory plan if trainer and engine share a GPU.

    Raises `ConfigError` when they do not fit, there or in main memory, or when the engine cannot serve the
    base on this machine.
    """
    names = {service.name for service in chosen if service.needs_base}
    if names:
        if "engine" in names:
            refuse_unless_served(params)
        refuse_unless_room(params, names)


def _databases(paths: Paths) -> tuple[Path, ...]:
    """Return the databases of MLflow and Prefect, whose creation is not crash-safe."""
    return (paths.mlflow_db, paths.mlflow_logins, paths.prefect / "prefect.db")


def _finished(database: Path) -> Path:
    return database.with_name(f"{database.name}.finished")


def _set_aside_unfinished(paths: Paths) -> None:
    """Rename a database whose server was never healthy: its creation was cut off, and it holds no data.

    MLflow would refuse to start on its tables without a schema version.
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
    _write_settings(params)
    programs = {service.name: service.command for service in chosen}
    own = own_environments(params, programs)
    supervisor.spawn(programs, _shared_environment(params), owner, settings_hash(params), own)
    for service in chosen:
        if service.health and not service.needs_base:
            supervisor.start(service.name)
            report(service.name, "starting")
    build_base()
    for service in chosen:
        if service.needs_base:
            supervisor.start(service.name)
            report(service.name, "starting")


def _write_settings(params: Params) -> None:
    # It may hold the address of a database with its password.
    write_whole(params.paths.root / "params.json", params.to_json(), mode=0o600)


def _shared_environment(params: Params) -> dict[str, str]:
    shared = os.environ | environment(params)
    return {name: value for name, value in shared.items() if name not in LOGIN_VARIABLES}


def _with_log(paths: Paths, name: str, sentence: str) -> str:
    log = paths.logs / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.is_file() else []
    return "\n".join([f"{sentence} Last lines of {log}:", *lines])
