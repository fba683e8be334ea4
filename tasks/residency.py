"""What `graftwork status --residency` shows: tiers, the load queue, and each revision's loads and waits.

The current state comes from the running engine, the history from the ledger's snapshot. Without an engine
every revision is `stored`.
"""

from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from engine.catalog.opening import open_catalog
from engine.catalog.records import served_name
from engine.clients.engine import EngineClient
from engine.errors import NotRunning
from engine.ledger.ledger import open_ledger
from engine.ledger.queries import named_rows
from engine.settings.params import Params
from engine.store.open import open_store

TIMEOUT_S = 10.0
ORDER = ("slot", "host", "loading", "queued", "stored")
LOADS = """
    SELECT policy, digest, loads, faults, evictions, waits, load_s, wait_s, last_at, last_fault
    FROM loads_per_revision ORDER BY last_at DESC LIMIT ?
"""


def residency(params: Params, limit: int) -> dict[str, Any]:
    """Return tiers, queue and at most `limit` revisions: those in the engine first, then by last load.

    Sizes are bytes, times seconds. `engine` is False when no engine runs. Raises `ServiceError` when the
    engine refuses the request.
    """
    answer = ask_engine(params)
    live = answer or {"adapters": {}, "tiers": {}, "queue": {"loads": {}}}
    under_way = {
        name: {"tier": load["state"], "waiters": load["waiters"], "waited_s": load["waited_s"]}
        for name, load in live["queue"]["loads"].items()
    }
    rows = [{"revision": name, **seen} for name, seen in (under_way | live["adapters"]).items()]
    rows.sort(key=lambda row: (ORDER.index(row["tier"]), -row.get("users", 0), row.get("idle_s", 0.0)))
    known = {row["revision"]: row for row in rows}
    with open_ledger(params.paths.ledger_snapshot) as ledger:
        for was in named_rows(ledger.execute(LOADS, [limit + len(rows)])):
            name = served_name(was.pop("policy"), was.pop("digest"))
            if name not in known:
                known[name] = {"revision": name, "tier": "stored"}
                rows.append(known[name])
            known[name] |= was
    return {
        "engine": answer is not None,
        "tiers": {"stored": {"bytes": stored_bytes(params)}, **live["tiers"]},
        "queue": {key: value for key, value in live["queue"].items() if key != "loads"},
        "evictions": live.get("evictions", 0),
        "states": live.get("states", {}),
        "transitions": live.get("transitions", []),
        "quarantined": quarantined(params, limit),
        "revisions": rows[:limit],
    }


def ask_engine(params: Params) -> dict[str, Any] | None:
    """Return the running engine's residency report, None when no engine runs."""
    with open_catalog(params.paths) as catalog:
        key = catalog.keys.ensure_local(params.paths.local_key)
    with EngineClient(params.url("engine"), key, timeout_s=TIMEOUT_S) as engine, suppress(NotRunning):
        return engine.residency()
    return None


def quarantined(params: Params, limit: int) -> list[dict[str, str]]:
    """Return at most `limit` revisions in quarantine with the reason, newest first."""
    with open_catalog(params.paths) as catalog:
        return [
            {"revision": served_name(policy, digest), "reason": reason}
            for policy, digest, reason in catalog.quarantine.newest(limit)
        ]


def stored_bytes(params: Params) -> int | None:
    """Return the bytes of the store's segments; None for a remote store, whose objects are not listed."""
    if params.store.url is not None and not params.store.url.startswith("file://"):
        return None
    with closing(open_store(params)) as store:
        return sum(size for _, size in store.segments())


def facts(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return what `residency` found of the engine as a whole, by name: tiers, queue, states, transitions."""
    whole = tables["tiers"] | {name: tables[name] for name in ("queue", "states") if tables[name]}
    told = {
        name: ", ".join(f"{what} {count:,}" for what, count in counts.items() if count is not None)
        for name, counts in whole.items()
    }
    for made in tables["transitions"]:
        told[f"{made['before']} -> {made['after']}"] = f"{made['event']} {made['count']:,}"
    return told


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return a revision's table row."""
    return {
        "revision": row["revision"],
        "tier": row["tier"],
        "bytes": f"{row['bytes']:,}" if row.get("bytes") is not None else "",
        "users": str(row.get("users", "")),
        "loads": str(row.get("loads", "")),
        "load s": f"{row['load_s']:.3f}" if row.get("load_s") is not None else "",
        "wait s": f"{row['wait_s']:.3f}" if row.get("wait_s") is not None else "",
    }
