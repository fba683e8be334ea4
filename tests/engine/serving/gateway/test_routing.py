"""Routing: sticky and fair splits, tombstones, and what a gateway does when it cannot read."""

import asyncio
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest

from engine.catalog.catalog import Base, Catalog, Policy, Release, Revision, Route, migrate
from engine.catalog.revision_rows import Standing
from engine.catalog.suggestions import Suggestions
from engine.errors import AdapterError, Ambiguous, NotFound, ServiceError
from engine.serving.assembly import rows_to_cache
from engine.serving.gateway.catalog_rows import RowCache
from engine.serving.gateway.routing import STALE_S, Gone, Router, in_canary
from engine.serving.gateway.suggesting import AT_ONCE, Suggester
from engine.settings.releases import ReleaseConfig

CHAMPION, CANARY = "a" * 64, "b" * 64


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def catalog(tmp_path) -> Catalog:
    url = f"sqlite:///{tmp_path}/catalog.db"
    migrate(url)
    catalog = Catalog(url)
    catalog.bases.add(Base("base", "tiny", "/tiny", 0.0))
    catalog.policies.add(Policy("sums", "base", {}, "me", 0.0))
    for digest in (CHAMPION, CANARY):
        catalog.revisions.add_many(
            [
                Revision(
                    "sums", digest, "base", None, 1, 8, 10, "layout", "s", 0, 10, "cc", "exported", "me", 0.0
                )
            ]
        )
    return catalog


def set_route(catalog: Catalog, **changes) -> Route:
    # With a salt by chance one user in a thousand is not on a canary with all but all of them.
    route = replace(catalog.routes.get("sums"), salt="fixed")
    return catalog.routes.update(replace(route, **changes), route.version)


def reads_of(monkeypatch, *asked) -> list[tuple]:
    """Return the arguments of the calls of these functions (part of the catalog, name), as they come."""
    reads = []
    for part, name in asked:
        read = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *args, read=read: (reads.append(args), read(*args))[1])
    return reads


def test_a_policy_without_champion_is_the_base(catalog):
    target = Router(catalog, "tiny", "base").resolve("sums", "ann")
    assert (target.arm, target.name, target.policy) == ("base", None, "sums")


def test_the_split_is_sticky_and_fair(catalog):
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.2)
    router, second = Router(catalog, "tiny", "base"), Router(catalog, "tiny", "base")
    arms = [router.resolve("sums", f"user-{i}").arm for i in range(5000)]
    assert arms == [second.resolve("sums", f"user-{i}").arm for i in range(5000)]
    # Binomial(5000, 0.2): five standard deviations are 0.028.
    assert abs(arms.count("canary") / 5000 - 0.2) < 0.03
    assert set(arms) == {"canary", "champion"}


def test_another_salt_draws_other_users(catalog):
    route = Route("sums", canary=CANARY, weight=0.5, salt="one")
    other = replace(route, salt="two")
    units = [f"user-{i}" for i in range(1000)]
    agree = sum(in_canary(route, unit) == in_canary(other, unit) for unit in units)
    assert 400 < agree < 600


def test_growing_the_weight_only_adds_users(catalog):
    small, large = (Route("sums", canary=CANARY, weight=weight, salt="s") for weight in (0.1, 0.4))
    assert all(in_canary(large, f"u{i}") for i in range(2000) if in_canary(small, f"u{i}"))


def test_every_resolve_sees_the_last_commit(catalog, tmp_path):
    router = Router(catalog, "tiny", "base")
    assert router.resolve("sums", "ann").arm == "base"
    other = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    set_route(other, champion=CHAMPION)
    assert router.resolve("sums", "ann").digest == CHAMPION
    other.tombstones.add("sums", CHAMPION, "It was bad.", "controller")
    assert router.resolve("sums", "ann").arm == "base"


def test_a_tombstone_is_stronger_than_the_route(catalog):
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.999)
    catalog.tombstones.add("sums", CANARY, "Reward fell.", "controller")
    router = Router(catalog, "tiny", "base")
    assert {router.resolve("sums", f"u{i}").digest for i in range(50)} == {CHAMPION}
    with pytest.raises(Gone, match="Reward fell"):
        router.resolve(f"sums@{CANARY[:12]}", "ann")
    assert router.resolve(f"sums@{CANARY[:12]}", "ann", purpose="score").digest == CANARY
    catalog.tombstones.lift("sums", CANARY, "ann", "looked again")
    assert router.resolve(f"sums@{CANARY[:12]}", "ann").arm == "pinned"


