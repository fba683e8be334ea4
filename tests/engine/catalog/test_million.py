"""The catalog of many revisions: batches, names that are near, retirement, expiry, bytes, purge, 0002."""

import difflib
import hashlib
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select

from engine.catalog import places as catalog_places
from engine.catalog import tables
from engine.catalog.catalog import Catalog, Policy, Revision, Route, migrate
from engine.catalog.opening import whole_catalog
from engine.catalog.suggestions import Suggestions
from engine.errors import AdapterError, Ambiguous, Conflict, Moved, NotFound, Purged
from engine.store.segments import Location
from tests.helpers.children import children
from tests.helpers.rows import make_release, make_revision


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def row(number: int, **changes: object) -> Revision:
    """A bulk row: exported, whole digests, a place of its own."""
    place = {"segment": "s1", "offset": 64 * number, "length": 64, "checksum": digest(-number - 1)}
    given = {"state": "exported", "expires_at": None, "created_at": float(number)} | place | changes
    return make_revision(digest(number), **given)


def place(revision: Revision) -> Location:
    return Location(revision.segment, revision.offset, revision.length, revision.checksum)


def test_a_batch_says_which_of_its_rows_are_new(catalog: Catalog) -> None:
    first = [row(i) for i in range(2500)]
    assert catalog.revisions.add_many([]) == []
    assert catalog.revisions.add_many(first) == [True] * 2500
    again = [row(2499), row(2500), row(2500), row(7, policy="other"), row(0)]
    assert catalog.revisions.add_many(again) == [False, True, False, True, False]
    assert catalog.revisions.get("sorting", digest(1234)) == row(1234)
    assert catalog.revisions.get("other", digest(7)) == row(7, policy="other")


def test_known_rows_of_a_batch_are_upgraded_as_single_ones_are(catalog: Catalog) -> None:
    snapshot = {"state": "snapshot", "expires_at": 10.0}
    catalog.revisions.add_many([row(i, **snapshot) for i in range(3)])
    catalog.revisions.add_many([row(0), row(1, state="snapshot", expires_at=20.0), row(2, **snapshot)])
    found = [catalog.revisions.get("sorting", digest(i)) for i in range(3)]
    assert [(r.state, r.expires_at) for r in found] == [
        ("exported", None),
        ("snapshot", 20.0),
        ("snapshot", 10.0),
    ]


def test_a_batch_with_what_is_no_digest_writes_nothing(catalog: Catalog) -> None:
    for bad in ({"checksum": "crc:1"}, {"parent": "it's"}, {"state": "draft"}):
        with pytest.raises(AdapterError, match="hexadecimal"):
            catalog.revisions.add_many([row(1), row(2, **bad)])
    assert catalog.revisions.scan() == []


def register(url: str, start: int, policy: str) -> None:
    catalog = whole_catalog(url)
    for at in range(start, start + 1000, 100):
        catalog.revisions.add_many(
            [row(i, policy=policy, owner=f"owner-{i % 7}") for i in range(at, at + 100)]
        )


def test_two_processes_that_register_at_once_lose_nothing(catalog_url: str, catalog: Catalog) -> None:
    """The ranges overlap by half, so the same rows are raced for too."""
    workers = [children.Process(target=register, args=(catalog_url, start, "sorting")) for start in (0, 500)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    found: list[Revision] = []
    while page := catalog.revisions.scan(after=(found[-1].digest, "sorting") if found else None, limit=333):
        found += page
    assert sorted(r.created_at for r in found) == list(range(1500))
    assert {r.owner for r in found} == {f"owner-{i}" for i in range(7)}
    assert [r.digest for r in found] == sorted(r.digest for r in found)


def test_what_is_stored_already_is_found_whatever_its_policy(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1), row(2, policy="other"), row(3)])
    wanted = [digest(i) for i in range(3000)]
    assert catalog.places.find(wanted) == {digest(i): place(row(i)) for i in (1, 2, 3)}
    catalog.quarantine.add("sorting", digest(1), "Damaged.")
    # Whoever shares the damaged bytes is no better off.
    catalog.revisions.add_many([row(1, policy="other")])
    assert set(catalog.places.find(wanted)) == {digest(2), digest(3)}
    assert catalog.places.find([]) == {}


