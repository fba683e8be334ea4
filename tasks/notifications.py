"""Prefect's automations that tell people: of bad news by default, of everything through one's own webhooks.

A webhook of Slack or another receiver is a block in Prefect, which encrypts its address. The block's name
says by which template it is told.
"""

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from engine.security.credentials import known_credential
from engine.settings.params import Params

if TYPE_CHECKING:
    from prefect.automations import AutomationCore

BAD_NEWS = (
    "graftwork.release.rolled_back",
    "graftwork.release.held",
    "graftwork.release.asked",
    "graftwork.revision.refused",
    "graftwork.engine.down",
    "graftwork.champion.rolled_back",
    "graftwork.policy.drift",
    "graftwork.alarm.began",
)
JSON = {"content-type": "application/json"}
# The filter `tojson` escapes quotes and line breaks of a reason.
NOTICE = (
    '{"text": {{ (event.event ~ ": " ~ event.payload.revision ~ " " ~ event.payload.reason) | tojson }}, '
    '"link": {{ event.payload.link | tojson }}}'
)
# Slack reads <!channel> as a mention, unless it is escaped so.
ESCAPED = "| replace('&', '&amp;') | replace('<', '&lt;') | replace('>', '&gt;')"
# By the name of a webhook's block.
TEMPLATES = {
    "graftwork-slack": (
        "{\"text\": {{ ('*' ~ event.event.removeprefix('graftwork.') ~ '* ' ~ "
        f"((event.payload.revision or event.resource.name) ~ ': ' ~ event.payload.reason) {ESCAPED} ~ "
        "(' <' ~ event.payload.link ~ '|More>' if event.payload.link else '')) | tojson }}}"
    ),
    "graftwork-webhook": (
        '{"id": {{ event.id | string | tojson }}, "event": {{ event.event | tojson }}, '
        '"at": {{ event.occurred | string | tojson }}, "subject": {{ event.resource.name | tojson }}, '
        '"revision": {{ event.payload.revision | tojson }}, "reason": {{ event.payload.reason | tojson }}, '
        '"link": {{ event.payload.link | tojson }}}'
    ),
}


def bad_news(params: Params) -> "AutomationCore":
    """Return the automation that posts bad news to `prefect.notify_url`, by default to the controller."""
    from prefect.blocks.webhook import Webhook

    url, headers = params.prefect.notify_url, JSON
    if url is None:
        url = f"{params.url('controller')}/notices/inbox"
        headers = JSON | {"authorization": f"Bearer {known_credential(params.paths, 'controller')}"}
    block = Webhook.model_validate({"url": url, "headers": headers}).save("graftwork-notices", overwrite=True)
    does = "Posts bad news to `prefect.notify_url`, by default to the controller."
    return _automation("graftwork: tell people", does, BAD_NEWS, block, NOTICE)


def of_webhook(name: str) -> "AutomationCore | None":
    """Return the automation of the webhook's block with this name of `TEMPLATES`; None without a block.

    The block is saved with a header that receivers of JSON need.
    """
    from prefect.blocks.webhook import Webhook
    from prefect.types import SecretDict

    try:
        webhook = Webhook.load(name)
    except ValueError:
        return None
    assert isinstance(webhook, Webhook)
    webhook.headers = SecretDict(JSON | webhook.headers.get_secret_value())
    block = webhook.save(name, overwrite=True)
    does = f"Posts all news of releases, engines and alarms to the webhook `{name}`."
    return _automation(automation_of(name), does, ("graftwork.*",), block, TEMPLATES[name])


def automation_of(webhook: str) -> str:
    """Return the name of a webhook's automation."""
    return f"graftwork: {webhook}"


def _automation(
    name: str, description: str, events: Collection[str], block: Any, payload: str
) -> "AutomationCore":
    from prefect.automations import AutomationCore, CallWebhook, EventTrigger, Posture

    return AutomationCore(
        name=name,
        description=description,
        trigger=EventTrigger(
            expect=set(events),
            match={"prefect.resource.id": ["graftwork.*"]},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[CallWebhook(block_document_id=block, payload=payload)],
    )
