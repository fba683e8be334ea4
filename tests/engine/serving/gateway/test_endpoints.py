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
from tests.helpers.gateway_world import make_world


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
