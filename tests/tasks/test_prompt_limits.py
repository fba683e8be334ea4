"""What is counted once, at `policy create`: prompts and answers that do not fit, chats that do."""

import json
import shutil
from pathlib import Path

import pytest

from engine.base.prompts import prompt_ids, tokenizer_of
from engine.errors import ConfigError
from engine.problems.procedural import stream
from engine.settings.params import BaseConfig, EngineConfig, Params
from engine.training.line_of_training import Line
from engine.training.rollout_data import Source
from tasks.policies import create_policy, describe
from tasks.suites import load_items, load_suite

SYSTEM = {"role": "system", "content": "Be terse."}


@pytest.fixture
def params(tmp_path: Path, tiny_base: Path) -> Params:
    return Params(
        state_dir=tmp_path / "state", suites_dir=tmp_path / "suites", base=BaseConfig(name=str(tiny_base))
    )


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain(count: int = 200) -> list[dict]:
    return [{"question": f"What is {n}?", "answer": str(n)} for n in range(count)]


def chats(count: int = 200) -> list[dict]:
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    return [
        {"messages": [SYSTEM, *said, {"role": "user", "content": f"And {n}?"}], "answer": str(n)}
        for n in range(count)
    ]


def question_of(tokens: int, params: Params) -> str:
    """A question whose rendered prompt has this many tokens: the base has a token a digit."""
    tokenizer = tokenizer_of(Path(params.base.name))
    return "é" + "1" * (tokens - len(prompt_ids(tokenizer, "é")))


def test_prompts_that_fit_exactly_are_taken_and_longer_ones_refused_by_line(
    params: Params, tmp_path: Path
) -> None:
    """256 tokens of context and 24 of an answer leave 232."""
    rows = [*plain(), {"question": question_of(232, params), "answer": "1"}]
    create_policy(params, "mine", write(tmp_path / "d.jsonl", rows), "exact")
    rows[4] = {"question": question_of(233, params), "answer": "1"}
    rows[150] = {"question": question_of(449, params), "answer": "1"}
    source = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(ConfigError, match=r"lines 5, 151: .*449 .*24 .*The base reads at most 256 "):
        create_policy(params, "mine", source, "exact")
    rows[150] = plain()[150]
    source = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(ConfigError, match=r"lines 5: .*233 .*lower max_tokens"):
        create_policy(params, "mine", source, "exact")
    assert create_policy(params, "mine", source, "exact", settings={"max_tokens": 23}).changed


def test_the_setting_that_would_admit_a_prompt_is_named(params: Params, tmp_path: Path) -> None:
    params = params.model_copy(update={"engine": EngineConfig(max_model_len=128)})
    source = write(tmp_path / "d.jsonl", [*plain(), {"question": question_of(150, params), "answer": "1"}])
    with pytest.raises(ConfigError, match=r"lines 201: .*Set engine\.max_model_len to 174 "):
        create_policy(params, "mine", source, "exact")
    wider = params.model_copy(update={"engine": EngineConfig(max_model_len=174)})
    assert create_policy(wider, "mine", source, "exact").changed


def test_the_system_prompt_and_examples_count(params: Params, tmp_path: Path) -> None:
    source = write(tmp_path / "d.jsonl", plain())
    with pytest.raises(ConfigError, match=r"lines 1, 2, 3, 4, 5 and 195 more"):
        create_policy(params, "mine", source, "exact", settings={"system": "1" * 230})


def test_an_answer_that_can_never_be_given_is_refused_by_line(params: Params, tmp_path: Path) -> None:
    rows = [*plain(), {"question": "Count.", "answer": "1" * 25}]
    source = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(ConfigError, match=r"lines 201: .*25 tokens.*Set max_tokens to 26"):
        create_policy(params, "mine", source, "exact")
    assert create_policy(params, "mine", source, "exact", settings={"max_tokens": 26}).changed
    assert create_policy(params, "other", source, "numeric").changed


@pytest.mark.parametrize(
    "row",
    [
        {"question": "<|user|>What is 3?<|assistant|>", "answer": "3"},
        {"messages": [SYSTEM, {"role": "user", "content": "3?<|end|>"}], "answer": "3"},
    ],
)
def test_a_prompt_that_was_rendered_already_is_refused(params: Params, tmp_path: Path, row: dict) -> None:
    """The template would be applied twice, and its control tokens would be read out of the data."""
    source = write(tmp_path / "d.jsonl", [*plain(), row])
    with pytest.raises(ConfigError, match=r"d\.jsonl:201 .*control token"):
        create_policy(params, "mine", source, "exact")