async def test_unknown_names_are_told_the_known_ones(catalog):
    router = Router(catalog, "tiny", "base", suggest=Suggester)
    with pytest.raises(NotFound, match="tiny, sums"):
        await router.admit("nobody", "ann")
    with pytest.raises(NotFound, match="no revision 'cccc'"):
        await router.admit("sums@cccc", "ann")


async def test_a_router_without_suggestions_says_what_is_unknown(catalog):
    router = Router(catalog, "tiny", "base")
    for model, said in (("nobody", "Unknown model 'nobody'."), ("sums@cccc", "no revision 'cccc'")):
        with pytest.raises(NotFound, match=said) as missing:
            await router.admit(model, "ann")
        assert missing.value.nearest == ()


async def test_suggestions_are_looked_for_in_a_thread_and_shared_until_something_changes(
    catalog, monkeypatch
):
    router, threads = Router(catalog, "tiny", "base", suggest=Suggester), []
    find = Suggestions.policies

    def suggests(self: Suggestions, name: str, patterns: tuple[str, ...]) -> list[str]:
        threads.append(threading.get_ident())
        return find(self, name, patterns)

    monkeypatch.setattr(Suggestions, "policies", suggests)
    for _ in range(3):
        with pytest.raises(NotFound) as missing:
            await router.admit("sum", "ann")
        assert missing.value.nearest == ("tiny", "sums")
        with pytest.raises(NotFound):
            router.revision("sums", "c" * 64)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    catalog.purges.run("sums", "ann", 1.0)
    with pytest.raises(NotFound) as missing:
        await router.admit("sum", "ann")
    assert missing.value.nearest == ("tiny",)


async def test_a_flood_of_unknown_names_occupies_few_threads(catalog, monkeypatch):
    router, running, most, pause_s = Router(catalog, "tiny", "base", suggest=Suggester), [], [], 0.02

    def suggests(self: Suggestions, name: str, patterns: tuple[str, ...]) -> list[str]:
        running.append(name)
        most.append(len(running))
        time.sleep(pause_s)
        running.remove(name)
        return []

    monkeypatch.setattr(Suggestions, "policies", suggests)
    asked = [router.admit(f"nobody-{number}", "ann") for number in range(50)]
    refused = await asyncio.gather(*asked, return_exceptions=True)
    assert all(type(error) is NotFound and "Unknown model" in str(error) for error in refused)
    assert 1 <= max(most) <= AT_ONCE
    assert len(most) == AT_ONCE
    # A refusal is not kept: whoever asks again is told of near names.
    pause_s = 0
    for number in range(50):
        with pytest.raises(NotFound):
            await router.admit(f"nobody-{number}", "ann")
    assert len(most) == 50


def test_what_nobody_has_is_read_once(catalog, monkeypatch):
    """An unknown model and an invalid key, again and again; they may come into being at any time."""
    monkeypatch.setattr("engine.catalog.keys.secrets.token_hex", lambda size: "0" * 2 * size)
    router = Router(catalog, "tiny", "base")
    reads = reads_of(
        monkeypatch, (catalog.routes, "get"), (catalog.purges, "find"), (catalog.keys, "find_hash")
    )
    later = f"gw-{'0' * 40}"
    for _ in range(10):
        with pytest.raises(NotFound):
            router.resolve("later", "ann")
        assert router.key(later) is None
        # Changes of others.
        set_route(catalog, champion=CHAMPION)
    assert len([args for args in reads if args != ("sums",)]) == 3
    catalog.policies.add(Policy("later", "base", {}, "me", 0.0))
    assert catalog.keys.create("ann", "user") == later
    assert router.resolve("later", "ann").arm == "base"
    assert router.key(later).owner == "ann"
    catalog.keys.revoke(later)
    catalog.purges.run("later", "ann", 1.0)
    assert router.key(later) is None
    with pytest.raises(Gone, match="purged by ann"):
        router.resolve("later", "ann")


def test_a_new_revision_is_found_by_a_name_that_was_unknown(catalog):
    """Gateways are not told of new revisions, so that a missing one is never remembered."""
    router, digest = Router(catalog, "tiny", "base"), "d" * 64
    with pytest.raises(NotFound):
        router.resolve(f"sums@{digest[:12]}", "ann")
    catalog.revisions.add_many([replace(catalog.revisions.get("sums", CANARY), digest=digest)])
    assert router.resolve(f"sums@{digest[:12]}", "ann").digest == digest


