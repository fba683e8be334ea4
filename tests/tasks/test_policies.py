"""`policy create`: data to a suite and a policy, whole or not at all; owners, leaks, versions, bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.base.resident import ensure_base
from engine.catalog.catalog import Base, Policy, migrate
from engine.catalog.opening import open_catalog, whole_catalog
from engine.errors import BaseModelError, ConfigError, Conflict, NotFound
from engine.problems.jsonl import read_rows
from engine.problems.verifiers import RULES
from engine.settings.params import BaseConfig, Params, known_policies, load_params
from tasks import policies
from tasks.policies import create_policy, describe, worked_examples
from tasks.suites import SUITES, load_suite
from tests.helpers.command_line import graftwork
from tests.helpers.repository import ROOT
from tests.helpers.rows import make_revision


@pytest.fixture
def params(tmp_path: Path, tiny_base: Path) -> Params:
    return Params(
        state_dir=tmp_path / "state", suites_dir=tmp_path / "suites", base=BaseConfig(name=str(tiny_base))
    )


def data(path: Path, count: int = 400, answer: str = "{}") -> Path:
    rows = [{"question": f"What is {n}?", "answer": answer.format(n)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_near_duplicate_of_a_frozen_item_is_refused(params: Params, tmp_path: Path) -> None:
    source = data(tmp_path / "d.jsonl")
    frozen = load_suite_of(params, source).items[0]
    near = frozen.question.replace("What is", "what's not is").replace("?", " ?")
    with source.open("a") as file:
        for text in (f"  {frozen.question}!", near):
            file.write(json.dumps({"question": text, "answer": frozen.answer}) + "\n")
    with pytest.raises(ConfigError, match=f"Training line .* is the frozen item {frozen.id}, or nearly"):
        create_policy(params, "other", source, "numeric")
    assert not (params.suites_dir / "other").exists()


def load_suite_of(params: Params, source: Path) -> Any:
    create_policy(params, "mine", source, "numeric")
    return load_suite("mine", params.suites_dir)


def test_everything_of_a_policy_lies_in_its_directory(params: Params, tmp_path: Path) -> None:
    settings = {"system": "Be terse.", "steps": 7}
    made = create_policy(
        params, "mine", data(tmp_path / "d.jsonl"), "numeric", "ada", settings=settings, items=30
    )
    where = params.suites_dir / "mine"
    assert sorted(file.name for file in where.iterdir() if file.suffix != ".py") == sorted(
        ["README.md", "items.jsonl", "mine.yaml", "policy.yaml", "train.jsonl"]
    )
    assert (made.training + made.held_out, made.frozen, made.changed) == (400, 30, True)
    config = params.policy("mine")
    assert (config.verifier, config.owner, config.steps) == ("numeric", "ada", 7)
    assert config.task == str(where / "train.jsonl")
    assert config.data_digest == made.data_digest
    assert known_policies(params) == ["mine"]
    suite = load_suite("mine", params.suites_dir)
    assert len(suite.items) == 30
    assert all("Be terse." in item.prompt for item in suite.items)
    trained = {row.question for _, row in read_rows(where / "train.jsonl")}
    assert not trained & {item.question for item in suite.items}


def test_the_same_again_changes_nothing(params: Params, tmp_path: Path) -> None:
    source = data(tmp_path / "d.jsonl")
    create_policy(params, "mine", source, "exact")
    before = {file: file.read_bytes() for file in (params.suites_dir / "mine").iterdir() if file.is_file()}
    again = create_policy(params, "mine", source, "exact")
    assert not again.changed
    assert "nothing has changed" in describe(again)
    assert before == {file: file.read_bytes() for file in before}


def test_new_data_is_a_new_version_and_keeps_the_change_log(params: Params, tmp_path: Path) -> None:
    first = create_policy(params, "mine", data(tmp_path / "d.jsonl"), "exact")
    second = create_policy(params, "mine", data(tmp_path / "d.jsonl", 900), "exact")
    assert (first.suite_version, second.suite_version) == (1, 2)
    assert first.data_digest != second.data_digest
    log = (params.suites_dir / "mine" / "README.md").read_text()
    assert "version 1," in log
    assert "version 2," in log


def test_another_rule_on_the_same_items_is_a_new_version(params: Params, tmp_path: Path) -> None:
    source = data(tmp_path / "d.jsonl")
    create_policy(params, "mine", source, "exact")
    assert create_policy(params, "mine", source, "numeric").suite_version == 2


def test_the_version_of_a_rule_is_a_part_of_the_suites(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite that was frozen under an older rule opens, and its scores are not those of the older rule."""
    source = data(tmp_path / "d.jsonl")
    monkeypatch.setitem(RULES, "numeric", 1)
    create_policy(params, "mine", source, "numeric")
    assert load_suite("mine", params.suites_dir).version == "1"
    monkeypatch.setitem(RULES, "numeric", 2)
    assert load_suite("mine", params.suites_dir).version == "1.2"
    assert not create_policy(params, "mine", source, "numeric").changed
    assert create_policy(params, "mine", data(tmp_path / "d.jsonl", 600), "numeric").suite_version == 2
    suite = load_suite("mine", params.suites_dir)
    assert (suite.version, suite.items_version, suite.rule_version) == ("2.2", 2, 2)
    assert create_policy(params, "own", source, "python:examples.verifier:judge").suite_version == 1
    assert load_suite("own", params.suites_dir).version == "1"


