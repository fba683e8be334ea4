"""Patterns of modules: they cover what peft's regular expressions cover, in bounded time."""

import re
import time

import pytest

from engine.adapters.module_patterns import Patterns

PATTERNS = (
    r".*\.layers\.1\..*(q_proj|k_proj)$", r"^model\.layers\.(0|1[0-9])\..*", "q_proj", r"q_proj|k_proj",
    r".*\.experts.gate_up_proj", "layers.0.*.k_proj", r"layers\.[^1]\.\w+\.(?:up|gate)_proj",
    r"layers\.\d{1,2}\.mlp\..+?", r"[\w.]+self_attn\.(q|k|v)_proj", r"(ab?){2,3}", r"(a|b)*c", r"(a?){0,5}b",
    r"(?:a|ab)(?:c|bcd)", r"(a*)*b", r"a{2}", r"[^\d]+\.c", r"\S+y", r"x+y?",
)  # fmt: skip
MODULES = (
    *(f"model.layers.{i}.{name}" for i in (0, 1, 2, 11) for name in ("self_attn.q_proj", "mlp.gate_proj")),
    "model.layers.1.self_attn.k_proj", "model.layers.0.self_attn.k_proj",
    "model.layers.2.mlp.experts.gate_up_proj", "xq_proj", "x.abc", "a.b.c", "abab", "ababab",
    "aab", "aa", "a", "xy", "xx.y", "abcd", "acd", "bbc", "b", "ab.aa",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_covers_what_peft_matches(pattern):
    """peft's `get_pattern_key` matches this expression; some pattern covers something, and not all."""
    one = Patterns({pattern: True})
    covered = {module for module in MODULES if one.get(module, False)}
    assert covered == {module for module in MODULES if re.match(rf"(.*\.)?({pattern})$", module)}
    assert set() != covered != set(MODULES)


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(a*)*(a*)*b", r"(.*a){20}b", r"(a?){99}a{99}b"])
def test_no_pattern_runs_away(pattern):
    began = time.process_time()
    assert not Patterns({pattern: True}).get("a" * 60, False)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "pattern", [r"(?=a)b", r"(a)\1", "(", r"(?i:a)", r"\bq", "[" * 299, "(" * 200, "a+" * 151, "(((a*)*)*)*"]
)
def test_what_is_no_plain_expression_is_refused(pattern):
    with pytest.raises(ValueError, match=r"."):
        Patterns({pattern: True})
