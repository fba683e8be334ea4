"""Gathers the facts that `due` judges, from the catalog, the manifests and the ledger's snapshot."""

import time
from typing import Any

import duckdb

from engine.adapters.manifests import stored_manifest
from engine.catalog.catalog import Catalog, Policy, Revision
from engine.controller.due import Facts
from engine.errors import NotFound
from engine.ledger.ledger import open_snapshot
from engine.ledger.queries import latest_scores
from engine.settings.params import Params, Paths
from engine.settings.policies import PolicyConfig

SINCE = "SELECT since FROM champion_history WHERE policy = ? AND champion = ? AND until IS NULL"
ONLINE = """
    SELECT avg(reward) FROM rated
    WHERE policy = $policy AND digest = $digest AND purpose = 'user' AND unit IS NOT NULL
        AND rated_at >= $since GROUP BY unit
"""


def gather(params: Params, name: str, catalog: Catalog) -> Facts:
    """Return the facts about a policy now; one without a catalog row was never adapted."""
    config, now = params.policy(name), time.time()
    try:
        policy = catalog.policies.get(name)
    except NotFound:
        return Facts(name, config, now)
    newest = catalog.listing.newest_exported(name)
    champion = catalog.routes.get(name).champion
    rated: dict[str, Any] = {}
    revision = catalog.revisions.find(name, champion) if champion else None
    if revision and params.paths.ledger_snapshot.is_file():
        with open_snapshot(params.paths.ledger_snapshot) as ledger:
            rated = _rated(ledger, revision, config, now)
    return Facts(
        name,
        config,
        now,
        blocked=_blocked(catalog, policy, newest),
        newest=newest.digest if newest else None,
        newest_at=newest.created_at if newest else None,
        newest_data=_data_of(params.paths, newest) if newest else None,
        **rated,
    )


def _blocked(catalog: Catalog, policy: Policy, newest: Revision | None) -> str | None:
    if catalog.switches.is_on("freeze"):
        return "Releases are frozen."
    if running := catalog.releases.all(policy.name, open_only=True):
        return f"Its release of {running[0].revision[:12]} is running."
    if newest and newest.base != policy.base:
        return f"Its newest revision was trained on another base, {newest.base[:12]}."
    return None


def _data_of(paths: Paths, revision: Revision) -> str | None:
    manifest = stored_manifest(paths.revision(revision.policy, revision.digest))
    digest = manifest.get("config", {}).get("data_digest")
    return str(digest) if digest else None


def _rated(
    ledger: duckdb.DuckDBPyConnection, champion: Revision, config: PolicyConfig, now: float
) -> dict[str, Any]:
    policy, digest = champion.policy, champion.digest
    row = ledger.execute(SINCE, [policy, digest]).fetchone()
    since = now - (config.drift_after_s or 0)
    online = ledger.execute(ONLINE, {"policy": policy, "digest": digest, "since": since}).fetchall()
    return {
        "champion_s": now - row[0] if row else 0.0,
        "online": tuple(value for (value,) in online),
        "offline": tuple(
            one.score for one in latest_scores(ledger, champion.base, policy, config.suite, digest)
        ),
    }
