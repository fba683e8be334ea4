"""Messages have text alone, whatever a part calls itself."""

from typing import Any

import pytest

from engine.serving.gateway.request_fields import plain_text, response_items

IMAGE = {"url": "http://x/"}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "messages",
    [
        "x",
        user("x"),
        user(None),
        user(["x", {"text": "x"}, {"type": "text", "text": "x", "cache_control": {}}]),
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [called('{"a": [' + "{}, " * 100 + "{}]}")],
        [called("[" * 60 + "]" * 60)],
        user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}, "4"]}]),
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        [{"type": "function_call_output", "call_id": "1", "output": "3"}],
        [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}],
    ],
)
def test_text_and_tools_pass(messages: Any) -> None:
    assert plain_text(messages) is None


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (user([{"type": "image_url", "image_url": IMAGE}]), "image_url"),
        # Python's parser raises an error at some thousand, which was a fault of the canary.
        ([called("[" * 5000 + "]" * 5000)], "nested deeper"),
        ([{"role": "assistant", "function_call": {"arguments": '{"a":' * 70 + "1" + "}" * 70}}], "nested"),
        ([{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[" * 65}], "nested"),
        # vLLM tells the kind of a part without a type by its keys.
        (user([{"image_url": IMAGE}]), "image_url"),
        (user([{"type": "text", "text": "x", "audio_url": IMAGE}]), "audio_url"),
        (user([{"text": "x", "uuid": "1"}]), "uuid"),
        (user([{"type": ["text"]}]), "text"),
        (user([{"type": "tool_result", "content": [{"source": {"type": "url"}}]}]), "source"),
        (user([{"type": "tool_result", "content": [{"type": "tool_result", "content": []}]}]), "tool_result"),
        (user({"image_url": IMAGE}), "neither"),
        (user([["x"]]), "neither"),
        (["x"], "objects"),
        ({"role": "user"}, "list"),
        ([{"type": "computer_call_output", "output": {"image_url": "http://x/"}}], "computer_call_output"),
        ([{"type": "function_call_output", "output": [{"image_url": IMAGE}]}], "image_url"),
        ([{"role": "user"}] * 4097, "4096"),
    ],
)
def test_anything_else_is_refused_by_name(messages: Any, says: str) -> None:
    assert says in (plain_text(messages) or "")


def test_items_of_the_responses_api_that_are_whole_pass():
    assert response_items("What is it?") is None
    items = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is 3 + 4?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"id": "m", "type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "7", "annotations": []}]},
    ]  # fmt: skip
    assert response_items(items) is None
