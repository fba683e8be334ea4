"""Questions as a base is asked them: chat template, system prompt, worked examples, end of an answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.settings.params import FewShotExample


def prompt_ids(
    tokenizer: Any, question: str, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> list[int]:
    """Return the token ids of a question as the chat template renders it, ready for an answer."""
    text = prompt_text(tokenizer, question, system, few_shot)
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_text(
    tokenizer: Any, question: str, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> str:
    """Return the rendered text whose ids are `prompt_ids`; frozen evaluation items hold this text.

    A base without a chat template gets the messages as plain paragraphs, after the token that its
    tokenizer begins every text with. Raises `ConfigError` when the template refuses the messages.
    """
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": system}] if system else []
    for example in few_shot:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer})
    messages.append({"role": "user", "content": question})
    if not tokenizer.chat_template:
        opening = tokenizer.bos_token if tokenizer.bos_token_id in tokenizer.encode("") else ""
        return opening + "\n\n".join(message["content"] for message in messages) + "\n"
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
        raise ConfigError(
            f"The base's chat template refuses this policy's messages: {error}. "
            "Leave out the policy's `system` or `few_shot`, or put them into the question."
        ) from None


def end_tokens(path: Path) -> tuple[int, ...]:
    """Return the ids that end an answer: those of generation_config.json, else the tokenizer's one."""
    file = path / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if found is None:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(path).eos_token_id
    return tuple(found) if isinstance(found, list) else (int(found),)
