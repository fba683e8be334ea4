"""The controller's process: its loop, its HTTP side, and what runs beside them, until a signal."""

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from engine.backup.age import BackupAge
from engine.backup.ledger_archive import Archiver
from engine.backup.place import BackupPlace
from engine.catalog.catalog import Catalog, migrate
from engine.catalog.fleet import Fleet
from engine.catalog.opening import open_catalog, refuse_unfinished, whole_catalog
from engine.clients.http_client import connect
from engine.clients.prefect import PrefectLogin
from engine.controller.api import build_app
from engine.controller.evidence import EvidenceReader
from engine.controller.release_loop import Controller
from engine.controller.route_changes import outlast_lease
from engine.controller.upkeep import upkeep
from engine.errors import GraftworkError
from engine.evaluation.child import EvaluationProcess
from engine.integrations.cancelled_runs import CancelledRuns
from engine.integrations.missed_runs import MissedRuns
from engine.integrations.mlflow_aliases import AliasMirror
from engine.integrations.mlflow_registry import open_registry
from engine.logs import set_up
from engine.notifications.alarm_watch import AlarmWatch
from engine.notifications.health_monitor import HealthMonitor
from engine.notifications.notice_endpoints import notices_router
from engine.notifications.notices import NotificationSender, released
from engine.ports import bind
from engine.report.live_page import page_router
from engine.security.credentials import USER, known_credential
from engine.security.http import server_options, trusted
from engine.settings.params import Params, load_params
from engine.threads import PeriodicThread, background


def whole_controller(
    params: Params, holder: str, evaluate: Callable[[bool], object] = lambda _: None
) -> Controller:
    """Return the loop with every optional part: chores, notifications of releases, several engines."""

    def reader(catalog: Catalog) -> EvidenceReader:
        return EvidenceReader(catalog, without=Fleet(catalog).without)

    on_change = [partial(released, site=params.url("controller"))]
    return Controller(params, holder, upkeep(params), on_change, reader, whole_catalog, evaluate)


def whole_app(controller: Controller, mirror: AliasMirror) -> FastAPI:
    """Return the HTTP side with every optional part: page, notices, a backup's age."""
    routers = page_router(controller), notices_router(controller.catalog)
    BackupAge(controller.metrics.registry, controller.catalog)
    return build_app(controller, routers, lambda: mirror.fault)


def alias_mirror(controller: Controller) -> AliasMirror:
    """Return what keeps routes and aliases in MLflow equal."""
    registry, site = open_registry(controller.params), controller.params.url("controller")
    return AliasMirror(controller.catalog, controller.decisions, registry, site)


def work_beside(controller: Controller) -> list[PeriodicThread]:
    """Return what runs in threads of its own: notifications, watchers, Prefect's runs, the archive."""
    params, catalog, decisions = controller.params, controller.catalog, controller.decisions
    login = PrefectLogin(USER, known_credential(params.paths, "prefect"))
    prefect = connect(params.url("prefect"), login=login)
    beside: list[PeriodicThread] = [
        NotificationSender(catalog, prefect),
        CancelledRuns(catalog, decisions, prefect),
        HealthMonitor(catalog, params),
        MissedRuns(prefect, controller.metrics.registry),
        AlarmWatch(controller),
    ]
    if params.controller.archive:
        place = BackupPlace(params.controller.archive, "The ledger's archive")
        paths, tell = params.paths, partial(controller.tell, "archive")
        archiver = Archiver(paths.ledger_snapshot, place, catalog.id, paths.ledger_archive, tell)
        controller.files.rewritten = archiver.wake
        beside.append(archiver)
    return beside


def serve(params: Params) -> None:
    """Run the controller until SIGTERM or SIGINT; raises the error that stopped its loop, if any."""
    listener = bind(params.listener("controller"), "controller")
    refuse_unfinished(params.paths)
    migrate(params.paths.catalog_url)
    # The holder is not the process id: after a kill, the next controller of this state directory renews the
    # lease at once. The ledger's lock and the lease's fence exclude the old process.
    holder = f"{socket.gethostname()}:{params.paths.root}"
    with open_catalog(params.paths) as catalog:
        outlast_lease(catalog, holder)
    evaluation = EvaluationProcess(params)
    controller = whole_controller(params, holder, evaluation.need)
    controller.catalog.keys.ensure_local(params.paths.local_key)
    mirror = alias_mirror(controller)
    beside = [mirror, *work_beside(controller)]
    config = uvicorn.Config(
        trusted(whole_app(controller, mirror), params.listener("controller")),
        log_level="warning",
        # Its loggers are configured with all others.
        log_config=None,
        timeout_graceful_shutdown=1,
        lifespan="off",
        **server_options(params.listener("controller")),
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal that stopped it again; it must not interrupt the shutdown below.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    for thread in beside:
        thread.start()
    turning = background(controller.run)
    turning.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listener])
    finally:
        for thread in beside:
            thread.stop()
        controller.stop()
        fault = turning.exception()
        # The loop, which has ended, might have started it.
        evaluation.stop()
        controller.close()
    if fault:
        raise fault


def main() -> int:
    """Run the controller with the settings of `--params`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.controller", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    arguments = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        params = load_params(arguments.params)
        set_up(params.log_format)
        serve(params)
    except GraftworkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
