"""How a question becomes a prompt: chat template, system prompt, worked examples, end tokens."""

import json
import threading
from collections.abc import Sequence
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.problems.rows import Asked, Message
from engine.settings.policies import FewShotExample

# How transformers 5 names a tokenizer that is tokenizer.json alone, and the model types for which
# AutoTokenizer takes another class all the same.
GENERIC = "TokenizersBackend"
OWN_CLASS = frozenset({"qwen2"})
# The date that Llama 3's template has where it is not told today's.
TEMPLATE_DATE = (2024, 7, 26)
# Transformers imports lazily, and two threads that do so at once find half a module.
_importing = threading.Lock()


def tokenizer_of(path: Path) -> Any:
    """Return the tokenizer that `AutoTokenizer` gives for a base's directory.

    Its module imports PyTorch's compiler, scikit-learn and pandas: four seconds of a core in each command.
    For a generic tokenizer its class is taken directly. Several threads may ask at once.
    """
    import transformers

    named, model = (_json(path / name) for name in ("tokenizer_config.json", "config.json"))
    is_generic = named.get("tokenizer_class") == GENERIC and model.get("model_type") not in OWN_CLASS
    fix_template_date()
    with _importing:
        taken = transformers.PreTrainedTokenizerFast if is_generic else transformers.AutoTokenizer
    return taken.from_pretrained(path)


def fix_template_date() -> None:
    """Have a chat template's `strftime_now` tell `TEMPLATE_DATE`, in this process. Idempotent.

    With the day's date the same messages become another prompt each day: scores of two days, or a revision's
    training and its serving, would not be of the same text. Bound: transformers 5. Remove when its
    `apply_chat_template` takes the date.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = TemplateDate  # type: ignore[misc]


class TemplateDate(datetime):
    """The clock of chat templates, which stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "TemplateDate":
        """Return `TEMPLATE_DATE`."""
        return cls(*TEMPLATE_DATE, tzinfo=tz)


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def prompt_ids(
    tokenizer: Any, question: Asked, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> list[int]:
    """Return the token ids of a question rendered by the chat template, up to where the answer begins."""
    text = prompt_text(tokenizer, question, system, few_shot)
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_text(
    tokenizer: Any, question: Asked, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> str:
    """Return the rendered text of `prompt_ids`; frozen evaluation items hold this text.

    A base without a chat template gets the messages as plain paragraphs after the tokenizer's BOS token, if
    it adds one. Raises `ConfigError` when the template refuses the messages.
    """
    from jinja2 import TemplateError

    messages = messages_of(question, system, few_shot)
    if not tokenizer.chat_template:
        opening = tokenizer.bos_token if tokenizer.bos_token_id in tokenizer.encode("") else ""
        return opening + "\n\n".join(message["content"] for message in messages) + "\n"
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
        raise ConfigError(
            f"The base's chat template refuses this policy's messages: {error}. "
            "Remove the `system` or `few_shot` of the policy, or the chat's system message, or put them "
            "into the question."
        ) from None


def messages_of(
    question: Asked, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> list[Message]:
    """Return what the template renders: system prompt, worked examples, then the question or chat.

    A chat's own system message stands in place of the policy's.
    """
    asked = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
    opening = [{"role": "system", "content": system}] if system else []
    if asked[0]["role"] == "system":
        opening, asked = asked[:1], asked[1:]
    for example in few_shot:
        opening.append({"role": "user", "content": example.question})
        opening.append({"role": "assistant", "content": example.answer})
    return opening + asked


def answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """Return an answer's token ids with the end token, as far as the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer.encode(answer, add_special_tokens=False), *end]


def end_tokens(path: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else the tokenizer's."""
    ids = _json(path / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = tokenizer_of(path).eos_token_id
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
