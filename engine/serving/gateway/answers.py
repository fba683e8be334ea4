"""Reads answers, of every API, at once or streamed: how they ended, what they used, and the errors in them.

An answer repeats words of its client: as text, as tools, as a schema. So each fact is read from its own place
in a parsed event; bytes only tell which events are worth parsing, since most pieces of a stream are not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import orjson

from engine.serving.gateway.asgi import CLIENT_LEFT

# (prompt, completion) tokens.
Used = tuple[int, int]
SERVER_ERROR = 500
DATA, END = b"data: ", b"\n\n"
# What an API calls the end of a choice, and its outcome. An abort, which has none, is the client's.
ENDS = {
    "stop": "ok",
    "tool_calls": "ok",
    "end_turn": "ok",
    "stop_sequence": "ok",
    "tool_use": "ok",
    "completed": "ok",
    "length": "truncated",
    "max_tokens": "truncated",
    "max_output_tokens": "truncated",
    "incomplete": "truncated",
    "content_filter": "refused",
    "refusal": "refused",
    "repetition": "invalid",
}
# The outcome of an answer is that of its worst choice.
WORST_FIRST = ("truncated", "refused", "invalid")


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it has come; `text` is kept where JSON was asked for."""

    has_text: bool = False
    has_call: bool = False
    is_refusal: bool = False
    end: str | None = None
    text: list[str] = field(default_factory=list)

    def outcome(self, is_json: bool) -> str | None:
        """Return how it ended, or None while it has not."""
        outcome = ENDS.get(self.end or "")
        if outcome != "ok":
            return outcome
        if self.is_refusal:
            return "refused"
        if not self.has_text:
            return "ok" if self.has_call else "invalid"
        return "ok" if not is_json or self.has_call or _is_json("".join(self.text)) else "invalid"


class AnswerReader:
    """What an answer of the API at `path` has told so far, and when.

    `used` is what it used, None while that is not known; `status` is that of its beginning, and `fault` that
    of an error behind it. Until there is an answer or an error, `status` is that of a client that left.
    """

    def __init__(self, path: str, is_stream: bool = False, is_json: bool = False, choices: int = 1):
        self.used: Used | None = None
        self.status = CLIENT_LEFT
        self.fault: int | None = None
        self.has_left = False
        # When (`time.perf_counter`) its first and its newest piece came, and how many came.
        self.first_at: float | None = None
        self.last_at = 0.0
        self.pieces = 0
        self.path, self._format = path, FORMATS.get(path, OF_TOKENS)
        self.is_stream, self._is_json, self._expected = is_stream, is_json, choices
        self._choices: dict[int, Choice] = {}
        self._held = bytearray()
        # What a piece has that need not be read; None as long as its text matters.
        self.plain: bytes | None = None

    @property
    def final_status(self) -> int:
        """The status as its client saw it: 499 for one that left before the first byte."""
        return CLIENT_LEFT if self.is_unanswered else self.fault or self.status

    @property
    def is_unanswered(self) -> bool:
        """Whether the client left before the first byte of its answer."""
        return self.has_left and self.first_at is None

    def time(self) -> None:
        """Note that a piece came now."""
        self.last_at = perf_counter()
        self.pieces += 1
        if self.first_at is None:
            self.first_at = self.last_at

    def again(self) -> "AnswerReader":
        """Return an answer to the same request, for which nothing has been computed yet."""
        other = AnswerReader(self.path, self.is_stream, self._is_json, self._expected)
        other.used = (0, 0)
        return other

    @property
    def outcome(self) -> str | None:
        """The outcome of the worst choice; None while one has not ended, and for answers without choices."""
        outcomes = {choice.outcome(self._is_json) for choice in self._choices.values()}
        if not outcomes or None in outcomes:
            return None
        return next((worst for worst in WORST_FIRST if worst in outcomes), "ok")

    def read(self, piece: bytes, is_last: bool = True) -> bytes:
        """Read events of a stream, or another piece of an answer that is read once it is whole.

        Return the piece without the events that only carry usage: they have no choices.
        """
        if self.is_stream:
            return self._read_events(piece) if b"{" in piece else piece
        if is_last:
            # Nearly always the whole answer.
            self._format.read_whole(self, bytes(self._held) + piece if self._held else piece)
            self._held.clear()
        else:
            self._held += piece
        return piece

    def _read_events(self, piece: bytes) -> bytes:
        kept = []
        # vLLM sends whole events.
        for event in piece.split(END):
            told = mapping(_loads(event[at + len(DATA) :])) if (at := event.find(DATA)) >= 0 else {}
            if told:
                self._format.read_event(self, told)
            if told.get("choices") != [] or "usage" not in told:
                kept.append(event)
        return END.join(kept)

    def take(self, index: Any, text: Any = None, has_call: bool = False, end: Any = None) -> None:
        """Take a piece of a choice."""
        choice = self._choices.setdefault(index if isinstance(index, int) else 0, Choice())
        if isinstance(text, str) and text:
            if self._is_json:
                choice.text.append(text)
            choice.has_text = choice.has_text or not text.isspace()
        choice.has_call = choice.has_call or has_call
        if isinstance(end, str):
            choice.end = end
        if self.plain is None and not self._is_json and (choice.has_text or choice.has_call):
            spoke = sum(one.has_text or one.has_call for one in self._choices.values())
            self.plain = self._format.plain if spoke >= self._expected else None

    def take_refusal(self, index: Any = 0) -> None:
        """Take the model's word that it does not answer."""
        self._choices.setdefault(index if isinstance(index, int) else 0, Choice()).is_refusal = True

    def take_usage(self, completion: Any, *prompt: Any) -> None:
        """Take the tokens of the completion and of the prompt's parts, unless one is no count of tokens."""
        counts = completion, *prompt
        if all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            self.used = sum(prompt), completion

    def take_fault(self, fault: Any) -> None:
        """Take an error that is told behind a 200."""
        code = mapping(fault).get("code")
        self.fault = code if isinstance(code, int) and 400 <= code < 600 else SERVER_ERROR


