"""Verifiers: what counts as right, and that one that raises, hangs, dies or talks nonsense ends nothing."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.problems.procedural import Problem
from engine.problems.verifiers import FAULTS, Verifier, foreign_reference, has_spread, load_judge, number
from engine.settings.policies import PolicyConfig

MODULE = """
import os, time

def half(question, answer, text): return 0.5
def right(question, answer, text): return text == answer
def raises(question, answer, text): raise KeyError("no")
def hangs(question, answer, text): time.sleep(600) if text == "hang" else None; return 1
def word(question, answer, text): return "yes"
def much(question, answer, text): return 7
def prints(question, answer, text): print("noise", input() if text == "ask" else ""); return 1
def odd(question, answer, text): return float("nan")
def dies(question, answer, text): os._exit(3)
def told(question, answer, text): return float(answer in open("/proc/self/environ").read() + str(os.environ))
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A person's module in the working directory."""
    (tmp_path / "my_rules.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "my_rules"
    sys.modules.pop("my_rules", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def config(kind: str, timeout_s: float = 60) -> PolicyConfig:
    return PolicyConfig(task="train.jsonl", suite="s", verifier=kind, verifier_timeout_s=timeout_s)


def judged(kind: str, answer: str, *texts: str, timeout_s: float = 60) -> tuple[list[float], dict[str, int]]:
    with Verifier(config(kind, timeout_s)) as verifier:
        found = verifier.judge([(Problem("t", "q", answer), text) for text in texts])
    return found.scores, dict(found.errors)


@pytest.mark.parametrize(
    ("kind", "answer", "right", "wrong"),
    [
        ("exact", "42", ["42", " 42\n"], ["042", "42.", "", "It is 42"]),
        ("exact", "caf\u00e9", ["caf\u00e9", "cafe\u0301"], ["cafe", "Caf\u00e9"]),
        ("exact", "cafe\u0301", ["caf\u00e9"], ["cafe"]),
        ("regex", "caf[\u00e9]", ["cafe\u0301"], ["cafe"]),
        ("regex", "cafe\u0301|the\u0301", ["caf\u00e9", "the\u0301"], ["cafe"]),
        ("regex", "caf(e\u0301)+", ["caf\u00e9", "cafe\u0301\u00e9"], ["cafe", "cafe\u0301\u0301"]),
        ("regex", "e\u0301?x", ["ex", "\u00e9x", "e\u0301x"], ["x", "e\u0301"]),
        ("regex", "[a\u0300-\u036f]+", ["a", "a\u0301", "\u00e1a"], ["b", "\u00e9"]),
        ("regex", "[\uf900-\ufaff]?x", ["x"], ["\u8c48x", "y"]),
        ("regex", "\\n\u0301?", [], ["\u0144", "n"]),
        ("regex", ".{4}", ["cafe\u0301", "caf\u00e9"], ["caf"]),
        ("json-schema", '{"const": "caf\u00e9"}', ['"cafe\u0301"'], ['"cafe"']),
        ("json-schema", '{"type": "number"}', ["1", "1e2"], ["NaN", "Infinity", "-Infinity"]),
        ("json-schema", '{"type": "object"}', ['{"a": 1, "b": {"a": 2}}'], ['{"a": 1, "a": 2}']),
        ("json-schema", '{"type": "array"}', ["[[]]"], ["[" * 100_000]),
        (
            "numeric",
            "1,234.5",
            ["1234.5", "It is 1,234.50", "3 + 1 = 1234.5"],
            ["1234", "1234.5 or 7", "none"],
        ),
        ("numeric", "-7", ["-7", "minus: -7.0"], ["7"]),
        ("regex", r"(yes|no)\.?", ["yes", "no.", " yes "], ["yes!", "maybe", "oh yes"]),
        ("json-schema", '{"type": "object", "required": ["a"]}', ['{"a": 1}'], ["{}", "no json", "[1]"]),
        ("json-schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}', ["1"], ['"1"']),
    ],
)
def test_what_is_right(kind: str, answer: str, right: list[str], wrong: list[str]) -> None:
    assert judged(kind, answer, *right, *wrong) == ([1.0] * len(right) + [0.0] * len(wrong), {})


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (np.True_, 1.0),
        (np.bool_(False), 0.0),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(1), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(1, dtype=torch.bfloat16), 1.0),
        (Fraction(1, 2), 0.5),
        (Decimal("0.25"), 0.25),
        (0.2 + 0.4 + 0.3 + 0.1, 1.0),
        (0.7 + 0.1 + 0.2, 1.0),
        (1 + 1e-6, 1.0),
        (-1e-7, 0.0),
        (np.float32(1) + np.finfo(np.float32).eps, 1.0),
        (1e-5, 1e-5),
        (1 - 1e-5, 1 - 1e-5),
    ],
)
def test_what_is_a_number_is_a_score(value: Any, score: float) -> None:
    found, fault = number(value)
    assert (type(found), found, fault) == (float, score, None)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (None, "returned NoneType"),
        ("1", "returned str"),
        ([1.0], "returned list"),
        (1j, "returned complex"),
        (np.array([1.0]), "returned ndarray"),
        (torch.tensor([1.0]), "returned Tensor"),
        (torch.tensor(1j), "returned Tensor"),
        (np.str_("1"), "returned str_"),
        (1.001, "returned out of range"),
        (-0.1, "returned out of range"),
        (10**400, "returned out of range"),
        (float("nan"), "returned out of range"),
        (np.float32("inf"), "returned out of range"),
        (torch.tensor(float("nan")), "returned out of range"),
    ],
)
def test_what_is_no_number_is_a_fault(value: Any, fault: str) -> None:
    assert number(value) == (0.0, fault)


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    assert not has_spread([0.1 + 0.2, 0.3])
    assert has_spread([0.3, 0.30001])


