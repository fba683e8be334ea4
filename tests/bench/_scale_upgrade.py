"""Controller and engines of an older version become this one's while users ask; an engine that is stopped."""

import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psycopg
from _scale_cluster import OLDER, START_S, Cluster, Host, wait_for
from _scale_kills import LONG, started_s, users
from _scale_releases import asked_of
from _scale_users import Asked, Crowd

from engine.catalog.catalog import migrate
from tests.helpers.repository import ROOT

POLICIES, RATE = 4, 5.0
# Streams of each way at the engine that stops.
STREAMS = 6
# In which HAProxy has seen that an engine drains: two checks.
NOTICED_S = 1.5


def upgrade(cluster: Cluster, crowd: Crowd) -> dict[str, list[float]]:
    """Migrate the catalog, then replace the controller and each engine; return what failed.

    The first engine gets SIGTERM without a word to HAProxy, the second drains before.
    """
    base = crowd.arrive(cluster.url, cluster.base.name, RATE, users())
    wait_for(lambda: any(one.is_whole for one in base.asked), "an answer of the older version")
    older = schema(cluster)
    migrate(cluster.controller.params.paths.catalog_url)
    newer = schema(cluster)
    if older == newer:
        raise RuntimeError(f"The older version's catalog has this one's schema, {newer}.")
    print(f"  schema {older} became {newer}", flush=True)
    policies = [f"stopping-{number}" for number in range(POLICIES)]
    for policy in policies:
        cluster.publish(policy, 1)
    flows = [base, *(crowd.arrive(cluster.url, policy, RATE, users()) for policy in policies)]
    wait_for(
        lambda: all(any(one.is_whole for one in flow.asked) for flow in flows), "answers of all policies"
    )
    hosts = (cluster.controller, *cluster.engines)
    if any(host.trees() != {older_tree(cluster)} for host in hosts):
        raise RuntimeError(f"The older version's services run {[host.trees() for host in hosts]}.")
    cluster.controller.upgrade()
    start_s = started_s(cluster)
    streams = list[Asked]()
    for number, host in enumerate(cluster.engines):
        streams += stop_under_load(cluster, crowd, host, policies, drains=bool(number))[0]
        host.upgrade()
        host.start()
        wait_for(host.is_ready, "it to be ready again", START_S)
    if any(host.trees() != {ROOT} for host in hosts):
        raise RuntimeError(f"After the upgrade the services run {[host.trees() for host in hosts]}.")
    time.sleep(1)
    for flow in flows:
        flow.rest()
    tell_broken([*streams, *asked_of(flows)])
    return {
        "upgrade_failed": [sum(not one.is_whole for one in asked_of(flows))],
        "upgrade_requests": [len(asked_of(flows))],
        "upgrade_streams_broken": [sum(not one.is_whole for one in streams)],
        "upgrade_streams": [len(streams)],
        "start_s": [start_s],
    }


def sigterm(cluster: Cluster, crowd: Crowd) -> dict[str, list[float]]:
    """Stop an engine of this version amid streams, without a word to HAProxy; it stays away."""
    policies = [f"leaving-{number}" for number in range(POLICIES)]
    for policy in policies:
        cluster.publish(policy, 1)
    flows = [crowd.arrive(cluster.url, policy, RATE, users()) for policy in policies]
    wait_for(lambda: all(any(one.is_whole for one in flow.asked) for flow in flows), "the first answers")
    streams, took = stop_under_load(cluster, crowd, cluster.engines[0], policies, drains=False)
    time.sleep(1)
    for flow in flows:
        flow.rest()
    tell_broken([*streams, *asked_of(flows)])
    return {
        "sigterm_failed": [sum(not one.is_whole for one in asked_of(flows))],
        "sigterm_streams_broken": [sum(not one.is_whole for one in streams)],
        "sigterm_streams": [len(streams)],
        "sigterm_s": [took],
    }


def tell_broken(asked: Sequence[Asked]) -> None:
    for one in [one for one in asked if not one.is_whole][:5]:
        print(f"  not whole: {one.is_stream} {one.got} of {one.tokens} {one.fault}", flush=True)


def older_tree(cluster: Cluster) -> Path:
    return cluster.controller.params.paths.root.parent / OLDER


def schema(cluster: Cluster) -> str:
    address = cluster.controller.params.paths.catalog_url.replace("+psycopg", "")
    with psycopg.connect(address) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def stop_under_load(
    cluster: Cluster, crowd: Crowd, host: Host, policies: Sequence[str], drains: bool
) -> tuple[list[Asked], float]:
    """Stop an engine amid streams; return those that were under way, and how long the stop took."""
    if drains:
        headers = {"authorization": f"Bearer {cluster.key}"}
        httpx.post(f"{host.url}/graftwork/drain", headers=headers, timeout=10).raise_for_status()
        time.sleep(NOTICED_S)
    flows = [
        crowd.once(url, policies[number % POLICIES], f"s{number}", LONG, is_stream=True)
        for number in range(STREAMS)
        for url in (cluster.url, host.url)
    ]
    wait_for(lambda: all(flow.asked and flow.asked[0].got for flow in flows), "the streams", every_s=0.01)
    under_way = [flow.asked[0] for flow in flows if not flow.asked[0].ended]
    if not any(one.url == host.url for one in under_way):
        raise RuntimeError("Every stream of the engine had ended before it was stopped.")
    process, began = host.process, time.monotonic()
    assert process is not None
    host.terminate()
    wait_for(lambda: process.poll() is not None, "its end", 60)
    took = time.monotonic() - began
    for flow in flows:
        flow.rest()
    host.process = None
    return under_way, took
