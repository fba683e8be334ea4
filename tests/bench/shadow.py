"""What users notice of a shadow, and how much of their traffic it answers again.

    graftwork bench shadow [--base tiny-dense|smollm2-135m] [--long]

One engine with its controller and the evaluators' process. Users stream answers at half of what the engine
can do, which is found first. Phases without a release and phases in which a release is in its shadow
alternate. `users_ttft_p95_ratio` is their warm TTFT p95 with the shadow over without,
and `shadow_share` the shadow's answers for each answer of theirs meanwhile; each pair of phases gives one of
each. The evaluator `examples.evaluator:sums` scores both answers, and the evaluators' process with the
function's own is part of what users meet; its start is not. Reported: the engine's seconds for an answer of
the shadow, the share of a phase in which it rested since users waited longer, and all TTFTs.

Red: a request of a user that does not end in 200 with all its tokens, a phase whose release left the shadow,
and shadow answers without scores.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import _made
import _record as record
import _served
from _run import Run, options, start
from _traffic import Answer, Ask, Client, Server, arrivals
from rollback import running

from engine.catalog.opening import whole_catalog
from engine.clients.controller import ControllerClient
from engine.clients.engine import EngineClient
from engine.ledger.ledger import open_snapshot
from engine.settings.params import Params, load_params
from tests.helpers.live import free_port

POLICY = "shadow"
TOKENS = 16
# Requests that find out what the engine can do, how many of them are under way, and the share that users ask.
PROBES, UNDER_WAY, LOAD = 250, 32, 0.5
# Of a phase without the shadow, and with it, in the short form and the long one.
PHASES_S = {False: (8.0, 12.0), True: (12.0, 20.0)}
# Until the evaluators' process has ended, until users find the engine at work, until the shadow has its first
# answer, and until its rows are in the controller's hands.
END_S, EMPTY_S, START_S, WRITTEN_S = 2.0, 1.0, 8.0, 1.5
# A pause between two of its answers that is no rest.
LEAST_REST_S = 2.0
# Never clear and never enough: the revision's answers are neither better nor worse.
SETTINGS = {
    "evaluators": {"sums": {"kind": "python:examples.evaluator:sums", "per_minute": 100_000}},
    "shadow": 1_000_000,
    "max_s": 86_400,
    "margin": 0.0,
    "alpha": 1e-6,
}
BOUNDS = {"users_ttft_p95_ratio": record.at_most(1.1), "shadow_share": record.at_least(0.1)}
SHADOWED = """
    SELECT mine."at", mine.latency_s, EXISTS (
        SELECT 1 FROM evaluations WHERE evaluations.request = mine.id AND score IS NOT NULL
    )
    FROM observations mine JOIN shadows ON shadows.answer = mine.id WHERE shadows.release = $release
        AND mine."at" <= $until
    ORDER BY mine."at"
"""


@dataclass
class Site:
    """An engine with its controller, and a champion and a revision of one policy."""

    params: Params
    server: Server
    engine: EngineClient
    controller: ControllerClient
    revision: str


@dataclass
class Found:
    """What all phases found, and what was wrong in them; `phases_s` are a pair's seconds."""

    phases_s: tuple[float, float] = PHASES_S[False]
    figures: record.Figures = field(default_factory=record.Figures)
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rested: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Shadowed:
    """The shadow's answers: when each came (epoch seconds), and the engine's seconds for it."""

    ends: Sequence[float]
    seconds: Sequence[float]
    unscored: int


@contextmanager
def site(given: Params, base: str, out: Path) -> Iterator[Site]:
    """Yield an engine with a champion, a revision that its probe accepted, and a controller."""
    ports = {name: {"port": free_port()} for name in ("controller", "mlflow", "prefect")}
    with _served.live(given, base, out, ports) as live:
        shape = _served.SHAPES[base]
        with closing(_made.Maker(live.params, live.base, POLICY, shape.rank, shape.torch_dtype)) as maker:
            names = maker.make(2)
        with whole_catalog(live.params.paths.catalog_url) as catalog:
            champion, revision = (
                catalog.revisions.get(POLICY, name.partition("@")[2]).digest for name in names
            )
            catalog.routes.update(replace(catalog.routes.get(POLICY), champion=champion), 0)
            catalog.revisions.set_probe(POLICY, revision, {"accepted": True, "reason": "Made for this."})
        url, key = live.params.url("controller"), live.server.key
        with (
            running(live.params, ("controller",)),
            ControllerClient(url, key) as controller,
            EngineClient(live.server.url, key) as engine,
        ):
            yield Site(live.params, live.server, engine, controller, revision)


def asks(chance: random.Random, times: Sequence[float]) -> list[Ask]:
    """Return users' requests at these times; no two have the same sum, so each is a unit of the shadow."""
    sums = chance.sample(range(1_000_000), len(times))
    return [
        Ask(at, POLICY, f"What is {one // 1000} + {one % 1000}?", TOKENS)
        for at, one in zip(times, sums, strict=True)
    ]


def bearable(client: Client, server: Server) -> float:
    """Return how many requests a second the engine answers when there are always enough."""
    for count in (UNDER_WAY, PROBES):
        answers = client.ask(server, asks(random.Random(count), [0.0] * count), UNDER_WAY)
    return len(answers) / max(one.done for one in answers)


def p95(answers: Sequence[Answer]) -> float:
    return sorted(one.ttft for one in answers)[math.ceil(0.95 * len(answers)) - 1]


