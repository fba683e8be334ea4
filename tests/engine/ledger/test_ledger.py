"""Spool and ledger: nothing lost, nothing doubled, readers never in the way, views by hand."""

import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.errors import ConfigError, Conflict, NotFound, ServiceError
from engine.ledger.ledger import OF_ANSWERS, Ledger, Spool, open_snapshot
from engine.ledger.spool import OLDEST_NEW_S, ready_files
from tests.helpers.children import children
from tests.helpers.history import step_row
from tests.helpers.live import eventually
from tests.helpers.state_of_265b009 import ledger_of_265b009


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "test")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.duckdb")


def take_in(ledger: Ledger, spool: Spool) -> int:
    spool.rotate()
    return ledger.ingest(spool.root)


def rows(ledger: Ledger, query: str) -> list[tuple]:
    return ledger.connection.execute(query).fetchall()


def write_forever(root: Path, journal: Path) -> None:
    """Write events, some twice, and note each id once `emit` has acknowledged it."""
    spool = Spool(root, "writer")
    note = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        id = str(uuid.uuid4())
        for _ in range(random.choice((1, 1, 1, 2))):
            spool.emit("feedback", id=id, request_id="r", reward=1.0, key="k")
        os.write(note, f"{id}\n".encode())
        time.sleep(0.0005)


def ingest_forever(root: Path, path: Path) -> None:
    ledger = Ledger(path)
    while True:
        ledger.ingest(root)
        time.sleep(0.005)


@pytest.mark.long
def test_kills_of_writers_and_reader_lose_and_double_nothing(tmp_path: Path) -> None:
    root, path = tmp_path / "spool", tmp_path / "ledger.duckdb"
    journals = [tmp_path / f"acknowledged-{i}" for i in range(5)]
    writers = [children.Process(target=write_forever, args=(root, journal)) for journal in journals]
    for writer in writers:
        writer.start()
    while not all(journal.is_file() for journal in journals):
        time.sleep(0.05)
    chance = random.Random(7)
    for turn in range(5):
        reader = children.Process(target=ingest_forever, args=(root, path))
        reader.start()
        time.sleep(0.9 + 0.3 * chance.random())
        if turn < len(writers):
            writers[turn].kill()
        reader.kill()
        reader.join()
    for writer in writers:
        writer.join()
    ledger = Ledger(path)
    ledger.ingest(root)
    known = {row[0] for row in rows(ledger, "SELECT id FROM feedback")}
    acknowledged = {line for journal in journals for line in journal.read_text().split("\n") if line}
    # A writer may die between the acknowledgement and its note: one event a writer.
    assert acknowledged <= known
    assert len(known - acknowledged) <= len(writers)
    assert rows(ledger, "SELECT count(*), count(DISTINCT id) FROM feedback") == [(len(known), len(known))]
    assert len(acknowledged) > 500
    assert ready_files(root) == []


def test_events_are_in_the_ledger_within_a_second(spool: Spool, ledger: Ledger) -> None:
    started = time.monotonic()
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    while not ledger.ingest(spool.root):
        assert time.monotonic() - started < 10
        time.sleep(0.05)


def test_a_known_event_is_ignored(spool: Spool, ledger: Ledger) -> None:
    for _ in range(2):
        spool.emit("loads", id="one", policy="p", tier="host", bytes=1 << 40, seconds=0.5)
    assert take_in(ledger, spool) == 1
    spool.emit("loads", id="one", policy="q")
    assert take_in(ledger, spool) == 0
    assert rows(ledger, "SELECT policy, bytes FROM loads") == [("p", 1 << 40)]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread hand a spool's file over, however long the test stands still after an event."""
    monkeypatch.setattr("engine.ledger.spool.ROTATE_S", 3600.0)


@pytest.mark.usefixtures("kept")
def test_the_files_of_a_live_writer_are_left_alone(spool: Spool, ledger: Ledger) -> None:
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    assert [path.suffix for path in spool.root.iterdir()] == [".open"]
    assert ready_files(spool.root) == []
    spool.close()
    assert [path.suffix for path in spool.root.iterdir()] == [".jsonl"]
    assert ledger.ingest(spool.root) == 1
    assert list(spool.root.iterdir()) == []


