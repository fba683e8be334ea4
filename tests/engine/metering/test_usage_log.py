"""The usage log: budgets without overshoot, exact counts, kills, roll-ups and Parquet."""

import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import pytest

from engine.errors import ConfigError, LimitReached
from engine.file_lock import alone_in
from engine.metering import usage_log, usage_upkeep
from engine.metering.dead_gateways import close_dead
from engine.metering.raw_usage import export
from engine.metering.usage_log import UsageLog
from engine.metering.usage_rows import DAY, MONTH, Budget, Metered, connect, periods, remaining_s
from engine.metering.usage_schema import VERSION, create
from engine.threads import WORKS, background
from tests.helpers.children import children
from tests.helpers.live import eventually
from tests.helpers.state_of_265b009 import usage_log_of_265b009

NOON = 1_790_000_000.0


def asked(number: int, reserved: int = 10, at: float = NOON, tenant: str = "acme") -> Metered:
    return Metered(f"r{number}", tenant, f"k-{tenant}", "acme-sums", "a" * 64, "user", at, reserved)


def totals(root: Path) -> tuple[int, int, int, int]:
    """Return requests and tokens (prompt, completion, unknown) of the roll-ups."""
    with closing(connect(root / "usage.db")) as connection:
        names = ("requests", "prompt", "completion", "unknown")
        query = f"SELECT {', '.join(f'coalesce(sum({name}), 0)' for name in names)} FROM hours"
        return connection.execute(query).fetchone()


def spent(root: Path) -> dict[tuple[str, str], tuple[int, int]]:
    with closing(connect(root / "usage.db")) as connection:
        return {(s, p): (u, r) for s, p, u, r in connection.execute("SELECT * FROM spent")}


@pytest.fixture
def log(tmp_path: Path):
    opened = UsageLog(tmp_path)
    yield opened
    opened.close()


def test_the_log_of_265b009_opens_and_its_negative_numbers_become_0(tmp_path: Path) -> None:
    with closing(usage_log_of_265b009(tmp_path / "usage.db")) as connection:
        whose = ("g", NOON, "acme", "k-acme", "acme-sums", "a" * 64, "user")
        for name, state, prompt, completion in (
            ("good", "settled", 7, 5), ("bad", "settled", -(10**9), 0), ("open", "admitted", None, None)
        ):  # fmt: skip
            row = (name, *whose, 100, state, 200, prompt, completion, NOON)
            connection.execute(f"INSERT INTO requests VALUES (NULL{', ?' * len(row)})", row)
        day, month = periods(NOON)
        connection.execute("INSERT INTO spent VALUES ('tenant:acme', ?, -999999988, 100)", (day,))
        connection.execute("INSERT INTO spent VALUES ('tenant:acme', ?, 12, 100)", (month,))
        hours = (0, "acme", "k-acme", "acme-sums", "a" * 64, "user", 2, -999999993, 5, 0)
        connection.execute(f"INSERT INTO hours VALUES (?{', ?' * 9})", hours)
        connection.commit()
    create(tmp_path / "usage.db")
    with closing(connect(tmp_path / "usage.db")) as connection:
        found = connection.execute(
            "SELECT seq, id, state, prompt, completion, reserved FROM requests"
        ).fetchall()
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert found == [
        (1, "good", "settled", 7, 5, 100),
        (2, "bad", "settled", 0, 0, 100),
        (3, "open", "admitted", None, None, 100),
    ]
    assert spent(tmp_path) == {("tenant:acme", day): (0, 100), ("tenant:acme", month): (12, 100)}
    assert totals(tmp_path) == (2, 0, 5, 0)
    create(tmp_path / "new.db")
    assert columns_of(tmp_path / "usage.db") == columns_of(tmp_path / "new.db")


