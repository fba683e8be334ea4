"""The text of a question and of its answer, read from the bodies of every API, whole and streamed.

Bodies come from clients and models. What has more than text, or is not of its API's form, has no exchange.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

Body = Mapping[str, Any]
Turn = dict[str, str]
# Fields of a request that are its client's own, its stream's, or of several choices and their tokens.
ITS_OWN = {
    "model", "stream", "stream_options", "user", "safety_identifier", "metadata", "store", "conversation",
    "previous_response_id", "background", "include", "prompt_cache_key", "service_tier", "priority",
    "cache_salt", "request_id", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs",
    "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids",
}  # fmt: skip
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# Parts of a message with its text, and those that are no part of what was said.
TEXTS, THOUGHTS = ("text", "input_text", "output_text"), ("thinking", "redacted_thinking", "reasoning_text")
# Pieces of a thought in Anthropic's streams.
OF_THOUGHTS = ("thinking_delta", "signature_delta")


@dataclass(frozen=True)
class Exchange:
    """A user's `question`, the last one of the turns `messages`, and the `answer` to them."""

    question: str
    answer: str
    messages: list[Turn]
    is_first_turn: bool


class NotText(ValueError):
    """A body has more than text, or is not of its API's form."""


def exchange_of(path: str, request: Body, is_stream: bool, answer: str) -> Exchange | None:
    """Return a request of the API at `path` and its answer as text, or None where they are not text alone."""
    if path not in APIS:
        return None
    read_turns, read_answer = APIS[path]
    try:
        turns = read_turns(request)
        said = "".join(read_answer(events_of(answer) if is_stream else [_parsed(answer)]))
    except NotText:
        return None
    spoken = [turn for turn in turns if turn["role"] != "system"]
    if not spoken or spoken[-1]["role"] != "user":
        return None
    return Exchange(spoken[-1]["content"], said, turns, all(turn["role"] == "user" for turn in spoken))


def follow_up_body(request: Body) -> dict[str, Any]:
    """Return a request to be sent to another `model`, which its caller adds: one choice, not streamed."""
    return {name: value for name, value in request.items() if name not in ITS_OWN}


def events_of(answer: str) -> Iterator[Body]:
    """Yield the events of a stream. Raises `NotText` for one that is no JSON object."""
    # A text may have other ends of lines in it, and those end no event.
    for line in answer.split("\n"):
        if line.startswith("data:") and (told := line[5:].strip()) != "[DONE]":
            yield _parsed(told)


def turns_of_completion(request: Body) -> list[Turn]:
    """Return a prompt as a user's turn. Raises `NotText`, also where the answer has the prompt in it."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or request.get("echo") or request.get("suffix"):
        raise NotText
    return [{"role": "user", "content": prompt}]


def turns_of_chat(request: Body) -> list[Turn]:
    """Return the turns of a list of messages. Raises `NotText`."""
    return [_turn(message) for message in _objects(request.get("messages"))]


def turns_of_messages(request: Body) -> list[Turn]:
    """Return Anthropic's system prompt and turns. Raises `NotText`."""
    return _system(request.get("system")) + turns_of_chat(request)


def turns_of_response(request: Body) -> list[Turn]:
    """Return the instructions and the turns of OpenAI's responses. Raises `NotText`."""
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
    turns = [_turn(item) for item in items if item.get("type") != "reasoning"]
    return _system(request.get("instructions")) + turns


def _system(content: Any) -> list[Turn]:
    return [{"role": "system", "content": "\n".join(_texts(content))}] if content else []


def _turn(message: Body) -> Turn:
    role = message.get("role")
    is_said = message.get("type", "message") == "message" and isinstance(role, str) and role in ROLES
    if not is_said or message.get("tool_calls") or message.get("function_call"):
        raise NotText
    return {"role": ROLES[str(role)], "content": "\n".join(_texts(message.get("content")))}


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content, which is a text or a list of parts."""
    for part in [content] if isinstance(content, str) else _array(content):
        if isinstance(part, str):
            yield part
            continue
        kind = _object(part).get("type", "text")
        if kind in TEXTS and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind not in THOUGHTS:
            raise NotText


def said_in_choices(events: Iterable[Body]) -> Iterator[str]:
    """Yield the pieces of completions' or chat's answer. Raises `NotText`."""
    has_choice = False
    for event in events:
        for choice in _objects(event.get("choices")):
            has_choice = True
            said = choice if "text" in choice else _object(choice.get("delta", choice.get("message")))
            piece = said.get("text", said.get("content"))
            is_text = piece is None or isinstance(piece, str)
            if not is_text or said.get("tool_calls") or said.get("refusal") or choice.get("index", 0) != 0:
                raise NotText
            yield piece or ""
    if not has_choice:
        raise NotText


def said_in_message(events: Iterable[Body]) -> Iterator[str]:
    """Yield the pieces of an answer of Anthropic's. Raises `NotText`."""
    has_message = False
    for event in events:
        kind = event.get("type")
        if kind in ("message", "message_start"):
            has_message = True
        if kind == "error":
            raise NotText
        if kind == "message":
            yield from _texts(event.get("content"))
        elif kind == "content_block_start":
            yield from _texts([event.get("content_block")])
        elif kind == "content_block_delta":
            delta = _object(event.get("delta"))
            if isinstance(text := delta.get("text"), str):
                yield text
            elif delta.get("type") not in OF_THOUGHTS:
                raise NotText
    if not has_message:
        raise NotText


def said_in_response(events: Iterable[Body]) -> Iterator[str]:
    """Yield the texts of an answer of OpenAI's responses; a stream's last event has it. Raises `NotText`."""
    *_, last = [{}, *events]
    response = _object(last.get("response", last))
    if response.get("status") not in ("completed", "incomplete"):
        raise NotText
    for item in _objects(response.get("output")):
        if item.get("type") == "message":
            yield from _texts(item.get("content"))
        elif item.get("type") != "reasoning":
            raise NotText


def _parsed(text: str) -> Body:
    try:
        return _object(orjson.loads(text))
    except orjson.JSONDecodeError:
        raise NotText from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotText
    return value


def _array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NotText
    return value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [_object(one) for one in _array(value)]


APIS = {
    "/v1/completions": (turns_of_completion, said_in_choices),
    "/v1/chat/completions": (turns_of_chat, said_in_choices),
    "/v1/messages": (turns_of_messages, said_in_message),
    "/v1/responses": (turns_of_response, said_in_response),
}
