"""The main job's summary: the paired gain of each policy, and what it says of a run that falls short."""

import json
from pathlib import Path

import pytest

from tasks.outcome import Adapted, Rollback, gain, release_json, shortcomings, summary
from tasks.score import ItemScore, Score

ENDED = {"state": "promoted"}
ROLLED_BACK = Rollback("rollback", 2.5, 0)


def scored(digest: str | None, values: list[float]) -> Score:
    items = tuple(ItemScore(f"{number:04}", value, "") for number, value in enumerate(values))
    mean = sum(values) / len(values)
    return Score("sums", digest, "b" * 64, "s", "1", mean, 0.0, 1.0, items, False, 1.0)


def adapted(before: list[float], after: list[float]) -> Adapted:
    return Adapted("sums", "c" * 64, Path("x"), 1, scored(None, before), scored("c" * 64, after), {})


def test_a_gain_on_the_same_items_counts_although_the_intervals_overlap() -> None:
    before = [0.0, 1.0] * 100
    after = [1.0 if number % 10 == 0 else value for number, value in enumerate(before)]
    found = gain(scored(None, before), scored("c" * 64, after))
    assert found.mean == pytest.approx(0.1)
    assert 0 < found.low < 0.1 < found.high
    result = summary([adapted(before, after)], [ENDED], ROLLED_BACK, {}, 1.0)
    assert result["policies"][0]["gain_ci_low"] == found.low
    assert shortcomings(result, apart=False) == []
    (said,) = shortcomings(result, apart=True)
    assert "interval of sums" in said


def test_a_gain_that_may_be_chance_is_said() -> None:
    before = [0.0, 1.0] * 100
    after = [1.0 if number % 50 == 0 else value for number, value in enumerate(before)]
    (said,) = shortcomings(summary([adapted(before, after)], [ENDED], ROLLED_BACK, {}, 1.0), apart=False)
    assert "sums is not surely" in said


def test_a_revision_and_its_release_are_json_values() -> None:
    told = json.loads(json.dumps(adapted([0.0, 1.0], [1.0, 1.0]).to_json()))
    assert (told["policy"], told["digest"], told["directory"]) == ("sums", "c" * 64, "x")
    assert [told[name]["mean"] for name in ("base", "revision")] == [0.5, 1.0]
    assert told["base"]["items"] == 2
    ended = {"id": "r1", "policy": "sums", "revision": "c" * 64, "state": "promoted", "reason": "Better."}
    row = release_json({**ended, "skip_gates": {"canary": "none"}, "created_at": 1.0, "updated_at": 3.5})
    assert (row["id"], row["verdict"], row["skipped"], row["seconds"]) == ("r1", "promote", ["canary"], 2.5)
