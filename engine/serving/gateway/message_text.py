"""Messages have text alone: what else a message may hold makes vLLM fetch a URL or decode a file.

A part without `type` is what its keys say to vLLM, so a part may have the keys of its own kind and no others.
"""

import re
from collections.abc import Iterator
from typing import Any

from engine.serving.gateway.request_depth import MOST_DEPTH

MOST_MESSAGES = 4096
BRACKETS = re.compile(r"[\[\]{}]")
# The kinds of parts, and their keys.
PARTS = {
    "text": {"text", "cache_control", "citations"},
    "input_text": {"text"},
    "output_text": {"text", "annotations", "logprobs"},
    "reasoning_text": {"text"},
    "refusal": {"refusal"},
    "tool_use": {"id", "name", "input", "cache_control"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
# What a list of messages may hold in the responses API; elsewhere a message has no type.
ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


def plain_text(messages: Any) -> str | None:
    """Say why messages are not text, tool calls and tool results alone; None when they are."""
    if isinstance(messages, str):
        return None
    if not isinstance(messages, list) or len(messages) > MOST_MESSAGES:
        return f"must be a list of at most {MOST_MESSAGES} messages"
    for message in messages:
        if not isinstance(message, dict):
            return "must be a list of messages, which are objects"
        kind = message.get("type", "message")
        if kind not in ITEMS:
            return _of_kind(kind)
        for name in ("content", "output"):
            if fault := text_parts(message.get(name)):
                return fault
        if any(_is_deep(text) for text in _arguments(message)):
            return f"has arguments of a tool that are nested deeper than {MOST_DEPTH} lists and objects"
    return None


def _arguments(message: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that vLLM parses as JSON: what tools were called with."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    for one in (message, message.get("function_call"), *functions):
        if isinstance(one, dict) and isinstance(text := one.get("arguments"), str):
            yield text


def _is_deep(text: str) -> bool:
    """Return whether a text has enough brackets in a row of openings to be nested too deeply.

    Brackets in the JSON's own texts count as well, so that a few deep ones of code may be refused.
    """
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return False
    depth = 0
    for bracket in BRACKETS.findall(text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > MOST_DEPTH:
            return True
    return False


ROLES = ("user", "assistant", "system", "developer")
# Fields of an item beside its type, each a text.
ITEM_TEXTS = {
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "custom_tool_call": {"call_id", "name", "input"},
    "custom_tool_call_output": {"call_id", "output"},
}


def response_items(items: Any) -> str | None:
    """Say why the input of the responses API is not a text, or a list of items that are whole; else None.

    vLLM tries each of some twenty kinds for an item that fits none: 4 ms on its event loop, and 1 MB.
    """
    if fault := plain_text(items):
        return fault
    for item in items if isinstance(items, list) else ():
        kind = item.get("type", "message")
        if kind == "message":
            if not _is_choice(item.get("role"), ROLES) or not _has_texts(item.get("content")):
                return "has a message without a role and a text"
        elif kind in ITEM_TEXTS and not all(isinstance(item.get(name), str) for name in ITEM_TEXTS[kind]):
            return f"has an item of type {kind!r} without {', '.join(sorted(ITEM_TEXTS[kind]))}"
        elif kind == "reasoning" and not (isinstance(item.get("summary", []), list) and "id" in item):
            return "has an item of type 'reasoning' without id and summary"
        if any(not isinstance(item.get(name, ""), str) for name in ("id", "status", "phase")):
            return "has an item whose id or status is no text"
    return None


def _is_choice(value: Any, choices: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in choices


def _has_texts(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, dict)
            and isinstance(part.get("text", part.get("refusal")), str)
            and _is_choice(part.get("type"), ("input_text", "output_text", "refusal"))
            and not part.get("annotations")
            and not part.get("logprobs")
            for part in content
        )
    return isinstance(content, str)


def text_parts(content: Any, is_result: bool = False) -> str | None:
    """Say why the content of a message, or of a tool's result in it, is not text; None when it is."""
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return "has content that is neither a text nor a list of parts"
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            return "has a part that is neither a text nor an object"
        kind = part.get("type", "text")
        keys = PARTS.get(kind) if isinstance(kind, str) else None
        if keys is None or (is_result and kind == "tool_result"):
            return _of_kind(kind)
        if unknown := part.keys() - keys - {"type"}:
            return f"has a part of type {kind!r} with {min(unknown)[:40]!r}; only text is served"
        if kind == "tool_result" and (fault := text_parts(part.get("content"), is_result=True)):
            return fault
    return None


def _of_kind(kind: Any) -> str:
    return f"has a part of type {str(kind)[:40]!r}; only text is served"
