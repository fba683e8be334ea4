"""The audit log: every change once, by whom, in an order that nobody can change unseen."""

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from engine.catalog.access import acting
from engine.catalog.audit import START, Audit
from engine.catalog.catalog import Catalog, Tenant, migrate
from engine.catalog.opening import whole_catalog
from engine.errors import ConfigError, Conflict, NotFound
from tests.helpers.rows import NEW, fill


def entries(catalog: Catalog) -> list[tuple[str, str, str, str | None]]:
    return [(one.action, one.subject, one.actor, one.on_behalf_of) for one in Audit(catalog.access).page()]


@pytest.fixture
def filled(catalog: Catalog) -> Catalog:
    fill(catalog)
    return catalog


def test_a_change_is_one_entry_with_its_actor_and_the_values_that_changed(filled: Catalog) -> None:
    before, route = len(Audit(filled.access).page()), filled.routes.get("sorting")
    with acting("ops", "ada"):
        filled.routes.update(replace(route, canary=NEW, weight=0.25), route.version)
    filled.switches.set("freeze", True)
    changed, switched = Audit(filled.access).page()[before:]
    assert (changed.action, changed.subject) == ("route.change", "sorting")
    assert (changed.actor, changed.on_behalf_of) == ("ops", "ada")
    assert json.loads(changed.before) == {"canary": None, "weight": 0.0}
    assert json.loads(changed.after) == {"canary": NEW, "weight": 0.25}
    assert (switched.action, switched.on_behalf_of) == ("switch.set", None)
    assert switched.actor.startswith("os:")


def test_a_refused_change_leaves_no_entry(filled: Catalog) -> None:
    route, before = filled.routes.get("sorting"), Audit(filled.access).page()
    with pytest.raises(Conflict):
        filled.routes.update(replace(route, canary=NEW), route.version + 7)
    with pytest.raises(Conflict):
        filled.policies.add(replace(filled.policies.get("sorting"), owner="eve"))
    filled.tombstones.add("sorting", NEW, "bad", "ada")
    filled.tombstones.add("sorting", NEW, "bad again", "eve")
    assert [one.action for one in Audit(filled.access).page()[len(before) :]] == ["tombstone.write"]


def test_every_kind_of_change_is_there(filled: Catalog) -> None:
    filled.tombstones.add("sorting", NEW, "bad", "ada")
    filled.tombstones.lift("sorting", NEW, "ada", "good")
    filled.lifecycle.retire("sorting", NEW, "ada", "old")
    filled.lifecycle.retire("sorting", NEW, "ada", "new", back=True)
    filled.policies.add(replace(filled.policies.get("sorting"), config={"rank": 4}))
    filled.purges.run("sorting", "ada", 5.0)
    assert {
        "policy.add", "policy.change", "policy.purge", "tombstone.write", "tombstone.lift",
        "revision.retire", "revision.unretire", "route.change",
    } <= {action for action, *_ in entries(filled)}  # fmt: skip
    assert Audit(filled.access).verify()[0] == len(Audit(filled.access).page())


def test_changes_of_keys_and_tenants_are_entries_without_a_secret(catalog: Catalog) -> None:
    before = len(Audit(catalog.access).page())
    key = catalog.keys.create("acme", ["infer"], ["acme-*"], {"concurrency": 4.0})
    hashed = catalog.keys.find(key).hash
    with acting("ops", "ada"):
        newer = catalog.keys.rotate(key, overlap_s=60)
    catalog.keys.limit(newer, {"concurrency": 8.0}, ["acme-sums"])
    catalog.keys.set_tenant(Tenant("acme", {"tokens_per_day": 5.0}))
    catalog.keys.set_tenant(Tenant("acme", {"tokens_per_day": 5.0}, weight=2.0))
    catalog.keys.revoke(newer)
    with pytest.raises(NotFound):
        catalog.keys.revoke(newer)
    found, id = Audit(catalog.access).page()[before:], hashed[:12]
    assert [(one.action, one.subject) for one in found] == [
        ("key.create", id), ("key.rotate", id), ("key.limits", id), ("tenant.limits", "acme"),
        ("tenant.limits", "acme"), ("key.revoke", id),
    ]  # fmt: skip
    assert (found[1].actor, found[1].on_behalf_of) == ("ops", "ada")
    created, rotated, limited, set_up, weighed, revoked = (json.loads(one.after) for one in found)
    assert (created["owner"], created["roles"], created["policies"]) == ("acme", ["infer"], ["acme-*"])
    assert (rotated["overlap_s"], rotated["hash"]) == (60, catalog.keys.all()[-1].hash[:12])
    assert json.loads(found[1].before) == {"hash": id}
    assert json.loads(found[2].before) == {"limits": {"concurrency": 4.0}, "policies": ["acme-*"]}
    assert limited == {"limits": {"concurrency": 8.0}, "policies": ["acme-sums"]}
    assert set_up == {"limits": {"tokens_per_day": 5.0}}
    assert (weighed, json.loads(found[4].before)) == ({"weight": 2.0}, {"weight": 1.0})
    assert revoked["revoked_at"] > 0
    texts = [one.before + one.after for one in found]
    assert not any(secret in text for secret in (key, newer, hashed) for text in texts)
    assert Audit(catalog.access).verify()[0] == before + 6


