"""The table of what a release waits for: every gate, with what it has, what it needs, and how it ends."""

from dataclasses import replace

import pytest

from engine.catalog.records import Release
from engine.controller.advance import Evidence, advance
from tests.engine.controller.test_advance import CANARIES, at, evidence, ramped, release, running_canary
from tests.helpers.canary_results import judged

ASKED = {"weight": 0.2, "asked_at": 90.0}
PAUSE = {"by": "ann", "reason": "Lunch.", "at": 40.0}


def approval(**changes: object) -> Release:
    row = release(step="approval", **changes)
    return replace(row, settings=row.settings | {"approval_s": 600})


@pytest.mark.parametrize(
    ("row", "seen", "table"),
    [
        (release(), evidence(), []),
        (approval(state="held"), evidence(), []),
        (release(step="approval"), evidence(), []),
        (approval(), evidence(step_s=50.0), [("approval of 20%", "no approval", 50, "hold in 550 s")]),
        (
            release(step="canary"),
            evidence(without={"b": "It is full.", "a": "It is away."}, step_s=10.0),
            [("load", "engines without the revision: a, b", 10, "hold in 50 s")],
        ),
        (
            ramped(0.05),
            at(0.05, replace(CANARIES["open"], step_units=12), weight_s=30.0, step_s=40.0),
            [("canary 5%", "12 of 20 units", 30, "next step in 70 s")],
        ),
        (
            ramped(0.05),
            at(0.05, CANARIES["open"], weight_s=30.0, step_s=580.0),
            [("canary 5%", "0 of 20 units", 30, "hold in 20 s")],
        ),
        (
            running_canary(),
            at(0.2, judged(12, 48, (0.9, 0.9), -0.2, 0.2), step_s=260.0, weight_s=260.0),
            [("canary 20%: reward", "open, 12 of 20 units", 260, "hold in 340 s")],
        ),
        (
            running_canary(),
            at(0.2, CANARIES["good, few"], step_s=1.0),
            [("canary 20%: reward", "clear, 19 of 20 units", 0, "hold in 599 s")],
        ),
        (running_canary(), at(0.2, CANARIES["good"]), []),
        (
            ramped(0.95),
            at(0.95, CANARIES["good"], weight_s=20.0),
            [("canary 95%", "no harm in 20 s", 20, "promotion in 40 s")],
        ),
        (
            ramped(0.05, approvals=[ASKED], settings=ramped(0.05).settings | {"approval_s": 60}),
            at(0.05, CANARIES["open"], asked_s=12.0),
            [("approval of 20%", "no approval", 12, "hold in 48 s")],
        ),
        (
            ramped(0.95, pauses=[PAUSE]),
            at(0.95, CANARIES["good"], weight_s=20.0, frozen=True),
            [
                ("pause", "paused by ann: Lunch.", 60, ""),
                ("freeze", "releases are frozen", 20, ""),
                ("canary 95%", "no harm in 20 s", 20, "promotion in 40 s"),
            ],
        ),
    ],
)
def test_each_gate_says_what_it_has_and_how_it_ends(
    row: Release, seen: Evidence, table: list[tuple[str, str, float, str]]
) -> None:
    waits = advance(row, seen).waits
    assert [(one.gate, one.has, one.waited_s, one.ends) for one in waits] == table
    assert all(one.needs and one.row()["ends"] == one.ends for one in waits)
