"""Settings of releases: the ramp, and what differs for a policy."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.errors import ConfigError
from engine.settings.model import explain
from engine.settings.params import Params, load_params
from engine.settings.releases import BAKE_WEIGHT, ReleaseConfig


def test_the_ramp_leads_to_the_weight_and_then_to_the_bake() -> None:
    assert ReleaseConfig().weights == (0.2,)
    ramped = ReleaseConfig(ramp=(0.01, 0.05), weight=0.5, bake_s=60, max_s=100, approval_s=7)
    assert ramped.weights == (0.01, 0.05, 0.5, BAKE_WEIGHT)
    assert ramped.longest_s == 227


@pytest.mark.parametrize(
    "wrong",
    [{"ramp": (0.3,)}, {"ramp": (0.1, 0.05)}, {"ramp": (0.2,)}, {"weight": 0.96, "bake_s": 1}],
)
def test_weights_that_do_not_grow_are_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError, match="must grow"):
        ReleaseConfig.model_validate(wrong)


def test_steps_that_need_an_approval_are_steps_of_the_canary() -> None:
    steps = ReleaseConfig(
        ramp=(0.1,), weight=0.5, bake_s=60, approval_s=7, approval_weights=(0.5, BAKE_WEIGHT)
    )
    assert steps.longest_s == 3 * 7 + 60 + 600 + 60
    with pytest.raises(ValidationError, match=r"0\.1, 0\.5 \(found 0\.95\)"):
        ReleaseConfig(ramp=(0.1,), weight=0.5, approval_s=7, approval_weights=(0.5, 0.95))
    with pytest.raises(ValidationError, match="set `approval_s`"):
        ReleaseConfig(approval_weights=(0.2,))


def test_a_policys_own_settings_replace_the_common_ones() -> None:
    params = Params(release={"alpha": 0.01}, releases={"sorting": {"margin": 0.02, "ramp": [0.01]}})
    assert params.release_of("arithmetic") == ReleaseConfig(alpha=0.01)
    assert params.release_of("sorting") == ReleaseConfig(alpha=0.01, margin=0.02, ramp=(0.01,))


def test_a_fault_of_a_policys_settings_names_policy_and_setting() -> None:
    with pytest.raises(ValidationError) as refused:
        Params(releases={"sorting": {"marjin": 0.02}})
    said = explain(refused.value, Params)
    assert "'sorting'" in said
    assert "marjin" in said


@pytest.mark.parametrize("more", [{"feedback": "none"}, {"guards": ("errors",)}])
def test_segments_without_rewards_are_refused(more: dict) -> None:
    with pytest.raises(ValidationError, match=r"`segments`.*`feedback`"):
        ReleaseConfig(segments=("de",), **more)


def test_a_segment_is_a_word() -> None:
    with pytest.raises(ValidationError):
        ReleaseConfig(segments=("two words",))


def test_a_release_that_an_earlier_version_started_keeps_its_settings() -> None:
    """A row of 265b009 has all of its settings, under their names of then."""
    row = {
        "weight": 0.3, "alpha": 0.01, "feedback": "reward", "guards": ["reward", "errors"], "segments": [],
        "margin": 0.2, "rate_margin": 0.05, "latency_margin": 0.5, "cost_margin": 1.0, "min_units": 30,
        "max_seconds": 700.0, "score_margin": 0.04, "general_margin": 0.05, "ramp": [0.1],
        "step_seconds": 120.0, "bake_seconds": 60.0, "load_s": 60.0, "unloaded": "hold", "approval_s": 5.0,
    }  # fmt: skip
    found = ReleaseConfig.stored(row)
    assert (found.max_s, found.step_s, found.bake_s, found.approval_s) == (700, 120, 60, 5)
    assert (found.weight, found.ramp, found.guards) == (0.3, (0.1,), ("reward", "errors"))
    assert ReleaseConfig.stored(found.model_dump(mode="json")) == found
    with pytest.raises(ValidationError, match="max_seconds"):
        ReleaseConfig.model_validate({"max_seconds": 700})


def test_two_evaluators_of_one_name_are_refused_and_merged_mappings_are_not(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    sums = 'sums: {kind: "python:examples.evaluator:sums"}'
    file.write_text(f"release:\n  evaluators:\n    {sums}\n    {sums}\n")
    with pytest.raises(ConfigError, match="'sums' is there twice"):
        load_params(file)
    file.write_text(
        "release: &all {weight: 0.3}\nreleases:\n  one: {<<: *all}\n  two: {<<: *all, weight: 0.1}\n"
    )
    params = load_params(file)
    assert [params.release_of(name).weight for name in ("one", "two")] == [0.3, 0.1]


def test_an_evaluators_module_must_be_listed(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text('releases: {a: {evaluators: {x: {kind: "python:os:system"}}}}\n')
    with pytest.raises(ConfigError, match="python_modules"):
        load_params(file)