def test_plain_text_that_mentions_a_control_token_is_told_so(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many bases have `<s>`, which is a tag of HTML as well: no template has rendered the text."""
    import tasks.policies

    def llama(path: Path):
        tokenizer = tokenizer_of(path)
        tokenizer.add_tokens(["<s>", "</s>", "<unk>"], special_tokens=True)
        return tokenizer

    monkeypatch.setattr(tasks.policies, "tokenizer_of", llama)
    row = {"question": "Explain the HTML <s>tag</s>.", "answer": "strikes"}
    source = write(tmp_path / "d.jsonl", [*plain(), row])
    with pytest.raises(ConfigError, match=r"d\.jsonl:201 contains '<s>'.* not as text.*'< s>'.*template"):
        create_policy(params, "mine", source, "exact")
    row["question"] = "Explain the HTML < s>tag< /s>."
    assert create_policy(params, "mine", write(source, [*plain(), row]), "exact").changed


def test_a_chat_is_rendered_as_its_messages_in_training_and_scoring(params: Params, tmp_path: Path) -> None:
    create_policy(params, "mine", write(tmp_path / "d.jsonl", chats()), "exact", settings={"system": "No."})
    config = params.policy("mine")
    tokenizer = tokenizer_of(Path(params.base.name))
    source = Source("mine", config, Line("", None, 1, ()), tokenizer, "", "", "base")
    problems = source.problems(0)[0] + [next(stream(config.task, "eval", 1))[1]]
    rendered = {
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        for row in chats()
    }
    assert "<|system|>Be terse.<|user|>2 + 2?<|assistant|>4<|end|><|user|>And 7?<|assistant|>" in rendered
    assert {tokenizer.decode(source.prompt_ids(problem.asked)) for problem in problems} <= rendered
    items = load_suite("mine", params.suites_dir).items
    assert {item.prompt for item in items} < rendered
    assert all(item.question == f"2 + 2?\n\n4\n\nAnd {item.answer}?" for item in items)
    documents = load_items("mine", "mine", params.suites_dir, verifier="exact")["test"]
    assert documents["prompt"] == [item.prompt for item in items]
    assert "messages" not in documents.column_names
    assert not create_policy(params, "mine", tmp_path / "d.jsonl", "exact").changed


def test_a_question_stays_on_its_side_of_the_split_as_a_chat(params: Params, tmp_path: Path) -> None:
    """Another system prompt, or a chat in place of a plain question, moves no question into training."""
    create_policy(params, "mine", write(tmp_path / "d.jsonl", plain()), "exact")
    frozen = {item.question for item in load_suite("mine", params.suites_dir).items}
    for system in ("Be terse.", "Be kind."):
        rows = [
            {"messages": [{**SYSTEM, "content": system}, {"role": "user", "content": row["question"]}],
             "answer": row["answer"]}
            for row in plain()
        ]  # fmt: skip
        create_policy(params, "mine", write(tmp_path / "d.jsonl", rows), "exact")
        assert {item.question for item in load_suite("mine", params.suites_dir).items} == frozen


def test_columns_that_no_prompt_shows_are_named(params: Params, tmp_path: Path) -> None:
    """A question about a text or of several choices, trained without them, earns by chance."""
    rows = [{"id": n, "choices": ["1", "2"], "note": None, **row} for n, row in enumerate(plain())]
    made = create_policy(params, "mine", write(tmp_path / "d.jsonl", rows), "exact")
    assert "`choices`, `id`:" in describe(made)
    assert "No prompt" not in describe(create_policy(params, "b", write(tmp_path / "d", plain()), "exact"))


def test_a_base_without_a_template_takes_no_chat(params: Params, tmp_path: Path, tiny_base: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_base, bare)
    (bare / "chat_template.jinja").unlink()
    params = params.model_copy(update={"base": BaseConfig(name=str(bare))})
    source = write(tmp_path / "d.jsonl", [*plain(), *chats(1)])
    with pytest.raises(ConfigError, match=r"d\.jsonl:201 .*no chat template"):
        create_policy(params, "mine", source, "exact")
    assert create_policy(params, "mine", write(source, plain()), "exact").changed


def test_a_chat_that_the_template_refuses_is_named_by_its_line(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tasks.policies

    def strict(path: Path):
        tokenizer = tokenizer_of(path)
        tokenizer.chat_template = (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
            "{% endif %}{{ messages[-1]['content'] }}"
        )
        return tokenizer

    monkeypatch.setattr(tasks.policies, "tokenizer_of", strict)
    source = write(tmp_path / "d.jsonl", [*plain(), *chats(1)])
    with pytest.raises(ConfigError, match=r"d\.jsonl:201: .*System role not supported"):
        create_policy(params, "mine", source, "exact")
