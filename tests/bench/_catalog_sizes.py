"""Registration and lookup in `bench catalog`: each size beside its floor, and other kinds of registration."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _record as record
import torch
from _catalog_adapters import KINDS, adapter_bytes

from engine.base.families import BaseShapes
from engine.base.resident import BaseInfo
from engine.catalog.records import served_name
from engine.publishing import bulk

PARTS = Path(__file__).with_name("_catalog_parts.py")
DTYPE = "bfloat16"
POLICIES = 1000
LOOKUPS = 20_000
RESTARTS = 5
WAIT_S = 3600


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


def policies_of(entries: int) -> int:
    return min(POLICIES, max(1, entries // 100))


def catalog_url(state: Path) -> str:
    return f"sqlite:///{state / 'catalog.db'}"


def repeated(
    root: Path, base: BaseInfo, entries: int, repeats: int
) -> tuple[dict[str, float], dict[str, str], list, list[str]]:
    """Measure a size by turns with its floor, and leave the last catalog.

    Return medians, spreads, a sample of the last catalog and what is wrong.
    """
    state, runs, faults = root / f"{entries}", [], []
    for _ in range(repeats):
        shutil.rmtree(state, ignore_errors=True)
        seconds = floor_s(root, base, entries, "7kb", policies_of(entries))
        found, sample, wrong = size_of(state, base, entries, catalog_url(state))
        found["register_floor_per_s"] = entries / seconds
        found["register_over_floor"] = entries / found["register_per_s"] / seconds
        runs.append(found)
        faults += wrong
    values = {key: [run[key] for run in runs] for key in runs[0]}
    medians = {key: record.median(several) for key, several in values.items()}
    return medians, {key: record.spread(several) for key, several in values.items()}, sample, faults


def size_of(
    state: Path, base: BaseInfo, entries: int, url: str, policies: int | None = None
) -> tuple[dict[str, float], list, list[str]]:
    """Register so many entries and look them up; return figures, a sample and what is wrong."""
    state.mkdir()
    policies = policies or policies_of(entries)
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
        **over_floor(found),
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


def over_floor(found: Mapping[str, float]) -> dict[str, float]:
    """Return the driver's own times of a lookup, and the router's over them, where they were taken."""
    if "floor_p50_us" not in found:
        return {}
    return {
        "resolve_floor_p50_us": found["floor_p50_us"],
        "resolve_floor_p99_us": found["floor_p99_us"],
        "resolve_p50_over_floor": found["p50_us"] / found["floor_p50_us"],
        "resolve_over_floor": found["p99_us"] / found["floor_p99_us"],
    }


def floor_s(root: Path, base: BaseInfo, entries: int, kind: str, policies: int) -> float:
    """Return the seconds that the plainest code takes to register so many adapters of a kind."""
    nbytes = adapter_bytes(BaseShapes.read(base.path), KINDS[kind], getattr(torch, DTYPE))
    found = part("floor", state=str(root), entries=entries, nbytes=nbytes, policies=policies)
    assert found["rows"] == entries
    return float(found["seconds"])


def larger(root: Path, base: BaseInfo, entries: int) -> tuple[dict[str, float], list[str]]:
    """Register adapters of 38 kB beside the same bytes only written and fsynced, before and after."""
    state = root / "38kb"
    state.mkdir()
    nbytes = entries * adapter_bytes(BaseShapes.read(base.path), KINDS["38kb"], getattr(torch, DTYPE))

    def bare() -> float:
        return float(part("write", state=str(state), nbytes=nbytes, batch_bytes=bulk.BATCH_BYTES)["seconds"])

    floor = floor_s(root, base, entries, "38kb", 100)
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
        "register_floor_per_s_38kb": entries / floor,
        "register_over_floor_38kb": registered["seconds"] / floor,
        "register_peak_mb_38kb": registered["peak_bytes"] / 1e6,
    }, missing(registered, entries)


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
