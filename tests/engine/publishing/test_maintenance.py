"""verify, gc and compact: what a row names stays whole, and everything else goes."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from contextlib import closing
from dataclasses import asdict, replace

import pytest

from engine.catalog.catalog import Catalog
from engine.catalog.revision_rows import location
from engine.errors import AdapterError, ServiceError
from engine.publishing import maintenance
from engine.publishing.maintenance import compact, gc, verify
from engine.publishing.publish import publish, put
from engine.settings.params import Params
from engine.store.open import open_store
from tests.helpers.command_line import graftwork
from tests.helpers.stored import Stored, opened, placing, prepare

POLICIES = ("here", "there")


@pytest.fixture
def state(tmp_path, empty_catalog_url):
    params = Params(state_dir=tmp_path, catalog={"url": empty_catalog_url})
    prepare(params, *POLICIES)
    with opened(params) as stored:
        yield stored


@pytest.fixture
def sqlite_state(tmp_path):
    params = Params(state_dir=tmp_path)
    prepare(params, *POLICIES)
    with opened(params) as stored:
        yield stored


def segments(state: Stored) -> dict[str, int]:
    return dict(state.store.segments())


def new_segment(state: Stored) -> None:
    state.store.close()


def test_the_same_bytes_are_stored_once(state):
    first = state.publish("here", 1)
    again = state.publish("here", 1)
    beside = state.publish("there", 1)
    assert location(first) == location(again) == location(beside)
    assert sum(segments(state).values()) == first.length
    assert state.is_whole(beside)


def test_damaged_bytes_are_not_shared_and_are_replaced_when_the_revision_comes_again(state):
    first = state.publish("here", 1)
    state.damage(first)
    beside = state.publish("there", 1)
    assert location(first) != location(beside)
    assert state.is_whole(beside)
    state.publish("here", 1)
    assert state.is_whole(first)
    assert state.is_whole(beside)


def test_bytes_that_move_while_they_are_about_to_be_shared_are_looked_up_again(state):
    first = state.publish("here", 1)
    given = placing(state, "there", 1)
    calls = []

    def place():
        calls.append(put(*given))
        if len(calls) == 1:
            with closing(open_store(state.params)) as other:
                assert compact(state.catalog, other, everything=True).removed == 1
        return calls[-1]

    row = publish(state.catalog, state.store, place)
    assert [placed.is_shared for placed in calls] == [True, True]
    assert location(row) == location(state.row(first)) != location(first)
    assert state.is_whole(row)


def test_a_known_revision_that_expires_meanwhile_is_written_anew(state):
    first = state.publish("here", 1, expires_at=1.0)
    given = placing(state, "here", 1)
    calls = []

    def place():
        calls.append(put(*given))
        if len(calls) == 1:
            state.store.close()
            state.catalog.lifecycle.expire(time.time())
            assert gc(state.catalog, state.store).removed == 1
        return calls[-1]

    assert publish(state.catalog, state.store, place, state="exported").segment != first.segment
    assert [placed.is_shared for placed in calls] == [True, False]
    assert state.is_whole(first)


def test_verify_quarantines_what_is_damaged_and_nothing_else(state):
    rows = [state.publish("here", seed) for seed in range(5)]
    pages = []
    assert asdict(verify(state.catalog, state.store, pages.append))["damaged"] == 0
    state.damage(rows[1])
    report = verify(state.catalog, state.store)
    assert (report.revisions, report.damaged, report.bytes) == (5, 1, sum(row.length for row in rows))
    assert report.examples[0]["revision"] == f"here@{rows[1].digest[:12]}"
    held = [state.catalog.quarantine.reason(row.policy, row.digest) is not None for row in rows]
    assert held == [False, True, False, False, False]
    # The same bytes are whole again, as from a backup.
    state.damage(rows[1])
    assert verify(state.catalog, state.store).healed == 1
    assert state.catalog.quarantine.reason("here", rows[1].digest) is None
    assert pages[-1].revisions == 5


def test_gc_takes_what_no_row_names_and_no_living_writer_holds(state, monkeypatch):
    kept = state.publish("here", 1)
    new_segment(state)
    with closing(open_store(state.params)) as writer:
        dead = writer.append(b"dead").segment
    writer = open_store(state.params)
    living = writer.append(b"living").segment
    # A clock that jumps decides nothing.
    for jumped in (1.0, 1e12):
        monkeypatch.setattr(time, "time", lambda jumped=jumped: jumped)
        report = gc(state.catalog, state.store)
        assert report.held == 1
    assert set(segments(state)) == {kept.segment, living}
    assert dead not in segments(state)
    writer.close()
    assert gc(state.catalog, state.store).removed == 1
    assert set(segments(state)) == {kept.segment}
    assert state.is_whole(kept)


def test_a_commit_that_a_kill_cut_short_never_comes_back_to_bytes_that_gc_took(sqlite_state, tmp_path):
    """Killed in its fsync, a commit's frames are in the log and unseen, until somebody recovers the log."""
    state = sqlite_state
    state.publish("here", 1)
    new_segment(state)
    database = state.params.paths.catalog
    log = database.with_name(f"{database.name}-wal")
    dying = tmp_path / "dying"
    dying.mkdir()
    for file in (database, log):
        shutil.copy(file, dying / file.name)
    before = log.stat().st_size
    with closing(open_store(state.params)) as store:
        # Its rows go to a copy of the catalog, whose log goes on where the true one ends.
        with closing(Catalog(f"sqlite:///{dying / database.name}")) as catalog:
            ghost = replace(state, catalog=catalog, store=store).publish("here", 2)
            frames = (dying / log.name).read_bytes()[before:]
    with log.open("r+b") as file:
        file.seek(before)
        file.write(frames)
    assert recovered(state, tmp_path / "seen") == 2
    assert gc(state.catalog, state.store).removed == 1
    assert ghost.segment not in segments(state)
    assert recovered(state, tmp_path / "after") == 1


