"""Releases of many policies on a real catalog and ledger, with routing and users, time being accelerated."""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.catalog import policy_rows
from engine.catalog.catalog import Catalog, Policy, Release, migrate
from engine.controller.evidence import EvidenceReader
from engine.controller.release_loop import Controller
from engine.ledger.ledger import Spool
from engine.serving.gateway.routing import Router
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tests.helpers.rows import ACCEPTED, make_revision

# Kinds of revisions: how much worse their rewards are than the champion's, and their share of 5xx.
KINDS = {
    "good": (0.04, 0.0),
    "neutral": (0.0, 0.0),
    "bad": (-0.3, 0.0),
    "worse": (-0.1, 0.0),
    "broken": (0.0, 0.3),
}
SHARES = (0.25, 0.35, 0.2, 0.1, 0.1)
HARMLESS, HARMFUL = ("good", "neutral"), ("bad", "worse", "broken")
# The reward of the first champions, and the most that a good revision reaches.
LEVEL, MOST = 0.85, 0.97
# Seconds between two looks of the controller, and how long a canary may take.
TICK_S, MAX_S = 10.0, 120.0
# Of the policies, every fifth has hardly any users; its canaries end as `hold`.
USERS, FEW_USERS = 120, 2


@dataclass
class ManyPolicies:
    """Policies with their traffic; `clock_s` is the controller's."""

    params: Params
    controller: Controller
    router: Router
    spool: Spool
    chance: np.random.Generator
    quality: dict[str, float] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    clock_s: float = 0.0
    # Requests that the base or a revision with a tombstone answered.
    unserved: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def digest(self, policy: str, kind: str) -> str:
        """Register a revision of this kind beside the policy's champion."""
        digest = f"{next(self.numbers):064x}"
        catalog = self.controller.catalog
        catalog.revisions.add_many([make_revision(digest, policy=policy, state="exported", expires_at=None)])
        catalog.revisions.set_probe(policy, digest, ACCEPTED)
        champion = catalog.routes.get(policy).champion
        effect, self.faults[digest] = KINDS[kind]
        self.quality[digest] = min(MOST, self.quality[champion] + effect) if champion else LEVEL
        self.kinds[digest] = kind
        return digest

    def users(self, policy: str, count: int) -> None:
        """Route `count` new users of a policy as a gateway does; spool their answers and ratings."""
        answers: Counter[str] = Counter()
        for number in itertools.islice(self.numbers, count):
            target = self.router.resolve(policy, f"u{number}")
            digest = target.digest or ""
            answers[digest] += 1
            id, at = f"request-{number}", time.time()
            is_fault = self.chance.random() < self.faults[digest]
            self.spool.emit(
                "observations", id=id, at=at, policy=policy, digest=digest, arm=target.arm, key="k",
                unit=f"u{number}", purpose="user", route_version=target.route_version,
                status=500 if is_fault else 200,
            )  # fmt: skip
            if not is_fault:
                reward = float(self.chance.random() < self.quality[digest])
                self.spool.emit("feedback", request_id=id, reward=reward, key="k", at=at)
        for digest, number in answers.items():
            is_buried = self.controller.catalog.tombstones.find(policy, digest) is not None
            self.unserved += number * (not digest or is_buried)
        self.answers += answers


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ManyPolicies]:
    # The salts decide who meets a canary, and so what is drawn: the same in every run.
    salts = itertools.count()
    monkeypatch.setattr(
        policy_rows, "secrets", SimpleNamespace(token_hex=lambda n: f"{next(salts):0{2 * n}x}")
    )
    release = ReleaseConfig(max_s=MAX_S)
    params = Params(state_dir=tmp_path / "state", release=release)
    migrate(params.paths.catalog_url)
    controller = Controller(params, "test")
    routes = Catalog(params.paths.catalog_url)
    router, spool = Router(routes, "base", "base"), Spool(params.paths.spool, "gateway")
    world = ManyPolicies(params, controller, router, spool, np.random.default_rng(1))
    controller.reader = EvidenceReader(controller.catalog, lambda: world.clock_s)
    yield world
    controller.close()
    routes.close()


def release_all(world: ManyPolicies, policies: list[str]) -> list[Release]:
    """Release a drawn revision of each policy and serve users until all have ended."""
    catalog, started = world.controller.catalog, []
    for policy in policies:
        kind = str(world.chance.choice(list(KINDS), p=SHARES))
        digest = world.digest(policy, kind)
        started.append(world.controller.decisions.start(policy, digest, {}, {"score": "none here"}, "me"))
    while running := {release.policy for release in catalog.releases.all(open_only=True)}:
        world.controller.tick()
        for number, policy in enumerate(policies):
            if policy in running:
                world.users(policy, FEW_USERS if number % 5 == 2 else USERS)
        world.spool.rotate()
        world.clock_s += TICK_S
    return [catalog.releases.get(release.id) for release in started]


def check(world: ManyPolicies, policies: int, rounds: int) -> str:
    """Run the releases, hold them to their bounds, and return what happened in a sentence."""
    names = [f"policy-{number}" for number in range(policies)]
    catalog = world.controller.catalog
    for name in names:
        catalog.policies.add(Policy(name, "base", {"suite": "none"}, "me", 1.0))
        champion = world.digest(name, "neutral")
        catalog.routes.update(replace(catalog.routes.get(name), champion=champion), 0)
    ended = [release for _ in range(rounds) for release in release_all(world, names)]
    found = Counter((world.kinds[release.revision], release.state) for release in ended)
    harmless = sum(found[kind, state] for kind, state in found if kind in HARMLESS)
    wrong_rollbacks = sum(found[kind, "rolled_back"] for kind in HARMLESS)
    wrong_promotions = sum(found[kind, "promoted"] for kind in HARMFUL)
    harmful = len(ended) - harmless
    exposed = [world.answers[one.revision] for one in ended if world.kinds[one.revision] in HARMFUL]
    states = Counter(release.state for release in ended)
    assert wrong_rollbacks <= max(1, world.params.release.alpha * harmless)
    assert wrong_promotions <= max(1, world.params.release.alpha * harmful)
    assert found["bad", "promoted"] == 0
    assert sum(found[kind, "rolled_back"] for kind in HARMFUL) > 0
    assert found["neutral", "promoted"] + found["good", "promoted"] > 0
    assert world.unserved == 0
    assert world.controller.faults == {}
    for name in names:
        route = catalog.routes.get(name)
        assert route.champion is not None
        assert route.canary is None
        assert catalog.tombstones.find(name, route.champion) is None
    return (
        f"{len(ended)} releases of {policies} policies: {dict(states)}; wrong rollbacks {wrong_rollbacks} of "
        f"{harmless}, wrong promotions {wrong_promotions} of {harmful}; a harmful revision answered "
        f"{statistics.median(exposed):.0f} requests in the median and {max(exposed)} at most, of "
        f"{sum(world.answers.values())} in all; by kind {dict(sorted(found.items()))}"
    )


@pytest.mark.slow
def test_500_releases_of_50_policies(world: ManyPolicies) -> None:
    print(check(world, 50, 10))


@pytest.mark.long
def test_nine_releases_of_three_policies(world: ManyPolicies) -> None:
    print(check(world, 3, 3))
