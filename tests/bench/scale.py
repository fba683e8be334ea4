"""Two engines of one catalog as on two machines: what users notice of kills, releases, stops and an upgrade.

    graftwork bench scale [--only kills rollback ...] [--repeats N] [--long]

Two engines with state directories of their own, a controller, Postgres, S3 and HAProxy, all on loopback. Each
engine computes with one thread. `failed_requests` are those without streaming that ended without their whole
answer while an engine was killed in the middle of a canary; `verdicts_unlike` are canaries whose verdict was
another than on one engine with the same users; `rollouts_unlike` are a step's groups that were not those of
one engine, although the other one was killed. `upgrade_failed` are requests that failed while the catalog was
migrated and the controller and both engines of the version before the last change of its schema became this
one's. `observations_lost` are whole answers of both engines that the ledger does not have, after all kills.
`rollback_s` is from the tombstone until the last request was routed to the canary at any engine, at the
latest that can be. `backup_lost` is what a backup under load lacks once it is restored elsewhere.
`failover_share` is the controller's failover over its lease and its start. `plan_off` is how far the figures
of `graftwork plan engines`, fitted to one engine, are off those of two, on `smollm2-135m`; with it comes
`throughput_share`, requests a second behind HAProxy over those of the same engines asked directly, in turns.
The default takes one scenario after another until its time is over, all but the last, `sizing`, which takes
15 minutes; `--long` takes all, each in its long form.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import _record as record
import httpx
from _run import Run, options, start
from _scale_backup import backups
from _scale_cluster import Cluster, cluster, wait_for
from _scale_front import faults
from _scale_kills import ENDS, failover, kills, rollouts, started_s
from _scale_releases import promotions, rollbacks, unloadable
from _scale_sizing import sizing
from _scale_upgrade import sigterm, upgrade
from _scale_users import Crowd

from engine.errors import GraftworkError
from engine.settings.params import load_params
from engine.threads import background
from tests.helpers.older_version import older_commit

BOUNDS = {
    "failed_requests": record.within(0),
    "streams_cut_silently": record.within(0),
    "verdicts_unlike": record.within(0),
    "observations_lost": record.within(0),
    "observations_extra": record.within(0),
    "promotion_skew_s": record.at_most(0.5),
    "cold_waits": record.within(0),
    "promotion_failed": record.within(0),
    "unloadable_named": record.within(1),
    "unloadable_failed": record.within(0),
    "rollback_s": record.at_most(1.0),
    "upgrade_failed": record.within(0),
    "upgrade_streams_broken": record.within(0),
    "sigterm_failed": record.within(0),
    "sigterm_streams_broken": record.within(0),
    "rollouts_unlike": record.within(0),
    "backup_lost": record.within(0),
    "backup_failed": record.within(0),
    "answers_before_ready": record.within(0),
    "join_failed": record.within(0),
    "others_failed.haproxy": record.within(0),
    "others_failed.router": record.within(0),
    "throughput_share": record.at_least(0.95),
    "failover_share": record.at_most(1.0),
    "plan_off": record.at_most(0.2),
}
# What counts over all repeats.
WORST = ("promotion_skew_s", "rollback_s")
Found = Mapping[str, Sequence[float]]


def scenarios(site: Cluster, crowd: Crowd, repeats: int, is_long: bool) -> dict[str, Callable[[], Found]]:
    return {
        "upgrade": lambda: upgrade(site, crowd),
        "releases": lambda: releases(site, crowd, repeats, is_long),
        "rollback": lambda: rollbacks(site, crowd, repeats),
        "kills": lambda: kills(site, crowd, ENDS[: 1 + is_long]),
        "rollouts": lambda: rollouts(site),
        "failover": lambda: failover(site, started_s(site)),
        # It leaves one engine.
        "sigterm": lambda: sigterm(site, crowd),
    }


# The last one has two engines of its own.
SIZING = "sizing"
NAMES = ("upgrade", "releases", "rollback", "kills", "rollouts", "failover", "sigterm", SIZING)


def releases(site: Cluster, crowd: Crowd, repeats: int, is_long: bool) -> Found:
    """Promote, meet faulty adapters and back up, while the release that cannot be loaded everywhere waits."""
    root = site.controller.params.paths.root
    held = background(lambda: unloadable(site, crowd))
    found = promotions(site, crowd, repeats) | faults(site, crowd, root, is_long)
    return found | backups(site, crowd, root.parent) | held.result(180)


def observations(site: Cluster, crowd: Crowd) -> dict[str, list[float]]:
    """Return how many answers the ledger lacks, and how many rows it has that nobody was answered."""
    crowd.rest()
    # The base has no policy, and its answers no rows by which revisions are judged.
    asked = [one for one in crowd.asked if one.policy != site.base.name]
    whole, policies = [one for one in asked if one.is_whole], sorted({one.policy for one in asked})
    broken = sum(one.status in (0, 200) and not one.is_whole for one in asked)
    known = dict[str, int]()

    def are_there() -> bool:
        query = (
            "SELECT id, count(*) FROM observations WHERE status = 200 AND NOT id LIKE '%-canary' "
            "AND policy IN (SELECT unnest(?)) GROUP BY id"
        )
        known.clear()
        known.update((str(row[0]), int(row[1])) for row in site.ledger(query, [policies]))
        return all(one.id in known for one in whole)

    try:
        wait_for(are_there, "all observations", 60)
    except RuntimeError as error:
        print(error, flush=True)
    lost = [one for one in whole if one.id not in known]
    for one in lost[:5]:
        print(f"  lost: {one.policy} {one.url} {one.sent}", flush=True)
    return {
        "observations_lost": [len(lost)],
        "observations_extra": [max(0, sum(known.values()) - len(whole) - broken)],
        "answers": [len(whole)],
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--repeats", type=int, help="promotions, and rollbacks of each kind")
    given = parser.parse_args()
    only = given.only or (NAMES if given.long else NAMES[:-1])
    # Five minutes without the sizing, starts of services included, where nothing else runs.
    run = Run("scale", given.long, minutes=20.0 if SIZING in only else 6.0)
    params, repeats = load_params(given.params), given.repeats or (3 if run.is_long else 1)
    given.out.mkdir(parents=True, exist_ok=True)
    figures, failed = record.Figures(), list[str]()

    def take_all(known: Mapping[str, Callable[[], Found]], at_end: Callable[[], object]) -> bool:
        """Take the figures of these scenarios; return whether none was cut off."""
        names = list(known)

        def one(number: int) -> None:
            name = names[number]
            began = time.monotonic()
            try:
                take(figures, known[name]())
                print(f"  {name}: {time.monotonic() - began:.1f} s", flush=True)
            except (RuntimeError, GraftworkError, httpx.HTTPError, TimeoutError) as error:
                # The others are still worth their time; no figure counts then.
                print(f"  {name} failed: {error}", flush=True)
                failed.append(name)
            finally:
                at_end()

        return len(run.repeats("scenario", one, most=len(names))) == len(names)

    # In their order: the upgrade is first.
    if names := [name for name in NAMES if name in only and name != SIZING]:
        if is_old := "upgrade" in names:
            older_commit()
        with cluster(params, given.out, is_old) as site, Crowd(site.key) as crowd:
            known = scenarios(site, crowd, repeats, run.is_long)
            is_whole = take_all({name: known[name] for name in names}, crowd.stop)
            # What is cut off leaves nothing that counts: an engine may be dead, and its events with it.
            if is_whole and crowd.asked:
                take(figures, observations(site, crowd))
    if SIZING in only:
        take_all({SIZING: lambda: sizing(params, 2 * repeats, given.out)}, lambda: None)
    if failed:
        record.show(f"without {', '.join(failed)}", figures, BOUNDS)
    record.report(run, figures, BOUNDS, not failed, given.out)


def take(figures: record.Figures, found: Found) -> None:
    """Take a scenario's figures: the worst of those in `WORST`, the median of others."""
    figures.add(found)
    for name, values in found.items():
        if name.partition(".")[0] in WORST:
            figures.values[name] = max(values)


if __name__ == "__main__":
    start(main)
