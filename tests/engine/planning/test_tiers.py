"""Slots and the host tier follow from memory, where the settings leave them open."""

from pathlib import Path

import psutil
import pytest

from engine.adapters.adapter_sizes import slot_bytes
from engine.base.families import BaseShapes
from engine.base.toys.recipes import RECIPES
from engine.planning import tiers
from engine.settings.services import EngineConfig

MANY_MOE = BaseShapes.of(RECIPES["many-moe"].config())
GIB = 1 << 30


@pytest.mark.parametrize(
    ("gib", "wanted"),
    # By hand: a quarter of the memory over 13.2 MB a slot, or 4 for each of 128 sequences, or two.
    [(24, "memory"), (64, "sequences"), (0.01, "two")],
)
def test_slots_of_a_cpu_follow_from_its_memory(gib: float, wanted: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "memory_bytes", lambda: int(gib * GIB))
    engine = EngineConfig(dtype="bfloat16", max_rank=1)
    each = slot_bytes(MANY_MOE, 1, 2)
    expected = {"memory": int(gib * GIB / 4) // each, "sequences": 512, "two": 2}[wanted]
    assert tiers.cpu_slots(engine, MANY_MOE) == expected
    assert tiers.cpu_slots(engine.model_copy(update={"slots": 5}), MANY_MOE) == 5


def test_no_engine_has_more_slots_than_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "memory_bytes", lambda: 1 << 45)
    assert tiers.cpu_slots(EngineConfig(max_num_seqs=4096), MANY_MOE) == 1024


def test_the_host_tier_has_half_of_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiers, "memory_bytes", lambda: 24 * GIB)
    assert tiers.host_tier_bytes(EngineConfig()) == 12 * GIB
    assert tiers.host_tier_bytes(EngineConfig(host_bytes=5 << 20)) == 5 << 20


@pytest.mark.parametrize(("given", "most"), [(None, 4096), (1 << 20, 4096), (1 << 30, 16384)])
def test_the_host_tier_has_more_adapters_where_it_is_given_the_bytes(given: int | None, most: int):
    assert tiers.host_tier_adapters(EngineConfig(host_bytes=given)) == most


@pytest.mark.parametrize(("limit", "share"), [("max\n", 1), (None, 1), ("half", 0.5), ("more", 1)])
def test_a_container_has_the_memory_that_it_may_use(
    limit: str | None, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    total = psutil.virtual_memory().total
    file = tmp_path / "memory.max"
    monkeypatch.setattr(tiers, "CONTAINER_LIMIT", file)
    if limit is not None:
        file.write_text({"half": str(total // 2), "more": str(2 * total)}.get(limit, limit))
    assert tiers.memory_bytes() == int(share * total)
