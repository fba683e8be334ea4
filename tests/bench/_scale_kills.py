"""Engines and controllers that are killed, in the middle of a canary or of a step; and engines that join."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from _scale_cluster import START_S, Cluster, Host, wait_for
from _scale_releases import OPEN, asked_of
from _scale_users import PROMPTS, Asked, Crowd

from engine.controller.route_changes import LEASE_S
from engine.threads import background
from engine.training.sample_groups import Sampling, sample_groups
from engine.training.several_engines import Engines, sample_over

RATE, STREAMS, LONG = 20.0, 3, 160
# A step's groups, and how it samples them.
GROUPS, SAMPLING = 64, Sampling(group_size=8, max_tokens=48, seed=5)
JUDGED = {"weight": 0.5, "min_units": 20, "margin": 0.2}
# How a canary must end that its users reject, and one that they like as well.
ENDS = (("rolled_back", False), ("promoted", True))
# Canary's answers before the kill.
BEFORE = 5


@dataclass(frozen=True)
class Judged:
    """A canary's end, and all requests meanwhile."""

    state: str
    reason: str
    asked: list[Asked]


def users() -> Iterator[str]:
    return (f"u{number}" for number in count())


def judge(cluster: Cluster, crowd: Crowd, url: str, canary: str, is_good: bool, kill: Host | None) -> Judged:
    """Have the same users rate a canary; kill an engine in its middle, if one is given."""
    policy = canary.partition("@")[0]

    def rated(one: Asked) -> float:
        return 1.0 if is_good or one.revision != canary else 0.0

    release = cluster.release(canary, JUDGED)
    wait_for(lambda: cluster.catalog.routes.get(policy).canary is not None, f"the canary {canary}")
    streams = [
        crowd.keep_asking(url, policy, f"s{number}", LONG, is_stream=True) for number in range(STREAMS)
    ]
    flow = crowd.arrive(url, policy, RATE, users(), rated=rated)
    if kill is not None:
        wait_for(
            lambda: sum(one.revision == canary for one in flow.asked) >= BEFORE,
            "the canary's first answers", every_s=0.005,
        )  # fmt: skip
        kill.kill()
    ended = cluster.client.wait_for_verdict(release, 120)
    # Users of the survivors go on for a while.
    time.sleep(1)
    for each in [*streams, flow]:
        each.rest()
    return Judged(ended["state"], ended["reason"], asked_of([*streams, flow]))


def home_of(cluster: Cluster, crowd: Crowd, policy: str) -> Host:
    """Return the engine to which HAProxy sends a policy's requests."""
    flow = crowd.once(cluster.url, policy, "who", 1)
    wait_for(lambda: all(one.ended for one in flow.asked) and bool(flow.asked), "an answer")
    answer = flow.asked[0]
    if not answer.is_whole:
        raise RuntimeError(f"{policy} gave {answer.got} of {answer.tokens} tokens: {answer.fault}")
    rows: list[tuple[str]] = []

    def is_there() -> bool:
        rows[:] = cluster.ledger("SELECT gateway FROM observations WHERE id = ?", [answer.id])
        return bool(rows)

    wait_for(is_there, "its observation")
    port = rows[0][0].rpartition(":")[2]
    return next(host for host in cluster.engines if host.url.endswith(f":{port}"))


def kills(
    cluster: Cluster, crowd: Crowd, ends: Sequence[tuple[str, bool]] = ENDS[:1], is_brief: bool = False
) -> dict[str, list[float]]:
    """Judge canaries while the engine that answers them is killed, and then on the other engine alone.

    The first one that was killed comes back while a release runs. `is_brief`: without both.
    """
    champion, *canaries = cluster.publish("judged", 5)
    verdicts, asked, joined = [], list[Asked](), dict[str, list[float]]()
    for number, (wanted, is_good) in enumerate(ends):
        victim = home_of(cluster, crowd, "judged")
        two = judge(cluster, crowd, cluster.url, canaries[2 * number], is_good, victim)
        asked += two.asked
        other = next(host for host in cluster.engines if host is not victim)
        reset(cluster, champion)
        one = two if is_brief else judge(cluster, crowd, other.url, canaries[2 * number + 1], is_good, None)
        reset(cluster, champion)
        print(
            f"  with a kill: {two.state}: {two.reason}\n  one engine: {one.state}: {one.reason}", flush=True
        )
        verdicts.append(two.state == one.state == wanted)
        if number == 0 and not is_brief:
            joined = join(cluster, crowd, victim)
        else:
            victim.start()
            wait_for(victim.is_ready, "it to be ready again", START_S)
    whole = [one for one in asked if not one.is_stream]
    streams = [one for one in asked if one.is_stream]
    for one in [one for one in whole if one.fault][:5]:
        print(f"  failed: {one.fault}", flush=True)
    return {
        "failed_requests": [sum(not one.is_whole for one in whole)],
        "requests": [len(whole)],
        "streams_cut": [sum(bool(one.fault) for one in streams)],
        "streams_cut_silently": [sum(one.is_short for one in streams)],
        "verdicts_unlike": [sum(not alike for alike in verdicts)],
        **joined,
    }


