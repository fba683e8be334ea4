"""`graftwork replay`: a canary's verdict again from the ledger, as recorded and with other settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from engine.catalog.catalog import migrate
from engine.catalog.opening import whole_catalog
from engine.controller.release_loop import Controller
from engine.errors import NotFound
from engine.settings.params import Params
from engine.settings.releases import ReleaseConfig
from tasks.replay import replay
from tests.helpers import command_line
from tests.helpers.canary_users import Users
from tests.helpers.rows import NEW, THIRD, fill

SKIPPED = {"score": "not scored here"}


@pytest.fixture
def params(tmp_path: Path) -> Iterator[Params]:
    """A promoted canary that is a little worse, in a ledger whose controller has ended."""
    params = Params(state_dir=tmp_path / "state", release=ReleaseConfig(margin=0.3))
    migrate(params.paths.catalog_url)
    fill(whole_catalog(params.paths.catalog_url))
    controller, users = Controller(params, "test"), Users(params)
    controller.decisions.start("sorting", NEW, {}, SKIPPED, "me")
    controller.tick()
    users.crowd(canary=0.9, baseline=1.0, pairs=25)
    controller.tick()
    controller.close()
    return params


def test_the_recorded_verdict_comes_again(params: Params) -> None:
    found = replay(params, f"sorting@{NEW[:12]}", None, None)
    assert (found.verdict, found.recorded, found.margin) == ("promote", "promote", 0.3)
    assert 20 <= found.canary_units <= 25
    assert replay(params, found.release, None, None) == found


def test_another_margin_and_another_level_decide_otherwise(params: Params) -> None:
    assert replay(params, "sorting", None, 0.1).verdict == "hold"
    assert replay(params, "sorting", 0.5, 0.01).verdict == "rollback"


def test_what_cannot_be_replayed_is_a_sentence(params: Params) -> None:
    with pytest.raises(NotFound, match="release of 'poems'"):
        replay(params, "poems", None, None)
    controller = Controller(params, "test")
    controller.decisions.start("sorting", THIRD, {}, {}, "me")
    controller.tick()
    controller.close()
    with pytest.raises(NotFound, match="had no canary"):
        replay(params, f"sorting@{THIRD}", None, None)


def test_the_command_says_both_verdicts(params: Params, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"state_dir": str(params.state_dir)}))
    said = command_line.graftwork("replay", "sorting", "--margin", "0.1", "--params", str(file)).stdout
    assert "at level 0.05 and margin 0.1: hold" in said
    assert "Recorded: promote." in said
