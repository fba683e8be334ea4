"""What `bench catalog` measures in processes of their own, so that each has its own imports and peak memory.

    python _catalog_parts.py register|resolve|floor|write|command

Reads its arguments from standard input and prints what it found, both one line of JSON.
"""

import contextlib
import gc
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _memory import peak_bytes

# What is made ahead while the clock stands still.
AHEAD_BYTES = 2 << 30
SEGMENT_BYTES = 1 << 30
WARM_UP = 200
QUANTILES = {"50": 0.5, "99": 0.99, "999": 0.999}


def register(
    state: str, url: str, config: str, base_digest: str, kind: str, dtype: str, entries: int, policies: int,
    sample: int, streamed: bool = False,
) -> dict:  # fmt: skip
    """Register so many adapters; `names` are a random sample of (number, policy, digest).

    Unless `streamed`, adapters are made ahead of each call, while the clock stands still.
    """
    import torch
    from _catalog_adapters import KINDS, Maker

    from engine.base.families import BaseShapes
    from engine.publishing.bulk import Entry, register_many
    from engine.store.segments import Store

    # The other cores are the hashes' and the writer's.
    torch.set_num_threads(1)
    base, serving = BaseShapes.read(Path(config)), getattr(torch, dtype)
    maker = Maker(base, KINDS[kind], serving)
    store, now = Store(Path(state) / "store"), time.time()
    catalog, added_s = catalog_of(url, config, base_digest, policies, now)
    wanted = set(random.Random(entries).sample(range(entries), min(sample, entries)))
    names, counted, seconds, made = [], {"new": 0, "refused": 0}, 0.0, 0.0
    ahead = entries if streamed else max(1, AHEAD_BYTES // maker.nbytes)
    for start in range(0, entries, ahead):
        end = min(entries, start + ahead)
        began = time.perf_counter()
        adapters = zip(range(start, end), maker.many(start, end), strict=True)
        given: Any = (Entry(f"bulk-{i % policies}", tensors) for i, tensors in adapters)
        if not streamed:
            given = list(given)
            # An iterator would not hold a million tensors, over which the garbage collector goes.
            gc.collect()
            gc.freeze()
        done = time.perf_counter()
        for one in register_many(catalog, store, base, base_digest, given, "bench", now, serving):
            counted["new"] += one.new
            counted["refused"] += one.refused is not None
            if start + one.position in wanted:
                names.append((start + one.position, one.policy, one.digest))
        made, seconds = made + done - began, seconds + time.perf_counter() - done
        gc.unfreeze()
        del given, adapters
    # While it is open, so that the write-ahead log counts.
    taken = on_disk(Path(state))
    store.close()
    catalog.close()
    return {
        "seconds": seconds,
        "made_s": made,
        "policies_s": added_s,
        "payload_bytes": entries * maker.nbytes,
        "names": names,
        "peak_bytes": peak_bytes(),
        **counted,
        **taken,
    }


def catalog_of(url: str, config: str, base_digest: str, policies: int, now: float) -> tuple[Any, float]:
    """Return a new catalog with a base and so many policies, and how many seconds these took."""
    from engine.catalog.catalog import Base, Policy, migrate
    from engine.catalog.opening import whole_catalog

    migrate(url)
    catalog = whole_catalog(url)
    catalog.bases.add(Base(base_digest, "bench", config, now))
    began = time.perf_counter()
    catalog.policies.add_many(Policy(f"bulk-{i}", base_digest, {}, "bench", now) for i in range(policies))
    return catalog, time.perf_counter() - began


def on_disk(state: Path) -> dict[str, int]:
    """Return the bytes that store and database take on the disk, the write-ahead log with the database."""

    def taken(paths: Iterable[Path]) -> int:
        return sum(path.stat().st_blocks * 512 for path in paths if path.is_file())

    return {"store": taken((state / "store").rglob("*")), "database": taken(state.glob("catalog.db*"))}


def floor(state: str, entries: int, nbytes: int, policies: int) -> dict:
    """Register so many adapters of `nbytes` by the plainest code."""
    import _catalog_floor

    return {**_catalog_floor.register(state, entries, nbytes, policies), "peak_bytes": peak_bytes()}


def write(state: str, nbytes: int, batch_bytes: int) -> dict:
    """Write so many bytes as the store does, a batch and its fsync after another; nothing else."""
    buffer, left, segment = os.urandom(batch_bytes), nbytes, -1
    made: list[Path] = []
    end = SEGMENT_BYTES
    began = time.perf_counter()
    while left > 0:
        if end >= SEGMENT_BYTES:
            if segment >= 0:
                os.close(segment)
            made.append(Path(state) / f"{uuid.uuid4().hex}.written")
            segment, end = os.open(made[-1], os.O_RDWR | os.O_CREAT | os.O_EXCL), 0
        count = os.pwrite(segment, memoryview(buffer)[: min(left, batch_bytes)], end)
        os.fdatasync(segment)
        left, end = left - count, end + count
    seconds = time.perf_counter() - began
    os.close(segment)
    for path in made:
        path.unlink()
    return {"seconds": seconds, "peak_bytes": peak_bytes()}


def resolve(url: str, base_digest: str, names: list[str], rounds: int, spawned: float) -> dict:
    """Resolve names through a gateway's router; `spawned` is when this process was asked for.

    In SQLite each name is also read by the driver alone, half a round later.
    """
    began = time.time()
    from engine.catalog.opening import whole_catalog
    from engine.serving.gateway.routing import Router

    imported = time.time()
    catalog = whole_catalog(url)
    Router(catalog, "bench", base_digest).resolve(names[0], "unit")
    first = time.time()
    # As a gateway does while it starts.
    catalog.read_ahead()
    read = time.time()
    others, read_alone = names[len(names) // 2 :] + names[: len(names) // 2], driver_alone(url)
    found: list[int] = []
    alone: list[int] = []
    for _ in range(rounds):
        # A new router each time: it remembers the names that it was asked.
        router = Router(catalog, "bench", base_digest)
        router.resolve("bench", "unit")
        for name, other in zip(names, others, strict=True):
            asked = time.perf_counter_ns()
            router.resolve(name, "unit")
            found.append(time.perf_counter_ns() - asked)
            if read_alone:
                asked = time.perf_counter_ns()
                read_alone(other)
                alone.append(time.perf_counter_ns() - asked)
    return {
        "restart_s": first - spawned,
        "interpreter_s": began - spawned,
        "import_s": imported - began,
        "open_and_first_s": first - imported,
        "read_ahead_s": read - first,
        **quantiles("p{}_us", found),
        **quantiles("floor_p{}_us", alone),
        "lookups": len(found),
        "peak_bytes": peak_bytes(),
    }


def driver_alone(url: str) -> Callable[[str], object] | None:
    """Return one indexed read by SQLite's driver; None for another database."""
    from engine.catalog.access import sqlite_path

    if (path := sqlite_path(url)) is None:
        return None
    import _catalog_floor

    return _catalog_floor.reader(path)


def quantiles(name: str, times_ns: list[int]) -> dict[str, float]:
    """Return quantiles in microseconds, without those of the warm-up; nothing for nothing."""
    found = sorted(times_ns[WARM_UP:] or times_ns)
    return {name.format(q): found[int(len(found) * share)] / 1000 for q, share in QUANTILES.items() if found}


def command(words: list[str]) -> dict:
    """Run a `graftwork` command in this process; what it prints is thrown away."""
    from engine.errors import GraftworkError
    from flows.cli import app

    began = time.perf_counter()
    code: Any = 0
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            app(words)
        except GraftworkError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        except SystemExit as ended:
            code = ended.code
    return {"seconds": time.perf_counter() - began, "code": code or 0, "peak_bytes": peak_bytes()}


PARTS = {"register": register, "resolve": resolve, "floor": floor, "write": write, "command": command}

if __name__ == "__main__":
    part = PARTS[sys.argv[1]]
    print(json.dumps(part(**json.loads(sys.stdin.read()))))
