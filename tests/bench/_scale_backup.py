"""A backup of a cluster that serves, restored as on another machine: a database and a store of its own."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from _scale_cluster import BUCKET, Cluster, wait_for
from _scale_kills import users
from _scale_releases import OPEN, asked_of
from _scale_users import Crowd

from engine.catalog.catalog import Route
from engine.catalog.opening import whole_catalog
from engine.catalog.revision_rows import location
from engine.ledger.ledger import open_snapshot
from engine.ledger.spool import Spool
from engine.settings.params import Params
from engine.store.open import open_store
from tasks.backup import backup
from tasks.restore_backup import restore_backup
from tests.helpers.postgres import fresh_database

POLICIES, REVISIONS, SCORES, RATE = 4, 3, 200, 5.0


def backups(cluster: Cluster, crowd: Crowd, folder: Path) -> dict[str, list[float]]:
    """Back up while users ask and a release runs; return what the restored installation lacks."""
    params, policies = cluster.controller.params, [f"kept-{number}" for number in range(POLICIES)]
    names = [cluster.publish(policy, REVISIONS) for policy in policies]
    spool = Spool(params.paths.spool, "bench")
    scores = {
        spool.emit(
            "scores", policy=policies[0], digest=cluster.digest(names[0][0]), item=str(item), score=0.5
        )
        for item in range(SCORES)
    }
    spool.close()
    wait_for(lambda: scores <= scores_of(params), "the scores in the ledger")
    flows = [crowd.arrive(cluster.url, policy, RATE, users()) for policy in policies]
    release = cluster.release(names[0][1], OPEN)
    wait_for(lambda: cluster.catalog.routes.get(policies[0]).canary is not None, "a canary")
    before, began = content(params, policies), time.monotonic()
    result = backup(params, str(folder / "backup"))
    took = time.monotonic() - began
    cluster.client.hold(release, "The backup has ended.", "bench")
    for flow in flows:
        flow.rest()
    there = Params.model_validate(
        {
            "state_dir": str(folder / "restored" / "state"),
            "suites_dir": str(folder / "restored" / "suites"),
            "base": params.base.model_dump(mode="json"),
            "catalog": {"url": fresh_database(cluster.postgres)},
            "store": {"url": f"s3://{BUCKET}/restored"},
        }
    )
    restore_backup(there, result.place)
    after = content(there, policies)
    lost = [key for key, value in before.items() if not is_kept(value, after.get(key))]
    lost += sorted(scores - scores_of(there))
    for one in lost[:5]:
        print(f"  lost: {one}", flush=True)
    return {
        "backup_lost": [len(lost)],
        "backup_kept": [len(before) + len(scores)],
        "backup_failed": [sum(not one.is_whole for one in asked_of(flows))],
        "backup_s": [took],
    }


def is_kept(before: Any, after: Any) -> bool:
    """Whether what was there when the backup began is restored, or a route that has moved on since."""
    if isinstance(before, Route):
        return isinstance(after, Route) and (after == before or after.version > before.version)
    return bool(after == before)


def content(params: Params, policies: list[str]) -> dict[Any, Any]:
    """Return an installation's revisions with their bytes, and its routes."""
    found: dict[Any, Any] = {}
    with whole_catalog(params.paths.catalog_url) as catalog, closing(open_store(params)) as store:
        for policy in policies:
            found[policy] = catalog.routes.get(policy)
            for row in catalog.listing.exported(policy, REVISIONS):
                found[policy, row.digest] = row, store.read(location(row))
    return found


def scores_of(params: Params) -> set[str]:
    """Return the ids of all scores in an installation's ledger."""
    with open_snapshot(params.paths.ledger_snapshot) as ledger:
        return {str(row[0]) for row in ledger.execute("SELECT id FROM scores").fetchall()}
