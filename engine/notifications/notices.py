"""Notifications for people and automations: durable catalog rows, sent to Prefect as events.

A notification's id derives from what happened, so adding or sending it twice is idempotent. While Prefect is
down the rows wait.
"""

import logging
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx

from engine.catalog.catalog import Catalog, Notice, Release
from engine.catalog.records import served_name
from engine.threads import PeriodicThread

NAMES = uuid.UUID("0b4b4c39-5c1e-5b6f-8f55-5ab1f5a1c6d4")
INTERVAL_S = 1.0
TIMEOUT_S = 5.0
BATCH = 50
# What an automation delivers back to the controller has this name.
DELIVERED = "graftwork.notice.delivered"
log = logging.getLogger(__name__)


def released(catalog: Catalog, release: Release, site: str) -> None:
    """Notify of a release's end or newest changes; also that the effect probe refused its revision.

    `site` is the controller's URL, whose page of the release is the link. What was told is not told again.
    """
    link = f"{site}/releases/{release.id}"
    for name, reason, key in _changes(release):
        notify(catalog, f"release.{name}", reason, link, key, release.policy, release.revision)
    probe = release.evidence.get("probe") or {}
    if release.state == "held" and probe.get("accepted") is False:
        notify(
            catalog, "revision.refused", release.reason, link, release.id, release.policy, release.revision
        )


def _changes(release: Release) -> Iterator[tuple[str, str, str]]:
    """Yield what is to be told of a release: a name, a reason, and what makes it one event."""
    if release.state != "running":
        yield release.state, release.reason, release.id
        return
    if release.ramp:
        version, weight = release.ramp[-1]
        yield "advanced", f"{weight:.0%} of the users go to the canary.", f"{release.id}/{version:g}"
    if release.asks is not None:
        how = f"`graftwork decide approve {release.policy}` or the form in Prefect"
        yield (
            "asked",
            f"{release.asks:.0%} of the users wait for an approval: {how}.",
            (f"{release.id}/{release.asks:g}"),
        )
    if release.pauses:
        pause, number = release.pauses[-1], f"{release.id}/{len(release.pauses)}"
        yield "paused", f"By {pause['by']}: {pause['reason']}", number
        if not release.paused:
            yield "resumed", f"By {pause['resumed_by']}: {pause['resumed_for']}", number


def notify(
    catalog: Catalog, name: str, reason: str, link: str, key: str, policy: str = "", digest: str | None = None
) -> None:
    """Notify of `graftwork.NAME`, and whose it is; what has an equal `key` too is the same event."""
    name = f"graftwork.{name}"
    id = str(uuid.uuid5(NAMES, f"{name}/{policy}/{digest}/{key}"))
    catalog.notices.add(Notice(id, name, policy, digest, reason, link, time.time()))


def event_of(notice: Notice) -> dict[str, Any]:
    """Return a notification as an event of Prefect's API."""
    kind = "engine" if notice.name.startswith("graftwork.engine.") else "controller"
    about = f"graftwork.policy.{notice.policy}" if notice.policy else f"graftwork.{kind}"
    revision = served_name(notice.policy, notice.revision) if notice.revision else ""
    resource = {
        "prefect.resource.id": about,
        "prefect.resource.name": notice.policy or kind,
        "graftwork.revision": revision,
        "graftwork.reason": notice.reason,
        "graftwork.link": notice.link,
    }
    related = [{"prefect.resource.id": f"graftwork.revision.{revision}", "prefect.resource.role": "revision"}]
    return {
        "id": notice.id,
        "occurred": datetime.fromtimestamp(notice.at, UTC).isoformat(),
        "event": notice.name,
        "resource": resource,
        "related": related if revision else [],
        "payload": {"revision": revision, "reason": notice.reason, "link": notice.link},
    }


class NotificationSender(PeriodicThread):
    """Sends waiting notifications to Prefect's server; `client` has its URL as base."""

    def __init__(self, catalog: Catalog, client: httpx.Client):
        super().__init__("notifications", INTERVAL_S, self.send)
        self._catalog = catalog
        self._client = client

    def send(self) -> int:
        """Send a batch of waiting notifications and return its size; raises `httpx.HTTPError`."""
        waiting = self._catalog.notices.page(limit=BATCH, unsent=True)
        if waiting:
            events = [event_of(notice) for notice in waiting if notice.name != DELIVERED]
            self._post(events)
            self._catalog.notices.mark_sent([notice.id for notice in waiting])
        return len(waiting)

    def _post(self, events: list[dict[str, Any]]) -> None:
        answer = self._client.post("/api/events", json=events, timeout=TIMEOUT_S)
        if answer.status_code in (401, 403):
            # That is no fault of the events: they wait.
            answer.raise_for_status()
        if answer.is_client_error and len(events) > 1:
            # One event that Prefect refuses must not block the others.
            for event in events:
                self._post([event])
        elif answer.is_client_error:
            log.error("Prefect refused the event %s: %s", events[0], answer.text)
        else:
            answer.raise_for_status()