def recovered(state: Stored, folder) -> int:
    """Count the revisions that a catalog shows after a recovery of its log."""
    folder.mkdir()
    database = state.params.paths.catalog
    for file in (database, database.with_name(f"{database.name}-wal")):
        shutil.copy(file, folder / file.name)
    with closing(Catalog(f"sqlite:///{folder / database.name}")) as catalog:
        return len(catalog.revisions.scan(None, 100))


def test_compact_rewrites_what_is_mostly_garbage(state):
    rows = [state.publish("here", seed, expires_at=1.0 if seed % 3 else None) for seed in range(6)]
    new_segment(state)
    full = [state.publish("there", seed) for seed in range(10, 13)]
    new_segment(state)
    before = segments(state)
    state.catalog.lifecycle.expire(time.time())
    kept = [row for row in rows if row.step % 3 == 0]
    report = compact(state.catalog, state.store)
    assert (report.moved, report.removed, report.freed) == (2, 1, before[rows[0].segment])
    assert rows[0].segment not in segments(state)
    assert full[0].segment in segments(state)
    assert all(state.is_whole(row) for row in kept + full)
    assert compact(state.catalog, state.store).moved == 0
    everything = compact(state.catalog, state.store, everything=True)
    assert (everything.moved, everything.removed) == (5, 2)
    assert len(segments(state)) == 1
    assert all(state.is_whole(row) for row in kept + full)
    assert gc(state.catalog, state.store).removed == 0


def test_compact_rewrites_the_segments_that_are_named_and_no_other(state):
    rows = []
    for seed in range(3):
        rows.append(state.publish("here", seed))
        new_segment(state)
    named = {rows[1].segment, "0" * 32 + ".seg"}
    report = compact(state.catalog, state.store, segments=named)
    assert (report.moved, report.removed) == (1, 1)
    assert {rows[0].segment, rows[2].segment} < set(segments(state))
    assert all(state.is_whole(row) for row in rows)


def test_compact_gives_room_back_as_it_goes(state, monkeypatch):
    """A disk that is nearly full has no room for a copy of everything that is live."""
    rows = []
    for seed in range(4):
        rows.append(state.publish("here", seed))
        new_segment(state)
    state.catalog.lifecycle.set_expiry("here", rows[2].digest, 1.0)
    assert len(state.catalog.lifecycle.expire(2.0)) == 1
    monkeypatch.setattr(maintenance, "GROUP_BYTES", 1)
    sizes = []
    append = state.store.append_many

    def appended(*given):
        sizes.append(set(segments(state)))
        return append(*given)

    monkeypatch.setattr(state.store, "append_many", appended)
    report = compact(state.catalog, state.store, everything=True)
    assert (report.moved, report.removed, report.revisions) == (3, 4, 3)
    old = [len(there & {row.segment for row in rows}) for there in sizes]
    # What nothing names went first, and each of the others before the next was copied.
    assert old == [3, 2, 1]
    assert all(state.is_whole(row) for row in rows[:2] + rows[3:])


