"""A conversation with one model through the gateway, as any user has it."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.catalog.records import split_served_name
from engine.clients.engine import EngineClient
from engine.settings.params import Params, known_policies


def opening_turns(params: Params, model: str) -> list[dict[str, str]]:
    """Return the turns before a question on which a policy was trained: system prompt and examples.

    The gateway adds nothing to a prompt. Empty for the base and for policies that the settings do not have.
    """
    policy, _ = split_served_name(model)
    if policy not in known_policies(params):
        return []
    config = params.policy(policy)
    turns = [{"role": "system", "content": config.system}] if config.system else []
    for example in config.few_shot:
        turns.append({"role": "user", "content": example.question})
        turns.append({"role": "assistant", "content": example.answer})
    return turns


@dataclass
class Conversation:
    """The turns with `model` so far; `user` keeps all of them on one side of a canary."""

    model: str
    turns: list[dict[str, str]]
    user: str = field(default_factory=lambda: f"chat-{uuid.uuid4().hex}")

    @contextmanager
    def ask(
        self, engine: EngineClient, question: str, temperature: float
    ) -> Iterator[tuple[str, Iterator[str]]]:
        """Send a question; give the served name that answers, and the answer's pieces as they come.

        A whole answer becomes a turn. One that fails or is stopped leaves the conversation as it was. Raises
        the errors of `EngineClient.chat`.
        """
        asked = [*self.turns, {"role": "user", "content": question}]
        body: Mapping[str, Any] = {
            "model": self.model, "user": self.user, "messages": asked, "temperature": temperature,
        }  # fmt: skip
        with engine.chat(body) as (revision, pieces):
            yield revision, self._kept(asked, pieces)

    def _kept(self, asked: list[dict[str, str]], pieces: Iterator[str]) -> Iterator[str]:
        answer = ""
        for piece in pieces:
            answer += piece
            yield piece
        self.turns = [*asked, {"role": "assistant", "content": answer}]


def in_turns(streams: list[Iterator[str]]) -> Iterator[tuple[int, str]]:
    """Yield pieces of several answers as they come, with each one's number, one of each answer in turn."""
    left = dict(enumerate(streams))
    while left:
        for number, stream in list(left.items()):
            piece = next(stream, None)
            if piece is None:
                del left[number]
            else:
                yield number, piece
