"""Registration in bulk gives what one adapter at a time gives, and an entry that is unfit stops no other."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from engine.adapters import packed, revision
from engine.adapters.revision import make_manifest
from engine.base.families import BaseShapes
from engine.catalog.catalog import Catalog, Policy
from engine.catalog.revision_rows import location
from engine.errors import Moved, ServiceError
from engine.publishing import bulk
from engine.publishing.bulk import Entry, Registered, register_many
from engine.publishing.publish import stored_tensors
from engine.store.segments import Store
from tests.helpers import made_adapters
from tests.helpers.repository import ROOT

BASE, OWNER, NOW = "ba" * 32, "me", 1000.0
DENSE = made_adapters.shapes("qwen3")


def adapter(seed: int, base: BaseShapes = DENSE, dtype=torch.float32, **kwargs) -> dict[str, torch.Tensor]:
    return made_adapters.canonical(base, seed=seed, dtype=dtype, **kwargs)


def alone(tensors: dict, base: BaseShapes, dtype: torch.dtype) -> tuple[str, packed.Packed]:
    """Return the digest and the packed form of one adapter by the ordinary way."""
    targets = {key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}
    rank = max(tensor.shape[0] for key, tensor in tensors.items() if key.endswith("lora_A"))
    return revision.digest(tensors, rank, targets, BASE), packed.pack(tensors, dtype, base.fused)


@contextmanager
def opened(url: str) -> Iterator[Catalog]:
    with closing(Catalog(url)) as catalog:
        for name in ("one", "two"):
            catalog.policies.add(Policy(name, BASE, {}, OWNER, NOW))
        yield catalog


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    with opened(catalog_url) as catalog:
        yield catalog


@pytest.fixture
def sqlite_catalog(sqlite_catalog_url: str) -> Iterator[Catalog]:
    with opened(sqlite_catalog_url) as catalog:
        yield catalog


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store")
    yield store
    store.close()


def register(catalog: Catalog, store: Store, entries, base=DENSE, dtype=torch.float32) -> list[Registered]:
    found = register_many(catalog, store, base, BASE, entries, OWNER, NOW, dtype)
    return sorted(found, key=lambda one: one.position)


def stored_bytes(store: Store) -> int:
    return sum(size for _, size in store.segments())


def test_every_entry_is_in_the_catalog_with_its_own_bytes(catalog: Catalog, store: Store):
    made = [adapter(seed, default=rank) for seed, rank in enumerate([1, 2, 1, 1, 2])]
    found = register(catalog, store, [Entry("one", one, step=i) for i, one in enumerate(made)])
    assert [(one.position, one.new, one.refused) for one in found] == [(i, True, None) for i in range(5)]
    for i, (one, tensors) in enumerate(zip(found, made, strict=True)):
        digest, whole = alone(tensors, DENSE, torch.float32)
        assert one.digest == digest
        row = catalog.revisions.get("one", digest)
        manifest = make_manifest(
            tensors, policy="one", base_digest=BASE, rank=row.rank, targets=DENSE.targets, step=i
        )
        assert (row.digest, row.bytes, row.step) == (manifest.digest, manifest.bytes, i)
        assert store.read(location(row)) == bytes(whole.tobytes())
        back = stored_tensors(catalog, store, row)
        assert all(torch.equal(back[key], tensors[key]) for key in tensors)


def test_an_unfit_entry_stops_no_other(catalog: Catalog, store: Store):
    nan, wide, q = adapter(1), adapter(2), "model.layers.0.self_attn.q_proj.lora_B"
    nan[q][0, 0] = torch.nan
    wide[q] = torch.zeros(3, 2)
    unfit = {
        f"{q} holds NaN": Entry("one", nan),
        f"{q} has the shape": Entry("one", wide),
        "not a policy name": Entry("../one", adapter(3)),
        "There is no policy 'three'": Entry("three", adapter(3)),
        "is not a digest": Entry("one", adapter(3), parent="abc"),
        "The step -1 is not a step number": Entry("one", adapter(3), step=-1),
        f"The step {1 << 31} is not a step number": Entry("one", adapter(3), step=1 << 31),
        "a dict of tensors": Entry("one", None),  # type: ignore[arg-type]
        "values cannot be read": Entry("one", {k: v.to("meta") for k, v in adapter(3).items()}),
        "serves float32": Entry("one", {k: v.numpy() for k, v in adapter(3, dtype=torch.float16).items()}),
    }
    entries = [Entry("one", adapter(10))]
    for i, entry in enumerate(unfit.values()):
        entries += [entry, Entry("two", adapter(11 + i))]
    found = register(catalog, store, entries)
    assert [one.new for one in found] == [True] + [False, True] * len(unfit)
    for reason, one in zip(unfit, found[1::2], strict=True):
        assert one.refused is not None
        assert reason in one.refused
    assert len(catalog.revisions.page("two", limit=100)) == len(unfit)


def test_policies_of_others_are_left_alone(catalog: Catalog, store: Store):
    catalog.policies.add(Policy("theirs", BASE, {}, "they", NOW))
    catalog.policies.add(Policy("elsewhere", "ef" * 32, {}, OWNER, NOW))
    found = register(catalog, store, [Entry("theirs", adapter(0)), Entry("elsewhere", adapter(0))])
    assert [one.refused is None for one in found] == [False, False]
    assert "belongs to 'they'" in str(found[0].refused)
    assert "on base efefefefefef" in str(found[1].refused)


def test_a_policy_for_each_entry_is_looked_up_with_its_batch(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
):
    catalog.policies.add_many(Policy(f"user-{i}", BASE, {}, OWNER, NOW) for i in range(40) if i != 17)
    asked = []
    owners = catalog.policies.owners
    monkeypatch.setattr(catalog.policies, "owners", lambda names: asked.append(len(names)) or owners(names))
    found = register(catalog, store, [Entry(f"user-{i}", adapter(i)) for i in range(40)])
    assert [i for i, one in enumerate(found) if one.refused] == [17]
    assert "no policy 'user-17'" in str(found[17].refused)
    assert sum(one.new for one in found) == 39
    assert asked == [40]
    assert catalog.revisions.get("user-39", str(found[39].digest)).policy == "user-39"


def test_known_bytes_are_not_appended_again(catalog: Catalog, store: Store):
    entries = [Entry("one", adapter(seed)) for seed in range(4)]
    # Twice in one batch, too.
    first = register(catalog, store, [*entries, entries[0]])
    assert [one.new for one in first] == [True] * 4 + [False]
    took = stored_bytes(store)
    assert took <= 4 * packed.pack(adapter(0), torch.float32, DENSE.fused).layout.nbytes
    again = register(catalog, store, [*entries, Entry("two", adapter(1)), Entry("two", adapter(9))])
    assert [one.new for one in again] == [False] * 4 + [True, True]
    digest = again[4].digest
    assert location(catalog.revisions.get("two", digest)) == location(catalog.revisions.get("one", digest))
    assert stored_bytes(store) - took <= took / 4 + 64


def test_many_shapes_do_not_add_up(catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch):
    nbytes = sum(tensor.nbytes for tensor in adapter(0, default=1).values())
    monkeypatch.setattr(bulk, "BATCH_BYTES", 10 * nbytes)
    pulled = 0

    def entries() -> Iterator[Entry]:
        nonlocal pulled
        for number in range(60):
            pulled += 1
            yield Entry("one", adapter(number, default=1 + number % 3))

    results = register_many(catalog, store, DENSE, BASE, entries(), OWNER, NOW, torch.float32)
    next(results)
    assert pulled <= 30
    assert sum(1 for _ in results) == 59


def test_bytes_that_move_meanwhile_are_found_again(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
):
    add, calls = catalog.revisions.add_many, []

    def moved_once(rows, *more):
        calls.append(len(rows))
        if len(calls) == 1:
            raise Moved("The bytes were moved.")
        return add(rows, *more)

    monkeypatch.setattr(catalog.revisions, "add_many", moved_once)
    found = register(catalog, store, [Entry("one", adapter(seed)) for seed in range(3)])
    assert [one.new for one in found] == [True] * 3
    # What was appended the first time is used, not appended again.
    assert stored_bytes(store) <= 3 * packed.pack(adapter(0), torch.float32, DENSE.fused).layout.nbytes


def test_a_full_disk_loses_nothing_that_was_told(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk, "BATCH", 4)
    append, calls = store.append_many, []

    def full(payloads, checksums=None, cached=True):
        calls.append(len(payloads))
        if len(calls) == 3:
            raise ServiceError("Could not write: No space left on device.")
        return append(payloads, checksums, cached)

    monkeypatch.setattr(store, "append_many", full)
    entries = (Entry("one", adapter(i)) for i in range(40))
    results = register_many(catalog, store, DENSE, BASE, entries, OWNER, NOW, torch.float32)
    told: list[str | None] = []
    with pytest.raises(ServiceError, match="No space left"):
        told.extend(one.digest for one in results)
    assert len(told) == 8
    # The batch behind the refused one was handed over before that was known.
    assert len(calls) <= 3 + 1
    rows = {row.digest: row for row in catalog.revisions.page("one", limit=100)}
    assert set(told) <= rows.keys()
    for row in rows.values():
        store.read(location(row))


def test_a_caller_who_stops_leaves_whole_batches(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk, "BATCH", 4)
    results = register_many(
        catalog, store, DENSE, BASE, (Entry("one", adapter(i)) for i in range(40)), OWNER, NOW, torch.float32
    )
    next(results)
    results.close()
    rows = catalog.revisions.page("one", limit=100)
    assert len(rows) % 4 == 0
    for row in rows:
        store.read(location(row))


KILLED = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.helpers import made_adapters
from engine.publishing import bulk
from engine.publishing.bulk import Entry
from engine.catalog.catalog import Catalog
from engine.store.segments import Store
bulk.BATCH = 16
base = made_adapters.shapes("qwen3")
state = Path(sys.argv[1])
entries = (Entry("one", made_adapters.canonical(base, seed=i)) for i in range(1_000_000))
for one in bulk.register_many(
    Catalog(sys.argv[3]), Store(state / "store"), base, "ba" * 32, entries, "me",
    1000.0, torch.float32,
):
    print(one.digest, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "told", [pytest.param(1, marks=pytest.mark.slow), 40, pytest.param(133, marks=pytest.mark.slow)]
)
def test_a_kill_loses_nothing_that_was_told(catalog: Catalog, store: Store, catalog_url: str, told: int):
    state = store.root.parent
    command = [sys.executable, "-c", KILLED, str(state), str(ROOT), catalog_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        digests = [process.stdout.readline().strip() for _ in range(told)]
        process.kill()
        digests += [line.strip() for line in process.stdout if len(line) == 65]
    rows = {row.digest: row for row in catalog.revisions.page("one", limit=100_000)}
    assert set(digests) <= rows.keys()
    for digest, row in rows.items():
        tensors = stored_tensors(catalog, store, row)
        assert alone(tensors, DENSE, torch.float32)[0] == digest


def test_whole_bytes_end_a_quarantine(catalog: Catalog, store: Store):
    entries = [Entry("one", adapter(1)), Entry("two", adapter(1)), Entry("one", adapter(2))]
    first = register(catalog, store, entries)
    damaged, beside, other = (catalog.revisions.get(one.policy, str(one.digest)) for one in first)
    catalog.quarantine.add("one", damaged.digest, "The checksum differs.")
    again = register(catalog, store, [*entries, entries[0]])
    assert [one.new for one in again] == [False] * 4
    assert catalog.quarantine.reason("one", damaged.digest) is None
    healed = catalog.revisions.get("one", damaged.digest)
    assert location(healed) != location(damaged)
    assert store.check([location(healed)]) == [None]
    # Who shared the damaged place has left it, too.
    assert location(catalog.revisions.get("two", beside.digest)) == location(healed)
    assert location(catalog.revisions.get("one", other.digest)) == location(other)


@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_bytes_that_a_disk_has_lost_are_written_again(catalog: Catalog, store: Store, fault: str):
    entries = [Entry("one", adapter(seed)) for seed in range(3)]
    first = register(catalog, store, entries)
    was = location(catalog.revisions.get("one", str(first[0].digest)))
    if fault == "lost":
        store.path(was.segment).unlink()
    else:
        with store.path(was.segment).open("r+b") as file:
            file.seek(was.offset)
            file.write(b"other bytes")
    again = register(catalog, store, [*entries, Entry("two", adapter(0))])
    assert [(one.new, one.refused) for one in again] == [(False, None)] * 3 + [(True, None)]
    rows = [catalog.revisions.get(one.policy, str(one.digest)) for one in again]
    assert store.check([location(row) for row in rows]) == [None] * 4
    assert location(rows[0]) == location(rows[3]) != was


def test_a_quarantined_revision_takes_no_place_of_another(catalog: Catalog, store: Store):
    (first,) = register(catalog, store, [Entry("one", adapter(1))])
    catalog.quarantine.add("one", str(first.digest), "The checksum differs.")
    register(catalog, store, [Entry("two", adapter(1))])
    (again,) = register(catalog, store, [Entry("one", adapter(1))])
    assert not again.new
    assert catalog.quarantine.reason("one", str(first.digest)) is None


def test_a_policy_that_is_purged_meanwhile_stops_no_other(catalog: Catalog, store: Store):
    def entries() -> Iterator[Entry]:
        for seed in range(3):
            yield Entry("one", adapter(seed))
            yield Entry("two", adapter(10 + seed))
        catalog.purges.run("two", "ann", NOW)

    found = register(catalog, store, entries())
    assert [one.new for one in found] == [True, False] * 3
    assert all("'two' was purged" in str(one.refused) for one in found[1::2])
    assert len(catalog.revisions.page("one")) == 3
    assert catalog.revisions.page("two") == []


def test_a_policy_that_is_purged_while_its_batch_is_committed_stops_no_other(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
):
    add = catalog.revisions.add_many

    def purged_first(rows, *more):
        monkeypatch.undo()
        catalog.purges.run("two", "ann", NOW)
        return add(rows, *more)

    monkeypatch.setattr(catalog.revisions, "add_many", purged_first)
    found = register(catalog, store, [Entry(name, adapter(1)) for name in ("one", "two", "one")])
    assert [one.refused is None for one in found] == [True, False, True]
    assert "'two' was purged" in str(found[1].refused)
    assert len(catalog.revisions.page("one")) == 1
    assert catalog.revisions.page("two") == []


def test_a_long_run_leaves_no_long_log(
    sqlite_catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
):
    catalog = sqlite_catalog
    monkeypatch.setattr(bulk, "MANY", 2)
    log = Path(catalog.label + "-wal")
    register(catalog, store, [Entry("one", adapter(seed)) for seed in range(2)])
    assert log.stat().st_size > 0
    register(catalog, store, [Entry("one", adapter(seed)) for seed in range(2, 5)])
    assert log.stat().st_size == 0
    register(catalog, store, [Entry("one", adapter(5))])
    # Somebody who reads is not waited for long.
    with catalog.access.read() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM revisions").scalar()
        register(catalog, store, [Entry("one", adapter(seed)) for seed in range(6, 9)])
        assert log.stat().st_size > 0


def test_batches_are_bounded_whatever_comes(catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk, "BATCH", 8)
    add, sizes, ahead, done = catalog.revisions.add_many, [], [], 0

    def recorded(batch, *more):
        sizes.append(len(batch))
        return add(batch, *more)

    monkeypatch.setattr(catalog.revisions, "add_many", recorded)

    def endless() -> Iterator[Entry]:
        for number in range(100):
            ahead.append(number - done)
            yield Entry("one", adapter(number, default=1))

    for one in register_many(catalog, store, DENSE, BASE, endless(), OWNER, NOW, torch.float32):
        assert one.new
        done += 1
    assert (done, max(sizes)) == (100, 8)
    # One batch that is collected, and one that is committed.
    assert max(ahead) <= 2 * 8


def test_an_entry_is_what_it_was_when_it_was_given(catalog: Catalog, store: Store):
    """Its tensors may be filled again, be sparse, have gradients, or come of inference mode."""
    buffers = adapter(0)

    def entries() -> Iterator[Entry]:
        for seed in range(3):
            for key, tensor in adapter(seed).items():
                buffers[key].copy_(tensor)
            yield Entry("one", dict(buffers))
        with torch.inference_mode():
            untracked = adapter(3)
        yield Entry("one", untracked)
        yield Entry("one", {key: tensor.requires_grad_() for key, tensor in adapter(4).items()})
        yield Entry("one", {key: tensor.to_sparse() for key, tensor in adapter(5).items()})

    *found, sparse = register(catalog, store, entries())
    assert [one.digest for one in found] == [alone(adapter(n), DENSE, torch.float32)[0] for n in range(5)]
    assert "cannot be read" in str(sparse.refused)