def test_bytes_that_moved_meanwhile_are_not_shared(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1)])
    moved = Location("s2", 128, 64, row(1).checksum)
    assert catalog.places.move([(place(row(1)), moved)], digests=[digest(1)]) == 1
    with pytest.raises(Moved):
        catalog.revisions.add_many([row(5), row(1, policy="other")], shared=[digest(1)])
    assert len(catalog.revisions.scan()) == 1
    shared = row(1, policy="other", segment="s2", offset=128)
    assert catalog.revisions.add_many([shared], shared=[digest(1)]) == [True]


def test_every_row_of_a_place_moves_with_it(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1), row(1, policy="other"), row(2), row(3, offset=64, segment="s9")])
    moves = [
        (place(row(1)), Location("s2", 0, 64, digest(-2))),
        (place(row(4)), Location("s2", 64, 64, "aa")),
    ]
    assert catalog.places.move(moves) == 2
    assert {place(r) for r in catalog.listing.starting_with(digest(1), 9)} == {moves[0][1]}
    assert catalog.revisions.get("sorting", digest(2)) == row(2)
    assert catalog.revisions.get("sorting", digest(3)).segment == "s9"


def test_rows_take_new_places_at_once_and_leave_quarantine(catalog: Catalog) -> None:
    rows = [row(i, policy=policy) for i in range(1500) for policy in ("sorting", "other")]
    catalog.revisions.add_many(rows)
    catalog.revisions.set_probe("sorting", digest(1), {"accepted": True})
    for policy, number in (("sorting", 1), ("other", 1), ("sorting", 2)):
        catalog.quarantine.add(policy, digest(number), "Damaged.")
    # All of one policy, and two that nobody knows.
    moved = [
        row(i, layout="l2", segment="s2", offset=i, length=9, checksum="dd", owner="you", created_at=0.5)
        for i in range(1502)
        if i != 2
    ]
    assert catalog.places.replace_many(moved) == 1499
    assert catalog.revisions.get("sorting", digest(1)) == row(
        1, layout="l2", segment="s2", offset=1, length=9, checksum="dd", probe={"accepted": True}
    )
    for still in (row(1, policy="other"), row(2)):
        assert catalog.revisions.get(still.policy, still.digest) == still
    assert catalog.revisions.find("sorting", digest(1500)) is None
    held = catalog.quarantine.among([digest(i) for i in (1, 2)])
    assert held == {("other", digest(1)), ("sorting", digest(2))}
    assert catalog.places.replace_many([]) == 0


def test_shared_bytes_count_once(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(i) for i in range(10)] + [row(i, policy="other") for i in range(5)])
    catalog.revisions.add_many([row(1, policy="third", segment="s2")])
    assert catalog.places.bytes_by_segment(page=3) == {"s1": 640, "s2": 64}


def test_a_segment_is_unused_when_no_row_names_it(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1), row(2, segment="s3")])
    assert catalog.places.unused_segments(["s1", "never seen", "s3"]) == {"never seen"}
    catalog.places.move([(place(row(1)), Location("s2", 0, 64, "aa"))])
    assert catalog.places.unused_segments(["s1", "s2"]) == {"s1"}
    assert catalog.places.unused_segments([]) == set()


def test_quarantine_ends_with_whole_bytes_or_by_hand(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1), row(2)])
    catalog.quarantine.add("sorting", digest(1), "The checksum differs.")
    catalog.quarantine.add("sorting", digest(1), "Another reason.")
    catalog.quarantine.add("sorting", digest(2), "Missing.")
    assert catalog.quarantine.reason("sorting", digest(1)) == "The checksum differs."
    catalog.places.replace(row(1, segment="s2"))
    catalog.quarantine.release("sorting", digest(2))
    assert [catalog.quarantine.reason("sorting", digest(i)) for i in (1, 2, 3)] == [None, None, None]


def test_one_query_tells_what_withholds_a_revision(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1), row(2)])
    catalog.tombstones.add("sorting", digest(1), "Reward fell.", "me")
    catalog.quarantine.add("sorting", digest(1), "Damaged.")
    catalog.tombstones.add("others", digest(2), "Not this policy's.", "me")
    for prefix in (digest(1), digest(1)[:12], digest(1)[:1]):
        found = catalog.revisions.standing("sorting", prefix)
        assert found == (catalog.revisions.get("sorting", digest(1)), "Reward fell.", "Damaged.")
    catalog.tombstones.lift("sorting", digest(1), "me", "It is fine.")
    catalog.quarantine.release("sorting", digest(1))
    for number in (1, 2):
        assert catalog.revisions.standing("sorting", digest(number))[1:] == (None, None)
    assert catalog.revisions.standing("sorting", digest(3)) is None


