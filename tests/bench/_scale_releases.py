"""Promotions and rollbacks over two engines: when each engine follows, and what users notice."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count

from _scale_cluster import Cluster, wait_for
from _scale_users import Asked, Crowd, Flow

from engine.serving.gateway.routing import STALE_S

# The users of a watcher, who asks for one token again and again.
WATCHERS, WATCH_S = 6, 0.02
RATE = 10.0
# Long enough that the canary has no verdict of its own.
OPEN = {"weight": 0.5, "min_units": 10_000}
PAUSE_S = 4.0
# Twice the bound: whatever is routed to the canary until then shows.
WATCHED_S = 2.0


@contextmanager
def watched(cluster: Cluster, crowd: Crowd, policy: str) -> Iterator[tuple[list[Flow], Flow]]:
    """Watch what a policy answers, at each engine directly, and have users come through HAProxy."""
    watchers = [
        crowd.keep_asking(host.url, policy, f"w{number}", 1, pause_s=WATCH_S)
        for host in cluster.engines
        for number in range(WATCHERS)
    ]
    users = crowd.arrive(cluster.url, policy, RATE, (f"u{number}" for number in count()))
    try:
        yield watchers, users
    finally:
        for flow in [*watchers, users]:
            flow.rest()


def asked_of(flows: Sequence[Flow]) -> list[Asked]:
    return [one for flow in flows for one in flow.asked]


def at(cluster: Cluster, flows: Sequence[Flow], number: int) -> list[Asked]:
    """Return what one engine was asked directly."""
    return [one for one in asked_of(flows) if one.url == cluster.engines[number].url]


def promotions(cluster: Cluster, crowd: Crowd, repeats: int) -> dict[str, list[float]]:
    """Promote revisions; return the engines' skew, and how many requests waited for a cold load."""
    names, skews, slowest = cluster.publish("promoted", 1 + repeats), list[float](), list[float]()
    with watched(cluster, crowd, "promoted") as (watchers, users):
        wait_for(lambda: all(at(cluster, watchers, number) for number in (0, 1)), "the first answers")
        time.sleep(1)
        for name in names[1:]:
            first = len(users.asked)
            cluster.release(name, OPEN, ("score", "canary"))

            def firsts(name: str = name) -> list[float]:
                found = []
                for number in (0, 1):
                    theirs = [one for one in at(cluster, watchers, number) if one.revision == name]
                    found += [min(one.begun for one in theirs)] if theirs else []
                return found

            wait_for(lambda: len(firsts()) == 2, f"{name} at both engines")
            skews.append(abs(firsts()[0] - firsts()[1]))
            time.sleep(0.5)
            slowest.append(max(one.ended - one.sent for one in users.asked[first:] if one.ended))
    asked = asked_of([*watchers, users])
    new = [cluster.digest(name) for name in names[1:]]

    def loads() -> list[tuple[object, ...]]:
        query = "SELECT priority FROM loads WHERE tier = 'host' AND digest IN (SELECT unnest(?))"
        return cluster.ledger(query, [new])

    wait_for(lambda: len(loads()) >= 2 * repeats, "the loads in the ledger")
    return {
        "promotion_skew_s": skews,
        "promotion_slowest_s": slowest,
        "cold_waits": [sum(row[0] == "interactive" for row in loads())],
        "promotion_failed": [sum(bool(one.fault) for one in asked)],
    }


def unloadable(cluster: Cluster, crowd: Crowd) -> dict[str, list[float]]:
    """Release a revision that the second engine cannot fetch; return whether it is named, and faults."""
    cluster.publish("unloadable", 1)
    # In a segment of its own.
    (canary,) = cluster.publish("unloadable", 1, champion=False)
    second = cluster.engines[1]
    id = next(row.id for row in cluster.catalog.replicas.all() if row.url == second.url)
    cluster.s3[1].gone.add(cluster.catalog.revisions.get("unloadable", cluster.digest(canary)).segment)
    asking = [crowd.keep_asking(host.url, "unloadable", "u", 1, pause_s=0.2) for host in cluster.engines]
    asking.append(crowd.arrive(cluster.url, "unloadable", RATE, (f"u{number}" for number in count())))
    # The release waits for a minute; others go on meanwhile.
    ended = cluster.client.wait_for_verdict(cluster.release(canary, OPEN), 120)
    for flow in asking:
        flow.rest()
    if ended["state"] != "held":
        raise RuntimeError(f"The release was {ended['state']}: {ended['reason']}")
    print(f"  {ended['reason']}", flush=True)
    others = [row.id for row in cluster.catalog.replicas.all() if row.id != id]
    is_named = f"{id}: " in ended["reason"] and not any(f"{one}: " in ended["reason"] for one in others)
    failed = sum(bool(one.fault) for one in asked_of(asking))
    return {"unloadable_named": [float(is_named)], "unloadable_failed": [failed]}


