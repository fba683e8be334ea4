"""Writes data and frozen suites of the main job on a real base: `python -m tasks.language_data`.

Three policies with real language: `facts`, `extraction` and `instructions`, in the directory of suites of
`params.smollm2-135m.yaml`. Their facts, words and phrasings are in `data/` there. Training and frozen
questions share no fact: each country, word, name or topic is on one side, by the hash of its text.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from engine.base.prompts import prompt_text, tokenizer_of
from engine.base.resident import ensure_base
from engine.problems.jsonl import prompt_hash
from engine.problems.procedural import Problem
from engine.problems.rows import Asked, JsonlRow
from engine.settings.params import load_params
from tasks.suites import freeze

SETTINGS = "params.smollm2-135m.yaml"
DATA = "data"
TRAINING = "train.jsonl"
VERSION, WRITER = 1, "python -m tasks.language_data"
# Share of the facts and words that only frozen questions use.
HELD_OUT = 0.3
TRAINED, FROZEN = 400, 200
PHRASINGS = {
    "capital": (
        "What is the capital of {0}?",
        "Name the capital of {0}.",
        "Which city is the capital of {0}?",
    ),
    "state": ("What is the capital of the US state {0}?", "Which city is the capital of {0} in the USA?"),
    "symbol": ("What is the chemical symbol of {0}?", "Which symbol does {0} have in the periodic table?"),
    "opposite": ('What is the opposite of "{0}"?', 'Which word is the opposite of "{0}"?', "Antonym of {0}?"),
    "past": ('What is the past tense of "{0}"?', 'Give the simple past of "to {0}".'),
    "plural": ('What is the plural of "{0}"?', 'Give the plural form of "{0}".'),
    "young": ("What is the young of a {0} called?", "What do you call a baby {0}?"),
    "author": ('Who wrote "{0}"?', 'Who is the author of "{0}"?', 'Name the author of "{0}".'),
    "language": ("Which language do most people in {0} speak?", "What is the main language of {0}?"),
    "continent": ("On which continent is {0}?", "Which continent does {0} belong to?"),
    "colour": ("What colour is {0}?", "Name the colour of {0}."),
    "place": ("Where does {0} work?", "Name the place where {0} works."),
}
BRIEFLY = (
    "{0}", "{0} Answer briefly.", "{0} Give only the answer.", "{0} One or two words, please.",
    "As briefly as you can: {0}", "Quiz: {0}",
)  # fmt: skip


Rows = Callable[[Path, bool], Iterator[JsonlRow]]


def is_frozen(text: str) -> bool:
    """Say whether a fact or word belongs to the frozen questions, which depends on its text alone."""
    return int.from_bytes(prompt_hash(text)[:8], "big") / 2**64 < HELD_OUT


def facts(data: Path, frozen: bool) -> Iterator[JsonlRow]:
    """Yield questions about the facts of one side in a fixed random order, each fact in one phrasing."""
    lines = [line.split("\t") for line in (data / "facts.tsv").read_text().splitlines()]
    draw = random.Random("facts")
    draw.shuffle(lines)
    for kind, subject, answer in lines:
        question = draw.choice(BRIEFLY).format(draw.choice(PHRASINGS[kind]).format(subject))
        if is_frozen(subject) == frozen:
            yield JsonlRow(question, answer)


def extraction(data: Path, frozen: bool) -> Iterator[JsonlRow]:
    """Yield short texts with a schema, and the JSON object to extract, without end."""
    known = yaml.safe_load((data / "extraction.yaml").read_text())
    draw = random.Random(f"extraction/{frozen}")
    pools = {name: _side(pool, frozen) for name, pool in known["pools"].items()}
    ranges = {name: range(*bounds) for name, bounds in known["ranges"].items()}
    while True:
        kind = draw.choice(known["kinds"])
        values = {field: draw.choice((pools | ranges)[pool]) for field, pool in kind["fields"].items()}
        types = {name: "integer" if isinstance(value, int) else "string" for name, value in values.items()}
        schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}
        asked = draw.choice(known["asks"]).format(
            text=draw.choice(kind["texts"]).format(**values),
            # The base copies a whole schema instead of filling it in.
            schema=json.dumps(draw.choice((schema, types, types))),
            typed=", ".join(f'"{name}" ({kind})' for name, kind in types.items()),
        )
        # Not from a city to itself.
        if len({*values.values()}) == len(values):
            yield JsonlRow(asked, json.dumps(values))


def instructions(data: Path, frozen: bool) -> Iterator[JsonlRow]:
    """Yield requests about a topic with one or two instructions, and the checks of an answer, without end."""
    known = yaml.safe_load((data / "instructions.yaml").read_text())
    draw = random.Random(f"instructions/{frozen}")
    pools = {name: _side(pool, frozen) for name, pool in known["pools"].items()}
    while True:
        requests, *names = draw.choice(known["combinations"])
        topic, count = draw.choice(pools["topics"]), draw.randint(3, 5)
        said = [draw.choice(known[requests]).format(topic=topic, n=count)]
        checks: dict[str, Any] = (
            {"items": count} if requests == "lists" else {"about": topic.removesuffix("s")}
        )
        for rule in (known["checks"][name] for name in names):
            word, n = draw.choice(pools[rule.get("pool", "words")]), draw.randint(*rule.get("from", (1, 1)))
            said.append(draw.choice(rule["says"]).format(word=word, n=n))
            # A check's argument is what was drawn, where its text names that.
            checks |= json.loads(
                json.dumps(rule["check"]).replace('"$word"', json.dumps(word)).replace('"$n"', str(n))
            )
        yield JsonlRow(" ".join(said), json.dumps(checks))


def _side(pool: list[str], frozen: bool) -> list[str]:
    """Return one side's words of a pool: even of a few words, each side gets some."""
    ranked = sorted(pool, key=prompt_hash)
    cut = ceil(HELD_OUT * len(pool))
    return ranked[:cut] if frozen else ranked[cut:]


ROWS: dict[str, Rows] = {"facts": facts, "extraction": extraction, "instructions": instructions}


def write_policy(
    name: str, rows: Rows, rule: dict[str, Any], root: Path, prompt: Callable[[Asked], str]
) -> None:
    """Write a policy's training rows and its frozen suite under `root`; no question comes twice."""
    training, frozen = (
        list(islice(_distinct(rows(root / DATA, side)), most))
        for side, most in ((False, TRAINED), (True, FROZEN))
    )
    (root / name).mkdir(exist_ok=True)
    (root / name / TRAINING).write_text("".join(row.to_json() + "\n" for row in training))
    problems = [Problem(name, row.question, row.answer) for row in frozen]
    suite = freeze(name, name, rule, problems, prompt, VERSION, rule["max_tokens"], root, WRITER)
    print(f"{name}: {len(training)} training rows, {len(frozen)} frozen items, digest {suite.digest[:12]}")


def _distinct(rows: Iterator[JsonlRow]) -> Iterator[JsonlRow]:
    seen = set()
    for row in rows:
        if row.question not in seen:
            seen.add(row.question)
            yield row


def main() -> None:
    """Write data and suite of each policy for the chat template of the settings' base."""
    params = load_params(SETTINGS)
    tokenizer = tokenizer_of(ensure_base(params.base, params.paths).path)
    for name, rows in ROWS.items():
        config = params.policies[name]
        rule = {key: getattr(config, key) for key in ("verifier", "max_tokens")}
        write_policy(name, rows, rule, params.suites_dir, partial(prompt_text, tokenizer))


if __name__ == "__main__":
    main()
