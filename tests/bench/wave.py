"""Thousands of distinct adapters in flight on one engine, and a hundred thousand names one after another.

    graftwork bench wave [--sizes 1000 4000] [--names 100000] [--long]

A wave is so many requests at once, each for an adapter of its own that nobody asked for before; the
gateway's queue refuses some with a `Retry-After`, which the client honours and counts. Every answer must be
the one that the same adapter gives when it is asked alone, later, and most must be neither the base's nor
another adapter's to the same prompt. The host tier holds all of them: nothing may be evicted.
`share_of_one` is the wave's throughput over that of the same requests on one adapter,
`share_of_one_resident` the same once the adapters are in the host tier. Then names, each asked for one
token, through a host tier that holds some hundreds of them: no errors, and the memory (PSS) of every process
stays flat. The default is one wave of 1,000; `--long` adds one of 4,000, and the names.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import _made
import _record as record
import _served
from _answers import MOST
from _flat import Memory, titled
from _run import Run, options, start
from _storm_figures import errors, percentile, refusals
from _traffic import Answer, Ask, Client, Server, prompt

from engine.planning.tiers import SMALL_ADAPTER
from engine.settings.params import Params, load_params

BASE, SLOTS = "tiny-dense", 64
RANKS = (1, 2, 4, 8)
PROMPT, TOKENS = 16, 8
# Names in one plan; memory is looked at between plans.
CHUNK, UNDER_WAY = 1000, 64
# Before, in bursts: an engine's memory goes with the largest step it has had, whatever the names in it.
BURSTS, BURST = 20, 256
# Of the names: small ones, as a policy for each user has them, and a host tier of some 800.
SMALL = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMES_HOST_BYTES = 8 << 20
BOUNDS = dict.fromkeys(("errors", "wrong_answers", "growing_processes"), record.within(0))


def waves(
    given: Params, client: Client, sizes: Sequence[int], beside: Path
) -> tuple[dict[str, float], list[str]]:
    """Return figures of each size, and what was wrong."""
    figures: dict[str, float] = {"wrong_answers": 0.0, "errors_waves": 0.0}
    wrong: list[str] = []
    held = sum(sizes) + SLOTS
    each = _made.adapter_bytes(given, BASE, max(RANKS), _served.SHAPES[BASE].torch_dtype)
    with _served.live(given, BASE, beside, slots=SLOTS, host_bytes=held * max(each, SMALL_ADAPTER)) as engine:
        makers = [
            _made.Maker(engine.params, engine.base, f"wave-{rank}", rank, _served.SHAPES[BASE].torch_dtype)
            for rank in RANKS
        ]
        for size in sizes:
            chance = random.Random(size)
            fresh = [name for maker in makers for name in maker.make(size // len(makers))]
            chance.shuffle(fresh)
            asks = [Ask(0.0, name, prompt(chance, PROMPT), TOKENS) for name in fresh]
            evicted = _served.evictions(engine.server)
            answers, seconds = wave(client, engine.server, asks, engine.base.name)
            evicted = _served.evictions(engine.server) - evicted
            figures |= figures_of(answers, seconds, size)
            figures["errors_waves"] += sum(map(errors, answers.values()))
            differing = differ(answers)
            figures["wrong_answers"] += differing
            if differing:
                wrong.append(f"{size} at once: {differing} answers are not those of their adapters alone.")
            for kind, whose in (("base", "the base's"), ("one", "another adapter's")):
                share = unlike(answers, kind)
                figures[f"unlike_{kind}_share.n{size}"] = share
                if share <= MOST:
                    wrong.append(f"{size} at once: only {share:.0%} of answers differ from {whose}.")
            figures[f"evictions.n{size}"] = float(evicted)
            if evicted:
                wrong.append(
                    f"{size} at once: {evicted} adapters left the host tier, so none was compared there."
                )
            print(
                f"  {size} at once: {figures[f'per_s_cold.n{size}']:.0f} a second, on one adapter "
                f"{figures[f'per_s_one.n{size}']:.0f}, {differing} wrong",
                flush=True,
            )
        for maker in makers:
            maker.close()
    return figures, wrong


def wave(
    client: Client, server: Server, asks: Sequence[Ask], base: str
) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """Return answers and seconds of the wave, on one adapter, of it again, one by one, and on the base."""
    one = [replace(ask, model=asks[0].model) for ask in asks]
    bare = [replace(ask, model=base) for ask in asks]
    answers, seconds = {}, {}
    kinds = {"cold": asks, "one": one, "resident": asks, "alone": asks, "base": bare}
    for kind, each in kinds.items():
        began = time.monotonic()
        answers[kind] = client.ask(server, each, under_way=int(kind == "alone"))
        seconds[kind] = time.monotonic() - began
        print(f"  {len(each)} requests, {kind}: {seconds[kind]:.1f} s", flush=True)
        say(answers[kind])
    return answers, seconds


def differ(answers: Mapping[str, Sequence[Answer]]) -> int:
    """Return how many answers are not what their adapter gives alone."""
    return sum(
        one.ids != alone.ids
        for kind in ("cold", "resident")
        for one, alone in zip(answers[kind], answers["alone"], strict=True)
    )


def unlike(answers: Mapping[str, Sequence[Answer]], kind: str) -> float:
    """Return the share of answers that differ from those of another kind, which another model gave."""
    pairs = [
        (cold.ids, other.ids)
        for cold, other in zip(answers["cold"], answers[kind], strict=True)
        if cold.ask.model != other.ask.model
    ]
    return sum(one != other for one, other in pairs) / len(pairs)


def figures_of(
    answers: Mapping[str, Sequence[Answer]], seconds: Mapping[str, float], size: int
) -> dict[str, float]:
    found = {f"per_s_{kind}.n{size}": size / seconds[kind] for kind in ("cold", "one", "resident")}
    done = [answer.done for answer in answers["cold"]]
    return found | {
        f"share_of_one.n{size}": seconds["one"] / seconds["cold"],
        f"share_of_one_resident.n{size}": seconds["one"] / seconds["resident"],
        f"refusals_429.n{size}": float(refusals(answers["cold"])),
        f"longest_s.n{size}": max(done),
        f"median_s.n{size}": percentile(done, 0.5),
    }


def names(given: Params, client: Client, count: int, beside: Path) -> tuple[dict[str, float], list[str]]:
    """Ask `count` distinct names for one token each; return figures, and what was wrong."""
    memory, failed, refused, done, seconds = Memory(), 0, 0, 0, 0.0
    chance = random.Random(2)
    with _served.live(given, BASE, beside, slots=SLOTS, host_bytes=NAMES_HOST_BYTES) as engine:
        maker = _made.Maker(engine.params, engine.base, "names", 1, _served.SHAPES[BASE].torch_dtype, SMALL)
        processes = titled(engine.processes())
        before = [(BURST, 0)] * BURSTS
        for asked, under_way in before + [(CHUNK, UNDER_WAY)] * math.ceil(count / CHUNK):
            asks = [Ask(0.0, name, prompt(chance, PROMPT), 1) for name in maker.make(asked)]
            began = time.monotonic()
            answers = client.ask(engine.server, asks, under_way)
            failed += errors(answers)
            refused += refusals(answers)
            say(answers)
            if not under_way:
                continue
            seconds += time.monotonic() - began
            done += len(asks)
            memory.sample(done, processes)
            if done % (10 * CHUNK) == 0 or done == CHUNK:
                told = ", ".join(f"{key} {values[-1] >> 20} MiB" for key, values in memory.bytes.items())
                print(f"  {done} names: {told}", flush=True)
        maker.close()
    growing = memory.growing()
    figures = {
        "names": float(done), "names_per_s": done / seconds, "errors_names": float(failed),
        "refusals_429_names": float(refused), "growing_processes": float(len(growing)),
        **{f"bytes_a_name.{process}": slope for process, slope in memory.slopes().items()},
        **{f"memory_mib.{process}": values[-1] / 2**20 for process, values in memory.bytes.items()},
    }  # fmt: skip
    return figures, [f"{process} grows by {slope:.0f} bytes a name." for process, slope in growing.items()]


def say(answers: Sequence[Answer]) -> None:
    for answer in [one for one in answers if not one.is_right][:3]:
        print(f"  {answer.ask.model}: {answer.status} {answer.fault}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*")
    parser.add_argument("--names", type=int)
    arguments = parser.parse_args()
    run = Run("wave", arguments.long)
    if arguments.sizes is None:
        arguments.sizes = [1000, 4000] if run.is_long else [1000]
    if arguments.names is None:
        arguments.names = 100_000 if run.is_long else 0
    given = load_params(arguments.params)
    beside = arguments.out.resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    wrong: list[str] = []
    with Client() as client:
        asked = [partial(waves, given, client, arguments.sizes, beside)] if arguments.sizes else []
        asked += [partial(names, given, client, arguments.names, beside)] if arguments.names else []
        for found, faults in run.parts(*asked):
            figures, wrong = figures | found, wrong + faults
        if figures:
            figures["client_cpu_share"] = client.cpu_share
            figures["errors"] = figures.get("errors_waves", 0.0) + figures.get("errors_names", 0.0)
            if figures["errors"]:
                wrong.append(f"{figures['errors']:.0f} requests did not end in 200 with every token.")
    print(*wrong, sep="\n")
    record.report(run, record.Figures(figures), BOUNDS, not wrong, arguments.out)


if __name__ == "__main__":
    start(main)
