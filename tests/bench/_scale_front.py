"""Whether one policy's fault harms the others, with HAProxy or the router in front of two engines."""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from _scale_cluster import BUCKET, Cluster
from _scale_releases import asked_of
from _scale_users import Asked, Crowd
from s3fs import S3FileSystem

from tests.helpers.router_process import arguments, routed

FAULT_S, FAULTY_RATE, OTHERS_RATE = 8.0, 10.0, 3.0


def faults(cluster: Cluster, crowd: Crowd, folder: Path, is_long: bool) -> dict[str, list[float]]:
    """Ask two policies whose adapters cannot load, and others meanwhile, through HAProxy, and the router."""
    others = [f"well-{number}" for number in range(4)]
    for name in others:
        cluster.publish(name, 1)
    broken = {"damaged": cluster.publish("damaged", 1)[0], "missing": cluster.publish("missing", 1)[0]}
    for policy, name in broken.items():
        spoil(cluster, name, is_gone=policy == "missing")
    urls = [host.url for host in cluster.engines]
    found = through(crowd, cluster.url, list(broken), others, "haproxy")
    if not is_long:
        return found
    with routed(urls, folder, arguments()) as url:
        found |= through(crowd, url, list(broken), others, "router")
    with routed(urls, folder, []) as url:
        found |= through(crowd, url, list(broken), others, "router_defaults")
    return found


def spoil(cluster: Cluster, name: str, is_gone: bool) -> None:
    """Remove the object that holds a revision's bytes, or overwrite it."""
    policy, _, digest = name.partition("@")
    segment = cluster.catalog.revisions.get(policy, digest).segment
    store = S3FileSystem()
    (path,) = (path for path in store.find(BUCKET) if segment in path)
    if is_gone:
        store.rm(path)
    else:
        store.pipe_file(path, bytes(store.info(path)["size"]))


def through(
    crowd: Crowd, url: str, broken: Sequence[str], others: Sequence[str], way: str
) -> dict[str, list[float]]:
    """Return how many requests of other policies failed, and the answers of those at fault."""
    bad = [crowd.arrive(url, policy, FAULTY_RATE, (f"u{n}" for n in count())) for policy in broken]
    good = [crowd.arrive(url, policy, OTHERS_RATE, (f"u{n}" for n in count())) for policy in others]
    time.sleep(FAULT_S)
    for flow in [*bad, *good]:
        flow.rest()
    met = asked_of(good)
    statuses = sorted({one.status for one in asked_of(bad)})
    if answered := [one for one in asked_of(bad) if one.status == 200]:
        raise RuntimeError(f"{len(answered)} requests were answered by an adapter that cannot load.")
    print(
        f"  {way}: {len(asked_of(bad))} at fault said {statuses}; {len(met)} others, {failed(met)} failed",
        flush=True,
    )
    for one in [one for one in met if not one.is_whole][:3]:
        print(f"    {one.fault}", flush=True)
    return {f"others_failed.{way}": [failed(met)], f"others_asked.{way}": [len(met)]}


def failed(asked: Sequence[Asked]) -> int:
    return sum(not one.is_whole for one in asked)
