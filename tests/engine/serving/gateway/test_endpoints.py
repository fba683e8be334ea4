"""Graftwork's own endpoints, called as FastAPI does, with a fake spool."""

import errno
import hashlib
import json
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from engine.catalog.catalog import Key
from engine.serving.gateway.call import RecentIds, id_for
from engine.serving.gateway.endpoints import Feedback, attach, feedback
from tests.helpers.api_answers import body_of
from tests.helpers.gateway_world import make_world
from tests.helpers.gateways import open_world


@pytest.fixture
def world(tmp_path):
    world = make_world(tmp_path)
    yield world
    world.usage.close()


class Spool:
    def __init__(self):
        self.rows, self.is_full = [], False

    def emit(self, table, **fields):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.rows.append((table, fields))


async def test_feedback_that_cannot_be_stored_is_a_503():
    spool, key = Spool(), Key("hash", "me", 0.0, id="k")
    names = [f"cmpl-{id_for(key, str(digit) * 32, words)}" for digit in range(2)]
    state = SimpleNamespace(spool=spool, router=SimpleNamespace(hash_once=words), rated=RecentIds())
    app = SimpleNamespace(state=SimpleNamespace(graftwork=state))
    request = SimpleNamespace(app=app, state=SimpleNamespace(graftwork_key=key))
    assert await feedback(Feedback(request_id=names[0], reward=1.0), request) == {"status": "accepted"}
    spool.is_full = True
    refusal, sent = await feedback(Feedback(request_id=names[1], reward=1.0), request), []

    async def send(message):
        sent.append(message)

    await refusal({"type": "http", "path": "/v1/feedback"}, None, send)
    assert sent[0]["status"] == 503
    assert "stored" in json.loads(sent[1]["body"])["error"]["message"]
    assert spool.rows == [("feedback", {"request_id": names[0], "reward": 1.0, "key": "k"})]
    # It is not known, so it may come again.
    assert names[1] not in state.rated


async def test_the_first_value_of_each_metric_counts_beside_the_reward(tmp_path):
    world = open_world(tmp_path)
    async with world.client(world.key()) as client:
        asked = await client.post("/v1/completions", json=body_of("/v1/completions", "acme-sums"))
        id = asked.json()["id"]
        for said in (
            {"metric": "resolved", "value": 1},
            {"metric": "resolved", "value": 0},
            {"metric": "minutes", "value": 0.25},
            {"reward": 0.5},
        ):
            answer = await client.post("/v1/feedback", json={"request_id": id} | said)
            assert (answer.status_code, answer.json()) == (202, {"status": "accepted"})
        for said in (
            {},
            {"reward": 1, "metric": "resolved", "value": 1},
            {"reward": 1, "value": 1},
            {"metric": "resolved"},
            {"value": 1},
        ):
            answer = await client.post("/v1/feedback", json={"request_id": id} | said)
            assert (answer.status_code, "`metric` and `value`" in answer.text) == (400, True)
        for said in ({"metric": "Resolved", "value": 1}, {"metric": "resolved", "value": 1.5}):
            answer = await client.post("/v1/feedback", json={"request_id": id} | said)
            assert answer.status_code == 400
        not_a_number = f'{{"request_id": "{id}", "metric": "sum", "value": NaN}}'
        assert (await client.post("/v1/feedback", content=not_a_number)).status_code == 400
        unknown = {"request_id": f"{id[:-1]}!", "metric": "resolved", "value": 1}
        assert (await client.post("/v1/feedback", json=unknown)).status_code == 404
    rows = [row for table, row in world.events.rows if table == "metrics"]
    assert [(row["request_id"], row["metric"], row["value"]) for row in rows] == [
        (id, "resolved", 1.0), (id, "minutes", 0.25)
    ]  # fmt: skip
    # So the ledger takes one, whichever gateway was told.
    assert rows[0]["id"] == f"{id} resolved {rows[0]['key']}"
    assert [row["reward"] for table, row in world.events.rows if table == "feedback"] == [0.5]
    world.close()


async def test_an_engine_alone_is_ready_once_it_is_up_until_it_is_drained(world):
    """Membership and upkeep are handed in: without them there is nobody to wait for."""
    app, said = FastAPI(), []
    attach(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        said.append((await client.get("/graftwork/ready")).json()["reason"])
        app.state.graftwork = world.state
        said.append((await client.get("/graftwork/ready")).json()["reason"])
        await client.post("/graftwork/drain")
        answer = await client.get("/graftwork/ready")
    assert [*said, answer.json()["reason"], answer.status_code] == ["starting", None, "draining", 503]


def words(*given: str) -> str:
    return hashlib.sha256("\0".join(given).encode()).hexdigest()


def test_the_oldest_ids_are_forgotten(monkeypatch):
    monkeypatch.setattr("engine.serving.gateway.call.MOST_IDS", 2)
    recent = RecentIds()
    for name in "abc":
        recent.add(name)
    assert ["a" in recent, "b" in recent, "c" in recent] == [False, True, True]