def reset(cluster: Cluster, champion: str) -> None:
    """Make the first champion the champion again."""
    route = cluster.catalog.routes.get("judged")
    wanted = replace(route, champion=cluster.digest(champion), previous=None, canary=None, weight=0.0)
    cluster.catalog.routes.update(wanted, route.version)


def join(cluster: Cluster, crowd: Crowd, host: Host) -> dict[str, list[float]]:
    """Start an engine while a release runs and users come; return what it answered before it was ready."""
    cluster.publish("joining", 1)
    names = cluster.publish("joining", 1, champion=False)
    release = cluster.release(names[0], OPEN)
    # The dead engine is waited for until it has been silent for 10 s.
    began = time.time()
    flows = [crowd.arrive(cluster.url, policy, 10.0, users()) for policy in ("joining", "judged")]
    host.start(wait=False)
    wait_for(lambda: host.is_healthy() and host.is_ready(), "it to join", START_S, every_s=0.02)
    ready = time.time()
    wait_for(lambda: cluster.catalog.routes.get("joining").canary is not None, "the canary")
    time.sleep(4)
    for flow in flows:
        flow.rest()
    cluster.client.hold(release, "The test has ended.", "bench")
    asked = asked_of(flows)
    port = host.url.rpartition(":")[2]

    def rows() -> list[tuple[float]]:
        query = 'SELECT "at" FROM observations WHERE gateway LIKE ? AND "at" > ? ORDER BY "at"'
        return cluster.ledger(query, [f"%:{port}", began])

    wait_for(lambda: bool(rows()), "an answer of the engine that has joined")
    return {
        "answers_before_ready": [sum(row[0] < ready - 0.1 for row in rows())],
        "join_failed": [sum(not one.is_whole for one in asked)],
        "join_answers": [len(rows())],
    }


def rollouts(cluster: Cluster) -> dict[str, list[float]]:
    """Sample a step over both engines, one of which is killed; return the groups unlike one engine's."""
    (name,) = cluster.publish("stepping", 1)
    first, second = cluster.engines
    turned = [(PROMPTS[number % len(PROMPTS)], number // len(PROMPTS)) for number in range(GROUPS)]
    prompts = [prompt[by:] + prompt[:by] for prompt, by in turned]
    engines = Engines(cluster.catalog, cluster.base.digest, first.url)
    wait_for(lambda: len(engines.urls()) == 2, "both engines in the catalog")
    alone = sample_groups(first.url, cluster.key, name, prompts, SAMPLING)
    sample_groups(second.url, cluster.key, name, prompts[:1], SAMPLING)
    step = background(lambda: sample_over(engines.urls, cluster.key, name, prompts, SAMPLING))
    # Its piece takes seconds.
    wait_for(lambda: second.running(cluster.key) > 0, "the second engine's piece", every_s=0.01)
    second.kill()
    if step.done():
        raise RuntimeError("The step ended before the engine was killed.")
    told = step.result(120)
    second.start()
    wait_for(second.is_ready, "it to be ready again", START_S)
    unlike = sum(one != other for one, other in zip(told, alone, strict=True))
    return {"rollouts_unlike": [unlike], "rollouts": [len(told)]}


def failover(cluster: Cluster, start_s: float) -> dict[str, list[float]]:
    """Kill the controller and start one elsewhere on its volume, which stays; return the times.

    `start_s` is what a controller takes to start whose lease is free.
    """
    held = cluster.controller
    # The same volume at another path: for the lease it is another holder.
    root = held.params.paths.root.with_name("controller-elsewhere")
    os.symlink(held.params.paths.root, root)
    standby = replace(held, params=held.params.model_copy(update={"state_dir": root}), process=None)
    cluster.at_end.callback(standby.stop)
    held.kill()
    began = time.monotonic()
    while True:
        standby.start(wait=False)
        try:
            wait_for(standby.is_healthy, "the controller", START_S, every_s=0.02)
            break
        except RuntimeError as error:
            if "lease" not in str(error):
                raise
            print(f"  {str(error).splitlines()[-1]}", flush=True)
            standby.process = None
    took = time.monotonic() - began
    cluster.controller = standby
    return {"failover_s": [took], "start_s": [start_s], "failover_share": [took / (LEASE_S + start_s)]}


def started_s(cluster: Cluster) -> float:
    """Stop the controller, which gives its lease back, and start it; return how long the start took."""
    cluster.controller.stop()
    began = time.monotonic()
    cluster.controller.start()
    return time.monotonic() - began
