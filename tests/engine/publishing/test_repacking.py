"""repack: today's packed form under the same digests, by batches; nothing in a batch harms the rest of it."""

import os
import signal
from contextlib import closing

import pytest
from sqlalchemy import event

from engine.adapters import packed
from engine.catalog.catalog import Base
from engine.catalog.revision_rows import location
from engine.errors import ServiceError
from engine.publishing import maintenance, repacking
from engine.publishing.maintenance import compact, gc, verify
from engine.publishing.publish import stored_tensors
from engine.publishing.repacking import repack
from engine.settings.params import Params
from engine.store.open import open_store
from tests.helpers.children import children
from tests.helpers.stored import BASE, KIND, SHAPES, Stored, opened, prepare

POLICIES = ("here", "there")


@pytest.fixture
def state(tmp_path, empty_catalog_url):
    params = Params(state_dir=tmp_path, catalog={"url": empty_catalog_url})
    prepare(params, *POLICIES)
    with opened(params) as stored:
        yield stored


def today(state: Stored, row) -> packed.Packed:
    tensors = stored_tensors(state.catalog, state.store, row)
    return packed.pack(tensors, next(iter(tensors.values())).dtype, SHAPES.fused)


def has_moved(state: Stored, row) -> bool:
    """Say whether a row that was packed in the older form names whole bytes in today's."""
    return state.row(row).layout != row.layout and state.is_whole(row)


def before_append(state: Stored, monkeypatch, act) -> None:
    """Have something done when a batch was read, and is not appended yet."""
    append = state.store.append_many

    def appended(*given):
        act()
        return append(*given)

    monkeypatch.setattr(state.store, "append_many", appended)


def counted(monkeypatch, owner, name: str) -> list[tuple]:
    """Return the list that each later call adds its arguments to."""
    calls: list[tuple] = []
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or real(*given))
    return calls


def test_repack_derives_todays_form_and_keeps_the_digests(state):
    old = [state.publish_older(policy, 1) for policy in POLICIES]
    new = state.publish("here", 2)
    form = today(state, old[0])
    assert old[0].layout != form.layout.digest
    report = repack(state.catalog, state.store)
    assert (report.revisions, report.moved, report.damaged) == (3, 2, 0)
    rows = [state.row(row) for row in old]
    assert {row.layout for row in rows} == {form.layout.digest}
    assert location(rows[0]) == location(rows[1])
    assert state.store.read(location(rows[0])) == bytes(form.tobytes())
    assert state.row(new) == new
    assert all(state.is_whole(row) for row in [*old, new])
    assert repack(state.catalog, state.store).moved == 0


def test_repack_without_its_base_or_bytes_goes_on_with_the_others(state):
    rows = [state.publish_older("here", seed) for seed in range(3)]
    state.damage(rows[1])
    assert (report := repack(state.catalog, state.store)).moved == 2
    assert report.damaged == 1
    later = state.publish_older("there", 7)
    (state.params.paths.bases / KIND / "config.json").unlink()
    report = repack(state.catalog, state.store)
    # The damaged one's layout is not today's either, so that its base is asked for first.
    assert (report.moved, report.damaged, report.unreadable) == (0, 0, 4)
    assert state.catalog.quarantine.reason("there", later.digest) is None
    assert any(BASE[:12] in example["fault"] for example in report.examples)


def test_after_a_move_of_the_state_repack_reads_the_base_where_it_is_now(state):
    row = state.publish_older("here", 1)
    moved = (state.params.paths.bases / KIND).rename(state.params.state_dir / "moved")
    assert repack(state.catalog, state.store).unreadable == 1
    # As the trainer does when it starts.
    state.catalog.bases.add(Base(BASE, KIND, str(moved), 0.0))
    assert repack(state.catalog, state.store).moved == 1
    assert has_moved(state, row)


def test_a_page_takes_one_append_and_one_commit_of_its_rows(state, monkeypatch):
    rows = [state.publish_older(policy, seed) for seed in range(20) for policy in POLICIES]
    appends = counted(monkeypatch, state.store, "append_many")
    moves = counted(monkeypatch, state.catalog.places, "replace_many")
    syncs = counted(monkeypatch, os, "fdatasync")
    commits: list[object] = []
    event.listen(state.catalog.access.engine, "commit", commits.append)
    report = repack(state.catalog, state.store)
    assert (report.revisions, report.moved, report.bytes) == (40, 40, sum(row.length for row in rows[::2]))
    assert [len(payloads) for payloads, _ in appends] == [20]
    assert [len(moved) for (moved,) in moves] == [40]
    assert len(syncs) == 1
    # Besides the rows a new layout and the words of layout and segment; the rest are single queries.
    assert len(commits) <= 3
    assert all(has_moved(state, row) for row in rows)


def test_what_waits_is_bounded_and_one_adapters_rows_still_share_its_bytes(state, monkeypatch):
    monkeypatch.setattr(repacking, "BATCH_BYTES", 1)
    rows = [state.publish_older(policy, seed) for seed in range(3) for policy in POLICIES]
    appends = counted(monkeypatch, state.store, "append_many")
    assert repack(state.catalog, state.store).moved == 6
    assert [len(payloads) for payloads, _ in appends] == [1, 1, 1]
    assert len({location(state.row(row)) for row in rows}) == 3
    assert all(has_moved(state, row) for row in rows)


def test_a_page_that_ends_among_an_adapters_rows(state, monkeypatch):
    monkeypatch.setattr(maintenance, "PAGE_ROWS", 3)
    rows = [state.publish_older(policy, seed) for seed in range(4) for policy in POLICIES]
    assert repack(state.catalog, state.store).moved == 8
    assert all(has_moved(state, row) for row in rows)
    assert verify(state.catalog, state.store).damaged == 0


