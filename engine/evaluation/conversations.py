"""The text of a question and of its answer, read from bodies of completions and chats, whole and streamed.

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
    "model", "stream", "stream_options", "user", "safety_identifier", "metadata", "store", "prompt_cache_key",
    "service_tier", "priority", "cache_salt", "request_id", "n", "best_of", "logprobs", "top_logprobs",
    "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids",
}  # fmt: skip
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


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
    try:
        turns = APIS[path](request)
        said = "".join(said_in_choices(events_of(answer) if is_stream else [_parsed(answer)]))
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


def _turn(message: Body) -> Turn:
    role = message.get("role")
    is_said = isinstance(role, str) and role in ROLES
    if not is_said or message.get("tool_calls") or message.get("function_call"):
        raise NotText
    return {"role": ROLES[str(role)], "content": "\n".join(_texts(message.get("content")))}


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content, which is a text or a list of parts."""
    for part in [content] if isinstance(content, str) else _array(content):
        if isinstance(part, str):
            yield part
        elif _object(part).get("type", "text") == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        else:
            raise NotText


def said_in_choices(events: Iterable[Body]) -> Iterator[str]:
    """Yield the pieces of an answer. Raises `NotText`."""
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


APIS = {"/v1/completions": turns_of_completion, "/v1/chat/completions": turns_of_chat}
