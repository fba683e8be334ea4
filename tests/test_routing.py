"""Routing: sticky and fair splits, tombstones, and what a gateway does when it cannot read."""

import sqlite3
import time
from dataclasses import replace

import pytest

from engine.adapters.catalog import Base, Catalog, Policy, Revision, Route, migrate
from engine.errors import AdapterError, NotFound, ServiceError
from engine.serving.routing import STALE_S, Gone, Router, in_canary

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
    catalog.add_base(Base("base", "tiny", "/tiny", 0.0))
    catalog.add_policy(Policy("sums", "base", {}, "me", 0.0))
    for digest in (CHAMPION, CANARY):
        catalog.add_revision(
            Revision(
                "sums", digest, "base", None, 1, 8, 10, "layout", "s", 0, 10, "cc", "exported", "me", 0.0
            )
        )
    return catalog


def set_route(catalog: Catalog, **changes) -> Route:
    route = catalog.route("sums")
    return catalog.set_route(replace(route, **changes), route.version)


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
    other.bury("sums", CHAMPION, "It was bad.", "controller")
    assert router.resolve("sums", "ann").arm == "base"


def test_a_tombstone_is_stronger_than_the_route(catalog):
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.999)
    catalog.bury("sums", CANARY, "Reward fell.", "controller")
    router = Router(catalog, "tiny", "base")
    assert {router.resolve("sums", f"u{i}").digest for i in range(50)} == {CHAMPION}
    with pytest.raises(Gone, match="Reward fell"):
        router.resolve(f"sums@{CANARY[:12]}", "ann")
    assert router.resolve(f"sums@{CANARY[:12]}", "ann", purpose="score").digest == CANARY
    catalog.lift("sums", CANARY, "ann", "looked again")
    assert router.resolve(f"sums@{CANARY[:12]}", "ann").arm == "pinned"


def test_unknown_names_are_told_the_known_ones(catalog):
    router = Router(catalog, "tiny", "base")
    with pytest.raises(NotFound, match="Known: tiny, sums"):
        router.resolve("nobody", "ann")
    with pytest.raises(NotFound, match="no revision 'cccc'"):
        router.resolve("sums@cccc", "ann")


def test_a_revision_of_another_base_is_refused(catalog):
    with pytest.raises(AdapterError, match="belongs to base base, and this engine serves other"):
        Router(catalog, "tiny", "other").resolve(f"sums@{CANARY[:12]}", "ann")


def test_a_gateway_that_cannot_read_drops_the_canary(catalog, monkeypatch):
    clock = Clock()
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.999)
    router = Router(catalog, "tiny", "base", clock)
    assert router.resolve("sums", "ann").arm == "canary"

    def fail() -> int:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(catalog, "data_version", fail)
    clock.now = STALE_S / 2
    assert router.resolve("sums", "ann").arm == "canary"
    clock.now = STALE_S * 1.01
    assert router.resolve("sums", "ann").arm == "champion"
    monkeypatch.undo()
    assert router.resolve("sums", "ann").arm == "canary"


def test_a_gateway_that_has_never_read_refuses(catalog, monkeypatch):
    monkeypatch.setattr(catalog, "data_version", lambda: 1 / 0)
    with pytest.raises(ServiceError, match="cannot be read"):
        Router(catalog, "tiny", "base").resolve("sums", "ann")


def test_resolving_costs_microseconds(catalog):
    set_route(catalog, champion=CHAMPION, canary=CANARY, weight=0.5)
    router = Router(catalog, "tiny", "base")
    router.resolve("sums", "warm")
    started = time.perf_counter()
    for i in range(2000):
        router.resolve("sums", f"user-{i}")
    # Some 10 us here; the bound leaves room for a busy machine, not for a query per request.
    assert (time.perf_counter() - started) / 2000 < 100e-6
