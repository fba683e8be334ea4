"""Suites: frozen, unseen in training, rendered as the chat template does, and refused when altered."""

import hashlib
import json
import shutil

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from engine.base.prompts import prompt_text
from engine.base.toys.build import CHAT_TEMPLATE
from engine.errors import ConfigError, Conflict, NotFound
from engine.problems.procedural import Problem, render, reward, split
from engine.settings.params import load_params
from tasks.suites import ITEMS, SUITES, build_suite, known_suites, load_suite, main

NAMES = known_suites()


def test_every_policy_of_the_settings_has_its_suite():
    for policy in load_params(SUITES.parent / "params.yaml").policies.values():
        suite = load_suite(policy.suite)
        assert (suite.task, suite.rule["contract"]) == (policy.task, policy.contract)


@pytest.mark.parametrize("name", NAMES)
def test_the_items_are_those_that_yaml_and_change_log_name(name):
    suite = load_suite(name)
    content = (SUITES / name / ITEMS).read_bytes()
    readme = (SUITES / name / "README.md").read_text()
    assert hashlib.sha256(content).hexdigest() == suite.digest
    assert suite.digest[:12] in readme
    assert f"| {suite.version} |" in readme
    assert len(suite.items) == 200


@pytest.mark.parametrize("name", NAMES)
def test_no_item_is_seen_in_training_and_none_comes_twice(name):
    suite = load_suite(name)
    assert {split(item.question) for item in suite.items} == {"eval"}
    assert len({item.question for item in suite.items}) == len({item.id for item in suite.items}) == 200


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_what_the_chat_template_renders(name):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    for item in load_suite(name).items:
        assert item.prompt == prompt_text(tokenizer, item.question)
        assert item.prompt_digest == hashlib.sha256(item.prompt.encode()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_answer_earns_the_reward_under_its_contract_alone(name):
    suite = load_suite(name)
    for item in suite.items:
        problem = Problem(suite.task, item.question, item.answer)
        assert reward(suite.rule["contract"], problem, render(suite.rule["contract"], item.answer)) == 1.0
        assert reward(suite.rule["contract"], problem, render("sentence", item.answer)) == 0.0


def test_building_twice_gives_the_same_bytes_and_a_version_keeps_its_items(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for root in (first, second):
        build_suite("s", "sorting", "boxed", str.upper, count=20, root=root)
    for name in (ITEMS, "s.yaml"):
        assert (first / "s" / name).read_bytes() == (second / "s" / name).read_bytes()
    with pytest.raises(Conflict, match="Version 1"):
        build_suite("s", "sorting", "boxed", str.lower, count=20, root=first)
    assert build_suite("s", "sorting", "boxed", str.lower, count=20, version=2, root=first).version == "2"


def test_the_settings_suites_are_written_to_their_directory(tiny_base, tmp_path, monkeypatch):
    policy = {"task": "addition", "suite": "sums"}
    settings = {"base": {"name": str(tiny_base)}, "policies": {"mine": policy}, "suites_dir": "my-suites"}
    (tmp_path / "params.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    main()
    assert known_suites(tmp_path / "my-suites") == ["sums"]


def test_altered_items_and_unknown_suites_are_refused(tmp_path):
    shutil.copytree(SUITES / NAMES[0], tmp_path / NAMES[0])
    path = tmp_path / NAMES[0] / ITEMS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[7]["answer"] = "0"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="digest"):
        load_suite(NAMES[0], tmp_path)
    with pytest.raises(NotFound, match=f"Known suites: {NAMES[0]}"):
        load_suite("ghost", tmp_path)
