"""Graftwork's own endpoints, called as FastAPI does, with a fake spool."""

import errno
import json
from types import SimpleNamespace

from engine.serving.gateway.endpoints import Feedback, feedback


class Spool:
    def __init__(self):
        self.rows, self.is_full = [], False

    def emit(self, table, **fields):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.rows.append((table, fields))


async def test_feedback_that_cannot_be_stored_is_a_503():
    spool = Spool()
    app = SimpleNamespace(state=SimpleNamespace(graftwork=SimpleNamespace(spool=spool)))
    request = SimpleNamespace(app=app, state=SimpleNamespace(graftwork_key=SimpleNamespace(hash="k")))
    given = Feedback(request_id="cmpl-1", reward=1.0)
    assert await feedback(given, request) == {"status": "accepted"}
    spool.is_full = True
    refusal, sent = await feedback(given, request), []

    async def send(message):
        sent.append(message)

    await refusal({"type": "http", "path": "/v1/feedback"}, None, send)
    assert sent[0]["status"] == 503
    assert "stored" in json.loads(sent[1]["body"])["error"]["message"]
    assert spool.rows == [("feedback", {"request_id": "cmpl-1", "reward": 1.0, "key": "k"})]