def test_compact_in_small_batches_keeps_shared_places_shared(state, monkeypatch):
    monkeypatch.setattr(maintenance, "PAGE_ROWS", 2)
    monkeypatch.setattr(maintenance, "BATCH_ROWS", 2)
    rows = [state.publish(policy, seed) for seed in range(4) for policy in POLICIES]
    new_segment(state)
    report = compact(state.catalog, state.store, everything=True)
    assert (report.moved, report.removed, report.damaged) == (4, 1, 0)
    assert len({location(state.row(row)) for row in rows}) == 4
    assert sum(segments(state).values()) == sum(row.length for row in rows) // 2
    assert all(state.is_whole(row) for row in rows)


def test_compact_leaves_a_damaged_revision_where_it_is_and_saves_the_others(state):
    rows = [state.publish("here", seed) for seed in range(3)]
    new_segment(state)
    state.damage(rows[1])
    report = compact(state.catalog, state.store, everything=True)
    assert (report.damaged, report.removed, report.moved) == (1, 0, 2)
    assert location(state.row(rows[1])) == location(rows[1])
    assert state.is_whole(rows[0])
    assert state.is_whole(rows[2])


def test_a_living_writers_segment_is_left_for_the_next_run(state):
    row = state.publish("here", 1)
    state.store.append(b"on its way")
    with closing(open_store(state.params)) as mine:
        report = compact(state.catalog, mine, everything=True)
        assert (report.held, report.moved, report.removed) == (1, 0, 0)
        state.store.committed()
        assert compact(state.catalog, mine, everything=True).removed == 1
    assert state.is_whole(row)


def test_compact_on_a_full_disk_loses_nothing(state, monkeypatch):
    rows = [state.publish("here", seed) for seed in range(3)]
    new_segment(state)
    before = segments(state)

    def full(file, views, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(ServiceError, match="No space left"):
        compact(state.catalog, state.store, everything=True)
    monkeypatch.undo()
    assert segments(state) == before
    assert all(state.is_whole(row) for row in rows)
    assert compact(state.catalog, state.store, everything=True).removed == 1


def test_a_read_only_and_a_full_disk_are_one_sentence_each_and_lose_nothing(small_disk, tmp_path):
    params = Params(state_dir=small_disk)
    prepare(params, *POLICIES)
    with opened(params) as state:
        rows = [state.publish("here", seed) for seed in range(3)]
    file = tmp_path / "params.yaml"
    file.write_text(json.dumps({"state_dir": str(small_disk)}))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    said = command_fault(file, "compact", "--all")
    assert "Read-only file system" in said
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as hole:
        while True:
            hole.write(bytes(512))
    said = command_fault(file, "compact", "--all")
    assert "room on its disk" in said or "Free some space" in said
    filler.unlink()
    with opened(params) as state:
        assert all(state.is_whole(row) for row in rows)
        assert compact(state.catalog, state.store, everything=True).moved == 3


def command_fault(file, *arguments):
    run = graftwork("store", *arguments, "--params", str(file))
    assert run.returncode == ServiceError.exit_code, run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    return run.stderr


def test_the_commands_say_what_they_did_and_fail_when_something_is_damaged(state, tmp_path):
    rows = [state.publish("here", seed) for seed in range(3)]
    new_segment(state)
    file = tmp_path / "params.yaml"
    catalog = {"url": state.params.paths.catalog_url}
    file.write_text(json.dumps({"state_dir": str(tmp_path), "catalog": catalog}))
    code, report, _ = command(file, "verify")
    assert (code, report["revisions"], report["damaged"]) == (0, 3, 0)
    assert 0 < report["peak_bytes"] < 4 << 30
    state.damage(rows[2])
    code, report, said = command(file, "verify")
    assert (code, report["damaged"]) == (AdapterError.exit_code, 1)
    assert "damaged" in said
    assert command(file, "compact", "--all")[1]["moved"] == 2
    assert command(file, "repack")[1]["moved"] == 0
    assert command(file, "gc")[0] == 0


def command(file, *arguments):
    run = graftwork("store", *arguments, "--json", "--params", str(file))
    return run.returncode, json.loads(run.stdout), run.stderr