def test_a_revision_of_another_base_is_refused(catalog):
    with pytest.raises(AdapterError, match=r"base base.*base other"):
        Router(catalog, "tiny", "other").resolve(f"sums@{CANARY[:12]}", "ann")


def test_a_gateway_that_cannot_read_drops_the_canary(catalog, monkeypatch):
    clock = Clock()
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.999)
    router = Router(catalog, "tiny", "base", clock)
    assert router.resolve("sums", "ann").arm == "canary"

    fault = sqlite3.OperationalError("disk I/O error")
    monkeypatch.setattr(router.rows, "watch", Mock(commits=Mock(side_effect=fault)))
    clock.now = STALE_S / 2
    assert router.resolve("sums", "ann").arm == "canary"
    clock.now = STALE_S * 1.01
    assert router.resolve("sums", "ann").arm == "champion"
    monkeypatch.undo()
    assert router.resolve("sums", "ann").arm == "canary"


def test_a_gateway_that_gets_no_cpu_for_a_second_is_not_blind(catalog, monkeypatch):
    """The time between a look that succeeded and the answer says nothing about the catalog."""
    clock = Clock()
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.999)
    router = Router(catalog, "tiny", "base", clock)
    found = catalog.revisions.standing

    def slow(*asked: str) -> Standing | None:
        clock.now += 2 * STALE_S
        return found(*asked)

    monkeypatch.setattr(catalog.revisions, "standing", slow)
    assert router.resolve("sums", "ann").arm == "canary"
    assert router.resolve(f"sums@{CHAMPION[:12]}", "ann").digest == CHAMPION


def test_a_gateway_that_has_never_read_refuses(catalog, monkeypatch):
    router = Router(catalog, "tiny", "base")
    router.rows.watch.close()
    with pytest.raises(ServiceError, match="cannot be read"):
        router.resolve("sums", "ann")


def test_resolving_costs_microseconds(catalog):
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.5)
    router = Router(catalog, "tiny", "base")
    router.resolve("sums", "warm")
    started = time.thread_time()
    for i in range(2000):
        router.resolve("sums", f"user-{i}")
    # Some 10 us of a core; the bound leaves room for a slow one, not for a query per request.
    assert (time.thread_time() - started) / 2000 < 100e-6


def test_a_retired_revision_is_gone_but_not_to_the_scorer(catalog):
    router = Router(catalog, "tiny", "base")
    pinned = f"sums@{CANARY[:12]}"
    assert router.resolve(pinned, "ann").arm == "pinned"
    catalog.lifecycle.retire("sums", CANARY, "ann", "Nobody needs it.")
    with pytest.raises(Gone, match=r"retired.*Nobody needs it\."):
        router.resolve(pinned, "ann")
    assert router.resolve(pinned, "ann", purpose="score").digest == CANARY
    catalog.lifecycle.retire("sums", CANARY, "ann", "Somebody does.", back=True)
    assert router.resolve(pinned, "ann").digest == CANARY


def test_a_purged_name_is_gone(catalog):
    router = Router(catalog, "tiny", "base")
    router.resolve("sums", "ann")
    router.resolve(f"sums@{CANARY[:12]}", "ann")
    catalog.purges.run("sums", "ann", 1.0)
    for model in ("sums", f"sums@{CANARY[:12]}"):
        with pytest.raises(Gone, match="purged by ann"):
            router.resolve(model, "ann")


async def test_names_that_name_nothing_or_too_much_are_told_the_near_ones(catalog):
    router = Router(catalog, "tiny", "base", suggest=Suggester)
    other = CANARY[:20] + "f" * 44
    catalog.revisions.add_many([replace(catalog.revisions.get("sums", CANARY), digest=other)])
    with pytest.raises(Ambiguous) as several:
        router.resolve(f"sums@{CANARY[:5]}", "ann")
    assert set(several.value.candidates) == {f"sums@{CANARY[:21]}", f"sums@{other[:21]}"}
    with pytest.raises(NotFound) as missing:
        await router.admit("sums@bbbc", "ann")
    assert missing.value.nearest[0].startswith("sums@bbb")
    for name in ("sum", "", "../sums", "sums@", "Sums@@", "x" * 500):
        with pytest.raises(NotFound) as refused:
            await router.admit(name, "ann")
        assert refused.value.nearest
        assert len(str(refused.value)) < 1000


