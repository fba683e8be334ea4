"""Copies of users' answers for the process that judges them, in memory and while it asks for them.

It asks every second or so, and each time says what to copy. Once it has not asked for `SUBSCRIBED_S`, calls
go past this module, as they do where nobody ever asked. Text is joined and encoded when it is taken.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import orjson

from engine.serving.gateway.asgi import App, Message, Send
from engine.serving.gateway.call import DIGITS, SEED_DIGITS, Call, GatewayState
from engine.serving.gateway.forwarding import forward
from engine.serving.gateway.route_table import OF_CHOICES
from engine.serving.gateway.routing import CANARY

SUBSCRIBED_S = 10.0
# Of a request, and of an answer.
MOST_BYTES = 1 << 20
# What waits, counting the other fields of each copy. The oldest go first.
WAITING_BYTES, WAITING_S, OTHER_BYTES = 64 << 20, 120.0, 2048
# Of one answer to who asks: the event loop encodes it in some milliseconds.
TAKEN_BYTES = 4 << 20
# Of users' calls since the last time: how long they took.
MOST_TIMES = 1 << 12
ARMS = ("champion", CANARY, "base")
COPIED = (
    "id", "at", "policy", "digest", "arm", "unit", "key", "status", "outcome", "prompt_tokens",
    "completion_tokens", "latency_s",
)  # fmt: skip
# The end of an id, which no client can choose, is one of so many numbers.
NUMBERS = float(16 ** (DIGITS - SEED_DIGITS))


@dataclass(frozen=True, slots=True)
class AnswerCopy:
    """A request's body and the pieces of its answer, with the fields `COPIED` of its observation."""

    copied_at: float
    row: Mapping[str, Any]
    path: str
    is_stream: bool
    request: bytes
    pieces: Sequence[bytes]
    size: int

    def told(self) -> dict[str, Any]:
        """Return it for JSON; the request's body was parsed once and goes on as it is."""
        own = {"path": self.path, "is_stream": self.is_stream, "request": orjson.Fragment(self.request)}
        return {**self.row, **own, "answer": b"".join(self.pieces).decode(errors="replace")}


class AnswerCopies:
    """What is copied in one gateway, and what waits to be taken. On the event loop."""

    def __init__(self) -> None:
        self._shares: Mapping[str, float] = {}
        self._waiting: deque[AnswerCopy] = deque()
        self._bytes = self._dropped = 0
        # After how many seconds the first byte of a user's answer came.
        self._times = {kind: deque[float](maxlen=MOST_TIMES) for kind in ("streamed", "whole")}
        self._end: asyncio.TimerHandle | None = None

    def subscribe(self, state: GatewayState, shares: Mapping[str, float]) -> None:
        """Copy this share of the answers of each policy for `SUBSCRIBED_S`, and of others none."""
        if self._end is not None:
            self._end.cancel()
        if not shares:
            return self._close(state)
        self._shares, state.copied = shares, self.forward
        self._end = asyncio.get_running_loop().call_later(SUBSCRIBED_S, self._close, state)
        return None

    def _close(self, state: GatewayState) -> None:
        state.copied, self._end = None, None
        self._shares, self._bytes, self._dropped = {}, 0, 0
        self._waiting.clear()
        self._users()

    def take(self, most: int) -> bytes:
        """Return the oldest copies, at most so many, as JSON, and remove them.

        Beside them: how many were dropped since the last call, and the seconds that users' calls since then
        spent in the engine until their first byte, of streams and of whole answers.
        """
        self._drop()
        taken, size = list[dict[str, Any]](), 0
        while self._waiting and len(taken) < most and size < TAKEN_BYTES:
            copy = self._pop()
            if copy.row["policy"] in self._shares:
                size += copy.size
                taken.append(copy.told())
        dropped, self._dropped = self._dropped, 0
        return orjson.dumps({"copies": taken, "dropped": dropped, "users": self._users()})

    def _users(self) -> dict[str, list[float]]:
        return {kind: [times.popleft() for _ in range(len(times))] for kind, times in self._times.items()}

    async def forward(self, call: Call, app: App) -> None:
        """Forward a call (`forwarding.forward`), and copy its answer if it is one of those."""
        send, started = call.send, perf_counter()
        recorder = Recorder(send) if self._is_chosen(call) else None
        if recorder is not None:
            call.send = recorder.send
        try:
            await forward(call, app)
        finally:
            # Another may answer in its place.
            call.send = send
        answer = call.answer
        if call.purpose != "user" or answer.final_status != 200 or answer.first_at is None:
            return
        if call.state.copied is None:
            # Nobody asks any more, and nothing would remove it.
            return
        self._times["streamed" if answer.is_stream else "whole"].append(answer.first_at - started)
        if recorder is not None and recorder.is_whole and answer.outcome is not None:
            self._keep(call, recorder)

    def _is_chosen(self, call: Call) -> bool:
        share = self._shares.get(call.target.policy or "", 0.0)
        return (
            int(call.id[SEED_DIGITS:], 16) < share * NUMBERS
            and call.purpose == "user"
            and call.target.arm in ARMS
            and call.endpoint.path in OF_CHOICES
            and call.size.samples == 1
            # Read before anybody asked for copies.
            and bool(call.raw)
        )

    def _keep(self, call: Call, recorder: "Recorder") -> None:
        if max(recorder.size, len(call.raw)) > MOST_BYTES:
            self._dropped += 1
            return
        observation = call.observation()
        row = {name: observation[name] for name in COPIED}
        size = len(call.raw) + recorder.size + OTHER_BYTES
        path, is_stream = call.endpoint.path, call.answer.is_stream
        copy = AnswerCopy(monotonic(), row, path, is_stream, call.raw, recorder.pieces, size)
        self._waiting.append(copy)
        self._bytes += size
        self._drop()

    def _drop(self) -> None:
        """Drop the oldest copies, as long as there are too many or they have waited too long."""
        waits_since = monotonic() - WAITING_S
        while self._waiting and (self._bytes > WAITING_BYTES or self._waiting[0].copied_at < waits_since):
            self._pop()
            self._dropped += 1

    def _pop(self) -> AnswerCopy:
        copy = self._waiting.popleft()
        self._bytes -= copy.size
        return copy


class Recorder:
    """Keeps what is sent to one client. `is_whole`: the last piece was sent."""

    __slots__ = ("_send", "is_whole", "pieces", "size")

    def __init__(self, send: Send):
        self._send, self.pieces, self.size, self.is_whole = send, list[bytes](), 0, False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message, and keep its piece unless the answer is too large to be copied."""
        if piece := message.get("body"):
            self.size += len(piece)
            if self.size <= MOST_BYTES:
                self.pieces.append(piece)
            else:
                self.pieces.clear()
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body")
        return self._send(message)
