"""Errors in the form of the API that was called: OpenAI's, or Anthropic's at `/v1/messages`."""

from collections.abc import Mapping
from typing import Any

import orjson

from engine.errors import Ambiguous, Busy, GraftworkError, LimitReached, NotFound
from engine.serving.gateway.asgi import Header, Refused, Send, answer

# OpenAI's `code` by status, and Anthropic's `type`; others are invalid requests, or the server's errors.
CODES = {
    401: "invalid_api_key",
    403: "insufficient_permissions",
    404: "model_not_found",
    405: "method_not_supported",
    409: "ambiguous_model",
    410: "model_withdrawn",
    413: "request_too_large",
    422: "adapter_refused",
    429: "rate_limit_exceeded",
    503: "unavailable",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Its path, and those below it, answer in Anthropic's form.
MESSAGES = "/v1/messages"


async def send_no_key(send: Send, path: str, *headers: Header) -> None:
    """Refuse a request without a valid key. There may be many, so the answer is made ahead."""
    await answer(send, 401, NO_KEY[path.startswith(MESSAGES)], headers)


async def send_error(
    send: Send, error: GraftworkError, path: str = "", headers: tuple[Header, ...] = ()
) -> None:
    """Send an error as the response to a request for this path."""
    told = [*headers, *getattr(error, "headers", ())]
    if isinstance(error, Busy):
        told.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    await answer(send, error.status, orjson.dumps(error_body(error, path)), told)


def error_body(error: GraftworkError, path: str) -> dict[str, Any]:
    """Return the JSON body for an error."""
    status, message = error.status, str(error)
    if path.startswith(MESSAGES):
        return anthropic_body(status, message)
    param = error.param if isinstance(error, Refused) else None
    code = error.code if isinstance(error, Refused | LimitReached) and error.code else CODES.get(status)
    body = openai_body(status, message, code, param or ("model" if code == "model_not_found" else None))
    if isinstance(error, NotFound):
        body["error"]["nearest"] = error.nearest
    elif isinstance(error, Ambiguous):
        body["error"]["candidates"] = error.candidates
    return body


def reason_of(error: GraftworkError) -> str:
    """Return an error's word in metrics: its code, else its class."""
    return getattr(error, "code", None) or CODES.get(error.status) or type(error).__name__


def openai_body(status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    otherwise = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, otherwise), "message": message}}


def translate(status: int, body: bytes, path: str) -> bytes:
    """Return an error of vLLM's in the form of the API; any other body as it is."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    fault = fields.get("error") if isinstance(fields, dict) else None
    if not isinstance(fault, Mapping) or not isinstance(fault.get("message"), str):
        return body
    message, param = fault["message"], fault.get("param")
    if path.startswith(MESSAGES):
        return orjson.dumps(anthropic_body(status, message))
    if not isinstance(fault.get("code"), int):
        # Of an endpoint of ours; vLLM repeats the status.
        return body
    return orjson.dumps(openai_body(status, message, CODES.get(status), param))


NO_VALID_KEY = (
    "No valid API key was sent. Send `Authorization: Bearer gw-...`; `graftwork key create` makes a key."
)
# In OpenAI's form and in Anthropic's.
NO_KEY = (
    orjson.dumps(openai_body(401, NO_VALID_KEY, CODES[401], None)),
    orjson.dumps(anthropic_body(401, NO_VALID_KEY)),
)