def test_a_name_that_names_nothing_has_near_ones(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(i) for i in range(300)])
    with pytest.raises(NotFound, match="Nearest") as caught:
        catalog.revisions.get("sorting", digest(7)[:11] + "x")
    assert caught.value.nearest[0] == f"sorting@{digest(7)[:12]}"
    assert len(caught.value.nearest) == 5
    for policy in ("sortin", "Sorting", "so rting'; DROP TABLE revisions; --"):
        with pytest.raises(NotFound) as caught:
            catalog.revisions.get(policy, digest(7)[:12])
        assert caught.value.nearest == ("sorting",)
    catalog.policies.add(Policy("sums", "base", {}, "me", 1.0))
    with pytest.raises(NotFound, match="has no revisions"):
        catalog.revisions.get("sums", "aa")
    assert pickle.loads(pickle.dumps(caught.value)).nearest == ("sorting",)


def test_no_digit_is_taken_for_another(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1)])
    for prefix in (
        "' OR 1=1 --",
        "%",
        "_" * 12,
        digest(1).upper(),
        digest(1) + "0",
        "\0",
        digest(1)[:8] + "\n",
    ):
        with pytest.raises(NotFound):
            catalog.revisions.get("sorting", prefix)
    for digits in (0, 1, 2, 3, 4, 5, 12, 63, 64):
        assert catalog.revisions.get("sorting", digest(1)[:digits]) == row(1)


def test_an_ambiguous_prefix_has_candidates_that_differ(catalog: Catalog) -> None:
    alike = ["ab" * 8 + f"{i:048x}" for i in range(20)]
    catalog.revisions.add_many([make_revision(one) for one in alike])
    with pytest.raises(Ambiguous, match="more digits") as caught:
        catalog.revisions.get("sorting", "ab" * 6)
    found = caught.value.candidates
    assert len(found) == len(set(found)) == 10
    assert all(catalog.revisions.get(*name.split("@")) for name in found)
    assert pickle.loads(pickle.dumps(caught.value)).candidates == found


def test_pages_of_an_owner_leave_the_retired_out(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(i, owner="you" if i % 2 else "me") for i in range(20)])
    catalog.lifecycle.retire("sorting", digest(3), "ann", "Old.")
    mine = catalog.revisions.page("sorting", limit=4, owner="you")
    mine += catalog.revisions.page("sorting", after=mine[-1], owner="you")
    assert [r.created_at for r in mine] == [19, 17, 15, 13, 11, 9, 7, 5, 1]
    assert len(catalog.revisions.page("sorting", owner="you", retired=True)) == 10
    assert catalog.revisions.page("sorting", owner="nobody") == []


def test_lineage_is_walked_both_ways(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(i, parent=digest(i - 1) if i else None) for i in range(6)])
    catalog.revisions.add_many([row(9, parent=digest(2))])
    parents = catalog.listing.parents("sorting", digest(5))
    assert [r.digest for r in parents] == [digest(i) for i in (4, 3, 2, 1, 0)]
    assert len(catalog.listing.parents("sorting", digest(5), limit=2)) == 2
    assert [r.digest for r in catalog.listing.children("sorting", digest(2))] == [digest(3), digest(9)]
    assert catalog.listing.children("sorting", digest(2), limit=1) == [row(3, parent=digest(2))]


def test_a_retired_revision_is_not_routed(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(i) for i in range(4)])
    catalog.routes.update(Route("sorting", champion=digest(0)), 0)
    catalog.releases.add(make_release("r1", digest(1)))
    for named in (0, 1):
        with pytest.raises(Conflict, match="routed"):
            catalog.lifecycle.retire("sorting", digest(named), "ann", "Old.")
    retired = catalog.lifecycle.retire("sorting", digest(2), "ann", "Old.")
    assert (retired.retired_by, retired.retired_reason) == ("ann", "Old.")
    assert catalog.lifecycle.retire("sorting", digest(2), "ben", "Older.") == retired
    with pytest.raises(Conflict, match="is retired: Old"):
        catalog.routes.update(Route("sorting", champion=digest(0), canary=digest(2)), 1)
    catalog.releases.update("r1", 0, state="held")
    with pytest.raises(Conflict, match="is retired"):
        catalog.releases.add(make_release("r2", digest(2)))
    back = catalog.lifecycle.retire("sorting", digest(2), "ben", "Still good.", back=True)
    assert (back.retired_at, back.retired_by, back.retired_reason) == (None, "ben", "Still good.")
    catalog.routes.update(Route("sorting", champion=digest(2)), 1)
    with pytest.raises(NotFound):
        catalog.lifecycle.retire("sorting", digest(8), "ann", "Old.")


