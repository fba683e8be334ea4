"""A catalog of up to a million real adapters: how fast they are registered and found, and what they take.

    graftwork bench catalog [--entries 1000 10000 100000 1000000] [--own 100000] [--served 1000]
                            [--postgres URL] [--keep]

Entries are rank-1 adapters of tiny-dense with real bytes, every one different, 7,680 bytes each in bfloat16;
they are made while the clock stands still. Names are looked up through a gateway's router in a process of
its own, none twice by the same router. `register_per_s_38kb` is of 10^5 adapters of 37,632 bytes, beside the
same bytes written and fsynced before and after. 10^6 entries need 10 GB beside --out.

A random sample of the largest catalog is served by a real engine, once as registered in bulk, once made
anew and published one by one: tokens and log-probabilities must be equal. `peft` and transformers, in
float32 on the same revisions' directories, are the third route, within bfloat16's tolerance.

Each command runs on the largest catalog in a process of its own; red when its peak memory is over a bound.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _catalog_served as served
import _record as record
import torch
from _catalog_adapters import KINDS, Maker, adapter_bytes
from live import free_port, start_engine, stop_engine

from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo, ensure_base
from engine.publishing import bulk
from engine.settings.params import BaseConfig, load_params, served_name

PARTS = Path(__file__).with_name("_catalog_parts.py")
DTYPE = "bfloat16"
TARGETS = {
    "register_per_s": record.at_least(20_000),
    "resolve_p99_us": record.at_most(300),
    "resolve_p50_over_least": record.at_most(2),
    "restart_s": record.at_most(2),
    "bytes_over_payload": record.at_most(1.05),
    # Beside `register_per_s_38kb`, which is as fast as the disk.
    "share_of_written_38kb": record.at_least(0.7),
}
POLICIES = 1000
LOOKUPS = 20_000
RESTARTS = 5
WAIT_S = 3600
# Commands on the largest catalog, each in a process of its own.
COMMANDS = {
    "ls_all": ("adapters", "ls", "--limit", "0", "--json"),
    "show": ("adapters", "show", "{name}", "--json"),
    "lineage": ("adapters", "lineage", "{name}", "--json"),
    "verify": ("store", "verify", "--json"),
    "gc": ("store", "gc", "--json"),
    "compact": ("store", "compact", "--json"),
    "repack": ("store", "repack", "--json"),
}
# The same for commands that change it; after all else, since nobody is served what they took away.
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


def part(name: str, **arguments: Any) -> dict[str, Any]:
    """Run one part in a process of its own; return what it found."""
    run = subprocess.run(
        [sys.executable, str(PARTS), name], input=json.dumps(arguments), stdout=subprocess.PIPE, text=True,
        check=True, timeout=WAIT_S,
    )  # fmt: skip
    return dict(json.loads(run.stdout))


def missing(registered: dict[str, Any], entries: int) -> list[str]:
    new = registered["new"]
    return [f"Of {entries} entries {new} were new."] if new != entries else []


def catalog_url(state: Path) -> str:
    return f"sqlite:///{state / 'catalog.db'}"


def size_of(
    state: Path, base: BaseInfo, entries: int, url: str, policies: int | None = None
) -> tuple[dict[str, float], list, list[str]]:
    """Register so many entries and look them up; return figures, a sample and what is wrong."""
    state.mkdir()
    policies = policies or min(POLICIES, max(1, entries // 100))
    registered = part(
        "register", state=str(state), url=url, config=str(base.path), base_digest=base.digest, kind="7kb",
        dtype=DTYPE, entries=entries, policies=policies, sample=LOOKUPS,
    )  # fmt: skip
    sample = registered["names"]
    names = [served_name(policy, digest) for _, policy, digest in sample]
    lookups = {"url": url, "base_digest": base.digest}
    found = part("resolve", **lookups, names=names, rounds=max(1, LOOKUPS // len(names)), spawned=time.time())
    restarts = [
        part("resolve", **lookups, names=names[i : i + 2], rounds=1, spawned=time.time())
        for i in range(RESTARTS)
    ]
    figures = {
        "register_per_s": entries / registered["seconds"],
        "register_with_making_per_s": entries / (registered["seconds"] + registered["made_s"]),
        "made_s": registered["made_s"],
        "policies_per_s": policies / registered["policies_s"],
        "resolve_p50_us": found["p50_us"],
        "resolve_p99_us": found["p99_us"],
        "resolve_p999_us": found["p999_us"],
        "restart_s": record.median([one["restart_s"] for one in restarts]),
        "read_ahead_s": found["read_ahead_s"],
        "restart_import_s": record.median([one["interpreter_s"] + one["import_s"] for one in restarts]),
        "restart_open_and_first_s": record.median([one["open_and_first_s"] for one in restarts]),
        "bytes_over_payload": (registered["store"] + registered["database"]) / registered["payload_bytes"],
        "database_bytes_a_row": registered["database"] / entries,
        "register_peak_mb": registered["peak_bytes"] / 1e6,
        "resolve_peak_mb": found["peak_bytes"] / 1e6,
    }
    return figures, sample, missing(registered, entries)


def larger(root: Path, base: BaseInfo, entries: int) -> tuple[dict[str, float], list[str]]:
    """Register adapters of 38 kB beside the same bytes only written and fsynced, before and after."""
    state = root / "38kb"
    state.mkdir()
    nbytes = entries * adapter_bytes(BaseShapes.read(base.path), KINDS["38kb"], getattr(torch, DTYPE))

    def bare() -> float:
        return float(part("write", state=str(state), nbytes=nbytes, batch_bytes=bulk.BATCH_BYTES)["seconds"])

    before = bare()
    registered = part(
        "register", state=str(state), url=catalog_url(state), config=str(base.path), base_digest=base.digest,
        kind="38kb", dtype=DTYPE, entries=entries, policies=100, sample=1,
    )  # fmt: skip
    written_s = (before + bare()) / 2
    shutil.rmtree(state)
    return {
        "register_per_s_38kb": entries / registered["seconds"],
        "written_per_s_38kb": entries / written_s,
        "share_of_written_38kb": written_s / registered["seconds"],
        "register_peak_mb_38kb": registered["peak_bytes"] / 1e6,
    }, missing(registered, entries)


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


def streamed(root: Path, base: BaseInfo, entries: int) -> tuple[dict[str, float], list[str]]:
    """Register adapters that an iterator makes meanwhile, none of them ahead."""
    state = root / "streamed"
    state.mkdir()
    registered = part(
        "register", state=str(state), url=catalog_url(state), config=str(base.path), base_digest=base.digest,
        kind="7kb", dtype=DTYPE, entries=entries, policies=100, sample=1, streamed=True,
    )  # fmt: skip
    shutil.rmtree(state)
    return {
        "register_streamed_per_s": entries / registered["seconds"],
        "register_streamed_peak_mb": registered["peak_bytes"] / 1e6,
    }, missing(registered, entries)


def own_policies(root: Path, base: BaseInfo, entries: int) -> tuple[dict[str, float], list[str]]:
    """Register a policy for each user: every adapter has one of its own, which is added before."""
    state = root / "own"
    found, _, wrong = size_of(state, base, entries, catalog_url(state), policies=entries)
    shutil.rmtree(state)
    names = ("register_per_s", "policies_per_s", "resolve_p50_us", "resolve_p99_us", "restart_s")
    return {f"{key}.own": found[key] for key in names}, wrong


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


def measure(given: argparse.Namespace, base: BaseInfo, root: Path) -> tuple[dict[str, float], list[str]]:
    """Measure every size; figures of the largest bear no size in their names."""
    figures: dict[str, float] = {}
    faults: list[str] = []
    sizes = sorted(given.entries)
    for entries in sizes:
        state = root / f"{entries}"
        found, sample, wrong = size_of(state, base, entries, catalog_url(state))
        faults += wrong
        figures |= {f"{key}.n{entries}": value for key, value in found.items()}
        if entries != sizes[-1]:
            shutil.rmtree(state)
    figures |= found
    least = figures[f"resolve_p50_us.n{sizes[0]}"]
    figures["resolve_p50_over_least"] = figures["resolve_p50_us"] / least
    _, policy, digest = sample[0]
    name = served_name(policy, digest)
    taken, wrong = commands(state, base, COMMANDS, name)
    figures |= taken
    faults += wrong
    if given.postgres:
        found, _, wrong = size_of(root / "postgres", base, sizes[-1], given.postgres)
        figures |= {
            f"{key}.postgres": value for key, value in found.items() if key.startswith(("resolve", "regi"))
        }
        faults += wrong
        shutil.rmtree(root / "postgres")
    if given.served:
        answered, wrong = through_engine(state, base, sample, given.served, root / "revisions")
        figures |= answered
        faults += wrong
    taken, wrong = commands(state, base, CHANGES, name)
    figures |= taken
    faults += wrong
    if given.own:
        found, wrong = own_policies(root, base, given.own)
        figures |= found
        faults += wrong
    if given.streamed:
        found, wrong = streamed(root, base, given.streamed)
        figures |= found
        faults += wrong
    if given.larger:
        found, wrong = larger(root, base, given.larger)
        figures |= found
        faults += wrong
    return figures, faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument(
        "--streamed", type=int, default=10**5, help="made while they are registered; 0 leaves it out"
    )
    parser.add_argument("--own", type=int, default=10**5, help="each with a policy of its own; 0: none")
    parser.add_argument("--larger", type=int, default=10**5, help="adapters of 38 kB; 0 leaves them out")
    parser.add_argument("--served", type=int, default=1000, help="asked of a real engine; 0 starts none")
    parser.add_argument("--postgres", help="URL of an empty database, for the same at the largest size")
    parser.add_argument("--keep", action="store_true", help="leave the largest catalog where it was made")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path(".graftwork/bench"))
    given = parser.parse_args()
    base = ensure_base(BaseConfig(name="tiny-dense"), load_params(given.params).paths)
    given.out.mkdir(parents=True, exist_ok=True)
    needed = int(1.1 * max(7_680 * sum(sorted(given.entries)[-2:]), 37_632 * given.larger))
    free = shutil.disk_usage(given.out).free
    if free < needed:
        sys.exit(f"bench catalog needs {needed >> 20} MB beside {given.out}, and {free >> 20} MB are free.")
    root = Path(tempfile.mkdtemp(prefix="catalog-", dir=given.out.parent))
    try:
        figures, faults = measure(given, base, root)
    finally:
        if given.keep:
            print(f"The catalogs are in {root}.")
        else:
            shutil.rmtree(root)
    print(*faults, sep="\n")
    record.report("catalog", figures, TARGETS, {}, not faults, given.out)


if __name__ == "__main__":
    main()
