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
from engine.problems.families import FAMILIES
from engine.problems.procedural import Problem, is_generated, render, reward, split, stream
from engine.settings.params import load_params
from tasks.suites import ITEMS, SEED, SUITES, build_suite, freeze, known_suites, load_suite, main

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
    # A mixed suite has its problems' task as the segment.
    task = suite.task if is_generated(suite.task) else None
    assert {split(item.question, task or item.segment) for item in suite.items} == {"eval"}
    assert len({item.question for item in suite.items}) == len({item.id for item in suite.items}) == 200


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_what_the_chat_template_renders(name):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    for item in load_suite(name).items:
        assert item.prompt == prompt_text(tokenizer, item.question)
        assert item.prompt_digest == hashlib.sha256(item.prompt.encode()).hexdigest()


@pytest.mark.parametrize("name", [name for name in NAMES if "contract" in load_suite(name).rule])
def test_the_stated_answer_earns_the_reward_under_its_contract_alone(name):
    suite = load_suite(name)
    for item in suite.items:
        problem = Problem(suite.task, item.question, item.answer)
        assert reward(suite.rule["contract"], problem, render(suite.rule["contract"], item.answer)) == 1.0
        assert reward(suite.rule["contract"], problem, render("sentence", item.answer)) == 0.0


def test_each_family_has_a_suite_with_segments_and_two_are_read_by_probability():
    suites = [suite for suite in map(load_suite, NAMES) if suite.task in FAMILIES]
    assert sorted(suite.task for suite in suites) == sorted(FAMILIES)
    assert all(2 <= len({item.segment for item in suite.items}) <= 6 for suite in suites)
    assert {suite.rule.get("verifier") for suite in suites} == {None, "likelihood", "preference"}
    for item in load_suite("circuit-preference").items:
        assert {item.target, item.rejected} == {"0<|end|>", "1<|end|>"}


def test_an_item_that_comes_twice_or_has_no_answer_is_refused_by_name(tmp_path):
    twice, mute = [Problem("t", "2 + 3", "5")] * 2, [Problem("t", "2 + 3", "5"), Problem("t", "2 + 4", " ")]
    for problems, said in ((twice, "item 0001.*item 0000 again"), (mute, "item 0001.*no answer")):
        with pytest.raises(ConfigError, match=said):
            freeze("s", "t", {"verifier": "exact"}, problems, str, 1, 8, tmp_path)
    # A function may judge without an expected answer, and two answers to one question are two items.
    assert freeze("s", "t", {"verifier": "python:m:f"}, mute, str, 1, 8, tmp_path).items[1].answer == " "
    both = [Problem("t", "2 + 3", "5"), Problem("t", "2 + 3", "five")]
    assert len(freeze("two", "t", {"verifier": "exact"}, both, str, 1, 8, tmp_path).items) == 2


def test_a_generated_problem_that_training_draws_is_not_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.suites._unseen", lambda task: (one for _, one in stream(task, "train", SEED)))
    with pytest.raises(ConfigError, match="training problem of gcd is a frozen item"):
        build_suite("s", "gcd", "terse", str, count=5, root=tmp_path)


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
