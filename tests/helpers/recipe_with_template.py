"""Run a recipe of tinker-cookbook with a renderer of the base's own chat template, by the cookbook's hook.

    python tests/helpers/recipe_with_template.py tinker_cookbook.recipes.chat_sl.train NAME=VALUE ...

The tiny bases know their template's tokens and not the words `User:` and `Assistant:`.
"""

import runpy
import sys
from typing import Any

import tinker
from tinker_cookbook.renderers import base, register_renderer

NAME = "graftwork/template"


class TemplateRenderer(base.Renderer):
    """`<|user|>QUESTION<|assistant|>ANSWER<|end|>`, as the tiny bases' chat template has it."""

    has_extension_property = True

    def render_message(self, message: base.Message, ctx: base.RenderContext) -> base.RenderedMessage:
        """Return a message's tokens: its role, and its text with the end token of an answer."""
        text = base.ensure_text(message["content"])
        ends = "<|end|>" if message["role"] == "assistant" else ""
        return base.RenderedMessage(
            header=self._chunk(f"<|{message['role']}|>"), output=[self._chunk(text + ends)]
        )

    def _chunk(self, text: str) -> tinker.types.EncodedTextChunk:
        return tinker.types.EncodedTextChunk(tokens=self.tokenizer.encode(text, add_special_tokens=False))

    def _get_generation_suffix(self, role: str, ctx: base.RenderContext) -> list[int]:
        return list(self.tokenizer.encode(f"<|{role}|>", add_special_tokens=False))

    @property
    def _end(self) -> int:
        (end,) = self.tokenizer.encode("<|end|>", add_special_tokens=False)
        return int(end)

    def get_stop_sequences(self) -> list[int]:
        """Return the end token."""
        return [self._end]

    def parse_response(self, response: list[int]) -> tuple[base.Message, base.ParseTermination]:
        """Return the answer's text, and whether it came to its end."""
        return base.parse_response_for_stop_token(response, self.tokenizer, self._end)


def make(tokenizer: Any, *_: Any, **__: Any) -> TemplateRenderer:
    """Return the renderer."""
    return TemplateRenderer(tokenizer)


register_renderer(NAME, make)

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
