"""Scores a champion again beside its predecessor where that is due, and has the controller judge them."""

import time

from engine.base.fitting import fitted_policy
from engine.catalog.opening import open_catalog
from engine.controller.recheck import Pair, due, pair_of
from engine.ledger.ledger import open_ledger
from engine.ledger.looks import Made, looks
from engine.settings.params import Params, content_hash
from engine.version import code_version
from tasks.release import controller
from tasks.score import compare, engine_hash, in_force, score
from tasks.suites import load_suite


def recheck(params: Params, policy: str, key: str, by: str) -> dict[str, str]:
    """Look at a policy's champion again; return `state`, its `reason`, and why it was scored (`scored`).

    Idempotent: a run that goes on after a crash finds what was scored. Raises what `score` raises.
    """
    with open_catalog(params.paths) as catalog:
        pair = pair_of(catalog, policy)
    scored = _score_if_due(params, policy, pair, key)
    with controller(params) as client:
        return {**client.recheck(policy, by), "scored": scored}


def _score_if_due(params: Params, policy: str, pair: Pair, key: str) -> str:
    config = fitted_policy(params, policy).config
    if pair.champion is None or config.recheck == "off":
        return ""
    champion, (made, items) = pair.champion, _in_force(params, config.suite)
    with open_ledger(params.paths.ledger_snapshot) as ledger:
        seen = looks(ledger, config.suite, champion.base, policy, champion.digest, pair.predecessor)
    why = due(seen, made, items, time.time(), config.recheck_after_s)
    if why:
        # The same until these scores are in the ledger, and then never again.
        take = content_hash([made, max((look.at for look in seen), default=0.0)])
        digests = (champion.digest, pair.predecessor)
        compare(params, *(score(params, policy, one, config.suite, key, take=take) for one in digests))
    return why or ""


def _in_force(params: Params, suite: str) -> tuple[Made, int]:
    """Return what scores are made with now, and how many items the suite has."""
    opened, _ = in_force(params, load_suite(suite, params.suites_dir))
    return Made(opened.version, engine_hash(params), code_version()), len(opened.items)