def test_longer_answers_are_a_new_version(params: Params, tmp_path: Path) -> None:
    """What was cut at 24 tokens is not comparable with what may have 200."""
    source = data(tmp_path / "d.jsonl")
    create_policy(params, "mine", source, "exact")
    assert create_policy(params, "mine", source, "exact", settings={"max_tokens": 200}).suite_version == 2


def test_what_is_not_given_again_stays_as_it_was(params: Params, tmp_path: Path) -> None:
    create_policy(params, "mine", data(tmp_path / "d.jsonl"), "exact", settings={"system": "Be terse."})
    file = params.suites_dir / "mine" / "policy.yaml"
    file.write_text(file.read_text() + "lr: 0.0004\nrank: 4\n")
    create_policy(params, "mine", data(tmp_path / "d.jsonl", 600), "exact", settings={"steps": 3})
    config = params.policy("mine")
    assert (config.system, config.lr, config.rank, config.steps) == ("Be terse.", 0.0004, 4, 3)


def test_a_suite_that_is_no_policys_own_is_never_replaced(params: Params, tmp_path: Path) -> None:
    shutil.copytree(SUITES / "addition-terse", params.suites_dir / "addition-terse")
    with pytest.raises(Conflict, match="suite of another policy"):
        create_policy(params, "addition-terse", data(tmp_path / "d.jsonl"), "exact")
    assert load_suite("addition-terse", params.suites_dir).rule["contract"] == "terse"


def test_a_name_that_yaml_reads_as_something_else(params: Params, tmp_path: Path) -> None:
    create_policy(params, "no", data(tmp_path / "d.jsonl"), "exact")
    assert load_suite("no", params.suites_dir).task == "no"


def test_an_empty_settings_file_is_replaced(params: Params, tmp_path: Path) -> None:
    create_policy(params, "mine", data(tmp_path / "d.jsonl"), "exact")
    (params.suites_dir / "mine" / "policy.yaml").write_text("")
    assert create_policy(params, "mine", data(tmp_path / "d.jsonl"), "exact").changed


def test_a_name_of_another_owner_is_refused(params: Params, tmp_path: Path) -> None:
    source = data(tmp_path / "d.jsonl")
    create_policy(params, "mine", source, "exact", "ada")
    with pytest.raises(Conflict, match="belongs to 'ada'"):
        create_policy(params, "mine", source, "exact", "bob")
    assert params.policy("mine").owner == "ada"