def test_a_change_elsewhere_reads_nothing_again(catalog, monkeypatch):
    """Leases, registrations and other policies' routes change every second; these rows did not."""
    set_route(catalog, champion=CHAMPION)
    router = Router(catalog, "tiny", "base")
    router.resolve("sums", "ann")
    reads = reads_of(monkeypatch, (catalog.routes, "get"), (catalog.revisions, "standing"))
    catalog.leases.acquire("controller", "me", 5)
    catalog.policies.add(Policy("others", "base", {}, "me", 0.0))
    assert router.resolve("sums", "ann").digest == CHAMPION
    assert reads == []
    catalog.tombstones.add("sums", CHAMPION, "It was bad.", "controller")
    reads.clear()
    assert router.resolve("sums", "ann").arm == "base"
    assert len(reads) == 2


def test_more_changes_than_are_kept_make_everything_old(catalog, monkeypatch):
    monkeypatch.setattr("engine.catalog.changes.CHANGES", 3)
    router = Router(catalog, "tiny", "base", cached_rows=2)
    assert router.resolve("sums", "ann").arm == "base"
    set_route(catalog, champion=CHAMPION)
    for number in range(9):
        catalog.policies.add(Policy(f"other-{number}", "base", {}, "me", 0.0))
    assert router.resolve("sums", "ann").arm == "champion"
    for number in range(9):
        catalog.policies.add(Policy(f"another-{number}", "base", {}, "me", 0.0))
        router.resolve(f"another-{number}", "ann")
    catalog.tombstones.add("sums", CHAMPION, "It was bad.", "controller")
    for number in range(9):
        catalog.policies.add(Policy(f"third-{number}", "base", {}, "me", 0.0))
        router.key("gw-nobody")
    assert router.resolve("sums", "ann").arm == "base"
    # Two rows are kept.
    reads = reads_of(monkeypatch, (catalog.routes, "get"))
    for number in (5, 6, 7, 5, 7):
        router.resolve(f"another-{number}", "ann")
    assert len(reads) == 4


def test_a_row_cache_keeps_few_rows_and_few_changes():
    cache = RowCache(2)
    for change, name in enumerate("abc", 1):
        cache.put(name, 0, None)
        cache.note(change, {name})
    assert [name in cache for name in "abc"] == [False, True, True]
    # Of the oldest change only its number is known: it may be of any policy.
    assert not cache.is_fresh("another", 0)
    assert cache.is_fresh("another", 1)


def test_a_read_that_failed_says_nothing_of_a_row_that_another_thread_has_read():
    cache = RowCache(2)
    cache.put("key", 0, "old")
    kept = cache.get("key")
    cache.fail("key", kept, 1.0)
    cache.fail("key", kept, 2.0)
    assert cache.unread_since("key") == 1.0
    cache.put("key", 1, "new")
    cache.fail("key", kept, 3.0)
    assert cache.unread_since("key") is None


def test_a_tombstone_that_is_seen_while_a_row_is_shared_counts(catalog, monkeypatch):
    """A pinned name's row is kept under the whole digest, too, but as no newer than it was read."""
    router = Router(catalog, "tiny", "base")
    read = router.rows.read

    def slow(whose, key, call):
        found = read(whose, key, call)
        if key == ("revision", "sums", CHAMPION[:12]):
            monkeypatch.undo()
            catalog.tombstones.add("sums", CHAMPION, "It was bad.", "controller")
            router.take_changed()
        return found

    set_route(catalog, champion=CHAMPION)
    monkeypatch.setattr(router.rows, "read", slow)
    assert router.resolve(f"sums@{CHAMPION[:12]}", "ann").digest == CHAMPION
    assert router.resolve("sums", "ann").arm == "base"


def test_a_row_that_could_not_be_read_again_is_not_shared(catalog, monkeypatch):
    clock = Clock()
    set_route(catalog, champion=CANARY, canary=CHAMPION, weight=0.999)
    router, pinned = Router(catalog, "tiny", "base", clock), f"sums@{CHAMPION[:12]}"
    assert router.resolve(pinned, "ann").digest == router.resolve("sums", "ann").digest == CHAMPION
    catalog.tombstones.add("sums", CHAMPION, "It was bad.", "controller")
    breaks(catalog.revisions, monkeypatch, "standing")
    assert router.resolve("sums", "ann").digest == CHAMPION
    assert router.resolve(pinned, "ann").digest == CHAMPION
    clock.now = STALE_S * 1.01
    assert router.resolve("sums", "ann").digest == CANARY


