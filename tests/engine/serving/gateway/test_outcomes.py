"""How an answer ended, as the gateway tells the ledger."""

from typing import Any

import pytest

from engine.catalog.catalog import Key
from engine.serving.gateway.arms import Target
from engine.serving.gateway.exchange import Exchange
from engine.serving.gateway.outcomes import outcome_of, streamed_outcome, wants_json


def choice(text: str | None = "42", finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"finish_reason": finish, "message": {"content": text, **message}}


@pytest.mark.parametrize(
    ("choices", "is_json", "outcome"),
    [
        ([choice()], False, "ok"),
        ([choice("4", "length")], False, "truncated"),
        ([choice("no", "content_filter")], False, "refused"),
        ([choice(None, refusal="I will not.")], False, "refused"),
        ([choice("  ")], False, "invalid"),
        ([choice(None)], False, "invalid"),
        ([choice(None, "tool_calls", tool_calls=[{"id": "1"}])], False, "ok"),
        ([choice('{"a": 1}')], True, "ok"),
        ([choice("{'a': 1}")], True, "invalid"),
        ([choice(), choice("4", "length"), choice("")], False, "truncated"),
        ([{"finish_reason": "stop", "text": "42"}], False, "ok"),
        ([], False, None),
        (None, False, None),
    ],
)
def test_a_whole_answer(choices: Any, is_json: bool, outcome: str | None) -> None:
    assert outcome_of({"choices": choices}, is_json) == outcome


def test_a_stream_tells_its_outcome_in_its_last_event() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":%s}]}'
    said = {b"null": None, b'"stop"': "ok", b'"length"': "truncated", b'"content_filter"': "refused"}
    assert {finish: streamed_outcome(event % finish) for finish in said} == said


@pytest.mark.parametrize(
    ("wanted", "is_json"),
    [
        ({"type": "json_object"}, True),
        ({"type": "json_schema"}, True),
        ({"type": "text"}, False),
        (None, False),
    ],
)
def test_who_asks_for_json(wanted: Any, is_json: bool) -> None:
    assert wants_json({"response_format": wanted}) == is_json


def exchange() -> Exchange:
    key = Key("hash", "me", "user", 0.0)
    return Exchange("id", key, Target("sums", None, "base"), "u", None, "user", 0.0, started=0.0)


def test_a_stream_is_timed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, moments = exchange(), iter((1.0, 1.5, 2.5, 3.0))
    monkeypatch.setattr("engine.serving.gateway.exchange.time.perf_counter", lambda: next(moments))
    for body in (b"data: a", b"data: b", b'data: {"finish_reason":"length"}'):
        seen.take_piece(body)
    row = seen.observation("here")
    assert (row["ttft_s"], row["token_s"], row["outcome"]) == (1.0, 0.75, "truncated")
    assert (row["completion_tokens"], row["pieces"]) == (None, 3)


def test_a_whole_answer_has_its_tokens_and_no_time_of_a_piece() -> None:
    seen = exchange()
    seen.take_whole(b'{"choices":[{"text":"4"}],"usage":{"completion_tokens":1}}', is_json=False)
    row = seen.observation("here")
    assert (row["completion_tokens"], row["token_s"], row["outcome"]) == (1, None, "ok")
    assert row["pieces"] is None