def test_a_question_that_was_frozen_never_becomes_training_data(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the split ever change, an old item among the new training rows is refused by name."""
    source = data(tmp_path / "d.jsonl")
    create_policy(params, "mine", source, "exact")
    before = (params.suites_dir / "mine" / "train.jsonl").read_bytes()
    monkeypatch.setattr("engine.problems.jsonl.is_held_out", lambda digest: digest[0] % 3 == 0)
    with pytest.raises(ConfigError, match="frozen item"):
        create_policy(params, "mine", data(tmp_path / "d.jsonl", 500), "exact")
    assert (params.suites_dir / "mine" / "train.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "verifier", "answer", "settings", "fault"),
    [
        ("Bad Name", "exact", "{}", {}, "'Bad Name'"),
        ("mine", "guess", "{}", {}, "`verifier`"),
        ("mine", "contract", "{}", {}, "`contract`.*generated"),
        ("mine", "python:nowhere:judge", "{}", {}, "python_modules"),
        ("mine", "python:examples.nowhere:judge", "{}", {}, "cannot be loaded"),
        ("mine", "numeric", "number {}", {}, r"d\.jsonl:1: .*numeric"),
        ("mine", "numeric", "1,{}", {}, r"d\.jsonl:1: .*'1,0'"),
        ("mine", "numeric", "{}%", {}, r"d\.jsonl:1: .*percent"),
        ("mine", "exact", " ", {}, r"d\.jsonl:1: .*empty"),
        ("mine", "regex", "", {}, r"d\.jsonl:1: .*empty"),
        ("mine", "regex", "({}", {}, r"d\.jsonl:1: .*regular expression"),
        ("mine", "json-schema", '{{"type": {}}}', {}, r"d\.jsonl:1: .*JSON schema"),
        ("mine", "json-schema", '{{"$ref": "file:///etc/passwd"}}', {}, r"d\.jsonl:1: .*etc/passwd"),
        ("mine", "exact", "{}", {"steps": 0}, "`steps`"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_leaves_nothing(
    params: Params, tmp_path: Path, name: str, verifier: str, answer: str, settings: dict, fault: str
) -> None:
    source = data(tmp_path / "d.jsonl", answer=answer)
    with pytest.raises(ConfigError, match=fault):
        create_policy(params, name, source, verifier, settings=settings)
    left = list(params.suites_dir.iterdir()) if params.suites_dir.is_dir() else []
    assert [entry.name for entry in left if entry.name != ".lock"] == []


def examples(path: Path, **more: str) -> Path:
    """Write so many example chats; with more answers than one, pairs."""
    rows: list[dict[str, Any]] = []
    for n in range(200):
        turns = [
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": f"It is {n}."},
        ]
        pair = {"prompt": f"What is {n}?", "chosen": f"It is {n}.", **more}
        rows.append(pair if more else {"messages": turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_data_suggest_the_method(params: Params, tmp_path: Path) -> None:
    """Example chats are learned by SFT, pairs by DPO; questions with answers leave it open."""
    create_policy(params, "chatty", examples(tmp_path / "chats.jsonl"))
    create_policy(params, "prefers", examples(tmp_path / "pairs.jsonl", rejected="?"))
    questions = data(tmp_path / "questions.jsonl")
    with pytest.raises(ConfigError, match=r"--verifier.*--method sft"):
        create_policy(params, "sums", questions)
    create_policy(params, "sums", questions, settings={"method": "sft", "steps": 9})
    found = {name: params.policy(name) for name in ("chatty", "prefers", "sums")}
    assert {name: (one.method, one.verifier) for name, one in found.items()} == {
        "chatty": ("sft", "likelihood"), "prefers": ("dpo", "preference"), "sums": ("sft", "likelihood"),
    }  # fmt: skip
    training = sum(1 for _ in read_rows(params.suites_dir / "chatty" / "train.jsonl"))
    assert found["chatty"].steps == -(-3 * training // 16)
    # A pass over the pairs alone, at a tenth of the others' rate.
    assert found["prefers"].steps == -(-training // 16)
    assert found["prefers"].lr == pytest.approx(found["chatty"].lr / 10)
    assert (found["sums"].epochs, found["sums"].steps) == (None, 9)
    assert (params.suites_dir / "chatty" / "validation.jsonl").is_file()
    items = load_suite("prefers", params.suites_dir).items
    assert all(item.rejected.startswith("?") and item.target.startswith(item.answer) for item in items)
    assert all(item.tokens > 1 for item in items)


def test_newer_data_keep_the_method_and_count_the_steps_anew(params: Params, tmp_path: Path) -> None:
    source = examples(tmp_path / "d.jsonl")
    create_policy(params, "chatty", source, settings={"epochs": 2})
    before = params.policy("chatty").steps
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines) + "".join(line.replace("What is", "Say") for line in lines))
    assert create_policy(params, "chatty", source).changed
    after = params.policy("chatty")
    assert (after.method, after.epochs) == ("sft", 2)
    assert after.steps > 1.5 * before
    assert not create_policy(params, "chatty", source).changed
    # Then by reinforcement, from what was learned.
    more = {"method": "grpo", "start": "chatty@0123456789ab"}
    questions = data(tmp_path / "q.jsonl")
    with pytest.raises(NotFound):
        create_policy(params, "chatty", questions, "exact", settings=more)
    base = ensure_base(params.base, params.paths).digest
    revision = make_revision("ab" * 32, policy="chatty", base=base, owner="local", state="exported")
    migrate(params.paths.catalog_url)
    with whole_catalog(params.paths.catalog_url) as catalog:
        catalog.bases.add(Base(base, "tiny", str(params.base.name), 1.0))
        catalog.policies.add(Policy("chatty", base, {}, "local", 1.0))
        catalog.revisions.add_many([revision])
    digest = revision.digest
    more = {"method": "grpo", "start": f"chatty@{digest[:12]}"}
    create_policy(params, "chatty", questions, "exact", settings=more)
    assert (params.policy("chatty").method, params.policy("chatty").start) == ("grpo", more["start"])
    with pytest.raises(ConfigError, match="--rank 8"):
        create_policy(params, "other", questions, "exact", settings={**more, "rank": 4})


@pytest.mark.parametrize(
    ("settings", "verifier", "fault"),
    [
        ({"method": "grpo"}, None, "--verifier"),
        ({"method": "dpo"}, None, r"d\.jsonl:1 needs `chosen` and `rejected`"),
        ({"method": "grpo"}, "likelihood", "needs a verifier"),
        ({"epochs": 0}, None, "`epochs`"),
        ({"start": "chatty"}, None, "POLICY@DIGEST"),
        ({"loss": "gspo"}, None, "does not read loss"),
        ({"group_size": 4}, None, "does not read group_size"),
        ({"epochs": 2, "steps": 7}, None, "either --epochs or --steps"),
        ({"groups": 1, "epochs": 1000}, None, "`steps`"),
        ({"method": "sft"}, "numeric", "verifier numeric"),
        ({"method": "dpo"}, "exact", r"d\.jsonl:1 needs `chosen` and `rejected`"),
    ],
)
def test_a_method_without_its_data_is_refused(
    params: Params, tmp_path: Path, settings: dict, verifier: str | None, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        create_policy(params, "mine", examples(tmp_path / "d.jsonl"), verifier, settings=settings)


def test_examples_that_do_not_fit_the_context_are_named(params: Params, tmp_path: Path) -> None:
    source = examples(tmp_path / "d.jsonl", rejected="word " * 1000)
    with pytest.raises(ConfigError, match=r"in lines 1, 2, 3, 4, 5 and 195 more.*engine\.max_model_len"):
        create_policy(params, "mine", source)


@pytest.mark.parametrize("answer", ["", " "])
def test_an_empty_answer_is_not_learned(params: Params, tmp_path: Path, answer: str) -> None:
    source = data(tmp_path / "d.jsonl", answer=answer)
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: .*empty"):
        create_policy(params, "mine", source, settings={"method": "sft"})


def test_pairs_are_not_for_grpo(params: Params, tmp_path: Path) -> None:
    source = examples(tmp_path / "d.jsonl", rejected="?")
    with pytest.raises(ConfigError, match="--method dpo or sft"):
        create_policy(params, "mine", source, "exact", settings={"method": "grpo"})


def test_another_method_does_not_keep_the_values_of_the_one_before(params: Params, tmp_path: Path) -> None:
    pairs = examples(tmp_path / "d.jsonl", rejected="?")
    create_policy(params, "mine", pairs, settings={"rank": 4})
    assert params.policy("mine").lr == pytest.approx(2e-4)
    create_policy(params, "mine", pairs, settings={"method": "sft"})
    config = params.policy("mine")
    assert (config.lr, config.epochs, config.verifier, config.rank) == (2e-3, 3, "likelihood", 4)
    # Steps that were given are kept, also those that are the default.
    create_policy(params, "mine", pairs, settings={"steps": 20})
    create_policy(params, "mine", examples(tmp_path / "e.jsonl"))
    assert (params.policy("mine").steps, params.policy("mine").epochs) == (20, None)


def test_worked_examples_come_from_any_file_but_are_no_chats(tmp_path: Path) -> None:
    (tmp_path / "shots.csv").write_text('question,answer\n"1, 2?",3\n')
    assert worked_examples(tmp_path / "shots.csv") == [{"question": "1, 2?", "answer": "3"}]
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    (tmp_path / "shots.json").write_text(json.dumps([{"messages": turns}]))
    with pytest.raises(ConfigError, match=r"shots\.json:1 is a chat"):
        worked_examples(tmp_path / "shots.json")


def test_a_name_of_the_settings_file_is_refused(params: Params, tmp_path: Path) -> None:
    taken = params.model_copy(update={"policies": {"mine": object()}})
    with pytest.raises(Conflict, match="Choose another name"):
        create_policy(taken, "mine", data(tmp_path / "d.jsonl"), "exact")


def test_another_base_is_refused(params: Params, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resident base.*'other'"):
        create_policy(params, "mine", data(tmp_path / "d.jsonl"), "exact", base="other")


def test_a_base_whose_template_was_exchanged_is_refused(
    params: Params, tmp_path: Path, tiny_base: Path
) -> None:
    """The frozen prompts would be rendered by another template than the one of its revisions."""
    own = shutil.copytree(tiny_base, tmp_path / "own")
    params = params.model_copy(update={"base": BaseConfig(name=str(own))})
    source = data(tmp_path / "d.jsonl")
    with open_catalog(params.paths, migrated=True) as catalog:
        assert create_policy(params, "unknown", source, "exact").changed
        catalog.bases.register(ensure_base(params.base, params.paths))
    assert create_policy(params, "known", source, "exact").changed
    template = own / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    with pytest.raises(BaseModelError, match=r"chat_template\.jinja changed") as refused:
        create_policy(params, "mine", source, "exact")
    assert known_policies(params) == ["known", "unknown"]
    accepted = str(refused.value).partition("base.text_digest to ")[2][:12]
    with open_catalog(params.paths) as catalog:
        catalog.bases.register(ensure_base(params.base, params.paths), accepted)
    assert create_policy(params, "mine", source, "exact").changed


@pytest.fixture
def settings_file(params: Params, tmp_path: Path) -> Path:
    file = tmp_path / "params.json"
    places = {"state_dir": str(params.state_dir), "suites_dir": str(params.suites_dir)}
    file.write_text(json.dumps(places | {"base": {"name": params.base.name}}))
    return file


def test_the_command_takes_the_recipe(settings_file: Path, tmp_path: Path) -> None:
    given = ("--data", str(data(tmp_path / "d.jsonl")), "--verifier", "exact", "--params", str(settings_file))
    recipe = ("--lr", "0.0005", "--loss", "dr_grpo", "--rank", "4", "--groups", "8", "--group-size", "16")
    made = graftwork("policy", "create", "mine", *given, *recipe)
    assert made.returncode == 0, made.stderr
    config = load_params(settings_file).policy("mine")
    assert (config.lr, config.loss, config.rank) == (0.0005, "dr_grpo", 4)
    assert (config.groups, config.group_size) == (8, 16)
    shown = graftwork("policy", "show", "mine", "--params", str(settings_file)).stdout
    assert "mine/train.jsonl" in shown
    assert str(tmp_path) not in shown


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--rank", "3", "`rank`"),
        ("--rank", "64", "rank is 64"),
        ("--lr", "-1", "`lr`"),
        ("--loss", "reinforce", "'reinforce'"),
        ("--loss", "python:nowhere:loss", "python_modules"),
        ("--loss", "python:examples.x:loss", "cannot be loaded"),
        ("--group-size", "1", "`group_size`"),
    ],
)
def test_a_wrong_recipe_is_a_sentence(
    settings_file: Path, tmp_path: Path, option: str, value: str, fault: str
) -> None:
    given = ("--data", str(data(tmp_path / "d.jsonl")), "--verifier", "exact", "--params", str(settings_file))
    refused = graftwork("policy", "create", "mine", *given, option, value)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert fault in refused.stderr
    assert known_policies(load_params(settings_file)) == []


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_while_swapping_loses_nothing(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Killed before or after the new directory is in its place: the next create goes on from a whole one."""
    create_policy(params, "mine", data(tmp_path / "d.jsonl"), "exact")
    rename, left = Path.rename, iter(range(renames))

    def cut(self: Path, target: Path) -> Path:
        if target.name in ("mine", ".mine.old") and next(left, None) is None:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut)
        patched.setattr(policies.shutil, "rmtree", lambda *_, **__: None)
        try:
            create_policy(params, "mine", data(tmp_path / "d.jsonl", 600), "exact")
        except KeyboardInterrupt:
            assert renames == 1
            assert known_policies(params) == []
    made = create_policy(params, "mine", data(tmp_path / "d.jsonl", 600), "exact")
    assert (made.suite_version, made.changed) == (2, renames == 1)
    assert known_policies(params) == ["mine"]
    assert not list(params.suites_dir.glob(".mine.old"))


def test_what_a_new_policy_leaves_beside_it_makes_no_checkout_dirty(params: Params, tmp_path: Path) -> None:
    create_policy(params, "mine", data(tmp_path / "d.jsonl"), "numeric", "ada", items=30)
    (lock,) = [file.name for file in params.suites_dir.iterdir() if file.name != "mine"]
    assert f"/eval_suites/{lock}" in (ROOT / ".gitignore").read_text().splitlines()
