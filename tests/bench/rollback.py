"""How soon a rollback reaches every engine, and what users notice of it.

    graftwork bench rollback [--catalog sqlite postgres] [--repeats N] [--rate 10] [--long]

Two engine processes of one catalog under load. A bad canary gets half of the users; they begin to reject it,
and the controller rolls it back. `rollback_s` is from the verdict until a gateway's look at the routes first
sends one of the canary's users to the champion, on the slower engine: no new request is routed to the
canary from then on. `admitted_s` is until the last look that sent anybody to it; the truth lies between.
First MLflow and Prefect run, and the policy's aliases in MLflow follow its route; then both are ended.
Figures bear catalog and state in their names (`rollback_s.sqlite.up`). `failed_requests` counts every
request that does not end in 200 with all its tokens. Streams of the canary that are under way must end with
the tokens that it gives alone, and these must not be the champion's.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import _made
import _record as record
import _served
import httpx
from _rollback_release import Rollback, Site, on_canarys_side, roll_back, wait
from _rollback_users import Asked, Users
from _run import Run, options, start

from engine.catalog.catalog import Catalog
from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.clients.http_client import ServiceClient
from engine.integrations.mlflow_registry import API, DIGEST_TAG, Registry, open_registry
from engine.security.credentials import LOGIN_VARIABLES, USER, known_credential
from engine.services.lifecycle import services
from engine.services.own_environments import own_environments
from engine.settings.params import Params, load_params
from tests.helpers.live import free_port, start_reaped, stop_reaped
from tests.helpers.postgres import fresh_database, postgres

BASE, POLICY = "tiny-dense", "rollback"
CATALOGS = ("sqlite", "postgres")
# Long streams on each engine: of the canary's users, and of others.
THEIRS, OTHERS = 2, 1
BOUNDS = {
    "rollback_s": record.at_most(1.0),
    "rollback_most_s": record.at_most(1.0),
    "failed_requests": record.within(0),
    "streams_changed": record.within(0),
    "tombstone_s": record.at_most(),
    "admitted_s": record.at_most(),
}


@contextmanager
def running(params: Params, names: Sequence[str]) -> Iterator[None]:
    """Run services of these settings for the block, each in a process tree of its own."""
    own = own_environments(params, names)
    shared = {name: value for name, value in os.environ.items() if name not in LOGIN_VARIABLES}
    with ExitStack() as stack:
        for service in services(params):
            if service.name not in names:
                continue
            log = stack.enter_context((params.paths.logs / f"{service.name}.log").open("ab"))
            process = start_reaped(service.command, log, shared | own.get(service.name, {}))
            stack.callback(stop_reaped, process)
            client = stack.enter_context(ServiceClient(service.name, params.url(service.name), timeout_s=5))
            wait(partial(client.is_healthy, str(service.health)), service.name, service.start_timeout_s)
        yield


def register(params: Params, names: Sequence[str]) -> None:
    """Register the policy and its revisions in MLflow; return once its alias `champion` follows the route."""
    login = httpx.BasicAuth(USER, known_credential(params.paths, "mlflow"))
    url = params.url("mlflow")
    with whole_catalog(params.paths.catalog_url) as catalog, httpx.Client(base_url=url, auth=login) as client:
        client.post(f"{API}/registered-models/create", json={"name": POLICY}).raise_for_status()
        for name in names:
            digest = catalog.revisions.get(POLICY, name.partition("@")[2]).digest
            tags = [{"key": DIGEST_TAG, "value": digest}]
            body = {"name": POLICY, "source": "s3://bucket/none", "tags": tags}
            client.post(f"{API}/model-versions/create", json=body).raise_for_status()
    with closing(open_registry(params)) as registry:
        wait(partial(has_champion, registry), "the alias `champion` in MLflow")


def has_champion(registry: Registry) -> bool:
    """Return whether MLflow has the policy's alias `champion`."""
    return any(model.name == POLICY and "champion" in model.aliases for model in registry.models())


def placed(catalog: Catalog) -> tuple[list[str], str]:
    """Return the names of users for long streams, on both sides of the split, and of a watcher."""
    names = [f"listener-{number}" for number in range(100)]
    theirs = on_canarys_side(catalog, POLICY, names)
    watcher, *mine = (name for name in names if name in theirs)
    others = (name for name in names if name not in theirs)
    return [*mine[:THEIRS], *islice(others, OTHERS)], watcher


