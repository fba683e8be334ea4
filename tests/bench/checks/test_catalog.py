"""The benchmark of a large catalog at small sizes: what it makes, registers, finds and compares is right."""

import hashlib
import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.base.families import BaseShapes
from engine.base.toys.recipes import RECIPES
from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.catalog.records import served_name
from engine.publishing.publish import stored_tensors
from engine.store.segments import Store
from tests.helpers import made_adapters
from tests.helpers.bench_files import BENCH, load

DIGEST = "ba" * 32
CONFIG = RECIPES["tiny-dense"].config()


def part(name: str, **arguments) -> dict:
    run = subprocess.run(
        [sys.executable, str(BENCH / "_catalog_parts.py"), name],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


def test_every_adapter_made_is_another_and_can_be_made_again(monkeypatch: pytest.MonkeyPatch):
    module = load("_catalog_adapters", monkeypatch)
    monkeypatch.setattr(module, "ROWS", 4)
    maker = module.Maker(made_adapters.shapes("qwen3"), module.KINDS["38kb"], torch.bfloat16)
    made = list(maker.many(0, 11))
    flat = [torch.cat([tensor.flatten() for tensor in one.values()]) for one in made]
    assert len({bytes(row.view(torch.uint8).numpy()) for row in flat}) == 11
    for number in (0, 3, 4, 10):
        again = maker.one(number)
        assert all(torch.equal(again[key], made[number][key]) for key in made[number])
    part_of = list(islice(maker.many(2, 11), 5))
    assert all(torch.equal(part_of[3][key], made[5][key]) for key in made[5])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "nbytes"), [("7kb", 7680), ("38kb", 37632)])
def test_adapters_have_the_size_that_is_said(kind: str, nbytes: int, monkeypatch: pytest.MonkeyPatch):
    module = load("_catalog_adapters", monkeypatch)
    base = BaseShapes.of(CONFIG)
    maker = module.Maker(base, module.KINDS[kind], torch.bfloat16)
    assert sum(tensor.nbytes for tensor in maker.one(7).values()) == nbytes
    assert maker.nbytes == nbytes
    assert module.adapter_bytes(base, module.KINDS[kind], torch.bfloat16) == nbytes


@pytest.mark.long
@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_registered_is_found(streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    registered = part(
        "register", state=str(tmp_path), url=url, config=str(tmp_path), base_digest=DIGEST, kind="7kb",
        dtype="bfloat16", entries=300, policies=3, sample=20, streamed=streamed,
    )  # fmt: skip
    assert (registered["new"], registered["refused"], registered["payload_bytes"]) == (300, 0, 300 * 7680)
    assert registered["store"] >= 300 * 7680
    assert registered["database"] > 0
    names = registered["names"]
    assert len(names) == 20
    module = load("_catalog_adapters", monkeypatch)
    maker = module.Maker(BaseShapes.of(CONFIG), module.KINDS["7kb"], torch.bfloat16)
    catalog, store = whole_catalog(url), Store(tmp_path / "store")
    for number, policy, digest in names:
        assert policy == f"bulk-{number % 3}"
        tensors = stored_tensors(catalog, store, catalog.revisions.get(policy, digest))
        wanted = maker.one(number)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)
    catalog.close()
    if streamed:
        return
    found = part(
        "resolve", url=url, base_digest=DIGEST,
        names=[served_name(policy, digest) for _, policy, digest in names], rounds=3, spawned=time.time(),
    )  # fmt: skip
    assert found["lookups"] == 60
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert 0 < found["import_s"] < found["restart_s"]
    assert 0 < found["floor_p50_us"] <= found["floor_p99_us"]
    read = load("_catalog_floor", monkeypatch).reader(tmp_path / "catalog.db")
    for _, policy, digest in names:
        row = read(served_name(policy, digest))
        assert (row[1].hex(), row[2]) == (digest, policy)


def test_the_floor_registers_as_many_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = load("_catalog_floor", monkeypatch)
    monkeypatch.setattr(module, "BATCH", 64)
    synced, kept = [], []
    monkeypatch.setattr(module.os, "fdatasync", synced.append)
    monkeypatch.setattr(module.shutil, "rmtree", kept.append)
    found = module.register(str(tmp_path), 300, 7680, 3)
    (folder,) = kept
    assert (found["rows"], len(synced)) == (300, 5)
    assert found["seconds"] > 0
    data, catalog = (folder / "floor.seg").read_bytes(), whole_catalog(f"sqlite:///{folder / 'catalog.db'}")
    rows = catalog.access.quick('SELECT digest, checksum, "offset", length FROM revisions', ())
    # Every adapter is another, where its row says, under its own hash.
    assert len({digest for digest, *_ in rows}) == 300
    for digest, checksum, offset, length in rows:
        assert digest == checksum == hashlib.sha256(data[offset : offset + length]).digest()
    catalog.close()
    monkeypatch.undo()
    part("floor", state=str(tmp_path / "part"), entries=10, nbytes=7680, policies=3)
    assert list((tmp_path / "part").iterdir()) == []


