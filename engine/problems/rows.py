"""One problem, as people write it down: which columns are the prompt, and which one the expected answer.

`row_of` takes `question` (or `prompt`) with `answer`, `prompt` with `completion`, chat rows (`messages`, or a
`prompt` that is a list of messages), ShareGPT (`conversations`), and pairs (`chosen` and `rejected`, beside a
prompt or with it in both). A chat stays messages, since only the base's template may render it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal, TypeGuard

from engine.errors import ConfigError
from engine.settings.own_functions import LIKELIHOODS

Message = dict[str, str]
# What a template renders: the text of a single user's message, or the messages of a chat.
Asked = str | Sequence[Message]

TEXTUAL, CHATS = ("question", "prompt"), ("messages", "conversations")
PAIR = ("chosen", "rejected")
COLUMNS = {*TEXTUAL, *CHATS, *PAIR, "answer", "completion"}
SCHEMAS = (
    "A row has `question` (or `prompt`) and `answer`, or `prompt` and `completion`, or `messages`, or "
    "ShareGPT's `conversations`, or `prompt`, `chosen` and `rejected`; rename other columns, "
    "with `datasets` by dataset.rename_columns({...})"
)
ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "model": "assistant", "chatgpt": "assistant",
}  # fmt: skip
TURN = {"role", "from", "content", "value"}
# Columns of a message that no template renders; any other one must be empty.
HARMLESS = {"id", "weight"}
# Verifiers that compare with an answer's text, and those whose `answer` is a rule.
TEXTS, RULES = ("exact", "numeric"), ("regex", "json-schema")
# How a worked answer of GSM8K ends.
WORKED = re.compile(r"(?:^|\n)#### *([-+]?\$?[\d,]*\.?\d+) *$")


@dataclass(frozen=True)
class JsonlRow:
    """One stored problem; of a chat, `question` is the text of its turns, for verifiers and people.

    A pair has the worse answer in `rejected`, which else is empty.
    """

    question: str
    answer: str
    messages: tuple[Message, ...] = ()
    rejected: str = ""

    @property
    def asked(self) -> Asked:
        """What the template renders."""
        return self.messages or self.question

    def to_json(self) -> str:
        """Return the row as a line of JSON."""
        row = asdict(self)
        del row["question" if self.messages else "messages"]
        if not self.rejected:
            del row["rejected"]
        return json.dumps(row, ensure_ascii=False)


def row_of(data: Any, where: str, verifier: str = "") -> JsonlRow:
    """Return one row of a file as a problem for a verifier; `ConfigError` at `where` if it is none.

    Of a chat that ends with the assistant, the last message is what was expected of it: it leaves the
    prompt, and is the answer where the row has no `answer` and the verifier compares with a text. For
    `exact` and `numeric` a worked answer that ends with `#### 7` counts as 7.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where} must be an object with question and answer, not {type(data).__name__}. {SCHEMAS}."
        )
    if data.get("chosen") is not None:
        data = _with_answers(data, where)
    question, messages, told = _prompt(data, where)
    answer = _expected(data, told, verifier, where)
    if verifier in TEXTS and (worked := WORKED.search(answer.rstrip())):
        answer = worked[1].replace(",", "").replace("$", "")
    rejected = _rejected(data, answer, where)
    if verifier == "preference" and not rejected:
        raise ConfigError(f"{where} needs `chosen` and `rejected`. {_seen(data)}.")
    try:
        (question + answer + rejected + "".join(one["content"] for one in messages)).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where} contains half a character (a lone surrogate). Correct the text."
        ) from None
    return JsonlRow(question, answer, messages, rejected)


def kind_of(data: Any) -> Literal["pairs", "examples", "questions"]:
    """Return what a row of a file is: a pair, an example conversation, or a question with its answer."""
    row = data if isinstance(data, dict) else {}
    names = {name for name, value in row.items() if value is not None}
    if "chosen" in names or "rejected" in names:
        return "pairs"
    return "questions" if "answer" in names else "examples"


def stored_item(data: Any, where: str) -> JsonlRow:
    """Return the problem of a frozen item's line."""
    if isinstance(data, dict) and data.get("messages"):
        return JsonlRow(data["question"], data["answer"], tuple(data["messages"]), data.get("rejected", ""))
    return row_of(data, where)


def unused_columns(data: Mapping[str, Any], row: JsonlRow) -> set[str]:
    """Return the columns with a value that neither prompt nor answer shows, such as a `context`."""
    used = COLUMNS - {*CHATS} | {_asking(data)}
    if row.messages:
        used.add("system")
    return {name for name in data.keys() - used if data[name] not in (None, "", [])}