def test_an_event_finds_a_file_ready_and_a_closed_spool_leaves_none(spool: Spool) -> None:
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    assert eventually(lambda: {path.suffix for path in spool.root.iterdir()} == {".jsonl", ".open"}, 60)
    (ready,) = spool.root.glob("*.open")
    with ready.open("rb") as file:
        assert file.read() == b""
        spool.emit("feedback", request_id="s", reward=1.0, key="k")
        assert b'"request_id":"s"' in file.read()
    assert eventually(lambda: len(list(spool.root.glob("*.jsonl"))) == 2, 60)
    spool.close()
    assert [path.suffix for path in spool.root.iterdir()] == [".jsonl"] * 2


def test_a_file_that_a_killed_writer_only_made_goes_after_an_hour(tmp_path: Path) -> None:
    old, young = tmp_path / "gateway-1-x.new", tmp_path / "gateway-2-y.new"
    for path, age_s in ((old, OLDEST_NEW_S + 60), (young, 60)):
        path.touch()
        os.utime(path, (at := time.time() - age_s, at))
    assert ready_files(tmp_path) == []
    assert list(tmp_path.iterdir()) == [young]


def test_a_torn_last_line_is_dropped_and_a_strange_one_put_aside(ledger: Ledger, tmp_path: Path) -> None:
    root = tmp_path / "spool"
    root.mkdir()
    good = {"id": "a", "at": 1.0, "table": "feedback", "reward": 0.5}
    strange = [
        b"not json",
        b"[]",
        json.dumps(good | {"table": "nothing"}).encode(),
        json.dumps(good | {"surprise": 1}).encode(),
        json.dumps(good | {"reward": "high"}).encode(),
        json.dumps({"table": "feedback", "at": 1.0}).encode(),
    ]
    lines = [
        json.dumps(good).encode(),
        *strange,
        json.dumps(good | {"id": "b", "reward": float("nan")}).encode(),
    ]
    (root / "dead-1-x.open").write_bytes(b"\n".join(lines) + b'\n{"id": "torn", "at": 1')
    assert ledger.ingest(root) == 2
    assert rows(ledger, "SELECT id, reward FROM feedback ORDER BY id") == [("a", 0.5), ("b", None)]
    assert (root / "rejected" / "dead-1-x.open").read_bytes().splitlines() == strange
    assert ready_files(root) == []


def test_a_forked_writer_has_a_file_of_its_own(spool: Spool, ledger: Ledger) -> None:
    spool.emit("feedback", id="parent", request_id="r", reward=1.0, key="k")
    child = os.fork()
    if child == 0:
        spool.emit("feedback", id="child", request_id="r", reward=0.0, key="k")
        os._exit(0)
    os.waitpid(child, 0)
    spool.emit("feedback", id="parent again", request_id="r", reward=1.0, key="k")
    assert take_in(ledger, spool) == 3
    assert spool.root.joinpath("rejected").exists() is False


