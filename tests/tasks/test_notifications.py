"""What a webhook of Slack, or of another receiver, is told: Prefect's automation, up to the request."""

import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.webhook import Webhook
from prefect.server.events.actions import CallWebhook
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.utilities.user_templates import render_user_template_sync

from engine.catalog.catalog import Notice
from engine.notifications.notices import event_of
from engine.security.credentials import create_credentials
from engine.settings.params import Params
from tasks.notifications import BAD_NEWS, TEMPLATES, automation_of, bad_news, of_webhook
from tests.helpers.rows import NEW

SECRET = "T000-a-secret"
LINK = "http://127.0.0.1:8462/releases/r1"


class Receiver(HTTPServer):
    """A local server in the place of Slack's; `got` are the paths, types and bodies of its requests."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str | None, Any]] = []
        super().__init__(("127.0.0.1", 0), Hook)


class Hook(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.got.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def webhook(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Webhook:
    """The block that an operator made in Prefect, without Prefect's server."""
    block = Webhook.model_validate({"url": f"http://127.0.0.1:{receiver.server_port}/{SECRET}"})
    monkeypatch.setattr(Webhook, "load", lambda name: block)
    monkeypatch.setattr(Webhook, "save", lambda *_, **__: uuid.uuid4())
    return block


def told(name: str, reason: str) -> ReceivedEvent:
    is_of_policy = name.startswith(("graftwork.release", "graftwork.revision", "graftwork.policy"))
    about = ("sorting", NEW) if is_of_policy else ("", None)
    return ReceivedEvent.model_validate(event_of(Notice(str(uuid.uuid4()), name, *about, reason, LINK, 1.0)))


async def call(webhook: Webhook, name: str, event: ReceivedEvent) -> None:
    """Do what Prefect's server does for an event: look whether it is meant, fill in the template, call."""
    automation = of_webhook(name)
    assert automation
    assert SECRET not in repr(automation)
    (action,), trigger = automation.actions, EventTrigger.model_validate(automation.trigger.model_dump())
    assert trigger.covers(event)
    payload = CallWebhook.model_validate(action.model_dump()).payload
    await webhook.call(render_user_template_sync(payload, {"event": event}))


async def test_slack_gets_a_message_in_which_nobody_is_mentioned(
    receiver: Receiver, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    await call(webhook, "graftwork-slack", told("graftwork.release.held", '<!channel> said "a & b".\nOver.'))
    text = f'*release.held* sorting@{NEW[:12]}: &lt;!channel&gt; said "a &amp; b".\nOver. <{LINK}|More>'
    assert receiver.got == [(f"/{SECRET}", "application/json", {"text": text})]
    assert SECRET not in "".join(record.getMessage() for record in caplog.records if record.levelno >= 30)


async def test_another_receiver_gets_every_field_and_the_events_id(
    receiver: Receiver, webhook: Webhook
) -> None:
    event = told("graftwork.engine.down", "It is gone.")
    await call(webhook, "graftwork-webhook", event)
    assert receiver.got[0][2] == {
        "id": str(event.id), "event": "graftwork.engine.down", "at": "1970-01-01 00:00:01+00:00",
        "subject": "engine", "revision": "", "reason": "It is gone.", "link": LINK,
    }  # fmt: skip


@pytest.mark.usefixtures("webhook")
def test_bad_news_of_every_kind_are_posted_by_default(tmp_path: Path) -> None:
    params = Params(state_dir=tmp_path)
    create_credentials(params.paths)
    trigger = EventTrigger.model_validate(bad_news(params).trigger.model_dump())
    assert all(trigger.covers(told(name, "It is bad.")) for name in BAD_NEWS)
    assert not trigger.covers(told("graftwork.release.promoted", "It is good."))


def test_without_a_block_there_is_no_automation(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Webhook:
        raise ValueError(f"Unable to find block document named {name}")

    monkeypatch.setattr(Webhook, "load", load)
    assert [of_webhook(name) for name in TEMPLATES] == [None, None]
    assert len({automation_of(name) for name in TEMPLATES}) == 2
