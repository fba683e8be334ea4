"""The recipe that follows a base's width: its values, what overrides them, and what a narrow base keeps."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from engine.base.fitting import fitted_policy, fitting_settings
from engine.base.toys.recipes import RECIPES
from engine.settings.params import BaseConfig, Params, load_params
from engine.settings.policies import PolicyConfig
from engine.training.loop import learning_rate
from tasks.policies import create_policy

WIDE = 576


@pytest.fixture
def params(tmp_path: Path, tiny_base: Path) -> Params:
    """Settings with a base whose `config.json` says that it is wide; nothing loads its weights."""
    base = tmp_path / "wide"
    shutil.copytree(tiny_base, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"hidden_size": WIDE}))
    return Params(
        state_dir=tmp_path / "state", suites_dir=tmp_path / "suites", base=BaseConfig(name=str(base))
    )


def test_the_rate_falls_with_the_width_by_the_published_exponent() -> None:
    # By hand: 6e-5 * (4096 / 576) ** 0.781 = 6e-5 * 4.627.
    rates = {hidden: fitting_settings({"hidden_size": hidden})["lr"] for hidden in (576, 1024, 4096)}
    assert rates == {576: 2.8e-4, 1024: 1.8e-4, 4096: 6e-5}


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.learns])
def test_a_built_base_keeps_the_defaults(name: str, tmp_path: Path) -> None:
    config = PolicyConfig(task="addition", suite="s")
    params = Params(state_dir=tmp_path, base=BaseConfig(name=name), policies={"sums": config})
    resolved = fitted_policy(params, "sums")
    assert resolved.config == config
    assert set(resolved.sources.values()) == {"default", "params.yaml"}


def test_a_wide_base_decides_what_nobody_gave(params: Params) -> None:
    given = PolicyConfig(task="addition", suite="s", lr=1e-3, loss_config={"clip_high": 0.5})
    settings = params.model_copy(update={"policies": {"sums": given}})
    resolved = fitted_policy(settings, "sums", {"rank": 4})
    config, sources = resolved.config, resolved.sources
    assert (config.lr, config.rank, config.alpha, config.warmup_steps) == (1e-3, 4, 32.0, 3)
    # Settings of the loss are merged one by one.
    assert (config.loss_config.clip_high, config.loss_config.kl) == (0.5, 0.04)
    named = {name: sources[name] for name in ("lr", "rank", "alpha", "groups")}
    assert named == {"lr": "params.yaml", "rank": "request", "alpha": "the base", "groups": "default"}


def test_settings_that_services_and_flows_read_leave_open_what_nobody_gave(
    params: Params, tmp_path: Path
) -> None:
    given = PolicyConfig(task="addition", suite="s", steps=7)
    settings = params.model_copy(update={"policies": {"sums": given}})
    file = tmp_path / "params.json"
    file.write_text(settings.to_json())
    read = load_params(file)
    assert read.model_dump() == settings.model_dump()
    assert fitted_policy(read, "sums").config == fitted_policy(settings, "sums").config
    assert fitted_policy(read, "sums").config.lr == 2.8e-4


def test_what_policy_create_is_given_stands_against_the_base_even_where_it_is_a_default(
    params: Params, tmp_path: Path
) -> None:
    source = tmp_path / "data.jsonl"
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(200)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    create_policy(params, "plain", source, "exact", items=10)
    assert fitted_policy(params, "plain").config.loss_config.kl == 0.04
    default_lr = PolicyConfig(task="addition", suite="s").lr
    given = {"lr": default_lr, "loss_config": {"kl": 0.0}}
    create_policy(params, "given", source, "exact", settings=given, items=10)
    own = yaml.safe_load((params.suites_dir / "given" / "policy.yaml").read_text())
    assert (own["lr"], own["loss_config"]) == (default_lr, {"kl": 0.0})
    assert "alpha" not in own
    config = fitted_policy(params, "given").config
    assert (config.lr, config.loss_config.kl, config.alpha) == (default_lr, 0.0, 32.0)
    # Created again with another setting, it keeps the first ones.
    create_policy(params, "given", source, "exact", settings={"steps": 7}, items=10)
    config = fitted_policy(params, "given").config
    assert (config.steps, config.lr, config.loss_config.kl) == (7, default_lr, 0.0)


def test_the_rate_rises_over_the_first_steps() -> None:
    warm = PolicyConfig(task="addition", suite="s", lr=3e-4, warmup_steps=3)
    assert [learning_rate(warm, step) for step in range(5)] == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4, 3e-4])
    cold = warm.model_copy(update={"warmup_steps": 0})
    assert [learning_rate(cold, step) for step in range(2)] == [3e-4, 3e-4]
