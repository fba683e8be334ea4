"""What a policy's problems take of the base's context, counted once, when the policy is created.

A prompt over the context would end the training; one that leaves too little room has its answers cut short,
without a word. Rendered as for training, scoring and serving; only a tokenizer is loaded.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.base.prompts import prompt_text
from engine.base.resident import base_config
from engine.errors import ConfigError
from engine.problems.rows import JsonlRow
from engine.settings.own_functions import LIKELIHOODS
from engine.settings.params import Params
from engine.settings.policies import TAUGHT, PolicyConfig

# Texts that are encoded at once, on all cores, and lines that an error names.
BATCH, SHOWN = 256, 5


class TooLong:
    """The lines whose text has more tokens than `most`: their count, the first of them, the longest."""

    def __init__(self, tokenizer: Any, most: int):
        self._tokenizer, self._most = tokenizer, most
        self._waiting: list[tuple[int, str]] = []
        self._first: list[int] = []
        self._count = self.longest = 0

    def add(self, number: int, text: str) -> None:
        """Count a text's tokens, now or with those that follow it."""
        # No token of ASCII is shorter than a character; a tokenizer may put one before the text.
        if text.isascii() and len(text) < self._most:
            return
        self._waiting.append((number, text))
        if len(self._waiting) == BATCH:
            self._encode()

    def found(self) -> str:
        """Return which lines are too long, empty for none."""
        self._encode()
        more = f" and {self._count - SHOWN} more" if self._count > SHOWN else ""
        return ", ".join(map(str, self._first)) + more

    def _encode(self) -> None:
        numbers, texts = [one for one, _ in self._waiting], [text for _, text in self._waiting]
        self._waiting = []
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        for number, tokens in zip(numbers, encoded, strict=True):
            if len(tokens) > self._most:
                self._count += 1
                self._first += [number][: SHOWN - len(self._first)]
                self.longest = max(self.longest, len(tokens))


class PromptLimits:
    """Checks each row of an import against the base's template, its control tokens and the context."""

    def __init__(self, params: Params, config: PolicyConfig, tokenizer: Any, source: Path):
        """Check for this policy; `source` is named in errors."""
        self._config, self._tokenizer, self._source = config, tokenizer, source
        self._context = params.engine.max_model_len
        base = base_config(params.base, params.paths)
        self._base = int((base.get("text_config") or base).get("max_position_embeddings") or self._context)
        self._prompts = TooLong(tokenizer, self._context - config.max_tokens)
        self._answers = TooLong(tokenizer, config.max_tokens)
        # One for the end token, and one that the engine generates when it is asked for probabilities.
        self._most = self._context - 2
        self._examples = TooLong(tokenizer, self._most)
        self._control = _control_tokens(tokenizer)

    def add(self, number: int, row: JsonlRow) -> None:
        """Check one row. Raises `ConfigError` with its line for a chat that the template refuses.

        So does a text that holds a control token of the base, which its tokenizer would not read as text.
        """
        where = f"{self._source}:{number}"
        is_taught = self._config.method in TAUGHT
        answers = [row.answer, row.rejected] if is_taught else []
        for text in [*answers, *([one["content"] for one in row.messages] or [row.question])]:
            if token := self._control(text):
                raise ConfigError(
                    f"{where} contains {token!r}, which the base's tokenizer reads as a control token, not "
                    f"as text. Where a text mentions it, write it otherwise, as {_apart(token)!r}. Where a "
                    "template has rendered the text, give what was there before, a chat as `messages`: the "
                    "base's template adds its own tokens."
                )
        if row.messages and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{where} is a chat, and the base has no chat template to tell its turns apart. Choose an "
                "instruct model as base, or give question and answer."
            )
        try:
            prompt = prompt_text(self._tokenizer, row.asked, self._config.system, self._config.few_shot)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for answer in filter(None, answers):
            self._examples.add(number, prompt + answer)
        if self._config.verifier not in LIKELIHOODS:
            self._prompts.add(number, prompt)
        if self._config.verifier == "exact":
            self._answers.add(number, row.answer.strip())

    def refuse(self) -> None:
        """Raise `ConfigError` with the lines that do not fit, and the setting that would admit them."""
        most, source = self._config.max_tokens, self._source
        if lines := self._prompts.found():
            needed = self._prompts.longest + most
            advice = f"Set engine.max_model_len to {needed} and start the services anew, lower"
            if needed > self._base:
                advice = f"The base reads at most {self._base} tokens: lower"
            raise ConfigError(
                f"{source} has prompts that do not fit the context, in lines {lines}: the longest has "
                f"{self._prompts.longest} tokens, its answer may have {most} (max_tokens), and "
                f"engine.max_model_len is {self._context}. {advice} max_tokens, or shorten "
                "the prompts."
            )
        if lines := self._examples.found():
            raise ConfigError(
                f"{source} has examples that do not fit, in lines {lines}: the longest has "
                f"{self._examples.longest} tokens with its prompt, and {self._most} fit into "
                f"engine.max_model_len ({self._context}). Raise it and start the services anew, or leave the "
                "lines out."
            )
        if lines := self._answers.found():
            raise ConfigError(
                f"{source} has answers that no answer can equal, in lines {lines}: the longest has "
                f"{self._answers.longest} tokens, and an answer ends after {most}. Set max_tokens to "
                f"{self._answers.longest + 1} (--max-tokens), or choose another verifier than exact."
            )


def _apart(token: str) -> str:
    return f"{token[0]} {token[1:]}"


def _control_tokens(tokenizer: Any) -> Callable[[str], str | None]:
    """Return a function that finds a special token of the base in a text."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    known = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")

    def find(text: str) -> str | None:
        match = pattern.search(text)
        return match[0] if match else None

    return find
