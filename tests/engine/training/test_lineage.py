"""A line of training: which session its settings name, and when it goes on from the champion."""

import json

import pytest

from engine.catalog.catalog import migrate
from engine.settings.params import Params, Paths
from engine.training.lineage import line_of

DENSE = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
CHAMPION = "ab" * 32


@pytest.fixture
def paths(tmp_path) -> Paths:
    paths = Paths(tmp_path)
    migrate(paths.catalog_url)
    return paths


def config(**changes):
    settings = {"task": "addition", "suite": "addition-terse", **changes}
    return Params.model_validate({"policies": {"arithmetic": settings}}).policies["arithmetic"]


def test_where_lora_sits_is_the_bases_word_unless_the_policy_says(paths):
    every = line_of(paths, "arithmetic", config(), DENSE)
    # The name before a policy could leave its targets to the base: such sessions go on.
    assert every.session == "arithmetic-c87769973dc0"
    assert (every.targets, every.parent, every.seed) == (DENSE, None, 1)
    some = line_of(paths, "arithmetic", config(targets=("q_proj", "v_proj")), DENSE)
    assert some.targets == ("q_proj", "v_proj")
    assert some.session != every.session


@pytest.mark.parametrize(("targets", "continues"), [(DENSE, True), (("q_proj", "v_proj"), False)])
def test_a_champion_on_other_projections_is_no_parent(paths, monkeypatch, targets, continues):
    monkeypatch.setattr("engine.training.lineage._standing", lambda *_: (CHAMPION, 0))
    directory = paths.revision("arithmetic", CHAMPION)
    directory.mkdir(parents=True)
    manifest = {"targets": sorted(targets), "config": config().model_dump(mode="json")}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    found = line_of(paths, "arithmetic", config(), DENSE)
    assert found.parent == (CHAMPION if continues else None)
