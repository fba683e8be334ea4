"""How long the ledger's views of quality take, on a made ledger of many revisions of 1,000 policies.

A revision has its items' scores and four estimates: the mean for both targets, that of a segment, and the
difference to its parent; of every tenth a part was read before. Rows lie in order of time, so that the
policies' rows are mixed.
"""

import time
from contextlib import closing
from pathlib import Path

import duckdb

from engine.ledger.ledger import Ledger

POLICIES, POLICY, TRIES = 1000, "policy-7", 3
NOTED = "'0.1.0+g0123456789ab' AS code_version, sha256('engine') AS config_hash"
OWN = f"'policy-' || number % {POLICIES} AS policy, sha256('revision ' || number) AS digest"
PARENT = f"sha256('revision ' || (number - {POLICIES}))"
SUITE = f"sha256('base') AS base, 'suite-' || number % {POLICIES} AS suite, '1' AS suite_version"
FILL = {
    "scores": f"""
        SELECT md5(number || '/' || item) AS id, number + item / 1000 AS "at", {NOTED}, {OWN}, {SUITE},
            'item ' || item AS item, (hash(number, item) % 3 > 0)::DOUBLE AS score,
            'answer ' || hash(item, number) AS answer, md5('run ' || number) AS run,
            'question ' || item AS question, 'segment ' || item % 2 AS segment
        FROM range($revisions) revisions(number), range($scores) items(item) ORDER BY number, item
    """,
    "estimates": f"""
        SELECT md5(number || '/' || kind) AS id, number + kind / 10 AS "at", {NOTED}, {OWN}, {SUITE},
            CASE kind WHEN 3 THEN 'segment 1' END AS segment,
            CASE WHEN kind IN (0, 2) THEN 'suite' ELSE 'task' END AS target,
            CASE kind WHEN 4 THEN {PARENT} END AS against,
            hash(number, kind) % 1000 / 1000 - (kind > 3)::INT / 2 AS mean,
            mean - 0.2 AS low, mean + CASE kind WHEN 2 THEN 0 ELSE 0.2 END AS high, 0.95 AS level,
            CASE kind WHEN 0 THEN 5 ELSE 10 END AS items, 10 AS available,
            0.5 AS seconds
        FROM range($revisions) revisions(number), range(5) kinds(kind)
        WHERE kind > 0 OR number // {POLICIES} % 10 = 0 ORDER BY number, kind
    """,
    "revisions": f"""
        SELECT 'r' || number AS id, number AS "at", {OWN}, {PARENT} AS parent,
            'session ' || number AS session, 1 AS step, 4096 AS tokens, 1.5 AS seconds
        FROM range($revisions) revisions(number)
    """,
    "route_changes": f"""
        SELECT 'c' || number AS id, number AS "at", policy, digest AS champion,
            number // {POLICIES} AS version
        FROM (SELECT number, {OWN} FROM range(least($revisions, {20 * POLICIES})) revisions(number))
    """,
}
BASES = f"""
    INSERT INTO estimates BY NAME
    SELECT 'b' || number AS id, 0 AS "at", {NOTED}, {SUITE}, 'task' AS target, 0.25 AS mean, 0.2 AS low,
        0.3 AS high, 0.95 AS level, 10 AS items, 10 AS available
    FROM range({POLICIES}) bases(number)
"""
WHOLE = "segment IS NULL AND target = 'task'"
QUERIES = {
    "best": f"FROM quality WHERE {WHOLE} ORDER BY mean DESC, digest LIMIT 10",
    "newest": f"""FROM quality WHERE {WHOLE} ORDER BY "at" DESC LIMIT 10""",
    "suites": f"SELECT suite, suite_version, count(*), avg(mean) FROM quality WHERE {WHOLE} GROUP BY ALL",
    "regressions": "SELECT policy, count(*) FROM regressions GROUP BY policy",
    "worst": "FROM regressions ORDER BY high, digest LIMIT 10",
    "cheapest": "FROM cost_per_point WHERE gain > 0.05 ORDER BY tokens_per_point, digest LIMIT 10",
    "calibration": "SELECT level, sum(intervals), sum(held) FROM calibration GROUP BY level",
    "champions": "SELECT policy, count(*) FROM champion_history GROUP BY policy",
} | {
    f"{view} of one policy": f"FROM {view} WHERE policy = '{POLICY}'"
    for view in ("quality", "regressions", "cost_per_point", "calibration", "champion_history")
}


def build(directory: Path, revisions: int, scores: int) -> Path:
    """Write the ledger, unless it is there, and return its path."""
    path = directory / f"views-{revisions}-{scores}.duckdb"
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        Ledger(draft).close()
        with closing(duckdb.connect(str(draft))) as ledger:
            for table, query in FILL.items():
                known = {"revisions": revisions} | ({"scores": scores} if "$scores" in query else {})
                ledger.execute(f"INSERT INTO {table} BY NAME {query}", known)
            ledger.execute(BASES)
        draft.rename(path)
    return path


def measure(directory: Path, revisions: int, scores: int) -> dict[str, float]:
    """Return the seconds of each documented query, the least of `TRIES`, on two threads."""
    seconds = {}
    with closing(duckdb.connect(str(build(directory, revisions, scores)), read_only=True)) as ledger:
        ledger.execute("SET threads = 2")
        for name, query in QUERIES.items():
            seconds[name] = min(_seconds(ledger, query) for _ in range(TRIES))
    return seconds


def _seconds(ledger: duckdb.DuckDBPyConnection, query: str) -> float:
    started = time.perf_counter()
    ledger.execute(query).fetchall()
    return time.perf_counter() - started
