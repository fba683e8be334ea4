"""A catalog of up to a million real adapters: how fast they are registered and resolved, and what they take.

    graftwork bench catalog [--entries 1000 100000 ...] [--repeats N] [--own N] [--served N]
                            [--postgres URL] [--keep] [--long]

Entries are rank-1 adapters of tiny-dense with real bytes, every one different, 7,680 bytes each in bfloat16;
making them is not timed. Names are resolved by a gateway's router in a process of its own, none twice by the
same router. `register_per_s_38kb` is of 10^5 adapters of 37,632 bytes, beside the same bytes only written and
fsynced before and after. 10^6 entries need 10 GB beside --out.

`register_over_floor` is the time of registration over that of the plainest code for as many bytes: hash them
twice, append, fsync, insert the rows, commit. `resolve_over_floor` is the 99th percentile of a lookup over
that of one indexed read by SQLite's driver alone, by turns in one process. Each size is measured --repeats
times, each time after its floor; figures are medians.

A random sample of the largest catalog is served by a real engine, once as registered in bulk, once made
again and published one by one: tokens and log-probabilities must be equal. `peft` and transformers, in
float32 on the same revisions' directories, are the third route, within bfloat16's tolerance.

Each command runs on the largest catalog in a process of its own; its peak memory has a bound. The default has
10^5 entries at most and serves 100 of them; `--long` has 10^6 and the other kinds of registration.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _catalog_served as served
import _record as record
import torch
from _catalog_adapters import KINDS, Maker
from _catalog_sizes import DTYPE, larger, own_policies, part, repeated, size_of, streamed
from _run import Run, options, start

from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.catalog.records import served_name
from engine.settings.params import BaseConfig, load_params
from tests.helpers.live import free_port, start_engine, stop_engine

TARGETS = {
    "register_over_floor": record.at_most(2),
    "resolve_over_floor": record.at_most(5),
    "resolve_p50_over_least": record.at_most(2),
    "restart_s": record.at_most(2),
    "bytes_over_payload": record.at_most(1.05),
    "register_over_floor_38kb": record.at_most(2),
}
# What is measured unless it is asked for.
SHORT: dict[str, Any] = {
    "entries": [10**3, 10**5], "repeats": 2, "streamed": 0, "own": 0, "larger": 0, "served": 100,
}  # fmt: skip
LONG: dict[str, Any] = {
    "entries": [10**3, 10**4, 10**5, 10**6], "repeats": 3, "streamed": 10**5, "own": 10**5,
    "larger": 10**5, "served": 1000,
}  # fmt: skip
# Commands on the largest catalog, each in a process of its own.
COMMANDS = {
    "ls_all": ("adapters", "ls", "--limit", "0", "--json"),
    "show": ("adapters", "show", "{name}", "--json"),
    "verify": ("store", "verify", "--json"),
    "gc": ("store", "gc", "--json"),
    "compact": ("store", "compact", "--json"),
    "repack": ("store", "repack", "--json"),
}
# The same for commands that change it; after all else, since what they remove can no longer be served.
CHANGES = {
    "export": ("adapters", "export", "{name}", "{folder}", "--json"),
    "import": ("adapters", "import", "{folder}", "--policy", "imported", "--json"),
    "retire": ("adapters", "retire", "{name}", "--reason", "bench", "--json"),
    "purge": ("purge", "{policy}", "--by", "bench", "--reason", "bench", "--yes", "--json"),
}
# Peak memory: what no command may exceed, whatever the catalog's size. An import loads torch and a base.
MOST_MB, MOST_IMPORT_MB = 512.0, 1024.0
# How far answers in bfloat16 may be off in the median and at most, and how many times as much the adapters
# must change in the median. The first is the effect probe's tolerance.
TOLERANCE_NATS, MOST_NATS, EFFECT_OVER_ERROR = 0.05, 0.5, 5


def commands(
    state: Path, base: BaseInfo, given: Mapping[str, Sequence[str]], name: str
) -> tuple[dict[str, float], list[str]]:
    """Run commands on a catalog or on one entry of it; return their seconds and peak memory, and faults."""
    settings = state / "params.yaml"
    # Ports where nothing is up: a command asks services that run.
    ports = {service: {"port": free_port()} for service in ("engine", "trainer", "controller", "mlflow")}
    settings.write_text(json.dumps({"state_dir": str(state), **ports}))
    if not (bases := state / "bases").exists():
        bases.symlink_to(base.path.parent)
    fields = {"name": name, "policy": name.partition("@")[0], "folder": str(state / "exported")}
    figures, faults = {}, []
    for key, words in given.items():
        found = part("command", words=[*(word.format(**fields) for word in words), "--params", str(settings)])
        peak = found["peak_bytes"] / 1e6
        figures[f"{key}_s"], figures[f"{key}_peak_mb"] = found["seconds"], peak
        if found["code"]:
            faults.append(f"`graftwork {' '.join(words[:2])}` ended with {found['code']}.")
        faults += over_bound(key, peak)
    return figures, faults


def over_bound(command: str, peak_mb: float) -> list[str]:
    most = MOST_IMPORT_MB if command == "import" else MOST_MB
    return [f"{command} took {peak_mb:.0f} MB, more than {most:.0f} MB."] if peak_mb > most else []


def through_engine(
    state: Path, base: BaseInfo, sample: list, count: int, scratch: Path
) -> tuple[dict[str, float], list[str]]:
    """Serve a random part of the sample by every route; return figures and what is wrong."""
    engine = start_engine(base.path, state, wait_s=600, slots=16, max_num_seqs=64, dtype=DTYPE)
    try:
        maker = Maker(BaseShapes.read(base.path), KINDS["7kb"], getattr(torch, DTYPE))
        chosen = random.Random(1).sample(sample, min(count, len(sample)))
        found = served.serve(engine, maker, chosen, scratch)
        peak = served.session_peak_bytes(engine.process.pid)
    finally:
        stop_engine(engine)
    figures = {
        "served": found.asked,
        "served_unlike_direct": found.unlike_direct,
        "served_off_peft_nats": found.peft_nats,
        "served_off_peft_median_nats": found.peft_median_nats,
        "served_effect_median_nats": found.effect_nats,
        "engine_peak_mb": peak / 1e6,
    }
    faults = []
    if found.unlike_direct:
        faults.append(f"{found.unlike_direct} answers are not those of the same adapters published directly.")
    if found.peft_median_nats > TOLERANCE_NATS or found.peft_nats > MOST_NATS:
        off = f"{found.peft_median_nats:.3f} in the median and {found.peft_nats:.3f} at most"
        faults.append(f"Answers are {off} nats off peft's.")
    if found.effect_nats < EFFECT_OVER_ERROR * found.peft_median_nats:
        faults.append(f"Adapters change {found.effect_nats:.3f} nats only, so that answers show nothing.")
    return figures, faults


def measure(run: Run, given: argparse.Namespace, base: BaseInfo, root: Path) -> tuple[record.Figures, list]:
    """Measure every size, then the largest catalog; return figures and faults.

    Figures and spreads of the largest bear no size in their names.
    """
    figures, faults = record.Figures(), list[str]()
    sizes, sample = sorted(given.entries), list[Any]()
    state = root / f"{sizes[-1]}"

    def size(entries: int) -> None:
        found, spread, sample[:], wrong = repeated(root, base, entries, given.repeats)
        faults.extend(wrong)
        for tail in (f".n{entries}", *([""] if entries == sizes[-1] else [])):
            figures.values |= {f"{key}{tail}": value for key, value in found.items()}
            figures.spreads |= {f"{key}{tail}": value for key, value in spread.items()}
        if entries != sizes[-1]:
            shutil.rmtree(root / f"{entries}")
            return
        least = figures.values[f"resolve_p50_us.n{sizes[0]}"]
        figures.values["resolve_p50_over_least"] = found["resolve_p50_us"] / least

    def take(measured: Callable[[], tuple[dict[str, float], list[str]]]) -> None:
        found, wrong = measured()
        figures.values |= found
        faults.extend(wrong)

    def of_largest(given_commands: Mapping[str, Sequence[str]]) -> tuple[dict[str, float], list[str]]:
        _, policy, digest = sample[0]
        return commands(state, base, given_commands, served_name(policy, digest))

    def in_postgres() -> tuple[dict[str, float], list[str]]:
        found, _, wrong = size_of(root / "postgres", base, sizes[-1], given.postgres)
        shutil.rmtree(root / "postgres")
        kept = {key: value for key, value in found.items() if key.startswith(("resolve", "regi"))}
        return {f"{key}.postgres": value for key, value in kept.items()}, wrong

    asked = [
        (True, partial(of_largest, COMMANDS)),
        (given.postgres, in_postgres),
        (given.served, lambda: through_engine(state, base, sample, given.served, root / "revisions")),
        (True, partial(of_largest, CHANGES)),
        (given.own, partial(own_policies, root, base, given.own)),
        (given.streamed, partial(streamed, root, base, given.streamed)),
        (given.larger, partial(larger, root, base, given.larger)),
    ]
    run.parts(
        *(partial(size, entries) for entries in sizes),
        *(partial(take, call) for is_asked, call in asked if is_asked),
    )
    return figures, faults


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--entries", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, help="of each size")
    parser.add_argument("--streamed", type=int, help="made while they are registered; 0 leaves it out")
    parser.add_argument("--own", type=int, help="each with a policy of its own; 0: none")
    parser.add_argument("--larger", type=int, help="adapters of 38 kB; 0 leaves them out")
    parser.add_argument("--served", type=int, help="asked of a real engine; 0 starts none")
    parser.add_argument("--postgres", help="URL of an empty database, for the same at the largest size")
    parser.add_argument("--keep", action="store_true", help="leave the largest catalog where it was made")
    given = parser.parse_args()
    run = Run("catalog", given.long)
    for name, value in (LONG if run.is_long else SHORT).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    base = ensure_base(BaseConfig(name="tiny-dense"), load_params(given.params).paths)
    given.out.mkdir(parents=True, exist_ok=True)
    needed = int(1.1 * max(7_680 * sum(sorted(given.entries)[-2:]), 37_632 * given.larger))
    free = shutil.disk_usage(given.out).free
    if free < needed:
        sys.exit(f"bench catalog needs {needed >> 20} MB beside {given.out}, and {free >> 20} MB are free.")
    root = Path(tempfile.mkdtemp(prefix="catalog-", dir=given.out.parent))
    try:
        figures, faults = measure(run, given, base, root)
    finally:
        if given.keep:
            print(f"The catalogs are in {root}.")
        else:
            shutil.rmtree(root)
    print(*faults, sep="\n")
    record.report(run, figures, TARGETS, not faults, given.out)


if __name__ == "__main__":
    start(main)
