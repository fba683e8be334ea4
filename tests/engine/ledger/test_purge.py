"""A policy's rows leave the ledger, its file, its snapshot and the spool; every other row stays as it was."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from engine.ledger import purge as purging
from engine.ledger.copies import LedgerCopy
from engine.ledger.ledger import Ledger, Spool, open_snapshot
from engine.ledger.purge import FRESH, Removal, of_keys, of_old, of_policy, purge, remove
from tests.helpers.children import children

# What must not be found in any file afterwards; long and random, so that no compression hides it.
SECRET = os.urandom(2000).hex()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A ledger with two policies' rows, some of them still in the spool, one in a file of rejected lines."""
    spool = Spool(tmp_path / "spool", "test")
    for policy in ("gone", "kept"):
        for number in range(50):
            answer = f"{SECRET}{number}" if policy == "gone" else f"fine {number}"
            spool.emit("scores", policy=policy, digest="aa", item=str(number), score=0.5, answer=answer)
            id = spool.emit("observations", policy=policy, digest="aa", arm="champion", key="k", unit="u")
            spool.emit("feedback", request_id=id, reward=number / 50, key="k")
        # What evaluators and clients said of the last answer.
        spool.emit("metrics", request_id=id, metric="resolved", value=1.0, key="k")
        for table in ("evaluations", "shadows"):
            spool.emit(table, request=id, policy=policy, digest="bb")
        spool.emit("train_steps", policy=policy, step=1, reward=0.5)
    spool.rotate()
    ledger = Ledger(tmp_path / "ledger.duckdb")
    ledger.ingest(tmp_path / "spool")
    ledger.snapshot(tmp_path / "ledger.snapshot.duckdb")
    ledger.close()
    spool.emit("scores", policy="gone", digest="aa", item="late", score=0.1, answer=SECRET)
    for policy in ("gone", "kept"):
        spool.emit("scores", policy=policy, unknown=SECRET if policy == "gone" else 1)
    spool.close()
    (tmp_path / "ledger.snapshot.duckdb.99999").write_text(SECRET)
    return tmp_path


def purged(state: Path, policy: str = "gone") -> dict[str, int]:
    ledger = Ledger(state / "ledger.duckdb")
    try:
        return purge(
            ledger, state / "spool", state / "ledger.snapshot.duckdb", of_policy(ledger.path, policy)
        )
    finally:
        ledger.close()


def rows(state: Path, query: str) -> list[tuple]:
    with open_snapshot(state / "ledger.snapshot.duckdb") as connection:
        return connection.execute(query).fetchall()


def test_nothing_of_the_policy_is_left_in_any_file(state):
    assert any(SECRET.encode() in file.read_bytes() for file in files(state))
    removed = purged(state)
    assert {name: count for name, count in removed.items() if count} == {
        "evaluations": 1, "feedback": 50, "metrics": 1, "observations": 50, "scores": 51, "shadows": 1,
        "train_steps": 1, "rejected": 1,
    }  # fmt: skip
    for file in files(state):
        assert SECRET.encode() not in file.read_bytes(), file
    assert rows(state, "SELECT count(*) FROM scores WHERE policy = 'gone'") == [(0,)]


def files(state: Path) -> list[Path]:
    return [path for path in state.rglob("*") if path.is_file()]


def test_every_other_row_stays_in_its_order_with_its_views(state):
    before = (
        "SELECT * FROM scores WHERE policy = 'kept' ORDER BY rowid",
        "SELECT * FROM feedback ORDER BY rowid",
    )
    ledger = Ledger(state / "ledger.duckdb")
    kept = ledger.connection.execute(before[0]).fetchall()
    feedback = ledger.connection.execute(before[1]).fetchall()[50:]
    ledger.close()
    purged(state)
    assert rows(state, before[0]) == kept
    assert rows(state, before[1]) == feedback
    assert rows(state, "SELECT count(*), max(reward) FROM rated") == [(50, 0.98)]
    for table in ("metrics", "evaluations", "shadows"):
        assert rows(state, f"SELECT count(*) FROM {table}") == [(1,)]
    rejected = b"".join(file.read_bytes() for file in (state / "spool/rejected").iterdir())
    assert [json.loads(line)["policy"] for line in rejected.splitlines()] == ["kept"]
    # What comes later is taken in as ever, and an event that was there already is known.
    ledger = Ledger(state / "ledger.duckdb")
    spool = Spool(state / "spool", "test")
    spool.emit("scores", policy="kept", item="new", score=1.0)
    spool.emit("scores", id=kept[0][0], policy="kept", item="again", score=1.0)
    spool.close()
    assert ledger.ingest(state / "spool") == 1
    ledger.close()