def test_a_size_is_measured_by_turns_with_its_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = load("_catalog_sizes", monkeypatch)
    seconds, turns = iter([1.0, 2.0, 1.0, 6.0, 1.0, 3.0]), []

    def floor_s(root, base, entries, kind, policies):
        turns.append("floor")
        return next(seconds)

    def size_of(state, base, entries, url):
        turns.append("ours")
        state.mkdir()
        return {"register_per_s": entries / next(seconds)}, [len(turns)], []

    monkeypatch.setattr(module, "floor_s", floor_s)
    monkeypatch.setattr(module, "size_of", size_of)
    figures, spreads, sample, faults = module.repeated(tmp_path, None, 600, 3)
    assert turns == ["floor", "ours"] * 3
    assert (figures["register_per_s"], figures["register_floor_per_s"]) == (200, 600)
    assert (figures["register_over_floor"], spreads["register_over_floor"]) == (3, "2..6")
    assert (sample, faults) == ([6], [])
    assert module.over_floor({"p50_us": 30.0, "p99_us": 80.0}) == {}
    found = {"p50_us": 30.0, "p99_us": 80.0, "floor_p50_us": 10.0, "floor_p99_us": 20.0}
    assert module.over_floor(found)["resolve_over_floor"] == 4
    assert module.over_floor(found)["resolve_p50_over_floor"] == 3


def test_bytes_are_only_written(tmp_path: Path):
    found = part("write", state=str(tmp_path), nbytes=1_000_000, batch_bytes=300_000)
    assert found["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_registered_adapters_answer_as_those_published_one_by_one(
    engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(BENCH))
    adapters, served = load("_catalog_adapters", monkeypatch), load("_catalog_served", monkeypatch)
    registered = part(
        "register", state=str(engine.state), url=f"sqlite:///{engine.state / 'catalog.db'}",
        config=str(engine.base_path), base_digest=engine.base_digest, kind="7kb", dtype="float32", entries=40,
        policies=2, sample=6,
    )  # fmt: skip
    maker = adapters.Maker(BaseShapes.read(engine.base_path), adapters.KINDS["7kb"], torch.float32)
    found = served.serve(engine, maker, registered["names"], tmp_path)
    assert found.asked == 6
    assert found.unlike_direct == 0
    # In float32 the engine and peft differ by rounding only, and each adapter matters.
    assert found.peft_nats < 2e-4
    assert found.effect_nats > 0.1
    assert served.session_peak_bytes(engine.process.pid) > 1 << 28


def test_a_command_that_takes_too_much_memory_is_red(monkeypatch: pytest.MonkeyPatch):
    catalog = load("catalog", monkeypatch)
    assert catalog.over_bound("purge", catalog.MOST_MB) == []
    assert catalog.over_bound("purge", 700.0) == ["purge took 700 MB, more than 512 MB."]
    assert catalog.over_bound("import", 700.0) == []
    assert catalog.over_bound("import", catalog.MOST_IMPORT_MB + 1) != []


@pytest.mark.long
def test_a_command_that_fails_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    catalog = load("catalog", monkeypatch)
    base = SimpleNamespace(path=tmp_path / "bases" / "base")
    migrate(f"sqlite:///{tmp_path / 'catalog.db'}")
    given = {"gc": catalog.COMMANDS["gc"], "purge": catalog.CHANGES["purge"]}
    figures, faults = catalog.commands(tmp_path, base, given, "bulk-1@abcd")
    assert figures.keys() == {"gc_s", "gc_peak_mb", "purge_s", "purge_peak_mb"}
    assert len(faults) == 1
    assert faults[0].startswith("`graftwork purge")


@pytest.mark.slow
def test_a_command_runs_with_its_peak_memory(tmp_path: Path):
    settings, url = tmp_path / "params.yaml", f"sqlite:///{tmp_path / 'catalog.db'}"
    settings.write_text(json.dumps({"state_dir": str(tmp_path)}))
    migrate(url)
    found = part("command", words=["store", "verify", "--params", str(settings)])
    assert found["code"] == 0
    assert found["peak_bytes"] > 1 << 20
    assert part("command", words=["store", "no-such-command"])["code"] != 0
