"""A line of training: which session its settings name, and when it goes on from the champion."""

import json
from dataclasses import replace

import pytest

from engine.catalog.catalog import Base, Catalog, Policy, migrate
from engine.settings.params import Params, Paths
from engine.training.line_of_training import line_of
from tests.helpers.rows import make_revision

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
def test_a_champion_on_other_projections_is_no_parent(paths, targets, continues):
    with Catalog(paths.catalog_url) as catalog:
        catalog.bases.add(Base("base", "tiny", "/tiny", 0.0))
        catalog.policies.add(Policy("arithmetic", "base", {}, "me", 0.0))
        champion = make_revision(CHAMPION, policy="arithmetic", state="exported", expires_at=None)
        catalog.revisions.add_many([champion])
        route = catalog.routes.get("arithmetic")
        catalog.routes.update(replace(route, champion=CHAMPION), route.version)
    directory = paths.revision("arithmetic", CHAMPION)
    directory.mkdir(parents=True)
    manifest = {"targets": sorted(targets), "config": config().model_dump(mode="json")}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    found = line_of(paths, "arithmetic", config(), DENSE)
    assert found.parent == (CHAMPION if continues else None)
