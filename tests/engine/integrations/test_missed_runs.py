"""Nightly runs that did not complete are counted at Prefect's server, as it counts them."""

import json

import httpx
import pytest
from prometheus_client import CollectorRegistry

from engine.integrations.missed_runs import MissedRuns


def value(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("graftwork_nightly_missed")


def test_missed_and_late_runs_are_added_up() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append((request.url.path, body["deployments"], body["flow_runs"]["state"]))
        return httpx.Response(200, json=2 if "type" in body["flow_runs"]["state"] else 1)

    found = CollectorRegistry()
    runs = MissedRuns(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://prefect"), found)
    runs.look()
    assert value(found) == 3
    assert {path for path, _, _ in asked} == {"/api/flow_runs/count"}
    assert {json.dumps(names) for _, names, _ in asked} == {'{"name": {"any_": ["nightly"]}}'}
    runs.work.end()


def test_what_prefect_does_not_answer_changes_nothing() -> None:
    found, answers = CollectorRegistry(), [httpx.Response(200, json=3), httpx.Response(200, json=1)]
    away = httpx.MockTransport(lambda _: answers.pop() if answers else httpx.Response(503))
    runs = MissedRuns(httpx.Client(transport=away, base_url="http://prefect"), found)
    runs.look()
    with pytest.raises(httpx.HTTPStatusError):
        runs.look()
    assert value(found) == 4
    runs.work.end()