def rollbacks(
    cluster: Cluster,
    crowd: Crowd,
    repeats: int,
    ways: Sequence[str] = ("up", "controller_dead", "postgres_paused"),
) -> dict[str, list[float]]:
    """Roll canaries back in some ways; return when the last answer of each began after its tombstone."""
    known = {"up": by_controller, "controller_dead": alone, "postgres_paused": paused}
    names = cluster.publish("withdrawn", 1 + len(ways) * repeats)
    found: dict[str, list[float]] = {}
    waiting = iter(names[1:])
    for way in ways:
        for _ in range(repeats):
            taken = rollback(cluster, crowd, next(waiting), known[way])
            print(f"  {way}: " + ", ".join(f"{key} {value:.3f}" for key, value in taken.items()), flush=True)
            for key, value in taken.items():
                found.setdefault(f"{key}.{way}", []).append(value)
    return found


Withdraw = Callable[[Cluster, str, str, ExitStack], float]


def rollback(cluster: Cluster, crowd: Crowd, name: str, withdraw: Withdraw) -> dict[str, float]:
    """Start a canary, withdraw it, and return what users saw; times from the tombstone."""
    policy, digest = name.partition("@")[0], cluster.digest(name)
    with watched(cluster, crowd, policy) as (watchers, users), ExitStack() as after:
        cluster.release(name, OPEN)

        def is_there(number: int) -> bool:
            newest = [one for flow in watchers for one in flow.asked[-5:]]
            return any(one.revision == name for one in newest if one.url == cluster.engines[number].url)

        wait_for(lambda: is_there(0) and is_there(1), f"the canary {name}")
        time.sleep(0.5)
        since = withdraw(cluster, policy, digest, after)
        lasts_s = PAUSE_S if withdraw is paused else WATCHED_S
        time.sleep(max(0.0, since + lasts_s - time.time()))
        after.close()
        ended = time.time()

        def resumed(number: int) -> bool:
            return any(one.is_whole and one.sent > ended for one in at(cluster, watchers, number))

        wait_for(lambda: resumed(0) and resumed(1), "answers of both engines")
    asked = [one for one in asked_of([*watchers, users]) if one.ended > since]
    last = max(latest_starts(cluster, [one for one in asked if one.revision == name]), default=since)
    wait_for(lambda: cluster.catalog.routes.get(policy).canary is None, "the end of the canary")
    return {
        "rollback_s": max(0.0, last - since),
        "rollback_failed": sum(bool(one.fault) for one in asked),
        "rollback_slowest_s": max(one.ended - one.sent for one in asked),
    }


def latest_starts(cluster: Cluster, asked: Sequence[Asked]) -> list[float]:
    """Return when each request was routed at the latest.

    Before its answer began, and within `STALE_S` of the look at the routes that its observation tells: then a
    gateway that cannot look again drops every canary.
    """
    looks: dict[str, float] = {}

    def are_there() -> bool:
        query = 'SELECT id, "at" FROM observations WHERE id IN (SELECT unnest(?))'
        looks.update(cluster.ledger(query, [[one.id for one in asked]]))  # type: ignore[arg-type]
        return len(looks) == len(asked)

    wait_for(are_there, f"{len(asked)} observations")
    return [min(one.begun, looks[one.id] + STALE_S) for one in asked]


def by_controller(cluster: Cluster, policy: str, digest: str, after: ExitStack) -> float:
    """Roll back by the controller, as a person does."""
    cluster.client.decide("rollback", "It is bad.", "bench", policy=policy, digest=digest)
    stone = cluster.catalog.tombstones.find(policy, digest)
    assert stone is not None
    return stone.at


def alone(cluster: Cluster, policy: str, digest: str, after: ExitStack) -> float:
    """Kill the controller, and write the tombstone alone: nobody changes the route."""
    cluster.controller.kill()
    after.callback(cluster.controller.start)
    return cluster.catalog.tombstones.add(policy, digest, "It is bad.", "bench").at


def paused(cluster: Cluster, policy: str, digest: str, after: ExitStack) -> float:
    """Stop Postgres right after the tombstone's commit."""
    stone = cluster.catalog.tombstones.add(policy, digest, "It is bad.", "bench")
    after.enter_context(cluster.paused_postgres())
    return stone.at
