"""The effect probe: accepts what the trainer shipped, refuses every way of being wrong."""

import math

import pytest

from engine.errors import AdapterError
from engine.quality.probe import TOLERANCE, Probe, ProbeRow, from_json, judge

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
        (base(), base(), "serves the plain base"),
        ([[-0.5, -1.05], [-2.15]], base(), "does not reproduce"),
        ([[0.5, -0.9], [-1.7]], base(), "does not reproduce"),
        (adapter(), [[-1.4, -1.1], [-2.3]], "base is another one"),
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
