"""The webhook by which MLflow says that an alias was moved."""

import base64
import hashlib
import hmac

from fastapi import APIRouter, Request

from engine.controller.access_control import WEBHOOK, whole_body
from engine.errors import Unauthorized
from engine.integrations.mlflow_aliases import AliasMirror
from engine.security.http import same


def webhook_router(mirror: AliasMirror, secret: str) -> APIRouter:
    """Return the route that MLflow posts to, signed with `secret`."""
    router = APIRouter()

    @router.post(WEBHOOK)
    async def webhook(request: Request) -> dict[str, bool]:
        """Read MLflow's aliases now."""
        check_signature(request, await whole_body(request), secret)
        mirror.wake()
        return {"looking": True}

    return router


def check_signature(request: Request, body: bytes, secret: str) -> None:
    """Raise `Unauthorized` unless MLflow signed this webhook (HMAC-SHA256 of id, time and body)."""
    id, at = (request.headers.get(f"x-mlflow-{name}", "") for name in ("delivery-id", "timestamp"))
    wanted = hmac.new(secret.encode(), f"{id}.{at}.".encode() + body, hashlib.sha256).digest()
    given = request.headers.get("x-mlflow-signature", "")
    if not same(given, f"v1,{base64.b64encode(wanted).decode()}"):
        raise Unauthorized("This call needs the signature of MLflow's webhook.")
