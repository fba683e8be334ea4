"""Scores the suite `general`: the perplexity of a revision or the base on text that no policy trains on.

An item's score is the geometric mean probability of a window's tokens, so the ledger keeps it like any other
score in [0, 1]. Idempotent: a row's id derives from its content.
"""

import hashlib
import math
import time
from dataclasses import dataclass
from statistics import fmean

from engine.base.prompts import tokenizer_of
from engine.base.resident import ensure_base
from engine.catalog.records import served_name
from engine.clients.engine import EngineClient
from engine.problems.general_text import GENERAL, general_text, text_digest, windows_of
from engine.quality.estimate import perplexity
from engine.settings.params import DIGEST12, Params
from tasks.score import ItemScore, emit_scores, on_base, recorded
from tasks.suites import Item, Suite

# Of one window, on a slow machine.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Perplexity:
    """The perplexity on general text, over `windows` windows; a `digest` of None is the base.

    `version` is the text's, `reused` as in `tasks.score.Score`.
    """

    policy: str
    digest: str | None
    version: str
    value: float
    windows: int
    reused: bool
    seconds: float


def score_general(params: Params, policy: str, digest: str | None, key: str) -> Perplexity:
    """Measure the perplexity of `policy`'s revision `digest` (None: the base) on general text.

    Asks the engine for the tokens' log-probabilities, with `key` of scope score or admin; scores that the
    ledger has are reused. Raises the errors of `EngineClient.logprobs`.
    """
    started = time.monotonic()
    base = ensure_base(params.base, params.paths)
    tokenizer = tokenizer_of(base.path)
    windows = windows_of(tokenizer.encode(general_text(), add_special_tokens=False, verbose=False))
    suite = _suite(windows, params)
    with EngineClient(params.url("engine"), key, "score", TIMEOUT_S) as engine:
        marker = engine.marker()
        suite = on_base(params, suite, marker["base"], base.text_digest)
        model = served_name(policy, digest) if digest else marker["base_name"]
        known = recorded(params, marker["base"], policy, digest, suite)
        items = known or tuple(
            ItemScore(item.id, math.exp(fmean(engine.logprobs(model, window))), "")
            for item, window in zip(suite.items, windows, strict=True)
        )
    if not known:
        emit_scores(params, marker["base"], policy, digest, suite, items)
    value, seconds = perplexity([item.score for item in items]), time.monotonic() - started
    return Perplexity(policy, digest, suite.version, value, len(items), bool(known), seconds)


def _suite(windows: list[tuple[int, ...]], params: Params) -> Suite:
    items = tuple(
        Item(f"{number:04d}", "", "", "", hashlib.sha256(repr(window).encode()).hexdigest())
        for number, window in enumerate(windows)
    )
    digest = text_digest()
    return Suite(GENERAL, digest[:DIGEST12], GENERAL, {}, digest, params.suites_dir / GENERAL, items)