def test_what_is_under_release_is_named_and_nothing_else(catalog):
    router = Router(catalog, "tiny", "base")
    set_route(catalog, champion=CHAMPION)
    for number in range(50):
        catalog.policies.add(Policy(f"user-{number}", "base", {}, "me", 0.0))
    assert router.under_release() == frozenset()
    settings = ReleaseConfig().model_dump()
    release = Release("r1", "sums", CANARY, CHAMPION, "score", 0.2, "running", settings, 0.0, 0.0)
    catalog.releases.add(release)
    assert router.under_release() == {("sums", CHAMPION)}
    catalog.releases.update("r1", 0, step="approval")
    assert router.under_release() == {("sums", CHAMPION), ("sums", CANARY)}
    set_route(catalog, canary=CANARY, weight=0.2)
    assert router.under_release() == {("sums", CHAMPION), ("sums", CANARY)}
    catalog.releases.update("r1", 1, state="promoted")
    assert router.under_release() == frozenset()


def test_what_is_under_release_is_of_this_base(catalog):
    catalog.policies.add(Policy("other", "large", {}, "me", 0.0))
    row = Revision(
        "other", "c" * 64, "large", None, 1, 8, 10, "layout", "s", 0, 10, "cc", "exported", "me", 0.0
    )
    catalog.revisions.add_many([row])
    settings = ReleaseConfig().model_dump()
    catalog.releases.add(
        Release("r1", "other", "c" * 64, None, "approval", 0.2, "running", settings, 0.0, 0.0)
    )
    assert Router(catalog, "tiny", "base").under_release() == frozenset()
    assert Router(catalog, "large", "large").under_release() == {("other", "c" * 64)}


def test_what_has_changed_is_told_once(catalog):
    router = Router(catalog, "tiny", "base")
    router.take_changed()
    set_route(catalog, champion=CHAMPION)
    catalog.keys.create("ann", "user")
    router.resolve("sums", "ann")
    assert router.take_changed() == {"sums"}
    assert router.take_changed() == set()
    catalog.purges.run("sums", "ann", 1.0)
    assert router.take_changed() == {"sums"}


@pytest.mark.long
def test_the_catalog_is_asked_of_what_is_asked_for_alone(catalog, monkeypatch):
    """A thousand policies: no route is read before its own request."""
    for number in range(1000):
        catalog.policies.add(Policy(f"user-{number}", "base", {}, "me", 0.0))
    router, reads = Router(catalog, "tiny", "base"), reads_of(monkeypatch, (catalog.routes, "get"))
    router.resolve("user-7", "ann")
    assert reads == [("user-7",)]
    assert router.policies(3) == ["sums", "user-0", "user-1"]


def breaks(part, monkeypatch, name: str) -> None:
    def fail(*args) -> None:
        raise ServiceError("The catalog cannot be read: disk I/O error.")

    monkeypatch.setattr(part, name, fail)


@pytest.mark.parametrize("part", ["routes", "tombstones"])
def test_a_changed_row_that_cannot_be_read_drops_the_canary(catalog, monkeypatch, part):
    """The catalog says that something has changed, and then fails."""
    clock = Clock()
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.999)
    router = Router(catalog, "tiny", "base", clock)
    assert {router.resolve("sums", f"u{i}").arm for i in range(5000)} == {"champion", "canary"}
    assert router.resolve("sums", "ann").arm == "canary"
    if part == "tombstones":
        catalog.tombstones.add("sums", CANARY, "Reward fell.", "controller")
    else:
        set_route(catalog, canary=None)
    broken = (catalog.routes, "get") if part == "routes" else (catalog.revisions, "standing")
    breaks(broken[0], monkeypatch, broken[1])
    assert router.resolve("sums", "ann").arm == "canary"
    clock.now = STALE_S * 1.01
    assert router.resolve("sums", "ann").arm == "champion"
    monkeypatch.undo()
    assert router.resolve("sums", "ann").arm == "champion"
    if part == "tombstones":
        catalog.tombstones.lift("sums", CANARY, "ann", "It is fine.")
    else:
        set_route(catalog, canary=CANARY, weight=0.999)
    assert router.resolve("sums", "ann").arm == "canary"


