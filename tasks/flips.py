"""Samples two revisions' answers to the uncertain items of a suite, and says which items' chances differ.

The answers are judged by the suite's verifier and not recorded: a chance at temperature 1 is another quantity
than the score of a greedy answer. The seeds derive from suite, revision and items: a second call is the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


def sampled_flips(params: Params, policy: str, digest: str, samples: int, key: str) -> Link:
    """Return on which items of its policy's suite a revision's chance differs from that of `other_of`.

    Raises `ConfigError` for a suite without a verifier of answers, `ServiceError` when the engine does not
    answer.
    """
    with open_catalog(params.paths) as catalog:
        revision = catalog.revisions.get(policy, digest)
        against, other = other_of(catalog.routes.get(policy), revision)
    suite, both = load_suite(params.policy(policy).suite, params.suites_dir), (revision.digest, against)
    with _verifier(params, suite) as verifier:
        ask = _SuiteAnswers(params, suite, policy, key, verifier)
        # What is certain under both is seen in the greedy answers; which items these are no sample decides.
        chosen = [
            item
            for item, one, two in zip(suite.items, *(ask(suite.items, it, 1) for it in both), strict=True)
            if one.successes != two.successes or any(is_uncertain(it.logprobs, samples) for it in (one, two))
        ]
        counts = [[one.successes for one in ask(chosen, it, samples)] for it in both]
    successes = list(zip(*counts, strict=True))
    found = [_flip(chosen[n], *successes[n]) for n in flips(successes, samples)]
    said = (
        f"{samples} samples each for {len(chosen)} uncertain or changed items of {len(suite.items)}: on "
        f"{len(found)} the chance of success differs from that of {other} (of these at most {LEVEL:.0%} are "
        "false in expectation)."
    )
    facts = {"against": against, "samples": samples, "sampled": len(chosen), "items": len(suite.items)}
    lines = (
        f"- {one['change']} {one['item']}: {excerpt(one['question'])} → {one['successes']} of {samples}, the "
        f"other {one['other_successes']}"
        for one in found
    )
    return Link("sampled", True, "\n".join([said, *lines]), facts | {"flips": found})


def _flip(item: Item, mine: int, theirs: int) -> dict[str, Any]:
    about = {"item": item.id, "segment": item.segment or None, "question": item.question}
    change = "won" if mine > theirs else "lost"
    return about | {"change": change, "successes": mine, "other_successes": theirs}


def _verifier(params: Params, suite: Suite) -> Verifier:
    kind = suite.rule.get("verifier", "")
    refuse_unlisted("verifier", kind, params.python_modules)
    if kind in LIKELIHOODS:
        raise ConfigError(f"The suite {suite.name} has no verifier of answers, but their {kind}.")
    return Verifier(PolicyConfig(task="", suite="", **suite.rule))


class Solved(NamedTuple):
    """How many of a revision's answers to an item succeed, and the first one's tokens' log-probabilities."""

    successes: int
    logprobs: list[float]


class _SuiteAnswers:
    """Asks the engine for answers to a suite's items and judges them; a digest of None is the base."""

    def __init__(self, params: Params, suite: Suite, policy: str, key: str, verifier: Verifier):
        self._params, self._suite, self._policy, self._key = params, suite, policy, key
        self._tokenizer, self._verifier = tokenizer_of(ensure_base(params.base, params.paths).path), verifier

    def __call__(self, items: Sequence[Item], digest: str | None, n: int) -> list[Solved]:
        """Ask for `n` answers to each item; a single one is greedy."""
        found, most = list[Solved](), MOST_ANSWERS // n
        with EngineClient(self._params.url("engine"), self._key, "score", TIMEOUT_S, PATIENCE_S) as engine:
            for batch in (items[at : at + most] for at in range(0, len(items), most)):
                groups = engine.samples(self._body(batch, digest, n))["groups"]
                found += map(self._judge, batch, (group["samples"] for group in groups))
        return found

    def _body(self, items: Sequence[Item], digest: str | None, n: int) -> dict[str, Any]:
        return {
            "model": served_name(self._policy, digest) if digest else Path(self._params.base.name).name,
            "prompts": [self._tokenizer.encode(item.prompt, add_special_tokens=False) for item in items],
            "n": n,
            "temperature": float(n > 1),
            "seed": int(content_hash([self._suite.digest, digest, [item.id for item in items]])[:7], 16),
            "max_tokens": self._suite.rule.get("max_tokens", 32),
            "texts": True,
        }

    def _judge(self, item: Item, answers: list[dict[str, Any]]) -> Solved:
        problem = Problem(self._suite.task, item.question, item.answer)
        scores = self._verifier.judge([(problem, one["text"]) for one in answers]).scores
        return Solved(sum(score >= SUCCESS for score in scores), answers[0]["logprobs"])
