"""Samples two revisions' answers to the uncertain items of a suite, and says which items' chances differ.

The answers are judged by the suite's verifier and not recorded: a chance at temperature 1 is another quantity
than the score of a greedy answer. The seeds derive from suite, revision and items: a second call is the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.base.prompts import tokenizer_of
from engine.base.resident import ensure_base
from engine.catalog.opening import open_catalog
from engine.catalog.records import served_name
from engine.clients.engine import EngineClient
from engine.errors import ConfigError
from engine.problems.procedural import Problem
from engine.problems.verifiers import Verifier
from engine.quality.flips import LEVEL, flips, is_uncertain
from engine.report.flipped_items import excerpt, other_of
from engine.report.links import Link
from engine.settings.own_functions import LIKELIHOODS, refuse_unlisted
from engine.settings.params import Params, content_hash
from engine.settings.policies import PolicyConfig
from tasks.suites import Item, Suite, load_suite

# A sampled answer succeeds from this score on.
SUCCESS = 0.5
# Answers of one request.
MOST_ANSWERS = 1 << 14
TIMEOUT_S, PATIENCE_S = 600.0, 60.0
Groups = list[list[Mapping[str, Any]]]


def sampled_flips(params: Params, policy: str, digest: str, samples: int, key: str) -> Link:
    """Return on which items of its policy's suite a revision's chance differs from that of `other_of`.

    Raises `ConfigError` for a suite without a verifier of answers, `ServiceError` when the engine does not
    answer.
    """
    with open_catalog(params.paths) as catalog:
        revision = catalog.revisions.get(policy, digest)
        against, other = other_of(catalog.routes.get(policy), revision)
    suite = load_suite(params.policy(policy).suite, params.suites_dir)
    kind, both = suite.rule.get("verifier", ""), (revision.digest, against)
    refuse_unlisted("verifier", kind, params.python_modules)
    if kind in LIKELIHOODS:
        raise ConfigError(f"The suite {suite.name} has no verifier of answers, but their {kind}.")
    engine = _SuiteAnswers(params, suite, policy, key)
    with Verifier(PolicyConfig(task="", suite="", **suite.rule)) as verifier:

        def judged(items: Sequence[Item], groups: Groups) -> list[int]:
            pairs = [
                (Problem(suite.task, item.question, item.answer), one["text"])
                for item, group in zip(items, groups, strict=True)
                for one in group
            ]
            scores = iter(verifier.judge(pairs).scores)
            return [sum(next(scores) >= SUCCESS for _ in group) for group in groups]

        greedy = [engine.answers(suite.items, one, 1) for one in both]
        right = [judged(suite.items, groups) for groups in greedy]
        # What is certain under both is seen in the greedy answers; which items these are no sample decides.
        chosen = [
            item
            for n, item in enumerate(suite.items)
            if right[0][n] != right[1][n]
            or any(is_uncertain(one[n][0]["logprobs"], samples) for one in greedy)
        ]
        counts = [judged(chosen, engine.answers(chosen, one, samples)) for one in both]
    successes = list(zip(*counts, strict=True))
    found = [
        {"item": chosen[n].id, "segment": chosen[n].segment or None, "question": chosen[n].question}
        | dict(zip(("successes", "other_successes"), successes[n], strict=True))
        for n in flips(successes, samples)
    ]
    facts = {"against": against, "samples": samples, "sampled": len(chosen), "items": len(suite.items)}
    said = (
        f"{samples} samples each for {len(chosen)} uncertain or changed items of {len(suite.items)}: on "
        f"{len(found)} the chance of success differs from that of {other} (of these at most {LEVEL:.0%} are "
        "false in expectation)."
    )
    return Link(
        "sampled", True, "\n".join([said, *(_line(one, samples) for one in found)]), facts | {"flips": found}
    )


def _line(one: Mapping[str, Any], samples: int) -> str:
    change = "won" if one["successes"] > one["other_successes"] else "lost"
    chances = f"{one['successes']} of {samples}, the other {one['other_successes']}"
    return f"- {change} {one['item']}: {excerpt(one['question'])} → {chances}"


class _SuiteAnswers:
    """Asks the engine for answers to a suite's items; a digest of None is the base."""

    def __init__(self, params: Params, suite: Suite, policy: str, key: str):
        self._params, self._suite, self._policy, self._key = params, suite, policy, key
        self._tokenizer = tokenizer_of(ensure_base(params.base, params.paths).path)

    def answers(self, items: Sequence[Item], digest: str | None, n: int) -> Groups:
        """Return `n` answers to each item; a single one is greedy."""
        model = served_name(self._policy, digest) if digest else Path(self._params.base.name).name
        found: Groups = []
        with EngineClient(self._params.url("engine"), self._key, "score", TIMEOUT_S, PATIENCE_S) as engine:
            for at in range(0, len(items), MOST_ANSWERS // n):
                batch = items[at : at + MOST_ANSWERS // n]
                seed = int(content_hash([self._suite.digest, digest, [it.id for it in batch]])[:7], 16)
                body = {
                    "model": model, "n": n, "temperature": float(n > 1), "seed": seed, "texts": True,
                    "max_tokens": self._suite.rule.get("max_tokens", 32),
                    "prompts": [self._tokenizer.encode(it.prompt, add_special_tokens=False) for it in batch],
                }  # fmt: skip
                found += [group["samples"] for group in engine.samples(body)["groups"]]
        return found