def test_a_pinned_revision_whose_stone_cannot_be_read_is_refused(catalog, monkeypatch):
    clock = Clock()
    router, pinned = Router(catalog, "tiny", "base", clock), f"sums@{CANARY[:12]}"
    assert router.resolve(pinned, "ann").digest == CANARY
    catalog.tombstones.add("sums", CANARY, "Reward fell.", "controller")
    breaks(catalog.revisions, monkeypatch, "standing")
    assert router.resolve(pinned, "ann").digest == CANARY
    clock.now = STALE_S * 1.01
    with pytest.raises(ServiceError, match="rolled back"):
        router.resolve(pinned, "ann")
    assert router.resolve(pinned, "ann", purpose="score").digest == CANARY
    monkeypatch.undo()
    with pytest.raises(Gone, match="Reward fell"):
        router.resolve(pinned, "ann")


def test_what_nobody_has_pushes_no_row_out(catalog, monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.catalog_rows.ABSENT_ROWS", 8)
    router = Router(catalog, "tiny", "base", cached_rows=4)
    assert router.resolve("sums", "ann").arm == "base"
    for number in range(20):
        for model in (f"nobody-{number}", f"No/body {number}", f"nobody@{number:012x}"):
            with pytest.raises(NotFound):
                router.resolve(model, "ann")
        assert router.key(f"gw-{number}") is None
    reads = reads_of(monkeypatch, (catalog.routes, "get"), (catalog.keys, "find_hash"))
    assert router.resolve("sums", "ann").arm == "base"
    assert router.key("gw-19") is None
    assert reads == []
    # It is forgotten again: only some of those are kept.
    assert router.key("gw-0") is None
    assert len(reads) == 1


def test_a_name_of_megabytes_is_refused_in_a_line(catalog, monkeypatch):
    router = Router(catalog, "tiny", "base")
    breaks(catalog.routes, monkeypatch, "get")
    breaks(catalog.purges, monkeypatch, "find")
    for model in ("x" * (1 << 20), "X" * (1 << 20) + "@" + "a" * 12):
        with pytest.raises(NotFound) as missing:
            router.resolve(model, "ann")
        assert len(str(missing.value)) < 1000


def test_every_row_of_a_full_host_tier_is_kept():
    assert rows_to_cache(1) >= 1000
    assert rows_to_cache(100_000) > 3 * 100_000


def test_a_restored_older_catalog_is_read_anew(catalog, monkeypatch):
    """Its changes count from a lower number, so none of them would look newer than what was read."""
    set_route(catalog, champion=CHAMPION)
    router = Router(catalog, "tiny", "base")
    assert router.resolve("sums", "ann").digest == CHAMPION
    newest, _ = catalog.changes.since(0)
    with catalog.access.write() as connection:
        connection.exec_driver_sql("DELETE FROM changes WHERE id > 1")
        connection.exec_driver_sql("UPDATE routes SET champion = NULL")
    assert router.resolve("sums", "ann").arm == "base"
    assert 0 < catalog.changes.since(0)[0] < newest
    assert router.take_changed() is None
    set_route(catalog, champion=CANARY)
    assert router.resolve("sums", "ann").digest == CANARY
    assert router.take_changed() == {"sums"}


@pytest.mark.parametrize("buried", [False, True])
def test_a_look_while_a_purge_runs_keeps_nothing_of_it(catalog, monkeypatch, buried):
    """Rows that were read between two of its transactions are old when the purge has ended."""
    router, pinned = Router(catalog, "tiny", "base"), f"sums@{CANARY[:12]}"
    if buried:
        catalog.tombstones.add("sums", CHAMPION, "It was bad.", "controller")
    write, seen = catalog.access.write, 0

    def looks():
        nonlocal seen
        if catalog.purges.find("sums"):
            with pytest.raises(Gone):
                router.resolve("sums", "ann")
            for digest in (CANARY, CHAMPION):
                with suppress(NotFound, Gone):
                    router.resolve(f"sums@{digest}", "ann")
            seen, _ = catalog.changes.since(seen)
        return write()

    monkeypatch.setattr(catalog.access, "write", looks)
    catalog.purges.run("sums", "ann", 1.0)
    with pytest.raises(NotFound):
        router.revision("sums", CANARY)
    with pytest.raises(Gone, match="purged by ann"):
        router.resolve(pinned, "ann")
    # The removal of a tombstone is a change, so that no gateway keeps it.
    assert catalog.changes.since(seen)[1] == ({"sums"} if buried else set())
    assert router.take_changed() == {"sums"}