def answers_of(live: Site, release: str, until: float) -> Shadowed:
    """Return what the ledger has of the answers of a release's shadow until a moment."""
    time.sleep(WRITTEN_S)
    live.controller.publish_ledger()
    with open_snapshot(live.params.paths.ledger_snapshot) as ledger:
        rows = ledger.execute(SHADOWED, {"release": release, "until": until}).fetchall()
    return Shadowed(
        [at for at, _, _ in rows], [seconds for _, seconds, _ in rows], sum(not one for *_, one in rows)
    )


def rested_s(shadowed: Shadowed, ended: float) -> float:
    """Return the seconds of all pauses that are too long for work under way."""
    gaps = [later - earlier for earlier, later in pairwise([*shadowed.ends, ended])]
    return sum(gap for gap in gaps if gap >= LEAST_REST_S)


@contextmanager
def shadow(live: Site) -> Iterator[str]:
    """Yield the id of a release whose shadow has begun to ask; it is put on hold in the end."""
    release = live.controller.start_release(
        POLICY, live.revision, SETTINGS, {"score": "It has no suite."}, "bench"
    )["id"]
    try:
        yield release
    finally:
        live.controller.hold(release, "Measured.", "bench")


def pair(live: Site, client: Client, rate: float, found: Found, number: int) -> dict[str, float]:
    """Measure a phase without the shadow and one with it, in either order."""
    sides = {"alone": partial(alone, live, client, rate), "beside": partial(beside, live, client, rate)}
    measured: dict[str, float] = {}
    for side in record.in_turn(sides, number):
        measured |= sides[side](found, number)
    found.alone.append(measured["alone"])
    found.beside.append(measured["beside"])
    ratio = measured["beside"] / measured["alone"]
    print(
        f"  TTFT p95 {1e3 * measured['alone']:.1f} ms alone, {1e3 * measured['beside']:.1f} ms beside; "
        f"{measured['shadow_share']:.3f} answers of the shadow for each of users, "
        f"rested {found.rested[-1]:.0%}",
        flush=True,
    )
    return {"users_ttft_p95_ratio": ratio, "shadow_share": measured["shadow_share"]}


def users(live: Site, client: Client, rate: float, number: int, seconds: float, found: Found) -> list[Answer]:
    """Return the answers of users who ask for so many seconds."""
    answers = client.ask(live.server, asks(random.Random(), arrivals(random.Random(number), rate, seconds)))
    found.faults += [one.fault or f"{len(one.ids)} tokens" for one in answers if not one.is_right]
    return answers


def alone(live: Site, client: Client, rate: float, found: Found, number: int) -> dict[str, float]:
    """Return the TTFT p95 without a release, evaluators and copies of answers."""
    users(live, client, rate, number, END_S, found)
    live.engine.copies({}, 1)
    answers = users(live, client, rate, number, EMPTY_S + found.phases_s[0], found)
    return {"alone": p95([one for one in answers if one.ask.at >= EMPTY_S])}


def beside(live: Site, client: Client, rate: float, found: Found, number: int) -> dict[str, float]:
    """Return the TTFT p95 beside a shadow as of its first answer, and the shadow's share."""
    with shadow(live) as release:
        began = time.time()
        answers = users(live, client, rate, number, START_S + found.phases_s[1], found)
        ended = time.time()
        shadowed = answers_of(live, release, ended)
        row = live.controller.release(release)
    if (row["state"], row["step"]) != ("running", "shadow"):
        found.faults.append(f"The release was {row['state']} in {row['step']}: {row['reason']}")
    first = shadowed.ends[0] if shadowed.ends else ended
    met = [one for one in answers if began + one.ask.at >= first]
    if ended - first < found.phases_s[1] / 2:
        raise RuntimeError(f"The shadow's first answer came {first - began:.1f} s after its release.")
    # An evaluator that is busy skips an answer now and then; one that never scores compares nothing.
    if shadowed.unscored > len(shadowed.ends) / 10:
        found.faults.append(f"{shadowed.unscored} of {len(shadowed.ends)} answers have no score.")
    found.seconds += shadowed.seconds
    found.rested.append(rested_s(shadowed, ended) / (ended - first))
    return {"beside": p95(met), "shadow_share": len(shadowed.ends) / len(met)}


def measure(run: Run, live: Site, suffix: str) -> Found:
    found = Found(PHASES_S[run.is_long])
    with Client() as client:
        most = bearable(client, live.server)
        rate = LOAD * most
        print(f"  The engine bears {most:.1f} requests a second; users ask {rate:.1f}.", flush=True)
        what = "a phase without the shadow and one with it"
        pairs = run.pairs(what, partial(pair, live, client, rate, found), BOUNDS, suffix=suffix)
        share = client.cpu_share
    if pairs:
        found.figures.add_pairs(pairs, suffix)
        found.figures.add(
            {
                "users_ttft_p95_alone_s": found.alone,
                "users_ttft_p95_beside_s": found.beside,
                "shadow_answer_s": found.seconds,
                "shadow_rested": found.rested,
            },
            suffix,
        )
        found.figures.values |= {f"users_per_s{suffix}": rate, f"client_cpu_share{suffix}": share}
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--base", choices=("tiny-dense", "smollm2-135m"), default="tiny-dense")
    given = parser.parse_args()
    run = Run("shadow", given.long)
    given.out.mkdir(parents=True, exist_ok=True)
    found = Found()
    with run.preparing(), site(load_params(given.params), given.base, given.out) as live:
        found = measure(run, live, f".{given.base}")
    for fault in found.faults[:5]:
        print(f"bench shadow: {fault}")
    record.report(run, found.figures, BOUNDS, not found.faults, given.out)


if __name__ == "__main__":
    start(main)
