"""Questions and answers as text, of completions and chats, whole and streamed; and what is no text."""

import random
import time
from typing import Any

import orjson
import pytest

from engine.evaluation.conversations import Exchange, exchange_of, follow_up_body
from tests.helpers.api_answers import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Said,
    body_of,
    event,
    pieces,
    whole,
)

APIS = (COMPLETIONS, CHAT)

QUESTION = "What is 40 + 2?"
STREAMED = pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
HARD = ("a\n\ndata: [DONE]\n\n", "\u2028\x85\r\n", '{"choices":[]}', "é🦆", "")


def answer_of(path: str, is_stream: bool, said: Said) -> str:
    return (b"".join(pieces(path, [said])) if is_stream else whole(path, [said])).decode()


def read(path: str, is_stream: bool = False, said: Said | None = None, **fields: Any) -> Exchange | None:
    said = said or Said()
    return exchange_of(path, body_of(path, "sums", **fields), is_stream, answer_of(path, is_stream, said))


@STREAMED
@pytest.mark.parametrize("words", [("4", "2"), (), HARD, ("x" * 100,) * 10_000])
@pytest.mark.parametrize("path", APIS)
def test_question_and_answer_of_every_api(path: str, words: tuple[str, ...], is_stream: bool) -> None:
    started = time.thread_time()
    found = read(path, is_stream, Said(words, "length"))
    assert found == Exchange(QUESTION, "".join(words), [{"role": "user", "content": QUESTION}], True)
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["again"]}),
        (CHAT, {"messages": ["S", "U", "A", [{"type": "text", "text": "ag"}, "ain"]]}),
    ],
)
def test_turns_of_every_api(path: str, fields: dict[str, Any]) -> None:
    roles = {"S": "developer", "U": "user", "A": "assistant"}
    fields = {
        name: [{"role": roles.get(str(one), "user"), "content": one} for one in value]
        if name == "messages"
        else value
        for name, value in fields.items()
    }
    found = read(path, **fields)
    assert found is not None
    assert found.question == ("ag\nain" if path == CHAT else "again")
    told = [(turn["role"], turn["content"]) for turn in found.messages]
    if path == COMPLETIONS:
        assert (told, found.is_first_turn) == ([("user", "again")], True)
    else:
        assert told == [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", found.question)]
        assert not found.is_first_turn


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "user", "content": QUESTION}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"suffix": "}"}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hello"}),
        (CHAT, {"messages": [ASKED, {"role": "assistant", "content": "So"}]}),
        (CHAT, {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}, ASKED]}),
        (CHAT, {"messages": [ASKED, {"role": "tool", "content": "42", "tool_call_id": "c"}]}),
        (CHAT, {"messages": [{"role": ["user"], "content": QUESTION}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}),
        (CHAT, {"messages": [{"role": "system", "content": QUESTION}]}),
    ],
)
def test_a_request_that_is_not_text_alone(path: str, fields: dict[str, Any]) -> None:
    assert read(path, **fields) is None


def chosen(said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": said, "finish_reason": "stop"} | more]}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (CHAT, chosen({"content": None, "tool_calls": [CALL]})),
        (CHAT, chosen({"content": "no", "refusal": "I will not."})),
        (CHAT, chosen({"content": ["4"]})),
        (CHAT, chosen({"content": "4"}, index=1)),
        (CHAT, chosen({"content": "4"}, message=None)),
        (CHAT, {"choices": []}),
        (CHAT, {"choices": {"0": {}}}),
        (CHAT, {"error": {"message": "no"}}),
        (COMPLETIONS, {"choices": [{"text": 7}]}),
    ],
)
def test_an_answer_that_is_not_text_alone(path: str, answer: Any) -> None:
    assert exchange_of(path, body_of(path, "m"), False, orjson.dumps(answer).decode()) is None


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (CHAT, {"choices": [{"index": 0, "delta": {"tool_calls": [CALL]}}]}),
        (CHAT, {"error": {"message": "It broke."}}),
    ],
)
def test_a_stream_that_is_not_text_alone(path: str, told: Any) -> None:
    streamed = b"".join([*pieces(path, [Said()]), event(told)]).decode()
    assert exchange_of(path, body_of(path, "m"), True, streamed) is None


@STREAMED
@pytest.mark.parametrize("path", [*APIS, MESSAGES, RESPONSES, "/graftwork/samples"])
def test_whatever_is_malformed_has_no_exchange_and_raises_nothing(path: str, is_stream: bool) -> None:
    draw = random.Random(7)
    known = path if path in APIS else CHAT
    good = answer_of(known, is_stream, Said())
    for text in ("", " ", "[]", "null", "data: ", "data: {", "{", "[" * 5000, "data: 7\n\n", "\ud800"):
        assert exchange_of(path, body_of(known, "m"), is_stream, text) is None, text
    if path not in APIS:
        assert exchange_of(path, body_of(known, "m"), is_stream, good) is None
    odd: list[Any] = [None, 7, 1.5, True, "x", [], {}, [[]], [None], [7], {"type": []}, [{"content": {}}]]
    fields = ("prompt", "messages", "input", "system", "instructions")
    for _ in range(300):
        request = body_of(known, "m") | {draw.choice(fields): draw.choice(odd)}
        at = draw.randrange(len(good))
        cut = good[:at] + draw.choice(("", "\n", '"', "}", "\0")) + good[at + draw.randrange(3) :]
        exchange_of(path, request, is_stream, cut)


def test_a_follow_up_is_the_same_request_for_another_model() -> None:
    """Whatever the gateway takes is kept, but for whose it is, how it is sent, and other choices."""
    kept = {"temperature": 0.5, "seed": 3, "tools": [], "response_format": {"type": "json_object"}}
    gone = {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "user": "ann", "n": 1,
        "safety_identifier": "ann", "metadata": {"user_id": "ann"}, "logprobs": True, "store": True,
    }  # fmt: skip
    plain = body_of(CHAT, "m")
    request = plain | kept | gone
    assert follow_up_body(request) == {"messages": plain["messages"], "max_tokens": 8} | kept
    assert request == plain | kept | gone
