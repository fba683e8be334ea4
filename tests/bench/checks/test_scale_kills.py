"""Two engines behind HAProxy: one is killed in the middle of a canary, the controller too; a rollback."""

from typing import Any

import pytest

from engine.settings.params import Params
from tests.helpers.bench_files import load

pytestmark = [pytest.mark.services, pytest.mark.heavy(minutes=1), pytest.mark.timeout(900)]


def test_a_killed_engine_a_killed_controller_and_a_rollback_are_no_users_fault(
    tiny_base: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = load("scale", monkeypatch)
    given = Params.model_validate({"state_dir": str(tmp_path), "base": {"name": str(tiny_base)}})
    figures = scale.record.Figures()
    with scale.cluster(given, tmp_path) as site, scale.Crowd(site.key) as crowd:
        scale.take(figures, scale.kills(site, crowd, is_brief=True))
        scale.take(figures, scale.rollbacks(site, crowd, 1, ("up",)))
        scale.take(figures, scale.failover(site, scale.started_s(site)))
        scale.take(figures, scale.observations(site, crowd))
    # How soon the controller is back is the machine's matter.
    bounds = {name: bound for name, bound in scale.BOUNDS.items() if name != "failover_share"}
    # Ten times what is promised, which the benchmark measures.
    bounds["rollback_s"] = scale.record.at_most(10.0)
    assert scale.record.sentences(figures, bounds, "missed") == []
    # Whether a stream was cut or had not begun, and is answered elsewhere, is the machine's matter.
    assert figures.values["requests"] > 0
    assert figures.values["answers"] > 0
    assert figures.values["rollback_failed.up"] == 0
