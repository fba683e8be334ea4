"""Where adapters are, as `graftwork residency` shows it: tiers, queue, and each revision's loads and waits.

What is now comes from the engine that runs, what was from the ledger's snapshot; without an engine every
revision is stored.
"""

from contextlib import closing, suppress
from typing import Any

from engine.catalog.catalog import open_catalog
from engine.clients.engine import EngineClient
from engine.errors import NotRunning
from engine.ledger.ledger import open_ledger
from engine.ledger.queries import named_rows
from engine.settings.params import Params, served_name
from engine.store.open import open_store

TIMEOUT_S = 10.0
ORDER = ("slot", "host", "loading", "queued", "stored")
LOADS = """
    SELECT policy, digest, loads, faults, evictions, waits, load_s, wait_s, last_at, last_fault
    FROM loads_per_revision ORDER BY last_at DESC LIMIT ?
"""


def residency(params: Params, limit: int) -> dict[str, Any]:
    """Return tiers, queue and at most `limit` revisions: those in the engine first, then by their last load.

    Bytes and seconds; `engine` is False when none runs. Raises `ServiceError` when one runs and refuses.
    """
    live = ask_engine(params)
    rows = [{"revision": name, **seen} for name, seen in _seen(live).items()]
    rows.sort(key=lambda row: (ORDER.index(row["tier"]), -row.get("users", 0), row.get("idle_s", 0.0)))
    known = {row["revision"]: row for row in rows}
    with open_ledger(params.paths.ledger_snapshot) as ledger:
        for was in named_rows(ledger.execute(LOADS, [limit + len(rows)])):
            name = served_name(was.pop("policy"), was.pop("digest"))
            if name not in known:
                known[name] = {"revision": name, "tier": "stored"}
                rows.append(known[name])
            known[name] |= was
    tiers = {"stored": {"bytes": stored_bytes(params)}, **(live or {}).get("tiers", {})}
    return {
        "engine": live is not None,
        "tiers": tiers,
        "queue": {key: value for key, value in (live or {}).get("queue", {}).items() if key != "loads"},
        "evictions": (live or {}).get("evictions", 0),
        "states": (live or {}).get("states", {}),
        "transitions": (live or {}).get("transitions", []),
        "revisions": rows[:limit],
    }


def ask_engine(params: Params) -> dict[str, Any] | None:
    """Return what the running engine says of its tiers, None when none runs."""
    with open_catalog(params.paths) as catalog:
        key = catalog.keys.ensure_local(params.paths.local_key)
    with EngineClient(params.url("engine"), key, timeout_s=TIMEOUT_S) as engine, suppress(NotRunning):
        return engine.residency()
    return None


def stored_bytes(params: Params) -> int | None:
    """Return the bytes of the store's segments; None where that would mean to list objects behind a URL."""
    if params.store.url is not None and not params.store.url.startswith("file://"):
        return None
    with closing(open_store(params)) as store:
        return sum(size for _, size in store.segments())


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return a revision's line of the table."""
    return {
        "revision": row["revision"],
        "tier": row["tier"],
        "bytes": f"{row['bytes']:,}" if row.get("bytes") is not None else "",
        "users": str(row.get("users", "")),
        "loads": str(row.get("loads", "")),
        "load s": _seconds(row.get("load_s")),
        "wait s": _seconds(row.get("wait_s")),
    }


def _seen(live: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    if live is None:
        return {}
    under_way = {
        name: {"tier": load["state"], "waiters": load["waiters"], "waited_s": load["waited_s"]}
        for name, load in live["queue"]["loads"].items()
    }
    return under_way | live["adapters"]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