def test_a_second_purge_and_that_of_an_unknown_policy_change_nothing(state):
    purged(state)
    assert not any(purged(state).values())
    assert not any(purged(state, "unknown").values())
    assert rows(state, "SELECT count(*) FROM scores") == [(50,)]


def test_a_kill_before_the_file_is_in_place_loses_nothing(state, monkeypatch):
    ledger = Ledger(state / "ledger.duckdb")
    ledger.ingest(state / "spool")
    monkeypatch.setattr(Ledger, "become", lambda *_: None)
    remove(ledger, state / "ledger.snapshot.duckdb", of_policy(ledger.path, "gone"))
    count = ledger.connection.execute("SELECT count(*) FROM scores").fetchone()
    ledger.close()
    monkeypatch.undo()
    assert (state / f"ledger.duckdb{FRESH}").is_file()
    assert count == (101,)
    assert purged(state)["scores"] == 51
    assert not (state / f"ledger.duckdb{FRESH}").is_file()


OF_KEYS = ("observations", "feedback", "metrics", "evaluations", "shadows")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Two keys' requests, at times 0 to 9, each rated by its own key; one rejected line of each."""
    spool = Spool(tmp_path / "spool", "test")
    for key in ("theirs", "ours"):
        for at in range(10):
            id = spool.emit("observations", policy="p", key=key, at=float(at), unit=f"{SECRET}{key}")
            spool.emit("feedback", request_id=id, reward=1.0, key=key, at=float(at))
            spool.emit("metrics", request_id=id, metric="resolved", value=1.0, key=key, at=float(at))
            # Both are told later than their answer was.
            spool.emit("evaluations", request=id, policy="p", evaluator=f"of {key}")
            spool.emit("shadows", request=id, policy="p", unit=f"{SECRET}{key}", key=key)
        spool.emit("observations", key=key, unknown=SECRET + key)
    spool.close()
    Ledger(tmp_path / "ledger.duckdb").close()
    return tmp_path


def test_what_some_keys_asked_is_left_in_no_file(asked: Path) -> None:
    with closing(Ledger(asked / "ledger.duckdb")) as ledger:
        removed = purge(
            ledger,
            asked / "spool",
            asked / "ledger.snapshot.duckdb",
            of_keys(ledger.path, ["theirs", "older"]),
        )
        assert removed == dict.fromkeys(OF_KEYS, 10) | {"rejected": 1}
        again = purge(
            ledger,
            asked / "spool",
            asked / "ledger.snapshot.duckdb",
            of_keys(ledger.path, ["theirs", "older"]),
        )
        assert not any(again.values())
    assert rows(asked, "SELECT DISTINCT key FROM observations") == [("ours",)]
    for table in OF_KEYS:
        key = "evaluator[4:]" if table == "evaluations" else "key"
        assert rows(asked, f"SELECT count(*), min({key}) FROM {table}") == [(10, "ours")]
    for file in files(asked):
        assert f"{SECRET}theirs".encode() not in file.read_bytes(), file


def test_a_shadows_answer_goes_with_the_question_that_it_answers(asked: Path) -> None:
    """It was asked for by a key of the installation."""
    spool = Spool(asked / "spool", "shadow")
    for key in ("theirs", "ours"):
        spool.emit("shadows", id=f"s {key}", request=f"q {key}", answer=f"a {key}", policy="p", key=key)
        spool.emit("observations", id=f"a {key}", policy="p", key="local", purpose="shadow", at=1.0)
        spool.emit("evaluations", id=f"e {key}", request=f"a {key}", policy="p", evaluator="of ours")
    spool.close()
    with closing(Ledger(asked / "ledger.duckdb")) as ledger:
        removal = of_keys(ledger.path, ["theirs"])
        purge(ledger, asked / "spool", asked / "ledger.snapshot.duckdb", removal)
    for table, id in (("shadows", "s"), ("observations", "a"), ("evaluations", "e")):
        left = rows(asked, f"SELECT id FROM {table} WHERE id LIKE '{id} %'")
        assert left == [(f"{id} ours",)], table


