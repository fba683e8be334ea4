"""The notices over HTTP: those that there are, and the inbox of what Prefect's automations deliver."""

import json
import time
import uuid
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from engine.catalog.catalog import Catalog, Notice
from engine.controller.access_control import Limit, whole_body
from engine.notifications.notices import DELIVERED


def notices_router(catalog: Catalog) -> APIRouter:
    """Return the routes of a catalog's notices."""
    router = APIRouter()

    @router.get("/notices")
    def notices(limit: Limit = 100) -> list[dict[str, Any]]:
        return [asdict(notice) for notice in catalog.notices.page(limit)]

    @router.post("/notices/inbox")
    async def inbox(request: Request) -> dict[str, str]:
        """Store what a Prefect automation delivered; the default target of `prefect.notify_url`."""
        text, link = read_delivery(await whole_body(request))
        id = str(uuid.uuid4())
        now = time.time()
        catalog.notices.add(Notice(id, DELIVERED, "", None, text, link, now, sent_at=now))
        return {"id": id}

    return router


def read_delivery(body: bytes) -> tuple[str, str]:
    """Return (text, link) of a delivered body; one that is not JSON with these keys is all text."""
    try:
        data = json.loads(body)
        return str(data["text"])[:2000], str(data.get("link", ""))[:2000]
    except (ValueError, TypeError, KeyError, AttributeError):
        return body.decode(errors="replace")[:2000], ""
