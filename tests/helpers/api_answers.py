"""Answers of each API that generates, whole and as the pieces of a stream, as vLLM 0.32.0 gives them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
APIS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
# The end of a choice, in the words of each API.
ENDS = {
    COMPLETIONS: {"stop": "stop", "length": "length"},
    CHAT: {"stop": "stop", "length": "length"},
    RESPONSES: {"stop": "completed", "length": "incomplete"},
    MESSAGES: {"stop": "end_turn", "length": "max_tokens"},
}


@dataclass(frozen=True)
class Said:
    """One choice: its words, each a piece of a stream, and why it ended; None: it has not ended."""

    words: tuple[str, ...] = ("4", "2")
    end: str | None = "stop"

    @property
    def text(self) -> str:
        return "".join(self.words)


def packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: dict[str, Any], name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + packed(value) + b"\n\n"


def body_of(path: str, model: str, **fields: Any) -> dict[str, Any]:
    """Return a request of the API at `path`."""
    asked = {
        COMPLETIONS: {"prompt": "What is 40 + 2?", "max_tokens": 8},
        CHAT: {"messages": [{"role": "user", "content": "What is 40 + 2?"}], "max_tokens": 8},
        RESPONSES: {"input": "What is 40 + 2?", "max_output_tokens": 8},
        MESSAGES: {"messages": [{"role": "user", "content": "What is 40 + 2?"}], "max_tokens": 8},
    }
    return {"model": model, **asked[path], **fields}


def whole(path: str, choices: Sequence[Said], used: tuple[int, int] = (3, 2), tools: Any = ()) -> bytes:
    """Return an answer that comes at once; only completions and chat have several choices."""
    if path in (COMPLETIONS, CHAT):
        told = [
            {"index": index, "finish_reason": said.end}
            | ({"text": said.text} if path == COMPLETIONS else {"message": {"content": said.text}})
            for index, said in enumerate(choices)
        ]
        return packed({"choices": told, "usage": {"prompt_tokens": used[0], "completion_tokens": used[1]}})
    (said,) = choices
    usage = {"input_tokens": used[0], "output_tokens": used[1]}
    end = ENDS[path][said.end or "stop"]
    if path == MESSAGES:
        content = [{"type": "text", "text": said.text}] if said.text else []
        return packed({"type": "message", "content": content, "stop_reason": end, "usage": usage})
    return packed(_response(said, end, usage, tools))


def _response(said: Said, status: str, usage: Any, tools: Any) -> dict[str, Any]:
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    part = {"type": "output_text", "text": said.text}
    output = [{"type": "message", "content": [part]}] if said.text else []
    return {
        "object": "response", "incomplete_details": cut, "output": output, "tools": list(tools),
        "status": status, "usage": usage,
    }  # fmt: skip


def pieces(
    path: str, choices: Sequence[Said], used: tuple[int, int] = (3, 2), tools: Any = ()
) -> list[bytes]:
    """Return the pieces of a stream, the last one with usage; choices take turns."""
    if path in (COMPLETIONS, CHAT):
        return _of_choices(path, choices, used)
    (said,) = choices
    return (_of_messages if path == MESSAGES else _of_response)(said, used, tools)


def _of_choices(path: str, choices: Sequence[Said], used: tuple[int, int]) -> list[bytes]:
    def piece(index: int, text: str, end: str | None) -> bytes:
        said = {"text": text} if path == COMPLETIONS else {"delta": {"content": text}}
        return event({"choices": [{"index": index, **said, "finish_reason": end}]})

    found = [piece(index, "", None) for index in range(len(choices))] if path == CHAT else []
    most = max(len(said.words) for said in choices)
    found += [
        piece(index, said.words[turn], None)
        for turn in range(most)
        for index, said in enumerate(choices)
        if turn < len(said.words)
    ]
    found += [piece(index, "", said.end) for index, said in enumerate(choices)]
    usage = {"prompt_tokens": used[0], "completion_tokens": used[1]}
    return [*found, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def _of_messages(said: Said, used: tuple[int, int], _tools: Any) -> list[bytes]:
    first = {"type": "message", "content": [], "usage": {"input_tokens": used[0], "output_tokens": 0}}
    found = [event({"type": "message_start", "message": first}, "message_start")]
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    found += [event(block, "content_block_start")] if said.words else []
    for word in said.words:
        delta = {"type": "text_delta", "text": word}
        told = {"type": "content_block_delta", "index": 0, "delta": delta}
        found.append(event(told, "content_block_delta"))
    usage = {"input_tokens": used[0], "output_tokens": used[1]}
    last = {"stop_reason": ENDS[MESSAGES][said.end or "stop"]}
    found.append(event({"type": "message_delta", "delta": last, "usage": usage}, "message_delta"))
    return [*found, event({"type": "message_stop"}, "message_stop")]


def _of_response(said: Said, used: tuple[int, int], tools: Any) -> list[bytes]:
    def told(kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", **fields}, f"response.{kind}")

    begun = _response(Said(()), "in_progress", None, tools)
    usage = {"input_tokens": used[0], "output_tokens": used[1]}
    end = _response(said, ENDS[RESPONSES][said.end or "stop"], usage, tools)
    words = [told("output_text.delta", delta=word) for word in said.words]
    return [told("created", response=begun), told("in_progress", response=begun), *words,
            told("completed", response=end)]  # fmt: skip
