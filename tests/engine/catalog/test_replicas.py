"""Engines in the catalog: heartbeats, one id each, what they have loaded."""

import time
import uuid
from dataclasses import replace

from engine.catalog.catalog import Catalog, Notice, Replica

PAIR, OTHER = ("sorting", "aa" * 32), ("sorting", "bb" * 32)


def replica(id: str) -> Replica:
    return Replica(id, f"http://{id}:8460", "base", "1", uuid.uuid4().hex, 0, 0.0, draining=False)


def test_beats_count_and_loads_follow(catalog: Catalog) -> None:
    one, two = replica("one"), replica("two")
    for each in (one, two):
        catalog.replicas.join(each)
    assert catalog.replicas.beat(one, {PAIR: None})
    assert catalog.replicas.beat(one, {PAIR: None, OTHER: "torn"})
    assert catalog.replicas.beat(two, {PAIR: "no room"})
    assert [(row.id, row.beats) for row in catalog.replicas.all()] == [("one", 2), ("two", 1)]
    assert catalog.replicas.loads(*PAIR) == {"one": None, "two": "no room"}
    assert catalog.replicas.loads(*OTHER) == {"one": "torn"}
    assert catalog.replicas.beat(one, {})
    assert catalog.replicas.loads(*PAIR) == {"two": "no room"}
    assert catalog.replicas.beat(replace(two, draining=True), {PAIR: None})
    assert catalog.replicas.all()[1].draining
    catalog.replicas.leave(two)
    assert catalog.replicas.find("two") is None
    assert catalog.replicas.loads(*PAIR) == {}


def test_the_newest_start_has_the_id(catalog: Catalog) -> None:
    first, second = replica("one"), replica("one")
    catalog.replicas.join(first)
    assert catalog.replicas.beat(first, {PAIR: None})
    catalog.replicas.join(second)
    # What an earlier start had loaded is gone.
    assert catalog.replicas.loads(*PAIR) == {}
    assert not catalog.replicas.beat(first, {PAIR: None})
    assert catalog.replicas.loads(*PAIR) == {}
    catalog.replicas.leave(first)
    found = catalog.replicas.find("one")
    assert found is not None
    assert found.incarnation == second.incarnation
    assert catalog.replicas.beat(second, {PAIR: None})


def test_many_loads_are_one_change(catalog: Catalog) -> None:
    one = replica("one")
    catalog.replicas.join(one)
    loads = {("p", f"{number:064x}"): None for number in range(300)}
    assert catalog.replicas.beat(one, loads)
    assert catalog.replicas.loads("p", f"{7:064x}") == {"one": None}


def test_an_engine_that_was_silent_for_long_is_forgotten_and_joins_again(catalog: Catalog) -> None:
    one = replica("one")
    catalog.replicas.join(one)
    catalog.replicas.beat(one, {("sorting", "a" * 64): None})
    assert catalog.replicas.forget(time.time() - 60) == 0
    assert catalog.replicas.forget(time.time() + 1) == 1
    assert catalog.replicas.all() == []
    assert catalog.replicas.loads("sorting", "a" * 64) == {}
    assert not catalog.replicas.beat(one, {})


def test_delivered_notices_go_and_others_wait(catalog: Catalog) -> None:
    for id in ("sent", "unsent"):
        catalog.notices.add(Notice(id, "graftwork.release.held", "sums", None, "r", "", 100.0))
    catalog.notices.mark_sent(["sent"])
    assert catalog.notices.forget(100.0) == 0
    assert catalog.notices.forget(101.0) == 1
    assert [one.id for one in catalog.notices.page()] == ["unsent"]