def test_a_key_that_is_refused_leaves_no_entry(catalog: Catalog) -> None:
    first = catalog.keys.create("acme", ["infer"], ["acme-*"])
    other = catalog.keys.create("umbrella", ["infer"], ["umbrella-*"])
    before = Audit(catalog.access).page()
    for refused in (
        lambda: catalog.keys.create("umbrella", ["infer"], ["acme-sums"]),
        lambda: catalog.keys.limit(other, {}, ["acme-sums"]),
        lambda: catalog.keys.limit(first, {"nothing": 1.0}),
        lambda: catalog.keys.set_tenant(Tenant("acme", weight=0.0)),
        lambda: catalog.keys.rotate("ffff", 1.0),
    ):
        with pytest.raises((Conflict, ConfigError, NotFound)):
            refused()
    assert Audit(catalog.access).page() == before


def test_the_salt_of_a_route_is_in_no_entry(filled: Catalog) -> None:
    salt = filled.routes.get("sorting").salt
    assert salt
    assert all(salt not in one.before + one.after for one in Audit(filled.access).page())


def test_a_policys_own_texts_are_kept_as_hashes(filled: Catalog) -> None:
    policy = filled.policies.get("sorting")
    for said in ("You are Ada.", "You are Bob."):
        filled.policies.add(replace(policy, config={"rank": 8, "system": said, "few_shot": [[said, said]]}))
    (entry,) = Audit(filled.access).newest(1)
    assert entry.action == "policy.change"
    assert json.loads(entry.before)["system"] != json.loads(entry.after)["system"]
    assert not any("You are" in one.before + one.after for one in Audit(filled.access).page())


def test_the_database_refuses_to_change_an_entry(filled: Catalog) -> None:
    for statement in ("UPDATE audit SET actor = 'nobody'", "DELETE FROM audit"):
        with (
            filled.access.engine.connect() as connection,
            pytest.raises(DatabaseError, match="never changed"),
        ):
            connection.execute(text(statement))


def rewritten(catalog: Catalog, *statements: str) -> None:
    """Change the log as someone would who owns the file."""
    with sqlite3.connect(catalog.label) as connection:
        connection.execute("DROP TRIGGER audit_no_update")
        connection.execute("DROP TRIGGER audit_no_delete")
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE audit SET actor = 'nobody' WHERE id = 2", "Entry 2.*hash"),
        ("UPDATE audit SET after = '{}' WHERE id = 3", "Entry 3.*hash"),
        ("DELETE FROM audit WHERE id = 2", "no entry 2"),
        ("DELETE FROM audit WHERE id = 1", "no entry 1"),
        ("UPDATE audit SET id = 99 WHERE id = 2", "no entry 2"),
        ("DELETE FROM audit WHERE id > 2", "ends.*entry 4"),
    ],
)
def test_a_changed_log_is_found(sqlite_catalog_url: str, statement: str, sentence: str) -> None:
    catalog = whole_catalog(sqlite_catalog_url)
    for on in (True, False, True, False):
        catalog.switches.set("freeze", on)
    expected = Audit(catalog.access).verify()
    assert expected[0] == 4
    rewritten(catalog, statement)
    with pytest.raises(Conflict, match=sentence):
        Audit(catalog.access).verify(expected)
    catalog.close()


def test_a_log_written_anew_is_found_by_the_hash_that_was_kept(sqlite_catalog_url: str) -> None:
    catalog = whole_catalog(sqlite_catalog_url)
    assert Audit(catalog.access).verify() == (0, START)
    for on in (True, False):
        catalog.switches.set("freeze", on)
    expected = Audit(catalog.access).verify()
    rewritten(catalog, "DELETE FROM audit")
    for on in (True, False):
        catalog.switches.set("other", on)
    assert Audit(catalog.access).verify()[0] == 2
    with pytest.raises(Conflict, match="expected"):
        Audit(catalog.access).verify(expected)
    catalog.close()


def test_writers_at_once_make_one_chain(catalog: Catalog) -> None:
    before = len(Audit(catalog.access).page())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: catalog.switches.set(f"s{number}", True), range(40)))
    assert Audit(catalog.access).verify()[0] == before + 40


def test_a_catalog_is_changed_without_a_log_where_none_is_handed_in(empty_catalog_url: str) -> None:
    migrate(empty_catalog_url)
    with closing(Catalog(empty_catalog_url)) as catalog:
        catalog.switches.set("freeze", True)
        catalog.note("backup", "somewhere", {})
        assert catalog.switches.is_on("freeze")
        assert Audit(catalog.access).page() == []