@dataclass(frozen=True)
class Format:
    """How an API tells: bytes of a piece that has only more text, and what is read of another or of a whole.

    `plain` has bytes that no text in JSON has: a quote or the end of a line.
    """

    plain: bytes
    read_event: Callable[[AnswerReader, dict[str, Any]], None]
    read_whole: Callable[[AnswerReader, bytes], None]


def mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a JSON array, or none for anything else."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _of_choices(answer: AnswerReader, event: dict[str, Any]) -> None:
    """Completions and chat: `choices`, whole or as pieces, and `usage`."""
    if "error" in event:
        return answer.take_fault(event["error"])
    choices = mappings(event.get("choices"))
    for choice in choices:
        said = mapping(choice.get("message") or choice.get("delta"))
        index = choice.get("index")
        text, end = said.get("content") or choice.get("text"), choice.get("finish_reason")
        answer.take(index, text, bool(said.get("tool_calls")), end)
        if said.get("refusal"):
            answer.take_refusal(index)
    usage = event.get("usage")
    # Beside the choices of a stream it is what was used until then.
    if isinstance(usage, dict) and not (answer.is_stream and choices):
        answer.take_usage(usage.get("completion_tokens") or 0, usage.get("prompt_tokens"))
    return None


def _of_messages(answer: AnswerReader, event: dict[str, Any]) -> None:
    """Anthropic's messages: blocks of content, then the reason of the end and `usage`."""
    kind = event.get("type")
    if kind == "error":
        answer.take_fault(event.get("error"))
    elif kind == "content_block_start":
        _take_block(answer, mapping(event.get("content_block")))
    elif kind == "content_block_delta":
        answer.take(0, mapping(event.get("delta")).get("text"))
    elif kind in ("message", "message_delta"):
        for block in mappings(event.get("content")):
            _take_block(answer, block)
        said = event if kind == "message" else mapping(event.get("delta"))
        answer.take(0, end=said.get("stop_reason"))
        usage = mapping(event.get("usage"))
        cached = [usage.get(f"cache_{name}_input_tokens") or 0 for name in ("read", "creation")]
        answer.take_usage(usage.get("output_tokens"), usage.get("input_tokens"), *cached)


def _take_block(answer: AnswerReader, block: dict[str, Any]) -> None:
    answer.take(0, block.get("text"), block.get("type") == "tool_use")


def _of_responses(answer: AnswerReader, event: dict[str, Any]) -> None:
    """OpenAI's responses: the last event of a stream has the whole answer."""
    kind = event.get("type")
    if kind == "error" or ("error" in event and kind is None and "output" not in event):
        return answer.take_fault(event.get("error", event))
    if isinstance(kind, str) and kind.startswith("response."):
        if kind not in RESPONSE_ENDS:
            return None
        event = mapping(event.get("response"))
    if event.get("status") == "failed":
        answer.take_fault(event.get("error"))
    for item in mappings(event.get("output")):
        answer.take(0, has_call=item.get("type") in ("function_call", "custom_tool_call"))
        for part in mappings(item.get("content")) if item.get("type") == "message" else ():
            answer.take(0, part.get("text"))
            if part.get("type") == "refusal":
                answer.take_refusal()
    answer.take(0, end=mapping(event.get("incomplete_details")).get("reason") or event.get("status"))
    usage = mapping(event.get("usage"))
    answer.take_usage(usage.get("output_tokens"), usage.get("input_tokens"))
    return None


def _whole(read: Callable[[AnswerReader, dict[str, Any]], None]) -> Callable[[AnswerReader, bytes], None]:
    def read_whole(answer: AnswerReader, body: bytes) -> None:
        read(answer, mapping(_loads(body)))

    return read_whole


def _read_last_usage(answer: AnswerReader, body: bytes) -> None:
    """Read the usage with which an answer in token ids ends; the megabytes before it are not parsed."""
    told = mapping(_loads(b"{" + body[body.rfind(b'"usage":{') :]))
    usage = mapping(told.get("usage"))
    answer.take_usage(usage.get("completion_tokens"), usage.get("prompt_tokens"))


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")
FORMATS = {
    "/v1/completions": Format(b'"finish_reason":null', _of_choices, _whole(_of_choices)),
    "/v1/chat/completions": Format(b'"finish_reason":null', _of_choices, _whole(_of_choices)),
    "/v1/messages": Format(b"event: content_block_delta\n", _of_messages, _whole(_of_messages)),
    "/v1/responses": Format(b"event: response.output_text.delta\n", _of_responses, _whole(_of_responses)),
}
# Rollouts and samples, which are never streamed.
OF_TOKENS = Format(b"", lambda answer, event: None, _read_last_usage)


def wants_json(request: Mapping[str, Any]) -> bool:
    """Return whether a request asks for JSON, in the words of any API."""
    asked = (
        request.get("response_format"),
        mapping(request.get("text")).get("format"),
        mapping(request.get("output_config")).get("format"),
    )
    if any(mapping(wanted).get("type") in ("json_object", "json_schema") for wanted in asked):
        return True
    own = mapping(request.get("structured_outputs"))
    return own.get("json") is not None or bool(own.get("json_object"))