def test_a_damaged_revision_is_quarantined_alone_and_its_batch_moves(state, monkeypatch):
    rows = [state.publish_older("here", seed) for seed in range(5)]
    state.damage(rows[2])
    appends = counted(monkeypatch, state.store, "append_many")
    report = repack(state.catalog, state.store)
    assert (report.moved, report.damaged, len(appends)) == (4, 1, 1)
    held = state.catalog.quarantine.among([row.digest for row in rows])
    assert held == {("here", rows[2].digest)}
    assert state.row(rows[2]) == rows[2]
    assert all(has_moved(state, row) for row in rows if row != rows[2])


def test_a_damaged_row_takes_the_new_bytes_of_its_adapter_once_there_are_some(state):
    """Here comes before there, and each has bytes of its own."""
    first, second = ([state.publish_older(policy, seed) for policy in POLICIES] for seed in range(2))
    state.damage(first[0])
    state.damage(second[1])
    report = repack(state.catalog, state.store)
    assert (report.moved, report.damaged) == (3, 1)
    assert state.catalog.quarantine.among([first[0].digest, second[0].digest]) == {("here", first[0].digest)}
    assert all(has_moved(state, row) for row in (first[1], *second))


def test_whole_bytes_end_a_quarantine(state):
    rows = [state.publish_older("here", seed) for seed in range(2)]
    state.catalog.quarantine.add("here", rows[0].digest, "The disk was away.")
    assert repack(state.catalog, state.store).moved == 2
    assert state.catalog.quarantine.reason("here", rows[0].digest) is None


def test_a_row_that_expires_meanwhile_stays_gone_and_is_no_error(state, monkeypatch):
    rows = [state.publish_older("here", seed) for seed in range(3)]

    def expire():
        state.catalog.lifecycle.set_expiry("here", rows[1].digest, 1.0)
        assert len(state.catalog.lifecycle.expire(2.0)) == 1

    before_append(state, monkeypatch, expire)
    report = repack(state.catalog, state.store)
    assert (report.revisions, report.moved, report.damaged) == (3, 2, 0)
    assert state.catalog.revisions.find("here", rows[1].digest) is None
    assert has_moved(state, rows[0])
    assert has_moved(state, rows[2])


def test_rows_that_compact_moves_meanwhile_name_the_newer_bytes(state, monkeypatch):
    rows = [state.publish_older("here", seed) for seed in range(3)]

    def move():
        with closing(open_store(state.params)) as other:
            assert compact(state.catalog, other, everything=True).moved == 3

    state.store.close()
    before_append(state, monkeypatch, move)
    assert repack(state.catalog, state.store).moved == 3
    assert all(has_moved(state, row) for row in rows)
    state.store.close()
    # What compact wrote is named by nobody any more.
    assert gc(state.catalog, state.store).removed == 1
    assert all(state.is_whole(row) for row in rows)


def test_bytes_that_were_moved_since_the_page_was_read_are_found(state, monkeypatch):
    rows = [state.publish_older("here", seed) for seed in range(3)]
    state.store.close()
    every = state.catalog.revisions.scan

    def page(*given):
        found = every(*given)
        monkeypatch.undo()
        with closing(open_store(state.params)) as other:
            assert compact(state.catalog, other, everything=True).removed == 1
        return found

    monkeypatch.setattr(state.catalog.revisions, "scan", page)
    report = repack(state.catalog, state.store)
    assert (report.moved, report.damaged) == (3, 0)
    assert all(has_moved(state, row) for row in rows)


def test_appended_bytes_are_held_until_their_rows_are_committed(state, monkeypatch):
    rows = [state.publish_older("here", seed) for seed in range(2)]
    state.store.close()
    place = state.catalog.places.replace_many

    def placed(moved):
        with closing(open_store(state.params)) as other:
            assert (report := gc(state.catalog, other)).removed == 0
            assert report.held == 1
        return place(moved)

    monkeypatch.setattr(state.catalog.places, "replace_many", placed)
    assert repack(state.catalog, state.store).moved == 2
    with closing(open_store(state.params)) as other:
        assert gc(state.catalog, other).removed == 1
        with other.claim(state.row(rows[0]).segment) as is_free:
            assert is_free
    assert all(has_moved(state, row) for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["append", "commit"])
def test_killed_around_a_batchs_append_it_loses_nothing(state, moment):
    rows = [state.publish_older(policy, seed) for seed in range(3) for policy in POLICIES]
    state.store.close()
    child = children.Process(target=die_at, args=(state.params, moment))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert [state.row(row) for row in rows] == rows
    assert all(state.is_whole(row) for row in rows)
    assert gc(state.catalog, state.store).removed == 1
    assert repack(state.catalog, state.store).moved == 6
    assert all(has_moved(state, row) for row in rows)


def die_at(params: Params, moment: str) -> None:
    """Repack, and die when half of a batch is written, or all of it and no row has moved."""
    with opened(params) as state:

        def die(*given):
            os.kill(os.getpid(), signal.SIGKILL)

        def cut(file, views, at):
            os.pwrite(file, b"".join(views)[: sum(map(len, views)) // 2], at)
            die()

        if moment == "append":
            os.pwritev = cut
        else:
            state.catalog.places.replace_many = die
        repack(state.catalog, state.store)


def test_a_full_disk_ends_it_and_the_next_run_goes_on(state, monkeypatch):
    rows = [state.publish_older("here", seed) for seed in range(3)]

    def full(file, views, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(ServiceError, match="No space left"):
        repack(state.catalog, state.store)
    monkeypatch.undo()
    assert [state.row(row) for row in rows] == rows
    assert repack(state.catalog, state.store).moved == 3
    assert all(has_moved(state, row) for row in rows)