def _with_answers(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a pair's row with `answer` and `rejected`, and with the prompt that begins both sides."""
    row = {name: value for name, value in data.items() if name not in PAIR}
    sides = [data.get(name) for name in PAIR]
    chats = [[_message(turn, where) for turn in side] for side in sides if isinstance(side, list) and side]
    if len(chats) == len(sides):
        if any(chat[-1]["role"] != "assistant" for chat in chats):
            raise ConfigError(
                f"{where} has a side that does not end with the assistant. End both with an answer."
            )
        sides = [chat.pop()["content"] for chat in chats]
        prompt = next((row[name] for name in (*TEXTUAL, *CHATS) if row.get(name)), None)
        # Some give the beginning of both sides once more, as the prompt's text.
        is_told_twice = isinstance(prompt, str) and chats[0][-1:] == [{"role": "user", "content": prompt}]
        if is_told_twice:
            row = {name: value for name, value in row.items() if name not in (*TEXTUAL, *CHATS)}
            prompt = None
        if any(chats) and (prompt or chats[0] != chats[1]):
            raise ConfigError(
                f"{where} has two prompts. Give the prompt once: in a column, or as the messages before the "
                "last one, which must be the same in `chosen` and `rejected`."
            )
        if not prompt:
            row["messages"] = chats[0]
    if not all(map(_is_text, sides)):
        raise ConfigError(
            f"{where} needs text, or a list of messages, in both `chosen` and `rejected`. {_seen(data)}."
        )
    return row | dict(zip(("answer", "rejected"), sides, strict=True))


def _rejected(data: Mapping[str, Any], answer: str, where: str) -> str:
    rejected = data.get("rejected") or ""
    if not isinstance(rejected, str):
        raise ConfigError(f"{where} has `rejected` without `chosen`. Give both.")
    if rejected and rejected.strip() == answer.strip():
        raise ConfigError(
            f"{where} has one text as `chosen` and `rejected`, so it prefers nothing. Leave it out."
        )
    return rejected


def _prompt(data: dict[str, Any], where: str) -> tuple[str, tuple[Message, ...], Any]:
    """Return a row's question, its messages if it is a chat, and what the assistant said after it."""
    name = _asking(data)
    asked, told = data.get(name), data.get("completion")
    if isinstance(told, list):
        told = _message(told[-1], where)["content"] if told else None
    if name in TEXTUAL and _is_text(asked):
        return asked, (), told
    if name in TEXTUAL and (not asked or not isinstance(asked, list)):
        raise ConfigError(
            f"{where} needs a `question` (or `prompt`) with non-empty text. {_seen(data)}. {SCHEMAS}."
        )
    messages, said = _split(_messages(asked, data, where), where)
    question = "\n\n".join(one["content"] for one in messages if one["role"] != "system")
    # A chat of one question is that question.
    return question, () if len(messages) == 1 else messages, said if told is None else told


def _asking(data: Mapping[str, Any]) -> str:
    """Return the name of the column that is a row's prompt; null and an empty list count as no column."""
    given = [name for name in (*TEXTUAL, *CHATS) if data.get(name) not in (None, [])]
    text = next((name for name in given if name in TEXTUAL), TEXTUAL[0])
    chat = next((name for name in given if name in CHATS), text)
    # `question` and `answer` keep their meaning beside a chat.
    is_kept = _is_text(data.get(text)) and data.get("answer") is not None
    return text if is_kept else chat


def _expected(data: dict[str, Any], told: Any, verifier: str, where: str) -> str:
    """Return a row's answer as text: its column, else what the assistant said."""
    value = data.get("answer")
    if told is not None and verifier in LIKELIHOODS:
        # What is learned is what the assistant said, not what a verifier would have of it.
        value = told
    if value is None and told is not None and verifier in RULES:
        raise ConfigError(
            f"{where} needs an `answer`: the verifier {verifier} takes a rule, not what an assistant said. "
            f"{_seen(data)}. Add the column `answer`."
        )
    value = told if value is None else value
    if value is None:
        raise ConfigError(f"{where} needs an `answer`. {_seen(data)}. {SCHEMAS}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            f"{where} needs an `answer`; {value} is what a table writes for a missing or overflown number. "
            "Leave the row out, or correct it."
        )
    if isinstance(value, (str, Decimal, date, time)):
        return str(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where} has an `answer` that is {type(value).__name__}, which is no text. Write it as text."
        ) from None


def _messages(turns: Any, data: Mapping[str, Any], where: str) -> list[Message]:
    if not isinstance(turns, list):
        raise ConfigError(
            f"{where} has a chat that is {type(turns).__name__} {str(turns)[:40]!r}, not a list of messages. "
            'Write [{"role": "user", "content": "1 + 2 ="}] as JSON; a CSV file cannot hold it.'
        )
    if data.get("tools"):
        raise ConfigError(f"{where} gives `tools` to the chat, and a policy calls none. Leave the row out.")
    messages = [_message(turn, where) for turn in turns]
    system = data.get("system")
    if _is_text(system) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ConfigError(f"{where} has a message that is {type(turn).__name__}, not an object with role.")
    said, role = turn.get("content", turn.get("value")), turn.get("role", turn.get("from"))
    parts = said if isinstance(said, list) else []
    # OpenAI's form of a text. Several parts have no one reading, and an image is no text.
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":
        said = parts[0].get("text")
    if ROLES.get(str(role)) is None:
        raise ConfigError(
            f"{where} has a message of {role!r}; a prompt has system, user and assistant. Leave tool calls "
            "and their results out, or write them into a user's message."
        )
    more = sorted(key for key in turn.keys() - TURN - HARMLESS if turn[key] not in (None, "", [], {}))
    if more:
        raise ConfigError(
            f"{where} has a message with `{more[0]}`, which the prompt would not show. Remove the field, or "
            "write what it says into the content."
        )
    if not _is_text(said):
        raise ConfigError(f"{where} has a message of {role!r} without text: {str(said)[:60]!r}.")
    return {"role": ROLES[str(role)], "content": said}


def _split(messages: list[Message], where: str) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages up to the last question, and the answer after it."""
    told = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{where} has no message of the user before the answer. End the chat with one.")
    if any(message["role"] == "system" for message in messages[1:]):
        raise ConfigError(f"{where} has a system message after the first. Put it first, or write it as user.")
    return tuple(messages), told


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _seen(data: Mapping[str, Any]) -> str:
    keys = ", ".join(f"`{str(key)[:40]}`" for key in list(data)[:6])
    return f"It has {keys or 'no key'}"
