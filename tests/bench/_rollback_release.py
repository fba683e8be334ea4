"""One release of a bad canary under load: how long its rollback takes to reach every engine."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, starmap
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from _rollback_users import LONG, Asked, Users, request
from _traffic import Server

from engine.catalog.catalog import Catalog
from engine.catalog.records import split_served_name
from engine.clients.controller import ControllerClient
from engine.ledger.ledger import open_snapshot
from engine.serving.gateway.routing import in_canary

WEIGHT = 0.5
SETTINGS = {"weight": WEIGHT, "min_units": 10}
# Users meet the canary for so long before the first of them rates it, and other revisions afterwards.
LEAD_S, TAIL_S = 0.5, 2.5
WAIT_S = 120.0
LOOKS = """
    SELECT gateway, "at", id, arm, arm = 'canary' AND digest = $digest FROM observations
    WHERE id IN (SELECT unnest($ids)) ORDER BY gateway, "at"
"""


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
    """What a release of a bad canary did; times in seconds from its verdict, on the slower engine.

    By the gateways' looks at the routes: `admitted_s` is when the last one began that sent anybody to the
    canary, `until_s` when the first one after it did that sent one of the canary's side to the champion.
    `crossed` are the canary's streams that were under way when its tombstone came; `changed` of them did not
    end as the canary alone says them.
    """

    asked: Sequence[Asked]
    tombstone_s: float
    until_s: float
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
    moment = time.time()
    theirs = on_canarys_side(site.catalog, policy, {one.user for one in users.asked})
    # By their answers all are known who were sent to the canary, and when the first was sent elsewhere.
    wait(lambda: all(one.ended for one in users.asked[first:] if one.sent < moment), "the answers under way")
    for engine in range(len(site.servers)):
        later = partial(has_later, users, engine, theirs, moment)
        wait(later, f"an answer to the canary's side from engine {engine}")
    asked = users.asked[first:]
    found = result(site, asked, theirs, canary, ended)
    return replace(found, changed=changed(site, users, found))


def on_canarys_side(catalog: Catalog, policy: str, names: Iterable[str]) -> set[str]:
    """Return the users whom the split sends to whichever canary the policy has."""
    route = replace(catalog.routes.get(policy), canary="any", weight=WEIGHT)
    return {name for name in names if in_canary(route, name)}


def result(
    site: Site, asked: Sequence[Asked], theirs: Set[str], canary: str, ended: dict[str, Any]
) -> Rollback:
    policy, decided = site.policy, ended["evidence"]["decided_at"]
    stone = site.catalog.tombstones.find(policy, ended["revision"])
    if stone is None:
        raise RuntimeError(f"{canary} has no tombstone.")
    crossed = [
        one
        for one in asked
        if one.revision == canary and one.tokens == LONG and one.sent < stone.at < one.ended
    ]
    answered = {one.answer: one.user for one in asked if one.answer and one.ended}
    looks = looks_of(site, ended["revision"], list(answered))
    if len(looks) < len(site.servers):
        raise RuntimeError(f"Only {len(looks)} of {len(site.servers)} gateways have answered.")
    until = max(first_elsewhere(one, {id for id in answered if answered[id] in theirs}) for one in looks)
    until -= decided
    last = max(look.at for one in looks for look in one if look.is_canary) - decided
    return Rollback(asked, stone.at - decided, until, last, crossed)


class Look(NamedTuple):
    """A look at the routes, by which a request was admitted: when it began (epoch seconds), and its arm."""

    gateway: str
    at: float
    id: str
    arm: str
    is_canary: bool


def looks_of(site: Site, digest: str, ids: Sequence[str]) -> list[list[Look]]:
    """Return each gateway's looks behind these answers, in order, once the ledger has them all."""
    named = {"digest": digest, "ids": list(ids)}
    found: list[Look] = []

    def are_there() -> bool:
        with open_snapshot(site.snapshot) as ledger:
            found[:] = starmap(Look, ledger.execute(LOOKS, named).fetchall())
        return len(found) == len(ids)

    wait(are_there, f"{len(ids)} observations")
    return [list(group) for _, group in groupby(found, key=lambda look: look.gateway)]


def first_elsewhere(looks: Sequence[Look], ids: Set[str]) -> float:
    """Return when the first look after the canary's last began that sent one of `ids` to the champion.

    A fallback is no such look: it follows the canary's route while the canary is not resident.
    """
    last = max(look.at for look in looks if look.is_canary)
    after = [look.at for look in looks if look.at > last and look.arm == "champion" and look.id in ids]
    if not after:
        raise RuntimeError(f"{looks[0].gateway} still sends users to the canary {TAIL_S:g} s later.")
    return min(after)


def has_later(users: Users, engine: int, theirs: Set[str], moment: float) -> bool:
    """Return whether an engine has answered a request of these users that was sent after a moment."""
    return any(
        one.ended and one.answer and one.engine == engine and one.user in theirs
        for one in users.asked
        if one.sent >= moment
    )


def of(asked: Sequence[Asked], engine: int, name: str) -> Iterator[Asked]:
    """Yield what a revision answered on an engine."""
    return (one for one in asked if one.engine == engine and one.revision == name)


def has_long(asked: Sequence[Asked], engine: int, name: str) -> bool:
    """Return whether a revision has begun a long stream on an engine."""
    return any(one.begun and one.tokens == LONG for one in of(asked, engine, name))


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


def wait(condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Waited {limit_s:g} s in vain for {what}.")
        time.sleep(0.05)