def test_an_expected_answer_that_is_no_number_is_a_fault_and_not_a_guess() -> None:
    """Data that was accepted before: 1,2 was read as 12."""
    assert judged("numeric", "1,2", "12", "2") == ([0.0, 0.0], {"raised ValueError": 2})


def test_what_a_function_prints_and_asks_is_not_the_commands(
    module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A command may write JSON to its standard output, and read a terminal."""
    assert judged(f"python:{module}:prints", "a", "b", "ask") == ([1.0, 0.0], {"raised EOFError": 1})
    assert capfd.readouterr().out == ""


def test_a_schema_fetches_nothing(tmp_path: Path) -> None:
    file = tmp_path / "any.json"
    file.write_text("{}")
    scores, faults = judged("json-schema", json.dumps({"$ref": file.as_uri()}), "1")
    assert (scores, sum(faults.values())) == ([0.0], 1)
    assert all(name.startswith("raised") for name in faults)
    assert foreign_reference({"allOf": [{"$ref": "http://x/a.json"}]}) == "http://x/a.json"
    assert foreign_reference({"$ref": "#/$defs/a", "$dynamicRef": "b.json", "$defs": {"a": {}}}) == "b.json"
    assert foreign_reference(True) is None
    assert foreign_reference({"$ref": "#/$defs/a", "$defs": {"a": {}}, "enum": [{"$ref": 1}]}) is None


def test_a_persons_function_gives_the_score(module: str) -> None:
    assert judged(f"python:{module}:half", "a", "b", "c") == ([0.5, 0.5], {})
    assert judged(f"python:{module}:right", "a", "a", "b") == ([1.0, 0.0], {})


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("raises", "raised KeyError"),
        ("word", "returned str"),
        ("much", "returned out of range"),
        ("odd", "returned out of range"),
        ("dies", "died"),
    ],
)
def test_a_faulty_function_earns_nothing_and_is_counted(module: str, function: str, fault: str) -> None:
    assert judged(f"python:{module}:{function}", "a", "b", "c") == ([0.0, 0.0], {fault: 2})
    assert fault.partition(" ")[0] in FAULTS


def test_a_hanging_function_is_ended_and_the_next_answer_is_judged(module: str) -> None:
    began = time.monotonic()
    with Verifier(config(f"python:{module}:hangs", timeout_s=0.5)) as verifier:

        def answers() -> Iterator[tuple[Problem, str]]:
            yield Problem("t", "q", "a"), "hang"
            # Whoever answers has time to: its process may be the one that stands still.
            verifier.timeout_s = 60
            yield Problem("t", "q", "a"), "go on"

        found = verifier.judge(answers())
    assert (found.scores, found.errors) == ([0.0, 1.0], {"timeout": 1})
    assert time.monotonic() - began < 60


def test_a_pattern_that_never_ends_is_ended(module: str) -> None:
    scores, errors = judged("regex", "(a+)+b", "a" * 40, timeout_s=0.5)
    assert (scores, errors) == ([0.0], {"timeout": 1})


@pytest.mark.parametrize("name", ["nowhere:half", "my_rules:absent", "my_rules:number"])
def test_what_cannot_be_loaded_is_a_sentence(module: str, name: str) -> None:
    with pytest.raises(ConfigError, match="The verifier 'python:"):
        load_judge(f"python:{name}")
    with pytest.raises(ConfigError, match="The verifier 'python:"):
        Verifier(config(f"python:{name}"))


def test_a_verifier_finds_no_password_in_its_environment(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "very secret")
    assert judged(f"python:{module}:told", "very secret", "a") == ([0.0], {})
    # It would be seen if it were there.
    assert judged(f"python:{module}:told", "TOKENIZERS_PARALLELISM", "a") == ([1.0], {})


def test_threads_never_get_each_others_scores(module: str) -> None:
    """Two policies with one rule score side by side, on one verifier."""
    with Verifier(config(f"python:{module}:right")) as verifier:

        def judge(answer: str) -> list[float]:
            texts = [answer if number % 3 else "wrong" for number in range(300)]
            return verifier.judge([(Problem("t", "q", answer), text) for text in texts]).scores

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(judge, ["a", "b", "c", "d"]))
    assert found == [[float(number % 3 > 0) for number in range(300)]] * 4


def test_a_module_that_breaks_while_it_runs_ends_nothing(module: str) -> None:
    with Verifier(config(f"python:{module}:dies")) as verifier:
        Path("my_rules.py").write_text("def dies(:")
        found = verifier.judge([(Problem("t", "q", "a"), "b")] * 2)
    assert (found.scores, dict(found.errors)) == ([0.0, 0.0], {"died": 1, "unloaded": 1})