@contextmanager
def site(given: Params, url: str | None, count: int, out: Path) -> Iterator[tuple[Site, Params, list[str]]]:
    """Yield two engines of one catalog with their controller, the settings, and `count` fresh revisions.

    One more revision is the champion.
    """
    ports = {name: {"port": free_port()} for name in ("controller", "mlflow", "prefect")}
    with ExitStack() as stack:
        first = stack.enter_context(_served.live(given, BASE, out, ports | {"catalog": {"url": url}}))
        second = stack.enter_context(_served.second(first))
        shape = _served.SHAPES[BASE]
        with closing(_made.Maker(first.params, first.base, POLICY, shape.rank, shape.torch_dtype)) as maker:
            champion, *others = maker.make(1 + count)
        catalog = stack.enter_context(whole_catalog(first.params.paths.catalog_url))
        digest = catalog.revisions.get(POLICY, champion.partition("@")[2]).digest
        catalog.routes.update(replace(catalog.routes.get(POLICY), champion=digest), 0)
        stack.enter_context(running(first.params, ("controller",)))
        controller = ControllerClient(first.params.url("controller"), first.server.key)
        stack.enter_context(controller)
        snapshot = first.params.paths.ledger_snapshot
        both = Site((first.server, second.server), controller, catalog, champion, snapshot)
        yield both, first.params, others


@dataclass(frozen=True)
class Series:
    """Rollbacks one after another, and every request meanwhile."""

    rollbacks: Sequence[Rollback]
    asked: Sequence[Asked]


def series(run: Run, live: Site, canaries: Sequence[str], rate: float, what: str, share: float) -> Series:
    """Roll these canaries back, one after another, under one load."""
    with Users(live.servers, POLICY, rate, *placed(live.catalog)) as users:
        found = run.repeats(
            what, lambda number: shown(live, users, canaries[number]), share=share, most=len(canaries)
        )
    return Series(found, users.asked)


def shown(live: Site, users: Users, canary: str) -> Rollback:
    found = roll_back(live, users, canary)
    print(
        f"  {canary}: {found.until_s:.3f} s, tombstone {found.tombstone_s:.3f} s, {len(found.asked)} "
        f"requests, {len(found.failed)} failed, {len(found.crossed)} streams under way, "
        f"{found.changed} changed",
        flush=True,
    )
    return found


def measure(
    run: Run, given: Params, name: str, url: str | None, asked: argparse.Namespace, share: float
) -> dict[str, Series]:
    """Return the rollbacks of one catalog while MLflow and Prefect are up, and while they are down."""
    count = asked.repeats
    with site(given, url, 2 * count, asked.out) as (live, params, canaries):
        with running(params, ("mlflow", "prefect")):
            register(params, [live.champion, *canaries])
            up = series(run, live, canaries[:count], asked.rate, f"{name}, rollback", share / 2)
        what = f"{name}, rollback without MLflow and Prefect"
        return {"up": up, "down": series(run, live, canaries[count:], asked.rate, what, share)}


def take(figures: record.Figures, catalog: str, found: Mapping[str, Series]) -> None:
    """Take the figures of one catalog's rollbacks."""
    for state, one in found.items():
        figures.add({"rollback_s": [each.until_s for each in one.rollbacks]}, f".{catalog}.{state}")
        figures.add({"tombstone_s": [each.tombstone_s for each in one.rollbacks]}, f".{catalog}.{state}")
        figures.add({"admitted_s": [each.admitted_s for each in one.rollbacks]}, f".{catalog}.{state}")
        crossed = sum(len(each.crossed) for each in one.rollbacks)
        figures.values[f"streams_crossed.{catalog}.{state}"] = crossed
    every = [each for one in found.values() for each in one.rollbacks]
    asked = [each for one in found.values() for each in one.asked]
    if not every:
        return
    figures.values |= {
        f"rollback_most_s.{catalog}": max(each.until_s for each in every),
        f"failed_requests.{catalog}": sum(bool(each.fault) for each in asked),
        f"requests.{catalog}": len(asked),
        f"streams_changed.{catalog}": sum(each.changed for each in every),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--catalog", nargs="+", choices=CATALOGS)
    parser.add_argument("--repeats", type=int, help="rollbacks with MLflow and Prefect up, and down; at most")
    parser.add_argument(
        "--rate", type=float, default=10.0, help="short requests a second on each engine, a watcher's aside"
    )
    given = parser.parse_args()
    run = Run("rollback", given.long)
    given.repeats = given.repeats or (5 if run.is_long else 3)
    given.out.mkdir(parents=True, exist_ok=True)
    figures, params = record.Figures(), load_params(given.params)
    catalogs = given.catalog or (CATALOGS if run.is_long else CATALOGS[:1])
    for number, name in enumerate(catalogs):
        if run.is_interrupted:
            break
        with run.preparing(), postgres() if name == "postgres" else nullcontext() as server:
            url = fresh_database(server) if server else None
            share = 1 / (len(catalogs) - number)
            take(figures, name, measure(run, params, name, url, given, share))
    # Without a stream under way nothing is known of how one ends.
    correct = all(count > 0 for name, count in figures.values.items() if name.startswith("streams_crossed"))
    record.report(run, figures, BOUNDS, correct, given.out)


if __name__ == "__main__":
    start(main)
