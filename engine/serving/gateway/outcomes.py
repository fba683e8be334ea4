"""How an answer ended: as it should, truncated, refused or invalid; for the canary's guards."""

from collections.abc import Mapping
from typing import Any

import orjson

# All but the last event of a stream have null there.
ENDED = b'"finish_reason":"'
# What the last event of a stream says, and the outcome.
STREAMED = {
    b'"finish_reason":"length"': "truncated",
    b'"finish_reason":"content_filter"': "refused",
    b'"finish_reason":"stop"': "ok",
    b'"finish_reason":"tool_calls"': "ok",
}
FAULT = b'data: {"error"'
SERVER_ERROR = 500


def wants_json(request: Mapping[str, Any]) -> bool:
    """Return whether a request asks for JSON."""
    wanted = request.get("response_format")
    return isinstance(wanted, Mapping) and wanted.get("type") in ("json_object", "json_schema")


def outcome_of(answer: Mapping[str, Any], is_json: bool) -> str | None:
    """Return the outcome of a whole answer: the worst of its choices; None for a body of another kind."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    found = {_outcome(choice, is_json) for choice in choices}
    return next((worst for worst in ("truncated", "refused", "invalid") if worst in found), "ok")


def streamed_outcome(chunk: bytes) -> str | None:
    """Return the outcome that a piece of a stream tells, or None."""
    return next((outcome for sign, outcome in STREAMED.items() if sign in chunk), None)


def streamed_fault(chunk: bytes) -> int:
    """Return the status of an error that vLLM tells in a stream, behind its 200: a piece that begins so."""
    try:
        return int(orjson.loads(chunk.removeprefix(b"data: ").partition(b"\n")[0])["error"]["code"])
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        return SERVER_ERROR


def _outcome(choice: Mapping[str, Any], is_json: bool) -> str:
    message = choice.get("message") or {}
    if choice.get("finish_reason") == "length":
        return "truncated"
    if choice.get("finish_reason") == "content_filter" or message.get("refusal"):
        return "refused"
    text = message.get("content") or choice.get("text") or ""
    if not text.strip() and not message.get("tool_calls"):
        return "invalid"
    return "invalid" if is_json and not _is_json(text) else "ok"


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
