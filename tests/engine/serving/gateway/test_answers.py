"""What an answer tells of its end, its usage and its errors: one table for every API, whole and streamed."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.catalog.catalog import Key
from engine.serving.gateway.answers import AnswerReader, wants_json
from engine.serving.gateway.call import Call
from engine.serving.gateway.route_table import ROUTE_OF
from engine.serving.gateway.routing import Target
from tests.helpers.api_answers import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Said, event, pieces, whole

OF_CHOICES = (COMPLETIONS, CHAT)
FAILED = event({"type": "response.failed", "response": {"status": "failed"}}, "response.failed")
STREAMED = pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])


def told(
    path: str, is_stream: bool, choices: list[Said], is_json: bool = False, **fields: Any
) -> AnswerReader:
    answer = AnswerReader(path, is_stream, is_json, len(choices))
    for piece in pieces(path, choices, **fields) if is_stream else [whole(path, choices, **fields)]:
        answer.read(piece)
    return answer


@STREAMED
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("said", "is_json", "outcome"),
    [
        (Said(), False, "ok"),
        (Said(end="length"), False, "truncated"),
        (Said(()), False, "invalid"),
        (Said((" ", "\n")), False, "invalid"),
        (Said(('{"a":', " 1}")), True, "ok"),
        (Said(("{'a':", " 1}")), True, "invalid"),
        (Said(("event: response.output_text.delta\n", "event: content_block_delta\n")), False, "ok"),
        # Its own words do not end it.
        (Said(('"finish_reason":"length"', '"stop_reason":"max_tokens"')), False, "ok"),
    ],
)
def test_how_an_answer_ended(path: str, is_stream: bool, said: Said, is_json: bool, outcome: str) -> None:
    answer = told(path, is_stream, [said], is_json)
    assert (answer.outcome, answer.used, answer.fault) == (outcome, (3, 2), None)


@STREAMED
@pytest.mark.parametrize("path", OF_CHOICES)
@pytest.mark.parametrize(
    ("choices", "outcome"),
    [
        ([Said(), Said()], "ok"),
        ([Said(end="length"), Said()], "truncated"),
        ([Said(), Said(())], "invalid"),
        ([Said(()), Said(("4",) * 8)], "invalid"),
        ([Said(end=None), Said()], None),
    ],
)
def test_the_worst_choice_counts(path: str, is_stream: bool, choices: list[Said], outcome: str) -> None:
    assert told(path, is_stream, choices).outcome == outcome


@STREAMED
@pytest.mark.parametrize("path", APIS)
def test_what_a_client_wrote_is_no_bill(path: str, is_stream: bool) -> None:
    bill = {"usage": {"input_tokens": -(10**9), "output_tokens": 0, "prompt_tokens": 0}}
    words = Said(('"usage":{"prompt_tokens":0,"completion_tokens":0}', "42"))
    tools = [{"type": "function", "name": "f", "parameters": bill}]
    assert told(path, is_stream, [words], used=(150, 1), tools=tools).used == (150, 1)


@pytest.mark.parametrize("path", APIS)
def test_a_stream_has_a_bill_at_its_end_alone(path: str) -> None:
    """Who leaves before pays what the engine counts, not what the first event says."""
    bill = {"usage": {"input_tokens": -(10**9), "output_tokens": 0}}
    answer = AnswerReader(path, is_stream=True)
    streamed = pieces(path, [Said()], tools=[{"parameters": bill}])
    for piece in streamed[: -1 if path == RESPONSES else -2]:
        answer.read(piece)
    assert answer.used is None


def test_usage_until_now_beside_choices_is_no_bill() -> None:
    answer = AnswerReader(CHAT, is_stream=True)
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    choice = {"index": 0, "delta": {"content": "4"}, "finish_reason": None}
    answer.read(event({"choices": [choice], "usage": usage}))
    assert answer.used is None


@pytest.mark.parametrize("counts", [("7", 1), (-1, 1), (True, 1), (None, 1), (1.5, 1)])
@pytest.mark.parametrize("path", APIS)
def test_what_is_no_count_of_tokens_is_not_billed(path: str, counts: Any) -> None:
    assert told(path, False, [Said()], used=counts).used is None


def test_tokens_of_a_cached_prompt_are_billed() -> None:
    usage = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 4}
    answer = AnswerReader(MESSAGES)
    answer.read(event({"type": "message", "stop_reason": "end_turn", "usage": usage})[6:])
    assert answer.used == (7, 4)


@pytest.mark.parametrize(
    ("path", "piece", "status"),
    [
        (COMPLETIONS, b'data: {"error": {"message": "no", "code": 400}}\n\n', 400),
        (CHAT, b'data: {"error": {"message": "no", "code": "none"}}\n\n', 500),
        (MESSAGES, event({"type": "error", "error": {"type": "internal_error"}}, "error"), 500),
        (RESPONSES, event({"type": "error", "code": "server_error"}, "error"), 500),
        (RESPONSES, FAILED, 500),
    ],
)
def test_an_error_behind_a_200(path: str, piece: bytes, status: int) -> None:
    answer = AnswerReader(path, is_stream=True)
    answer.read(piece)
    assert (answer.fault, answer.outcome) == (status, None)


@STREAMED
def test_a_call_without_words_and_a_refusal(is_stream: bool) -> None:
    name = "delta" if is_stream else "message"
    for said, end, outcome in (
        ({"tool_calls": [{"id": "1"}]}, "tool_calls", "ok"),
        ({"refusal": "I will not."}, "stop", "refused"),
        ({"content": "no"}, "content_filter", "refused"),
        ({"content": "no no no"}, "repetition", "invalid"),
    ):
        answer = AnswerReader(CHAT, is_stream)
        told = event({"choices": [{"index": 0, name: said, "finish_reason": end}]})
        answer.read(told if is_stream else told[6:])
        assert answer.outcome == outcome


def test_an_answer_in_several_messages_is_read_once_it_is_whole() -> None:
    body, answer = whole(CHAT, [Said()]), AnswerReader(CHAT)
    answer.read(body[:20], is_last=False)
    answer.read(body[20:], is_last=False)
    assert answer.outcome is None
    answer.read(b"")
    assert (answer.outcome, answer.used) == ("ok", (3, 2))


def test_an_answer_in_token_ids_ends_with_its_usage() -> None:
    answer = AnswerReader("/graftwork/samples")
    answer.read(b'{"groups":[[{"text":"\\"usage\\":{"}]],"usage":{"prompt_tokens":9,"completion_tokens":4}}')
    assert (answer.used, answer.outcome) == ((9, 4), None)


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b'{"choices":7,"usage":[]}', b'{"choices":[null]}', b"<html>"]
)
@pytest.mark.parametrize("path", APIS)
def test_what_is_no_answer_tells_nothing(path: str, body: bytes) -> None:
    for is_stream in (False, True):
        answer = AnswerReader(path, is_stream)
        answer.read(b"data: " + body if is_stream else body)
        assert (answer.outcome, answer.used) == (None, None)


def test_usage_that_nobody_asked_for_is_taken_away() -> None:
    last = event({"choices": [], "usage": {"prompt_tokens": 1}})
    assert AnswerReader(CHAT, is_stream=True).read(last) == b""
    kept = event({"choices": [{"index": 0, "text": '"choices":[]'}], "usage": {"prompt_tokens": 1}})
    assert AnswerReader(CHAT, is_stream=True).read(kept + last) == kept


@pytest.mark.parametrize(
    ("asked", "is_json"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"text": {"format": {"type": "json_schema"}}}, True),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({"structured_outputs": {"json": {}}}, True),
        ({"structured_outputs": {"json_object": True}}, True),
        ({"structured_outputs": {"choice": ["a"]}}, False),
        ({"text": "json"}, False),
        ({}, False),
    ],
)
def test_who_asks_for_json(asked: Any, is_json: bool) -> None:
    assert wants_json(asked) == is_json


def call_with(answer: AnswerReader) -> Call:
    """Return a call of which only the answer matters."""
    endpoint = ROUTE_OF[COMPLETIONS]
    found = Call(SimpleNamespace(name="here"), {}, None, None, endpoint, "id")  # type: ignore[arg-type]
    found.key, found.unit, found.segment, found.purpose = Key("hash", "me", 0.0), None, None, "user"
    found.target, found.admitted_at, found.started = Target("sums", None, "base"), 0.0, 0.0
    found.answer = answer
    return found


def test_a_stream_is_timed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((1.0, 1.5, 2.5))
    monkeypatch.setattr("engine.serving.gateway.answers.perf_counter", lambda: next(moments))
    answer = AnswerReader(COMPLETIONS, is_stream=True)
    for _ in range(3):
        answer.time()
    row = call_with(answer).observation()
    assert (row["ttft_s"], row["token_s"], row["pieces"]) == (1.0, 0.75, 3)


def test_a_whole_answer_has_no_time_of_a_piece() -> None:
    answer = AnswerReader(COMPLETIONS)
    answer.time()
    row = call_with(answer).observation()
    assert row["ttft_s"] is not None
    assert (row["token_s"], row["pieces"]) == (None, None)