def test_any_revision_may_expire_but_not_what_is_buried(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(i, expires_at=10.0 + i) for i in range(8)])
    catalog.routes.update(Route("sorting", previous=digest(0)), 0)
    catalog.tombstones.add("sorting", digest(1), "Bad.", "ann")
    catalog.lifecycle.set_expiry("sorting", digest(2), None)
    catalog.lifecycle.set_expiry("sorting", digest(3), 99.0)
    assert [r.digest for r in catalog.lifecycle.expire(now=50.0, limit=3)] == [digest(i) for i in (4, 5, 6)]
    assert [r.digest for r in catalog.lifecycle.expire(now=50.0)] == [digest(7)]
    assert catalog.lifecycle.expire(now=50.0) == []
    assert len(catalog.revisions.scan()) == 4
    with pytest.raises(NotFound):
        catalog.lifecycle.set_expiry("sorting", digest(9), None)


def test_a_purge_leaves_a_mark_and_nothing_else(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.catalog.purges.CHUNK", 10)
    catalog.revisions.add_many([row(i) for i in range(25)] + [row(1, policy="other")])
    catalog.tombstones.add("sorting", digest(1), "Bad.", "ann")
    catalog.releases.add(make_release("r1", digest(2)))
    catalog.aliases.note("sorting", "champion", "1", digest(3))
    catalog.quarantine.add("sorting", digest(4), "Damaged.")
    removed = catalog.purges.run("sorting", "ann", now=7.0)
    assert removed == {
        "policies": 1, "routes": 1, "revisions": 25, "releases": 1, "aliases": 1, "notices": 0,
        "quarantine": 1, "tombstones": 1,
    }  # fmt: skip
    assert not any(catalog.purges.run("sorting", "ben", now=8.0).values())
    assert catalog.purges.find("sorting") == {"policy": "sorting", "by": "ann", "at": 7.0}
    assert catalog.purges.find("other") is None
    assert catalog.revisions.scan() == [row(1, policy="other")]
    with pytest.raises(Conflict, match="was purged"):
        catalog.revisions.add_many([row(1)])
    with pytest.raises(Conflict, match="purged by 'ann'"):
        catalog.policies.add(Policy("sorting", "base", {}, "me", 1.0))
    catalog.policies.add(Policy("sorting", "base", {}, "me", 1.0), again=True)
    catalog.policies.add(Policy("sorting", "base", {"rank": 1}, "me", 1.0))
    assert catalog.revisions.add_many([row(1)])[0]
    assert catalog.purges.find("sorting") is not None


def test_policies_come_by_the_thousand(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.catalog.policy_rows.POLICIES", 10)
    at, _ = catalog.changes.since(0)

    def policy(i: int, owner: str = "me", **config: int) -> Policy:
        return Policy(f"p{i:02}", "base", config, owner, 1.0)

    # Twice in one transaction, too: the last word counts.
    catalog.policies.add_many([policy(i) for i in range(25)] + [policy(24, rank=2), policy(3, rank=1)])
    names = {f"p{i:02}" for i in range(25)}
    assert {one.name: one.config for one in catalog.policies.page(limit=100) if one.config} == {
        "p03": {"rank": 1}, "p24": {"rank": 2}, "sorting": {"rank": 8},
    }  # fmt: skip
    assert catalog.changes.since(at)[1] == names
    assert len({catalog.routes.get(name).salt for name in names}) == 25
    assert catalog.policies.owners([*sorted(names), "ghost"]) == dict.fromkeys(names, ("me", "base"))
    catalog.purges.run("p07", "ann", 1.0)
    for refused, reason in ((policy(3, "they"), "belongs to 'me'"), (policy(7), "purged by 'ann'")):
        with pytest.raises(Conflict, match=reason):
            catalog.policies.add_many([*(policy(i) for i in range(30, 41)), policy(42), refused])
        # Of one transaction all or none.
        assert catalog.policies.owners(["p39", "p42"]) == {"p39": ("me", "base")}
    with pytest.raises(Conflict, match="belongs to 'me'"):
        catalog.policies.add_many([policy(50), policy(50, "they")])
    catalog.policies.add_many([policy(7)], again=True)
    assert catalog.policies.owners(["p07", "p50"]) == {"p07": ("me", "base")}


def test_gateways_hear_of_what_changed_alone(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.catalog.changes.CHANGES", 20)
    at, changed = catalog.changes.since(0)
    assert changed == {"sorting"}
    catalog.revisions.add_many([row(i) for i in range(5)])
    catalog.switches.set("freeze", True)
    assert catalog.changes.since(at) == (at, set())
    steps = {
        "set_route": lambda: catalog.routes.update(Route("sorting", champion=digest(0)), 0),
        "bury": lambda: catalog.tombstones.add("sorting", digest(1), "Bad.", "ann"),
        "lift": lambda: catalog.tombstones.lift("sorting", digest(1), "ann", "Good."),
        "add_release": lambda: catalog.releases.add(make_release("r1", digest(1))),
        "update_release": lambda: catalog.releases.update("r1", 0, state="held"),
        "retire": lambda: catalog.lifecycle.retire("sorting", digest(2), "ann", "Old."),
        "unretire": lambda: catalog.lifecycle.retire("sorting", digest(2), "ann", "Good.", back=True),
        "quarantine": lambda: catalog.quarantine.add("sorting", digest(4), "The checksum differs."),
        "expire": lambda: (
            catalog.lifecycle.set_expiry("sorting", digest(3), 1.0),
            catalog.lifecycle.expire(2.0),
        ),
        "purge": lambda: catalog.purges.run("sorting", "ann", 3.0),
    }
    for step, change in steps.items():
        change()
        newest, changed = catalog.changes.since(at)
        assert (step, changed) == (step, {"sorting"})
        assert newest > at
        at = newest
    key = catalog.keys.create("me", "user")
    assert catalog.changes.since(at)[1] == {None}
    catalog.keys.revoke(key)
    for i in range(25):
        catalog.policies.add(Policy(f"p{i}", "base", {}, "me", 1.0))
    newest, changed = catalog.changes.since(at)
    assert changed is None
    # A catalog from a backup is behind.
    assert catalog.changes.since(newest + 100) == (newest, None)
    assert catalog.changes.since(newest - 3)[1] == {"p22", "p23", "p24"}


def test_policies_and_routes_come_in_pages(catalog: Catalog) -> None:
    for i in range(9):
        catalog.policies.add(Policy(f"p{i}", "base", {}, "me", 1.0))
    names = [f"p{i}" for i in range(9)] + ["sorting"]
    assert [p.name for p in catalog.policies.page(limit=4)] == names[:4]
    assert [p.name for p in catalog.policies.page(after="p3", limit=4)] == names[4:8]
    assert [r.policy for r in catalog.routes.page(after="p3")] == names[4:]
    catalog.routes.update(Route("p5", weight=0.5), 0)
    assert [r.policy for r in catalog.routes.page(changed=True)] == ["p5"]
    assert catalog.routes.among(["p1", "sorting", "unknown"]) == {"p1", "sorting"}


def test_a_misspelt_name_is_compared_with_a_few(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway answers nobody else meanwhile."""
    for number in range(200):
        catalog.policies.add(Policy(f"customer-{number:03}", "base", {}, "me", 0.0))
    compared, compare = [], difflib.get_close_matches

    def counts(name, names, **how):
        compared.append(len(names))
        return compare(name, names, **how)

    monkeypatch.setattr(difflib, "get_close_matches", counts)
    near = Suggestions(catalog.access).policies("customer-00x")
    assert len(near) == 5
    assert any(name.startswith("customer-00") for name in near)
    assert max(compared) <= 50


def test_quarantine_ends_with_the_row(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1, state="snapshot", expires_at=10.0), row(2), row(3)])
    for number in (1, 2, 4):
        catalog.quarantine.add("sorting", digest(number), "The checksum differs.")
    assert [r.digest for r in catalog.lifecycle.expire(20.0)] == [digest(1)]
    assert catalog.quarantine.reason("sorting", digest(1)) is None
    # A mark that another version left behind says nothing of a row that comes later.
    assert catalog.revisions.add_many([row(4), row(2)]) == [True, False]
    assert catalog.quarantine.reason("sorting", digest(4)) is None
    assert catalog.quarantine.reason("sorting", digest(2))


def test_an_adapter_of_many_policies_is_not_read_whole(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [row(1, policy=f"policy-{number}") for number in range(3000)]
    assert catalog.revisions.add_many(shared) == [True] * 3000
    read: list[Location] = []

    def counted(*values: Any) -> Location:
        read.append(Location(*values))
        return read[-1]

    monkeypatch.setattr(catalog_places, "Location", counted)
    assert catalog.places.find([digest(1)] * 3000) == {digest(1): place(row(1))}
    assert len(read) == 1
    more = [row(1, policy=f"more-{number}") for number in range(2000)]
    assert catalog.revisions.add_many([*more, shared[5]], [digest(1)]) == [True] * 2000 + [False]


def test_many_rows_are_published_in_one_statement(catalog: Catalog) -> None:
    changes = {"created_at": 1 / 3, "owner": "me"}
    rows = [
        row(
            i,
            policy=f"policy-{i % 7}",
            parent=digest(i - 1) if i % 3 else None,
            step=i,
            segment=f"s{i % 2}",
            offset=(1 << 40) + i,
            **changes,
        )
        for i in range(2500)
    ]
    twin = replace(rows[3], step=99)
    assert catalog.revisions.add_many([*rows, twin]) == [True] * 2500 + [False]
    assert all(catalog.revisions.find(one.policy, one.digest) == one for one in rows[:50])
    assert catalog.revisions.scan(limit=3000) == sorted(rows, key=lambda one: one.digest)
    snapshot = row(3000, state="snapshot", expires_at=10.0, **changes)
    catalog.revisions.add_many([snapshot])
    exported = replace(snapshot, state="exported", expires_at=None)
    assert catalog.revisions.add_many([rows[0], row(3001, **changes), exported]) == [False, True, False]
    assert catalog.revisions.find("sorting", digest(3000)) == exported


def test_a_batch_shares_no_bytes_that_moved_and_is_of_no_purged_policy(catalog: Catalog) -> None:
    catalog.revisions.add_many([row(1)])
    lost = [row(5), row(1, policy="other", offset=640)]
    with pytest.raises(Moved, match="other@"):
        catalog.revisions.add_many(lost, [digest(1)])
    assert catalog.revisions.add_many([row(5), row(1, policy="other")], [digest(1)]) == [True] * 2
    catalog.purges.run("sorting", "ann", now=7.0)
    with pytest.raises(Purged, match="'sorting' was purged"):
        catalog.revisions.add_many([row(6, policy="other"), row(7)])
    assert {one.digest for one in catalog.revisions.scan()} == {digest(1)}


@pytest.mark.long
def test_a_page_may_have_more_words_than_a_statement_takes(catalog: Catalog, catalog_url: str) -> None:
    # SQLite takes 32,766, Postgres 65,535.
    many = 66_000 if catalog_url.startswith("postgresql") else 33_000
    catalog.revisions.add_many([row(0)])
    with catalog.access.write() as connection:
        (first,) = connection.execute(select(tables.revisions)).mappings()
        names = [{"id": 10 + number, "name": f"more-{number}"} for number in range(many)]
        connection.execute(insert(tables.names), names)
        # The row once more for each name, which is its segment.
        rows = ({"id": 10 + one["id"], "segment": one["id"], "digest": one["name"].encode()} for one in names)
        connection.execute(insert(tables.revisions), [dict(first) | one for one in rows])
    other = whole_catalog(catalog_url)
    assert len(other.places.bytes_by_segment()) == 1 + many
    other.close()


def test_revisions_are_read_ahead_beside_one_who_writes(tmp_path: Path) -> None:
    """To open and close the file by other ways than SQLite's would end its locks."""
    path = tmp_path / "catalog.db"
    migrate(f"sqlite:///{path}")
    catalog, other = whole_catalog(f"sqlite:///{path}"), whole_catalog(f"sqlite:///{path}")
    catalog.policies.add(Policy("p", "ba" * 32, {}, "me", 1.0))
    catalog.revisions.add_many([row(i, policy="p") for i in range(3000)])
    other.shorten_log()

    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read_bytes()
    other.read_ahead()
    assert read_bytes() - before >= path.stat().st_size / 2
    catalog.revisions.add_many([row(3000, policy="p")])
    log = Path(f"{path}-wal").stat().st_ino
    # A process that finds no lock takes itself for the last one, and takes the log away.
    reads = (
        f"import sqlite3; sqlite3.connect({str(path)!r}).execute('SELECT count(*) FROM revisions').fetchone()"
    )
    subprocess.run([sys.executable, "-c", reads], check=True, timeout=60)
    assert Path(f"{path}-wal").stat().st_ino == log
    catalog.close()
    other.close()
