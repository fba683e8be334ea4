"""One release of a bad canary under load: how long its rollback takes to reach every engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from _rollback_users import LONG, Asked, Users, request
from _traffic import Server

from engine.catalog.catalog import Catalog
from engine.clients.controller import ControllerClient
from engine.ledger.ledger import open_snapshot
from engine.settings.params import split_served_name

WEIGHT = 0.5
SETTINGS = {"weight": WEIGHT, "min_units": 10}
# Users meet the canary for so long before the first of them rates it, and other revisions afterwards.
LEAD_S, TAIL_S = 0.5, 2.5
WAIT_S = 120.0


@dataclass(frozen=True)
class Site:
    """Engines of one catalog, their controller, and the policy whose champion is the served name.

    `snapshot` is the ledger's, for readers.
    """

    servers: Sequence[Server]
    controller: ControllerClient
    catalog: Catalog
    champion: str
    snapshot: Path

    @property
    def policy(self) -> str:
        return self.champion.partition("@")[0]


@dataclass(frozen=True)
class Rollback:
    """What a release of a bad canary did; times in seconds from its verdict, a value an engine.

    `until_s` is when a user of the canary's is first seen on the champion, after the last whom the canary
    answered; `admitted_s` when the last look at the routes began that sent anybody to it. `crossed` are the
    canary's streams that were under way from the verdict past the tombstone; `changed` of them did not end as
    the canary alone says them.
    """

    asked: Sequence[Asked]
    tombstone_s: float
    until_s: Sequence[float]
    admitted_s: float
    crossed: Sequence[Asked]
    changed: int = 0

    @property
    def failed(self) -> list[str]:
        """The faults of requests that did not end in 200 with every token."""
        return [one.fault for one in self.asked if one.fault]


def roll_back(site: Site, users: Users, canary: str) -> Rollback:
    """Release a canary, have its users reject it, and return what they saw."""
    policy, digest = split_served_name(canary)
    whole = site.catalog.revisions.get(policy, digest or "").digest
    site.catalog.revisions.set_probe(policy, whole, {"accepted": True, "reason": "Made for this."})
    first = len(users.asked)
    release = site.controller.start_release(policy, whole, SETTINGS, {"score": "It has no suite."}, "bench")
    for engine in range(len(site.servers)):
        wait(lambda engine=engine: has_long(users.asked[first:], engine, canary), f"streams of {canary}")
    time.sleep(LEAD_S)
    users.reject(canary)
    ended = site.controller.wait_for_verdict(release["id"], WAIT_S)
    users.reject(None)
    if ended["state"] != "rolled_back":
        raise RuntimeError(f"The canary was {ended['state']}: {ended['reason']}")
    time.sleep(TAIL_S)
    wait(lambda: all(one.ended for one in users.asked[first:] if one.sent < time.time() - TAIL_S), "answers")
    found = result(site, users.asked[first:], canary, ended)
    return replace(found, changed=changed(site, users, found))


def result(site: Site, asked: Sequence[Asked], canary: str, ended: dict[str, Any]) -> Rollback:
    policy, decided = site.policy, ended["evidence"]["decided_at"]
    stone = site.catalog.tombstones.find(policy, ended["revision"])
    if stone is None:
        raise RuntimeError(f"{canary} has no tombstone.")
    crossed = [
        one
        for one in asked
        if one.revision == canary and one.tokens == LONG and one.begun < decided and one.ended > stone.at
    ]
    until = [until_s(list(asked), engine, canary) - decided for engine in range(len(site.servers))]
    last = admitted(site, ended["revision"], sum(one.revision == canary for one in asked))
    return Rollback(asked, stone.at - decided, until, last - decided, crossed)


def admitted(site: Site, digest: str, count: int) -> float:
    """Return when the last look at the routes began that sent a request to a revision (epoch seconds).

    Waits until the ledger has so many of its requests.
    """
    query = 'SELECT "at" FROM observations WHERE policy = ? AND digest = ? ORDER BY "at"'
    found: list[float] = []

    def are_there() -> bool:
        with open_snapshot(site.snapshot) as ledger:
            found[:] = [at for (at,) in ledger.execute(query, [site.policy, digest]).fetchall()]
        return len(found) >= count

    wait(are_there, f"{count} observations")
    return found[-1]


def of(asked: Sequence[Asked], engine: int, name: str) -> Iterator[Asked]:
    """Yield what a revision answered on an engine."""
    return (one for one in asked if one.engine == engine and one.revision == name)


def has_long(asked: Sequence[Asked], engine: int, name: str) -> bool:
    """Return whether a revision has begun a long stream on an engine."""
    return any(one.begun and one.tokens == LONG for one in of(asked, engine, name))


def until_s(asked: Sequence[Asked], engine: int, canary: str) -> float:
    """Return when another revision first answered one of the canary's users, after its last answer began."""
    answered = list(of(asked, engine, canary))
    users, last = {one.user for one in answered}, max(one.sent for one in answered)
    after = [
        one.begun
        for one in asked
        if one.engine == engine and one.user in users and one.begun and one.sent > last
    ]
    if not after:
        raise RuntimeError(f"No user of {canary} came again on engine {engine}.")
    return min(after)


def changed(site: Site, users: Users, rollback: Rollback) -> int:
    """Return how many streams that were under way did not end as their revision says them alone.

    Raises `RuntimeError` where the champion says the same: then nothing could be told apart.
    """
    known: dict[tuple[int, int, str], list[int]] = {}

    def alone(engine: int, prompt: int, name: str) -> list[int]:
        at = engine, prompt, name
        if at not in known:
            known[at] = tokens_of(site.servers[engine], request(name, users.prompts[prompt], LONG, False))
        return known[at]

    for one in rollback.crossed:
        if alone(one.engine, one.prompt, one.revision) == alone(one.engine, one.prompt, site.champion):
            raise RuntimeError(f"{one.revision} and {site.champion} say the same.")
    return sum(one.ids != alone(one.engine, one.prompt, one.revision) for one in rollback.crossed)


def tokens_of(server: Server, body: dict[str, Any]) -> list[int]:
    """Ask for a scorer, who may ask a revision that was rolled back."""
    headers = {"authorization": f"Bearer {server.key}", "x-graftwork-purpose": "score"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Waited {WAIT_S:g} s in vain for {what}.")
        time.sleep(0.05)
