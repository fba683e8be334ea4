"""Data of the main job on a real base: what is committed is what is written, and no fact is on both sides."""

import json
from itertools import islice
from pathlib import Path

import pytest

from engine.problems.jsonl import read_rows
from engine.problems.language import CHECKS
from engine.problems.procedural import Problem, check_task
from engine.problems.verifiers import Verifier
from engine.settings.params import load_params
from flows.entry import on_base
from tasks.language_data import DATA, ROWS, TRAINING, is_frozen, write_policy
from tasks.suites import SUITES, load_suite

ROOT = SUITES.parent
SETTINGS = load_params(ROOT / "params.smollm2-135m.yaml")
SUITES_DIR = SETTINGS.suites_dir
MOST_BYTES = 200_000


@pytest.mark.parametrize("name", ROWS)
def test_the_committed_data_are_those_that_the_module_writes(name: str, tmp_path: Path) -> None:
    (tmp_path / DATA).symlink_to(SUITES_DIR / DATA)
    config = SETTINGS.policies[name]
    write_policy(
        name, ROWS[name], {"verifier": config.verifier, "max_tokens": config.max_tokens}, tmp_path, str
    )
    assert (tmp_path / name / TRAINING).read_text() == (SUITES_DIR / name / TRAINING).read_text()
    made, known = load_suite(name, tmp_path), load_suite(name, SUITES_DIR)
    assert made.rule == known.rule
    assert [(item.question, item.answer) for item in made.items] == [
        (item.question, item.answer) for item in known.items
    ]
    assert all(item.question in item.prompt for item in known.items)


@pytest.mark.parametrize("name", ROWS)
def test_no_file_is_large_and_no_question_is_on_both_sides(name: str) -> None:
    items = load_suite(name, SUITES_DIR).items
    trained = [row.question for _, row in read_rows(SUITES_DIR / name / TRAINING)]
    assert len({item.question for item in items}) == 200
    assert len(set(trained)) == len(trained) == 400
    assert not {item.question for item in items} & set(trained)
    assert all(file.stat().st_size < MOST_BYTES for file in (SUITES_DIR / name).iterdir())


def test_no_fact_is_on_both_sides() -> None:
    lines = [line.split("\t") for line in (SUITES_DIR / DATA / "facts.tsv").read_text().splitlines()]
    sides = {
        frozen: {subject for _, subject, _ in lines if is_frozen(subject) == frozen} for frozen in (0, 1)
    }
    assert len({(kind, subject) for kind, subject, _ in lines}) == len(lines)
    for frozen in (False, True):
        for row in ROWS["facts"](SUITES_DIR / DATA, frozen):
            assert any(subject in row.question for subject in sides[frozen])


def test_no_word_of_a_text_and_no_topic_is_on_both_sides() -> None:
    words: dict[bool, set[str]] = {False: set(), True: set()}
    topics: dict[bool, set[str]] = {False: set(), True: set()}
    for frozen in (False, True):
        for row in islice(ROWS["extraction"](SUITES_DIR / DATA, frozen), 400):
            words[frozen] |= {value for value in json.loads(row.answer).values() if isinstance(value, str)}
        for row in islice(ROWS["instructions"](SUITES_DIR / DATA, frozen), 400):
            checks = json.loads(row.answer)
            topics[frozen] |= {checks[name] for name in ("about", "with", "starts") if name in checks}
    # Each side of every pool has words.
    assert not words[False] & words[True]
    assert not topics[False] & topics[True]
    assert min(map(len, (*words.values(), *topics.values()))) > 20


@pytest.mark.parametrize("name", ["facts", "extraction"])
def test_the_stated_answer_earns_the_whole_reward(name: str) -> None:
    items = load_suite(name, SUITES_DIR).items
    stated = [item.answer.partition("|")[0] for item in items]
    with Verifier(SETTINGS.policies[name]) as verifier:
        found = verifier.judge(
            (Problem(name, item.question, item.answer), text)
            for item, text in zip(items, stated, strict=True)
        )
    assert (set(found.scores), found.errors) == ({1.0}, {})


def test_every_check_of_an_instruction_is_known_and_asked_for() -> None:
    used = {
        check for item in load_suite("instructions", SUITES_DIR).items for check in json.loads(item.answer)
    }
    assert used == set(CHECKS)


def test_the_base_has_its_own_policies_and_the_other_settings_stay() -> None:
    other = load_params(ROOT / "params.yaml", engine={"port": 9460})
    settings = on_base(other, "smollm2-135m")
    assert settings.policies == SETTINGS.policies
    assert settings.release == SETTINGS.release
    assert settings.engine.port == 9460
    assert settings.state_dir == other.state_dir / "smollm2-135m" == SETTINGS.state_dir
    for policy in settings.policies.values():
        check_task(policy.task)
