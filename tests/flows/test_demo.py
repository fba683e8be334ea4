"""The main job's own part: the form of the bad revision."""

import pytest

from engine.settings.params import load_params, resolve_policy
from flows.demo import bad_form
from flows.entry import on_base
from tests.helpers.repository import ROOT


@pytest.mark.parametrize(
    ("base", "verifier", "contract", "steps"),
    [
        ("tiny-dense", "contract", "json", 12),
        ("smollm2-135m", "python:engine.problems.language:not_short_answer", "terse", 4),
    ],
)
def test_the_bad_revision_learns_another_rule_than_its_policy(
    base: str, verifier: str, contract: str, steps: int
) -> None:
    params = on_base(load_params(ROOT / "params.yaml"), base)
    form = bad_form(params)
    config, policy = resolve_policy(params, form.policy, form.changes()).config, params.policy(form.policy)
    assert (config.verifier, config.contract) == (verifier, contract)
    assert (config.verifier, config.contract) != (policy.verifier, policy.contract)
    assert config.steps == steps < policy.steps
    assert not form.scored
