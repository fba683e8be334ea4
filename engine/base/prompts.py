"""How a question becomes a prompt: chat template, system prompt, worked examples, end tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.settings.policies import FewShotExample


def prompt_ids(
    tokenizer: Any, question: str, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> list[int]:
    """Return the token ids of a question rendered by the chat template, up to where the answer begins."""
    text = prompt_text(tokenizer, question, system, few_shot)
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_text(
    tokenizer: Any, question: str, system: str | None = None, few_shot: Sequence[FewShotExample] = ()
) -> str:
    """Return the rendered text of `prompt_ids`; frozen evaluation items hold this text.

    A base without a chat template gets the messages as plain paragraphs after the tokenizer's BOS token, if
    it adds one. Raises `ConfigError` when the template refuses the messages.
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
            "Remove the policy's `system` or `few_shot`, or move them into the question."
        ) from None


def end_tokens(path: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else the tokenizer's."""
    file = path / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if found is None:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(path).eos_token_id
    return tuple(found) if isinstance(found, list) else (int(found),)