def test_a_log_is_created_by_one_process_after_another(tmp_path: Path) -> None:
    """Of two that begin a database at once, SQLite tells one that it is locked, without a wait."""
    with alone_in(tmp_path):
        created = background(lambda: create(tmp_path / "usage.db"))
        with pytest.raises(TimeoutError):
            created.result(0.2)
    created.result(60)
    assert columns_of(tmp_path / "usage.db")


def columns_of(path: Path) -> list[tuple[Any, ...]]:
    query = """SELECT t.name, t.ncol, t.wr, t.strict, c.*
        FROM pragma_table_list t, pragma_table_info(t.name) c
        WHERE t.schema = 'main' ORDER BY t.name, c.cid"""
    with closing(connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_a_log_of_a_newer_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    create(tmp_path / "usage.db")
    with closing(connect(tmp_path / "usage.db")) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(ConfigError, match=f"schema {VERSION + 1}"):
        UsageLog(tmp_path)
    with closing(connect(tmp_path / "usage.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION + 1,)


def test_commits_become_durable_although_exports_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB has an error of its own for a full disk, and SQLAlchemy one for a read-only Postgres."""
    synced = threading.Event()
    monkeypatch.setattr(usage_upkeep, "EXPORT_S", 0.0)
    monkeypatch.setattr(
        usage_upkeep, "export", Mock(side_effect=duckdb.IOException("No space left on device"))
    )
    log = UsageLog(tmp_path)
    assert eventually(lambda: "usage-export" in WORKS and WORKS["usage-export"].errors > 1)
    monkeypatch.setattr(usage_log.os, "fdatasync", lambda file: synced.set())
    log.admit(asked(1, reserved=1))
    assert synced.wait(60)
    log.close()


def test_a_request_is_reserved_and_settled(log: UsageLog, tmp_path: Path) -> None:
    entry = log.admit(asked(1, reserved=100), [Budget("tenant:acme", DAY, 100)])
    day, month = periods(NOON)
    assert spent(tmp_path) == {("tenant:acme", day): (0, 100)}
    log.settle(entry, 200, (7, 5))
    # A second time changes nothing.
    log.settle(entry, 200, (7, 5))
    log.flush(gives_back=True)
    assert set(spent(tmp_path)) == {(s, p) for s in ("tenant:acme", "key:k-acme") for p in (day, month)}
    assert set(spent(tmp_path).values()) == {(12, 0)}
    assert totals(tmp_path) == (1, 7, 5, 0)
    assert (tmp_path / "usage.db").stat().st_mode & 0o777 == 0o600


def test_what_is_not_known_counts_as_reserved(log: UsageLog, tmp_path: Path) -> None:
    log.settle(log.admit(asked(1, reserved=100)), 200, None)
    log.flush()
    assert totals(tmp_path) == (1, 0, 0, 100)
    assert set(spent(tmp_path).values()) == {(100, 0)}


def test_a_budget_is_used_up_and_not_exceeded(log: UsageLog) -> None:
    budgets = [Budget("tenant:acme", DAY, 100), Budget("key:k-acme", MONTH, 1000)]
    first = log.admit(asked(1, reserved=60), budgets)
    with pytest.raises(LimitReached, match=r"40 of 100.*2026-09-21") as refused:
        log.admit(asked(2, reserved=41), budgets)
    assert refused.value.code == "insufficient_quota"
    assert 0 < refused.value.retry_after_s <= 86400
    log.settle(first, 200, (10, 0))
    log.admit(asked(3, reserved=90), budgets)
    with pytest.raises(LimitReached):
        log.admit(asked(4, reserved=1), budgets)
    # The next day has a budget of its own; the month goes on.
    log.admit(asked(5, reserved=100, at=NOON + 86400), budgets)


def test_periods_end_with_their_month() -> None:
    december = 1_798_700_000.0
    assert periods(december) == ("2026-12-31", "2026-12")
    assert remaining_s(december, DAY) == remaining_s(december, MONTH) == 86400 - december % 86400


CLIENTS, TURNS, BUDGET = 250, 8, 100_000


def spend(root: Path, seed: int, outcome: "multiprocessing.Queue") -> None:
    """A gateway with many clients, which take turns; each reserves, and settles later with less or all."""
    log, rng, held, used = UsageLog(root), random.Random(seed), [], 0
    budgets = [Budget("tenant:acme", DAY, BUDGET)]
    refused = 0
    for number in range(CLIENTS * TURNS):
        one = asked(number, reserved=rng.randint(50, 400))
        try:
            held.append(log.admit(one, budgets))
        except LimitReached:
            refused += 1
        if len(held) >= CLIENTS or rng.random() < 0.5:
            used += settle_one(log, rng, held)
    while held:
        used += settle_one(log, rng, held)
    # Near the end the budget goes to whoever still fits.
    for size in (64, 8, 1):
        one = asked(0, reserved=size)
        while True:
            try:
                log.settle(log.admit(one, budgets), 200, (0, size))
                used += size
            except LimitReached:
                break
    outcome.put((used, refused))
    log.close()


def settle_one(log: UsageLog, rng: random.Random, held: list) -> int:
    if not held:
        return 0
    entry = held.pop(rng.randrange(len(held)))
    tokens = rng.choice([0, entry.request.reserved // 2, entry.request.reserved])
    log.settle(entry, 200, (tokens // 3, tokens - tokens // 3))
    if rng.random() < 0.1:
        log.flush()
    return tokens


def test_500_clients_of_two_gateways_use_the_whole_budget_and_no_token_more(tmp_path: Path) -> None:
    outcome = children.Queue()
    gateways = [children.Process(target=spend, args=(tmp_path, seed, outcome)) for seed in range(2)]
    for gateway in gateways:
        gateway.start()
    results = [outcome.get(timeout=300) for _ in gateways]
    for gateway in gateways:
        gateway.join(60)
    used, reserved = spent(tmp_path)["tenant:acme", periods(NOON)[0]]
    assert (used, reserved) == (BUDGET, 0)
    assert sum(mine for mine, _ in results) == BUDGET
    assert all(refused for _, refused in results)
    _, prompt, completion, unknown = totals(tmp_path)
    assert (prompt + completion, unknown) == (BUDGET, 0)


def serve_until_killed(root: Path, told: "multiprocessing.connection.Connection", seed: int) -> None:
    """A gateway that says what it has admitted and settled; it is killed somewhere."""
    log, rng, held = UsageLog(root), random.Random(seed), []
    budgets = [Budget("tenant:acme", DAY, 10**9), Budget("key:k-acme", MONTH, 10**6)]
    for number in range(1_000_000):
        entry = log.admit(asked(seed * 1_000_000 + number, reserved=10), budgets)
        told.send(("admitted", entry.request.id))
        held.append(entry)
        if len(held) > 5:
            entry = held.pop(rng.randrange(len(held)))
            log.settle(entry, 200, (1, 2))
            told.send(("settled", entry.request.id))
        if rng.random() < 0.1:
            log.flush()


def kill_gateways(root: Path, times: int) -> None:
    """Kill a gateway many times; every request that it admitted must be in the log, once."""
    admitted, settled = set(), set()
    for seed in range(times):
        reader, writer = children.Pipe(duplex=False)
        gateway = children.Process(target=serve_until_killed, args=(root, writer, seed))
        gateway.start()
        writer.close()
        # Two of each, however little of a core it has until the kill.
        for _ in range(2):
            assert reader.poll(60)
            admitted.add(reader.recv()[1])
        time.sleep(random.Random(seed).uniform(0.001, 0.03))
        assert gateway.pid
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.join()
        try:
            while True:
                kind, name = reader.recv()
                (admitted if kind == "admitted" else settled).add(name)
        except EOFError:
            pass
    with closing(connect(root / "usage.db")) as connection:
        close_dead(root, connection)
        rows = connection.execute("SELECT id, state FROM requests").fetchall()
        for left in ("requests WHERE state = 'admitted'", "held", "gateways"):
            assert connection.execute(f"SELECT count(*) FROM {left}").fetchone() == (0,)
    states = dict(rows)
    assert len(rows) == len(states) >= len(admitted) > times
    assert admitted <= states.keys()
    assert all(states[name] == "settled" for name in settled)
    # What was committed and not told yet is one request for each kill.
    assert len(states) - len(admitted) <= times
    done = sum(state == "settled" for state in states.values())
    assert totals(root) == (len(states), done, 2 * done, 10 * (len(states) - done))
    assert set(spent(root).values()) == {(3 * done + 10 * (len(states) - done), 0)}
    assert list((root / "gateways").glob("*")) == []


@pytest.mark.long
def test_a_killed_gateway_loses_no_request_and_counts_none_twice(tmp_path: Path) -> None:
    kill_gateways(tmp_path, 5)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    kill_gateways(tmp_path, 100)


def test_what_a_proxy_asks_elsewhere_is_billed_there_alone(tmp_path: Path) -> None:
    """The engine died before it answered a byte: HAProxy sent the request to another one."""
    log = UsageLog(tmp_path)
    for number, repeated in ((1, 1), (2, 0)):
        log.admit(asked(number)._replace(repeated=repeated))
    log.close()
    with closing(connect(tmp_path / "usage.db")) as connection:
        assert close_dead(tmp_path, connection) == 2
    assert totals(tmp_path) == (1, 0, 0, 10)
    assert spent(tmp_path)["tenant:acme", periods(NOON)[0]] == (10, 0)


def test_a_stream_whose_beginning_is_noted_after_its_end_counts_once(log: UsageLog, tmp_path: Path) -> None:
    entry = log.admit(asked(1)._replace(repeated=1))
    log.settle(entry, 200, (1, 2))
    log.flush()
    log.note_beginning(entry)
    log.flush()
    assert totals(tmp_path) == (1, 1, 2, 0)


def test_a_running_gateways_requests_stay_open(log: UsageLog, tmp_path: Path) -> None:
    entry = log.admit(asked(1))
    with closing(connect(tmp_path / "usage.db")) as connection:
        assert close_dead(tmp_path, connection) == 0
    log.settle(entry, 200, (1, 1))
    log.flush()
    assert totals(tmp_path) == (1, 1, 1, 0)


def test_rows_move_to_parquet_and_the_rollups_stay_equal(log: UsageLog, tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(301):
        one = asked(number, at=NOON + 3600 * rng.randrange(60), tenant=rng.choice(["acme", "umbrella"]))
        entry = log.admit(one._replace(reserved=50))
        if number % 10:
            used = None if number % 7 == 0 else (rng.randrange(20), rng.randrange(20))
            log.settle(entry, 200, used)
    log.flush()
    assert export(tmp_path, time.time() + 61) == 270
    assert export(tmp_path, time.time() + 61) == 0
    raw = (
        'SELECT CAST(floor("at" / 3600) AS BIGINT), tenant, key, policy, revision, purpose, count(*), '
        "coalesce(sum(prompt), 0), coalesce(sum(completion), 0), "
        "coalesce(sum(CASE WHEN state = 'unknown' THEN reserved END), 0) "
        f"FROM read_parquet('{tmp_path}/raw/*/*.parquet') GROUP BY ALL ORDER BY ALL"
    )
    with closing(connect(tmp_path / "usage.db")) as connection:
        query = "SELECT * FROM hours ORDER BY hour, tenant, key, policy, revision, purpose"
        rolled = connection.execute(query).fetchall()
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (31,)
    assert [tuple(map(_plain, row)) for row in duckdb.sql(raw).fetchall()] == rolled
    assert {path.parent.name for path in tmp_path.glob("raw/*/*.parquet")} == {
        periods(NOON + 3600 * hour)[0] for hour in range(60)
    }


def _plain(value: object) -> object:
    return value if isinstance(value, str) else int(value)  # type: ignore[call-overload]


def test_a_file_of_a_crashed_export_is_written_again(log: UsageLog, tmp_path: Path) -> None:
    for number in (1, 2):
        # The newest row stays in the log.
        log.settle(log.admit(asked(number)), 200, (1, 1))
    log.flush()
    orphan = tmp_path / "raw" / periods(NOON)[0] / "1-1.parquet"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"half")
    assert export(tmp_path, time.time() + 61) == 1
    assert duckdb.sql(f"SELECT id, prompt FROM read_parquet('{orphan}')").fetchall() == [("r1", 1)]


def test_the_files_of_a_day_that_is_over_become_one(log: UsageLog, tmp_path: Path) -> None:
    """A minute's files are merged, also with a row that was settled late; each row stays once."""
    late = log.admit(asked(0))
    for minute in range(4):
        for turn in range(3):
            one = asked(10 * minute + turn + 1)
            log.settle(log.admit(one), 200, (1, 1))
        log.flush()
        export(tmp_path, NOON + 61 + 60 * minute + (time.time() - NOON))
    found = list((tmp_path / "raw" / periods(NOON)[0]).glob("*"))
    assert len(found) == 1
    log.settle(late, 200, (1, 1))
    for _ in range(2):
        # The newest row stays in the log.
        log.settle(log.admit(asked(99, at=time.time())), 200, (1, 1))
        log.flush()
        export(tmp_path, time.time() + 61)
    found = list((tmp_path / "raw" / periods(NOON)[0]).glob("*"))
    assert [path.suffix for path in found] == [".parquet"]
    ids = duckdb.sql(f"SELECT id FROM read_parquet('{found[0]}')").fetchall()
    assert sorted(ids) == sorted(
        {(f"r{number}",) for number in (0, 1, 2, 3, 11, 12, 13, 21, 22, 23, 31, 32, 33)}
    )


def test_a_crash_while_files_are_merged_loses_no_row(
    log: UsageLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(3):
        one = asked(turn)
        log.settle(log.admit(one), 200, (1, 1))
        log.flush()
        export(tmp_path, time.time() + 61, go_on=lambda: False)

    def crash(*_: object) -> None:
        raise OSError("The power failed.")

    folder = tmp_path / "raw" / periods(NOON)[0]
    assert len(list(folder.glob("*.parquet"))) == 2
    # After the merged file is there and noted, before the others are gone.
    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(OSError, match="power"):
        export(tmp_path, time.time() + 61)
    monkeypatch.undo()
    assert len(list(folder.glob("*.parquet"))) == 3
    export(tmp_path, time.time() + 61)
    (file,) = folder.glob("*.parquet")
    assert duckdb.sql(f"SELECT id FROM read_parquet('{file}')").fetchall() == [("r0",), ("r1",)]


def test_a_month_of_a_hundred_million_rows_is_summed_up_in_seconds(tmp_path: Path) -> None:
    """By its roll-ups: 10^8 requests of 100 policies are 720 hours of them at the most."""
    UsageLog(tmp_path).close()
    hour = int(NOON // 3600)
    rows = (
        (hour + at, "acme", "k", f"p{policy}", "", "user", 1389, 10, 10, 0)
        for at in range(720)
        for policy in range(100)
    )
    with closing(sqlite3.connect(tmp_path / "usage.db")) as connection:
        connection.executemany(f"INSERT INTO hours VALUES ({', '.join('?' * 10)})", rows)
        connection.commit()
    from engine.settings.params import Params
    from tasks.usage import usage_by

    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "usage").symlink_to(tmp_path)
    began = time.perf_counter()
    found = usage_by(Params(state_dir=tmp_path / "state"), "tenant")
    assert time.perf_counter() - began < 20
    assert found[0]["requests"] == 720 * 100 * 1389
