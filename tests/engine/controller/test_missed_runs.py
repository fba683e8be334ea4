"""Nightly runs that did not complete are counted at Prefect's server, as it counts them."""

import json

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from engine.controller.missed_runs import MissedRuns


def gauge() -> Gauge:
    return Gauge("missed", "Missed.", registry=CollectorRegistry())


def value(of: Gauge) -> float:
    (metric,) = of.collect()
    return metric.samples[0].value


def test_missed_and_late_runs_are_added_up() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append((request.url.path, body["deployments"], body["flow_runs"]["state"]))
        return httpx.Response(200, json=2 if "type" in body["flow_runs"]["state"] else 1)

    found = gauge()
    runs = MissedRuns(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://prefect"), found)
    runs.look()
    assert value(found) == 3
    assert {path for path, _, _ in asked} == {"/api/flow_runs/count"}
    assert {json.dumps(names) for _, names, _ in asked} == {'{"name": {"any_": ["nightly"]}}'}
    runs.work.end()


def test_what_prefect_does_not_answer_changes_nothing() -> None:
    found = gauge()
    found.set(4)
    away = httpx.MockTransport(lambda _: httpx.Response(503))
    runs = MissedRuns(httpx.Client(transport=away, base_url="http://prefect"), found)
    with pytest.raises(httpx.HTTPStatusError):
        runs.look()
    assert value(found) == 4
    runs.work.end()