def test_observations_are_forgotten_from_a_time_on(asked: Path) -> None:
    snapshot = asked / "ledger.snapshot.duckdb"
    with closing(Ledger(asked / "ledger.duckdb")) as ledger:
        ledger.ingest(asked / "spool")
        assert of_old(ledger, 0.0) is None
        removal = of_old(ledger, 4.0)
        assert removal is not None
        assert remove(ledger, snapshot, removal) == dict.fromkeys(OF_KEYS, 8)
    assert rows(asked, 'SELECT min("at"), count(*) FROM observations') == [(4.0, 12)]
    for table in OF_KEYS:
        assert rows(asked, f"SELECT count(*) FROM {table}") == [(12,)]


def test_what_comes_between_two_steps_is_there_once_and_in_order(asked: Path) -> None:
    """Rows of the readers' copy, of a later one, and those that only the ledger has, at the switch."""
    snapshot, spool = asked / "ledger.snapshot.duckdb", Spool(asked / "spool", "later")
    with closing(Ledger(asked / "ledger.duckdb")) as ledger:
        removal = of_keys(ledger.path, ["theirs"])
        for number in range(3):
            ledger.ingest(asked / "spool")
            if number < 2:
                ledger.snapshot(snapshot)
                removal.copy(snapshot)
            for key in ("theirs", "ours"):
                at = 100.0 + number
                id = spool.emit("observations", policy="p", key=key, at=at, unit=f"{SECRET}{key}")
                spool.emit("feedback", request_id=id, reward=1.0, key=key, at=at)
            spool.rotate()
        ledger.ingest(asked / "spool")
        assert removal.switch(ledger)["observations"] == 13
        ledger.snapshot(snapshot)
    later = [100.0, 101.0, 102.0]
    for table in ("observations", "feedback"):
        found = rows(asked, f'SELECT "at", key FROM {table} ORDER BY rowid')
        assert found == [(float(at), "ours") for at in (*range(10), *later)]
    for file in asked.glob("ledger*"):
        assert f"{SECRET}theirs".encode() not in file.read_bytes(), file


def purge_until(state: Path, step: str) -> None:
    """Purge in a process that ends, as by a kill, when it comes to a step."""

    def dies(*_: object) -> None:
        os._exit(9)

    ledger = Ledger(state / "ledger.duckdb")
    places = {
        "new file": (purging, "create_like_source"),
        "rows": (Removal, "_copy_rows"),
        "newest rows": (Removal, "switch"),
        "rename": (Ledger, "become"),
        "reopen": (Ledger, "_open"),
    }
    if step == "readers":
        switch = Removal.switch

        def switches(removal: Removal, ledger: Ledger) -> dict[str, int]:
            removed = switch(removal, ledger)
            LedgerCopy.write = dies  # type: ignore[method-assign]
            return removed

        Removal.switch = switches  # type: ignore[method-assign]
    else:
        setattr(*places[step], dies)
    purge(ledger, state / "spool", state / "ledger.snapshot.duckdb", of_policy(ledger.path, "gone"))


@pytest.mark.long
@pytest.mark.parametrize("step", ["new file", "rows", "newest rows", "rename", "reopen", "readers"])
def test_a_kill_at_any_step_leaves_the_old_file_or_the_new_one(state: Path, step: str) -> None:
    killed = children.Process(target=purge_until, args=(state, step))
    killed.start()
    killed.join(60)
    assert killed.exitcode == 9
    spool = Spool(state / "spool", "later")
    spool.emit("scores", policy="kept", digest="aa", item="later", score=1.0)
    spool.close()
    with closing(Ledger(state / "ledger.duckdb")) as ledger:
        assert ledger.ingest(state / "spool") == 1
        found = "SELECT policy, count(*), count(DISTINCT id) FROM scores GROUP BY ALL ORDER BY ALL"
        is_new = step in ("reopen", "readers")
        kept = [("kept", 51, 51)]
        assert ledger.connection.execute(found).fetchall() == (kept if is_new else [("gone", 51, 51), *kept])
    assert purged(state)["scores"] == (0 if is_new else 51)
    assert rows(state, "SELECT count(*), count(DISTINCT id) FROM scores") == [(51, 51)]
    assert rows(state, "SELECT count(*) FROM feedback") == [(50,)]
    for file in files(state):
        assert SECRET.encode() not in file.read_bytes(), file
        assert FRESH not in file.name
