"""The effect probe: accepts what the trainer shipped, refuses every way of being wrong."""

import math
from dataclasses import replace

import pytest

from engine.errors import AdapterError
from engine.quality.probe import TOLERANCE, Probe, ProbeResult, ProbeRow, from_json, judge

ROWS = (ProbeRow((5, 6, 7), (-0.5, -1.0), (-1.5, -1.1)), ProbeRow((5, 9), (-2.0,), (-2.3,)))
SHIPPED = Probe("d" * 64, "b" * 64, "float32", ROWS)
TOL = TOLERANCE["float32"]


def adapter() -> list[list[float]]:
    return [[-0.5, -1.0], [-2.0]]


def base() -> list[list[float]]:
    return [[-1.5, -1.1], [-2.3]]


def test_what_was_shipped_is_accepted():
    result = judge(SHIPPED, adapter(), base(), TOL)
    assert result.accepted
    assert result.effect == pytest.approx(1.0)
    slightly = [[value + TOL / 2 for value in row] for row in adapter()]
    assert judge(SHIPPED, slightly, base(), TOL).accepted


@pytest.mark.parametrize(
    ("served", "plain", "sentence"),
    [
        (base(), base(), "plain base"),
        ([[-0.5, -1.05], [-2.15]], base(), "does not reproduce"),
        ([[0.5, -0.9], [-1.7]], base(), "does not reproduce"),
        (adapter(), [[-1.4, -1.1], [-2.3]], "a different base"),
        ([[-0.5, math.nan], [-2.0]], base(), "does not reproduce"),
    ],
    ids=["missing", "partial", "doubled", "other base", "NaN"],
)
def test_every_way_of_being_wrong_is_refused(served, plain, sentence):
    result = judge(SHIPPED, served, plain, TOL)
    assert not result.accepted
    assert sentence in result.reason


def test_a_revision_that_is_the_base_is_refused():
    empty = Probe("d", "b", "float32", (ProbeRow((5, 6, 7), (-1.5, -1.1), (-1.5, -1.1)),))
    result = judge(empty, [[-1.5, -1.1]], [[-1.5, -1.1]], TOL)
    assert not result.accepted
    assert "is the base" in result.reason


def test_probes_round_trip_and_foreign_ones_are_refused():
    assert from_json(SHIPPED.to_json()) == SHIPPED
    with pytest.raises(AdapterError, match="format version"):
        from_json({**SHIPPED.to_json(), "version": 99})
    with pytest.raises(AdapterError, match="has no rows"):
        from_json({**SHIPPED.to_json(), "rows": []})


# 40 tokens. The adapter moves the first 20 by 0.5 to 1.5 nats and the rest by 0.001.
MOVED = [0.5 + at / 20 if at < 20 else 0.001 for at in range(40)]
PLAIN = [-2.0 - 0.1 * at for at in range(40)]
SHIFTED = [plain + moved for plain, moved in zip(PLAIN, MOVED, strict=True)]
NARROW = Probe("d", "b", "bfloat16", (ProbeRow(tuple(range(41)), tuple(SHIFTED), tuple(PLAIN)),))


def rounded(values: list[float], by: float, flips: int = 0) -> list[list[float]]:
    """Return values that err by `by` up and down, and by 8 nats where experts flip, as one row."""
    return [[value + (8.0 if at < flips else by * (-1) ** at) for at, value in enumerate(values)]]


def narrow(adapter: list[list[float]], base: list[list[float]], probe: Probe = NARROW) -> ProbeResult:
    return judge(probe, adapter, base, TOLERANCE["bfloat16"])


def test_in_bfloat16_flipped_experts_refuse_no_right_revision():
    adapter, base = rounded(SHIFTED, 0.02, flips=6), rounded(PLAIN, 0.015, flips=3)
    result = narrow(adapter, base)
    assert result.accepted
    assert (result.error, result.base_error) == (pytest.approx(0.02), pytest.approx(0.015))
    assert result.max_error == pytest.approx(8.0)
    assert result.tolerance == pytest.approx(2.5 * 0.015)
    in_float32 = replace(NARROW, dtype="float32")
    assert not judge(in_float32, adapter, base, TOL).accepted


def test_in_bfloat16_the_bound_follows_the_error_of_the_base():
    assert not narrow(rounded(SHIFTED, 0.03), rounded(PLAIN, 0.01)).accepted
    assert narrow(rounded(SHIFTED, 0.03), rounded(PLAIN, 0.02)).accepted
    assert narrow(rounded(SHIFTED, 0.019), rounded(PLAIN, 0.0)).accepted
    assert not narrow(rounded(SHIFTED, 0.051), rounded(PLAIN, 0.04)).accepted


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [(0.0, "plain base"), (0.9, "does not reproduce"), (2.0, "does not reproduce")],
    ids=["missing", "partial", "doubled"],
)
def test_in_bfloat16_a_wrong_effect_is_refused_however_still_the_other_tokens_are(factor, sentence):
    wrong = [plain + factor * moved for plain, moved in zip(PLAIN, MOVED, strict=True)]
    result = narrow(rounded(wrong, 0.01), rounded(PLAIN, 0.01))
    assert not result.accepted
    assert sentence in result.reason
    assert not result.is_base


def test_in_bfloat16_another_base_and_no_number_are_refused():
    assert "a different base" in narrow(rounded(SHIFTED, 0.01), rounded(PLAIN, 0.06)).reason
    broken = rounded(SHIFTED, 0.0)
    broken[0][-1] = math.nan
    assert not narrow(broken, rounded(PLAIN, 0.0)).accepted


def test_in_bfloat16_an_effect_within_rounding_is_the_base():
    faint = [plain + 0.015 for plain in PLAIN]
    probe = replace(NARROW, rows=(ProbeRow(tuple(range(41)), tuple(faint), tuple(PLAIN)),))
    result = narrow(rounded(faint, 0.01), rounded(PLAIN, 0.01), probe)
    assert (result.accepted, result.is_base) == (False, True)
    assert "is the base" in result.reason


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"rows": [{"tokens": [5], "adapter": [], "base": []}]},
        {"rows": [{"tokens": [5, 6, 7], "adapter": [-1.0], "base": [-1.0, -2.0]}]},
        {"rows": [{"tokens": [5, 6], "adapter": [-1.0], "base": [float("nan")]}]},
        {"rows": [{"tokens": [5, 6], "adapter": [-1.0], "base": [None]}]},
        {"rows": [{"tokens": [5, 6], "adapter": [-1.0]}]},
        {"dtype": ["float32"]},
    ],
    ids=["unknown dtype", "no token to judge", "ragged", "not a number", "null", "no base", "a list"],
)
def test_a_probe_that_could_not_be_judged_is_refused_when_it_is_read(change):
    body = {
        "version": 1, "digest": "d", "base_digest": "b", "dtype": "float32",
        "rows": [{"tokens": [5, 6], "adapter": [-1.0], "base": [-2.0]}],
    }  # fmt: skip
    assert from_json(body).dtype == "float32"
    with pytest.raises(AdapterError, match="two tokens"):
        from_json(body | change)
