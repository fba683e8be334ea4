"""Estimates and the views of quality, against plain Python on the same rows."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.ledger.estimates import Estimate, calibration, emit_estimate, newest_estimates
from engine.ledger.ledger import Ledger, Spool
from engine.ledger.queries import named_rows
from tests.bench import _quality_views as views
from tests.helpers.state_of_265b009 import ledger_of_265b009

SERIES = ("policy", "digest", "base", "suite", "suite_version", "config_hash", "segment", "target", "against")
PART = Estimate("sums", "d", "base", "s", "1", "suite", 0.5, 0.25, 0.75, items=10, available=40)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "test")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.duckdb")) as opened:
        yield opened


def take_in(ledger: Ledger, spool: Spool, *estimates: Estimate) -> int:
    for estimate in estimates:
        emit_estimate(spool, estimate)
    spool.rotate()
    return ledger.ingest(spool.root)


def found(ledger: Ledger, query: str) -> list[dict[str, Any]]:
    return named_rows(ledger.connection.execute(query))


def test_an_estimate_comes_back_as_it_was_and_once(spool: Spool, ledger: Ledger) -> None:
    full = replace(PART, mean=0.6, low=0.6, high=0.6, items=40, at=9.0, seconds=1.5)
    against = replace(full, against="c", segment="short", mean=-0.1, low=-0.2, high=-0.05)
    assert take_in(ledger, spool, replace(full, at=1.0, mean=0.5), full, against) == 3
    # The same content again, at another time and cost.
    assert take_in(ledger, spool, replace(full, at=20.0, seconds=9.0)) == 0
    newest = newest_estimates(ledger.connection, "base", "sums", "s")
    assert sorted(newest, key=lambda one: one.mean) == [against, full]
    assert newest_estimates(ledger.connection, "base", "poems", "s") == []
    assert newest_estimates(ledger.connection, "other", "sums", "s") == []


@pytest.mark.parametrize(
    "change", [{"base": "b2"}, {"suite_version": "2"}, {"config_hash": "e2"}, {"target": "task"}]
)
def test_rows_of_another_base_version_engine_or_target_are_not_mixed(
    spool: Spool, ledger: Ledger, change: dict[str, Any]
) -> None:
    base = replace(PART, policy=None, digest=None, mean=0.25, items=40, config_hash="e")
    mine = replace(base, policy="sums", digest="d", mean=0.75, config_hash="e")
    gain = replace(mine, mean=0.5, against="base")
    worse = replace(gain, mean=-0.5, low=-0.6, high=-0.4)
    take_in(ledger, spool, base, replace(mine, **change), gain, replace(worse, **change))
    assert [row["mean"] for row in found(ledger, "FROM quality ORDER BY mean")] == [0.25, 0.75]
    assert [row["mean"] for row in found(ledger, "FROM regressions")] == [-0.5]


def test_a_gain_is_over_the_parent_or_else_the_base(spool: Spool, ledger: Ledger) -> None:
    for digest, parent in (("d", None), ("e", "d")):
        spool.emit("revisions", policy="sums", digest=digest, parent=parent, tokens=1000, seconds=2.0)
    gains = [
        replace(PART, digest=digest, against=against, mean=mean)
        for digest, against, mean in (
            ("d", "base", 0.5),
            ("e", "base", 0.6),
            ("e", "d", 0.1),
            ("e", "x", 0.3),
        )
    ]
    take_in(ledger, spool, *gains)
    rows = found(ledger, "FROM cost_per_point ORDER BY digest")
    assert [(row["gain"], row["tokens_per_point"]) for row in rows] == [
        (0.5, pytest.approx(20.0)), (0.1, pytest.approx(100.0))
    ]  # fmt: skip


def test_calibration_counts_intervals_that_hold_the_later_full_value(spool: Spool, ledger: Ledger) -> None:
    full = replace(PART, mean=0.7, low=0.7, high=0.7, items=40, at=5.0)
    missed = replace(PART, digest="e", at=2.0)
    never = replace(PART, digest="f", at=2.0)
    other = replace(full, digest="f", suite_version="2")
    late = replace(PART, low=0.1, at=6.0)
    take_in(ledger, spool, replace(PART, at=1.0), full, missed, replace(full, digest="e", mean=0.8), never,
            other, late, replace(PART, target="task", low=0.6, at=1.5))  # fmt: skip
    assert calibration(ledger.connection, "sums") == (2, 1)
    assert calibration(ledger.connection, "poems") == (0, 0)


def test_scores_of_an_older_ledger_have_quality(tmp_path: Path) -> None:
    path = tmp_path / "ledger.duckdb"
    new = [("p", "d", "new", 2.0, float(item < 9)) for item in range(10)]
    scores = [("p", "d", "old", 1.0, 0.0), *new, (None, None, "base", 1.0, 1.0)]
    query = """INSERT INTO scores BY NAME SELECT uuid() AS id, ? AS policy, ? AS digest, ? AS run, ? AS "at",
        ? AS score, 'b' AS base, 's' AS suite, '1' AS suite_version"""
    with closing(ledger_of_265b009(path)) as old:
        old.executemany(query, scores)
    with closing(Ledger(path)) as ledger:
        base, mine = found(ledger, "FROM quality ORDER BY digest NULLS FIRST")
    assert (base["policy"], base["items"], base["mean"]) == (None, 1, 1.0)
    assert (mine["target"], mine["items"], mine["mean"], mine["at"]) == ("task", 10, 0.9, 2.0)
    # E. B. Wilson's interval of 9 in 10.
    assert (mine["low"], mine["high"]) == pytest.approx((0.5958, 0.9821), abs=1e-4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("views")


@pytest.fixture(scope="module")
def tables(made: Path) -> dict[str, list[dict[str, Any]]]:
    names = ("estimates", *VIEWS)
    with closing(duckdb.connect(str(views.build(made, 10_000, 2)), read_only=True)) as ledger:
        return {name: named_rows(ledger.execute(f"FROM {name}")) for name in names}


VIEWS = ("quality", "regressions", "cost_per_point", "calibration")


def newest_of(rows: list[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    newest: dict[tuple, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda one: one["at"]):
        newest[tuple(row[name] for name in SERIES)] = row
    return newest


def test_each_view_is_what_plain_python_finds(tables: dict[str, list[dict[str, Any]]]) -> None:
    newest = newest_of(tables["estimates"]).values()
    means = [row for row in newest if row["against"] is None]
    figures = ("mean", "low", "high", "level", "items", "available", "seconds", "at")

    def chosen(rows: Any, names: tuple[str, ...]) -> set[tuple]:
        return {tuple(row[name] for name in names) for row in rows}

    names = (*SERIES[:-1], *figures)
    assert chosen(tables["quality"], names) == chosen(means, names)
    assert len(tables["quality"]) == len(means) == 10_000 * 3 + 1000
    worse = [row for row in newest if row["against"] is not None and row["high"] < 0]
    names = (*SERIES, "mean", "low", "high", "items", "at")
    assert chosen(tables["regressions"], names) == chosen(worse, names)
    assert len(worse) > 1000


def test_cost_and_calibration_are_what_plain_python_finds(tables: dict[str, list[dict[str, Any]]]) -> None:
    gains = {
        (row["policy"], row["digest"]): row["mean"]
        for row in sorted(tables["estimates"], key=lambda one: one["at"])
        if row["against"] and not row["segment"]
    }
    assert len(tables["cost_per_point"]) == len(gains) == 10_000
    for row in tables["cost_per_point"]:
        gain = gains[row["policy"], row["digest"]]
        assert row["gain"] == gain
        per_point = 4096 / (100 * gain) if gain > 0 else None
        assert row["tokens_per_point"] == (pytest.approx(per_point) if per_point else None)
        assert (row["training_tokens"], row["training_s"]) == (4096, 1.5)
    held: dict[str, list[bool]] = defaultdict(list)
    suite = [row for row in tables["estimates"] if row["target"] == "suite" and row["segment"] is None]
    full = {row["digest"]: row["mean"] for row in suite if row["items"] == 10}
    for row in suite:
        if row["items"] == 5:
            held[row["policy"]].append(row["low"] <= full[row["digest"]] <= row["high"])
    found = {row["policy"]: (row["intervals"], row["held"], row["share"]) for row in tables["calibration"]}
    assert found == {name: (len(all), sum(all), sum(all) / len(all)) for name, all in held.items()}
    assert sum(map(len, held.values())) == 1000


def test_each_documented_query_is_measured(made: Path, tables: dict[str, Any]) -> None:
    seconds = views.measure(made, 10_000, 2)
    assert set(seconds) == set(views.QUERIES)
    assert all(math.isfinite(value) and value > 0 for value in seconds.values())
    asked = " ".join(views.QUERIES)
    assert [view for view in VIEWS if f"{view} of one policy" not in asked] == []