def test_rotate_waits_for_a_thread_that_is_handing_over(
    spool: Spool, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, whole = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(20)
        whole(fd)

    spool.emit("feedback", id="a", request_id="r", reward=1.0, key="k")
    monkeypatch.setattr("engine.ledger.spool.os.fdatasync", slow)
    other = threading.Thread(target=spool.rotate)
    other.start()
    assert begun.wait(20)
    threading.Timer(0.2, go_on.set).start()
    assert take_in(ledger, spool) == 1
    other.join()


def test_a_full_file_is_handed_over_at_once(spool: Spool) -> None:
    for _ in range(11):
        spool.emit("scores", answer="x" * 100_000)
    assert any(path.suffix == ".jsonl" for path in spool.root.iterdir())


def test_a_failed_write_leaves_no_torn_line(
    spool: Spool, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.emit("feedback", id="before", request_id="r", reward=1.0, key="k")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(OSError, match="of an event"):
        spool.emit("feedback", id="lost", request_id="r", reward=1.0, key="k")
    monkeypatch.undo()
    spool.emit("feedback", id="after", request_id="r", reward=1.0, key="k")
    assert take_in(ledger, spool) == 2
    assert rows(ledger, "SELECT id FROM feedback ORDER BY id") == [("after",), ("before",)]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from engine.ledger.ledger import Ledger
ledger = Ledger(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + 20_000, -1))
ledger.ingest(Path(sys.argv[2]))
"""


def open_files(folder: Path) -> list[Path]:
    """Return what this process has open in a folder, also where it has lost its name."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        # Other threads close theirs meanwhile.
        with suppress(FileNotFoundError):
            found.append(file.readlink())
    return [file for file in found if file.is_relative_to(folder)]


def test_a_file_that_gets_no_name_takes_no_event(
    spool: Spool, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event written into a file that readers do not look for would be acknowledged and lost."""

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            spool.emit("feedback", request_id="r1", reward=1.0, key="k")
    assert open_files(spool.root) == []
    assert list(spool.root.iterdir()) == []
    monkeypatch.undo()
    spool.emit("feedback", request_id="r2", reward=1.0, key="k")
    assert take_in(ledger, spool) == 1


def test_a_full_disk_loses_nothing(tmp_path: Path, spool: Spool) -> None:
    path = tmp_path / "ledger.duckdb"
    for i in range(200):
        spool.emit("scores", item=str(i), answer=uuid.uuid4().hex * 30)
    spool.close()
    command = [sys.executable, "-c", FULL_DISK, str(path), str(spool.root)]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode != 0, "the limit was too generous to fill the disk"
    assert len(ready_files(spool.root)) >= 1
    ledger = Ledger(path)
    ledger.ingest(spool.root)
    assert rows(ledger, "SELECT count(DISTINCT item) FROM scores") == [(200,)]


HOLD = "import duckdb, sys, time; c = duckdb.connect(sys.argv[1]); print('held', flush=True); time.sleep(60)"


def test_a_ledger_held_by_somebody_else_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ledger.duckdb"
    Ledger(path).close()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(Conflict, match=f"process {holder.pid}"):
            Ledger(path)
    finally:
        holder.kill()
        holder.wait()
    Ledger(path).close()


def test_a_ledger_held_in_another_container_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What DuckDB 2.0 says across namespaces of process ids, such as of a backup beside the controller."""
    says = f'Could not set lock on file "{tmp_path}": Conflicting lock is held in PID 0. See also https://d'

    def connect(path: str) -> None:
        raise duckdb.IOException(says)

    monkeypatch.setattr(duckdb, "connect", connect)
    with pytest.raises(Conflict, match="another container"):
        Ledger(tmp_path / "ledger.duckdb")


def test_a_ledger_that_a_newer_version_did_more_to_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    ledger.connection.execute("INSERT INTO migrations VALUES (9999, 0, 9999)")
    ledger.close()
    with pytest.raises(ConfigError, match="schema 9999"):
        Ledger(tmp_path / "ledger.duckdb")


BY_REASON = ("masked", "verifier_faults")


def test_every_metric_of_a_training_step_is_in_the_ledger(spool: Spool, ledger: Ledger) -> None:
    row = step_row(7)
    spool.emit("train_steps", **row)
    spool.emit("train_steps", id="nan", **row | {"entropy": float("nan"), "masked": None})
    assert take_in(ledger, spool) == 2
    assert not (spool.root / "rejected").exists()
    found = ledger.connection.execute("FROM train_steps ORDER BY id = 'nan'")
    names = [column[0] for column in found.description]
    first, second = (dict(zip(names, values, strict=True)) for values in found.fetchall())
    assert {name: json.loads(first[name]) if name in BY_REASON else first[name] for name in row} == row
    assert (second["entropy"], second["masked"]) == (None, None)
    identity = {"id", "at", "code_version", "config_hash"}
    assert set(names) - set(row) == identity


def test_the_ledger_of_265b009_has_the_schema_of_a_new_one_and_goes_on(
    tmp_path: Path, spool: Spool, ledger: Ledger
) -> None:
    path = tmp_path / "old.duckdb"
    with ledger_of_265b009(path) as old:
        old.execute(
            """INSERT INTO train_steps (id, "at", policy, step, reward) VALUES ('x', 1, 'p', 1, 0.5)"""
        )
    went_on = Ledger(path)
    assert schema_of(went_on) == schema_of(ledger)
    spool.emit("train_steps", **step_row(2, "p"))
    assert take_in(went_on, spool) == 1
    query = "SELECT step, reward, entropy, masked FROM train_steps ORDER BY step"
    assert rows(went_on, query) == [(1, 0.5, None, None), (2, 0.005, 1.0, '{"outlier":3,"router":5}')]


def schema_of(ledger: Ledger) -> list[tuple[Any, ...]]:
    """Return all columns in their order, views included, each view's text, and the version."""
    columns = """SELECT table_name, column_index, column_name, data_type, is_nullable FROM duckdb_columns()
        WHERE NOT internal ORDER BY ALL"""
    views = "SELECT view_name, sql FROM duckdb_views() WHERE NOT internal ORDER BY ALL"
    return rows(ledger, columns) + rows(ledger, views) + rows(ledger, "SELECT max(version) FROM migrations")


def test_an_older_ledger_than_265b009s_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.duckdb"
    ledger_of_265b009(path, 9).close()
    with pytest.raises(ConfigError, match=r"schema 9, older than 11.*265b009"):
        Ledger(path)
    with duckdb.connect(str(path), read_only=True) as old:
        assert old.execute("SELECT max(version) FROM migrations").fetchall() == [(9,)]


@pytest.mark.long
def test_a_snapshot_is_whole_at_every_moment_and_keeps_the_lock(
    tmp_path: Path, spool: Spool, ledger: Ledger
) -> None:
    copy = tmp_path / "copy.duckdb"
    with pytest.raises(NotFound):
        open_snapshot(copy)
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    take_in(ledger, spool)
    assert ledger.snapshot(copy)
    assert not ledger.snapshot(copy)
    with open_snapshot(copy) as held:
        stop = threading.Event()
        seen: list[int] = []

        def read() -> None:
            query = (
                f"import duckdb; print(duckdb.connect({str(copy)!r}, read_only=True).sql('FROM feedback'))"
            )
            while not stop.is_set():
                done = subprocess.run([sys.executable, "-c", query], capture_output=True, check=False)
                seen.append(done.returncode)

        reader = threading.Thread(target=read)
        reader.start()
        slowest = 0.0
        for _ in range(30):
            spool.emit("feedback", request_id="r", reward=1.0, key="k")
            started = time.monotonic()
            take_in(ledger, spool)
            assert ledger.snapshot(copy)
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.02)
        stop.set()
        reader.join()
        assert held.execute("SELECT count(*) FROM feedback").fetchone() == (1,)
    assert seen
    assert set(seen) == {0}
    assert slowest < 20
    with open_snapshot(copy) as fresh:
        assert fresh.execute("SELECT count(*) FROM feedback").fetchone() == (31,)
    # Copying must not give DuckDB's lock away.
    steal = f"import duckdb; duckdb.connect({str(ledger.path)!r})"
    assert subprocess.run([sys.executable, "-c", steal], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("end", ["close", "checkpoint"])
def test_a_copy_of_a_file_that_changes_meanwhile_is_thrown_away(
    tmp_path: Path, spool: Spool, ledger: Ledger, end: str
) -> None:
    copy = tmp_path / "copy.duckdb"
    for number in range(2):
        spool.emit("feedback", id=str(number), request_id="r", reward=1.0, key="k")
        take_in(ledger, spool)
        begun = ledger.begin_copy(copy)
        assert begun is not None
        if not number:
            # What is ingested in the meantime comes with the next one.
            spool.emit("feedback", id="meanwhile", request_id="r", reward=1.0, key="k")
            take_in(ledger, spool)
            begun.write()
            assert not ledger.is_copied(copy)
    # So many that the checkpoint does not make the file shorter.
    for number in range(100):
        spool.emit("scores", item=str(number), answer=os.urandom(10_000).hex())
    take_in(ledger, spool)
    if end == "close":
        ledger.close()
    else:
        ledger.connection.execute("CHECKPOINT")
    with pytest.raises(ServiceError, match="copied"):
        begun.write()
    assert [path.name for path in tmp_path.glob("copy.*")] == ["copy.duckdb"]
    with open_snapshot(copy) as held:
        assert held.execute("SELECT id FROM feedback").fetchall() == [("0",)]


@pytest.mark.long
def test_many_events_between_two_copies_do_not_change_the_file_under_one(
    tmp_path: Path, spool: Spool, ledger: Ledger
) -> None:
    """DuckDB would checkpoint by itself after 16 MB."""
    spool.emit("scores", item="first", answer="x")
    take_in(ledger, spool)
    begun = ledger.begin_copy(tmp_path / "copy.duckdb")
    assert begun is not None
    for number in range(24):
        for part in range(8):
            spool.emit("scores", item=f"{number} {part}", answer=os.urandom(60_000).hex())
        take_in(ledger, spool)
    begun.write()
    with open_snapshot(tmp_path / "copy.duckdb") as held:
        assert held.execute("SELECT item FROM scores").fetchall() == [("first",)]
    assert ledger.snapshot(tmp_path / "copy.duckdb")
    with open_snapshot(tmp_path / "copy.duckdb") as held:
        assert held.execute("SELECT count(*) FROM scores").fetchall() == [(193,)]


def observe(spool: Spool, id: str, digest: str | None, unit: str | None, **more: object) -> None:
    fields = {"policy": "p", "arm": "champion", "key": "k", "purpose": "user"} | more
    spool.emit("observations", id=id, digest=digest, unit=unit, **fields)


def test_the_first_feedback_by_the_same_key_counts(spool: Spool, ledger: Ledger) -> None:
    for id in ("r1", "r2", "r3", "r4"):
        observe(spool, id, "d", "u")
    spool.emit("feedback", request_id="r1", reward=1.0, key="k")
    spool.emit("feedback", request_id="r1", reward=0.0, key="k")
    spool.emit("feedback", request_id="r2", reward=0.25, key="somebody else")
    spool.emit("feedback", request_id="r3", reward=7.0, key="k")
    take_in(ledger, spool)
    spool.emit("feedback", request_id="r1", reward=0.5, key="k")
    take_in(ledger, spool)
    assert rows(ledger, "SELECT id, reward, seq FROM rated") == [("r1", 1.0, 0)]


def test_quality_per_revision_shows_the_latest_run_beside_what_users_said(
    spool: Spool, ledger: Ledger
) -> None:
    def score(digest: str | None, run: str, at: float, *values: float) -> None:
        for item, value in enumerate(values):
            fields = {"policy": "p", "suite": "s", "item": str(item), "score": value}
            spool.emit("scores", digest=digest, run=run, at=at, **fields)

    score("d", "old", 1.0, 0.0, 0.0, 0.0)
    score("d", "new", 2.0, 1.0, 0.5)
    score(None, "base", 1.0, 0.25)
    observe(spool, "r1", "d", "u1")
    observe(spool, "r2", "d", "u1")
    observe(spool, "r3", "d", "u2")
    observe(spool, "r4", "d", "u3", purpose="score")
    observe(spool, "r5", "e", "u4")
    for id, reward in (("r1", 1.0), ("r2", 0.0), ("r3", 0.5), ("r4", 0.0), ("r5", 0.75)):
        spool.emit("feedback", request_id=id, reward=reward, key="k")
    spool.emit("verdicts", policy="p", digest="d", verdict="hold", at=1.0)
    spool.emit("verdicts", policy="p", digest="d", verdict="promote", at=2.0, evidence={"n": 1})
    take_in(ledger, spool)
    assert rows(ledger, "FROM quality_per_revision ORDER BY digest NULLS FIRST") == [
        ("p", None, "s", 1, 0.25, None, None, None),
        ("p", "d", "s", 2, 0.75, 2, 0.5, "promote"),
        ("p", "e", None, None, None, 1, 0.75, None),
    ]


def test_champion_history_has_a_row_for_each_reign(spool: Spool, ledger: Ledger) -> None:
    changes = [(1, None, "c"), (2, "a", None), (3, "a", "b"), (4, "b", None), (5, "a", None)]
    for version, champion, canary in changes:
        fields = {"policy": "p", "champion": champion, "canary": canary, "version": version}
        spool.emit("route_changes", at=float(version), **fields)
    take_in(ledger, spool)
    assert rows(ledger, "FROM champion_history ORDER BY since") == [
        ("p", None, 1.0, 2.0),
        ("p", "a", 2.0, 4.0),
        ("p", "b", 4.0, 5.0),
        ("p", "a", 5.0, None),
    ]


def test_the_ledger_survives_a_kill_between_commit_and_removal(
    tmp_path: Path, spool: Spool, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.emit("feedback", request_id="r", reward=1.0, key="k")
    spool.rotate()
    monkeypatch.setattr(Path, "unlink", _kill)
    with pytest.raises(KeyboardInterrupt):
        ledger.ingest(spool.root)
    monkeypatch.undo()
    ledger.close()
    again = Ledger(tmp_path / "ledger.duckdb")
    assert again.ingest(spool.root) == 0
    assert rows(again, "SELECT count(*) FROM feedback") == [(1,)]
    assert ready_files(spool.root) == []


def _kill(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_rows_keep_their_order_of_arrival(spool: Spool, ledger: Ledger) -> None:
    for i in range(3000):
        spool.emit("feedback", id=str(i), request_id="r", reward=1.0, key="k")
        if i % 7 == 0:
            spool.emit("feedback", id=str(i // 2), request_id="again", reward=0.0, key="k")
        if i % 1000 == 0:
            take_in(ledger, spool)
    take_in(ledger, spool)
    assert rows(ledger, "SELECT id::INT FROM feedback ORDER BY rowid") == [(i,) for i in range(3000)]


def test_a_number_too_large_for_its_column_does_not_block_the_others(spool: Spool, ledger: Ledger) -> None:
    spool.emit("observations", id="o", status=1 << 40)
    spool.emit("feedback", id="f", request_id="r", reward=1.0, key="k")
    assert take_in(ledger, spool) == 2
    assert rows(ledger, "SELECT id, status FROM observations") == [("o", None)]


def test_what_is_gone_does_not_come_back(spool: Spool, ledger: Ledger) -> None:
    """An answer that streams on while its policy is purged is told of afterwards."""
    observe(spool, "a", "aa", "u", policy="gone")
    observe(spool, "b", "aa", "u", policy="kept")
    for id in "ab":
        spool.emit("feedback", request_id=id, reward=1.0, key="k")
    for policy in ("gone", "kept"):
        spool.emit("scores", policy=policy, unknown=1)
    spool.rotate()
    asked: list[set[str]] = []

    def gone(policies: Collection[str]) -> set[str]:
        asked.append(set(policies))
        return {"gone"}

    assert ledger.ingest(spool.root, gone) == 2
    assert asked == [{"gone", "kept"}]
    assert rows(ledger, "SELECT policy FROM observations") == [("kept",)]
    assert rows(ledger, "SELECT request_id FROM feedback") == [("b",)]
    (file,) = (spool.root / "rejected").iterdir()
    assert b"gone" not in file.read_bytes()
    assert b"kept" in file.read_bytes()


def test_what_is_said_of_answers_that_never_come_is_swept(spool: Spool, ledger: Ledger) -> None:
    """It names no policy, so that only time tells it from feedback that is ahead of its answer."""
    observe(spool, "known", "aa", "u")
    for id, at in (("known", 10.0), ("gone", 10.0), ("gone", 20.0)):
        for table, column in OF_ANSWERS.items():
            spool.emit(table, **{column: id}, at=at)
    take_in(ledger, spool)
    assert ledger.sweep(20.0) == len(OF_ANSWERS)
    for table, column in OF_ANSWERS.items():
        found = f'SELECT {column}, "at" FROM {table} ORDER BY rowid'
        assert rows(ledger, found) == [("known", 10.0), ("gone", 20.0)]
    assert (ledger.sweep(21.0), ledger.sweep(21.0)) == (len(OF_ANSWERS), 0)


def test_a_ledger_that_could_not_become_another_file_closes_nothing_of_others(
    ledger: Ledger, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        ledger.become(tmp_path / "never written")
    # Takes the number of the descriptor that was closed.
    other = os.open(tmp_path, os.O_RDONLY)
    ledger.close()
    os.fstat(other)
    os.close(other)


@pytest.mark.usefixtures("kept")
def test_only_their_user_reads_the_events_of_a_spool(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        spool = Spool(tmp_path / "spool", "test")
        spool.emit("observations", unit="someone")
        open_mode = {path.stat().st_mode & 0o777 for path in spool.root.iterdir()}
        spool.close()
    finally:
        os.umask(before)
    assert open_mode | {path.stat().st_mode & 0o777 for path in spool.root.iterdir()} == {0o600}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e999"])
def test_a_score_that_is_not_finite_is_refused_with_a_sentence(
    value: str, spool: Spool, ledger: Ledger
) -> None:
    fields = {"policy": "p", "suite": "sums", "item": "7"}
    for table, name in (("scores", "score"), ("estimates", "low")):
        with pytest.raises(ConfigError, match=f"The {name} of sums, 7 is -?(nan|inf)"):
            spool.emit(table, **fields, **{name: float(value)})
    lines = [
        f'{{"id": "{id}", "at": 1.0, "table": "scores", "policy": "p", "suite": "sums", "score": {score}}}\n'
        for id, score in (("a", value), ("b", "0.5"))
    ]
    (spool.root / "dead-1-x.jsonl").write_text("".join(lines))
    assert ledger.ingest(spool.root) == 1
    assert rows(ledger, "SELECT id, score FROM scores") == [("b", 0.5)]
    (rejected,) = (spool.root / "rejected" / "dead-1-x.jsonl").read_text().splitlines()
    assert rejected.startswith(lines[0].rstrip()[:-1])
    assert "The score of sums is" in json.loads(rejected)["rejected"]
