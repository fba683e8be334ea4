"""A base with a second end token, one that it likes to say."""

import json
from pathlib import Path

from engine.base.prompts import end_tokens, prompt_text


def prompts_of(base: Path, count: int = 4) -> list[list[int]]:
    """Return the tokens of a few sums as the base is asked them."""
    from transformers import AutoTokenizer

    from engine.problems.procedural import stream

    tokenizer, problems = AutoTokenizer.from_pretrained(base), stream("addition", "eval", 1)
    texts = [prompt_text(tokenizer, next(problems)[1].question) for _ in range(count)]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def add_end_token(base: Path) -> None:
    """Make the third token of the base's first answer an end token too."""
    from engine.training.model.lora import ResidentBase

    ends = end_tokens(base)
    (answer,) = ResidentBase(base, 1, 512).greedy(None, prompts_of(base, 1), ends, 8)
    file = base / "generation_config.json"
    known = json.loads(file.read_text()) | {"eos_token_id": [*ends, answer.tokens[answer.start + 2]]}
    file.write_text(json.dumps(known))
