"""Scores a revision or the base on a frozen suite: lm-eval asks the live engine, the ledger stores the rows.

lm-eval runs offline, without a cache or a second engine, for one revision or for several in one pass. A row's
id derives from its content, so scoring twice adds no duplicates. The suite judges answers with the verifier
that training uses.
"""

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, log
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.base.prompts import tokenizer_of
from engine.base.resident import ensure_base
from engine.catalog.catalog import text_digests
from engine.catalog.records import served_name
from engine.clients.engine import EngineClient
from engine.errors import ConfigError, ServiceError
from engine.ledger.estimates import BASE, Estimate
from engine.ledger.ledger import open_snapshot
from engine.ledger.sender import open_spool
from engine.problems.procedural import Problem
from engine.quality.estimate import interval
from engine.settings.own_functions import LIKELIHOODS, refuse_unlisted
from engine.settings.params import Params, content_hash
from engine.version import code_version
from tasks.estimates import emit_difference, emit_means
from tasks.suites import Suite, faults, load_suite, verifier_of

RECORDED = """
    SELECT id, score, answer FROM scores
    WHERE base = ? AND suite = ? AND digest IS NOT DISTINCT FROM ?
"""
# Revisions that are asked for at once; the others wait.
TOGETHER = 8
# Answers that a verifier judges again, to see whether it says the same.
JUDGED_TWICE = 20
# In the name of a scoring, for all of its items.
ALL = "*"
NAMES = uuid.UUID("6f1c1a52-6f0e-5b0e-9d4e-6d1a3f1b7c11")


@dataclass(frozen=True)
class ItemScore:
    """One item's score in [0, 1] and the scored answer."""

    item: str
    score: float
    answer: str


@dataclass(frozen=True)
class Score:
    """A suite's result: mean and 95% interval in [0, 1]; a `digest` of None is the base.

    `reused` is True when the ledger had every item and the engine was not asked. `verifier_errors` counts
    the answers on which the verifier failed; each scores 0. `held_out_loss` is the mean loss of the answers'
    tokens (nats), where their likelihood is the score. `run` names the scoring.
    """

    policy: str
    digest: str | None
    base: str
    suite: str
    suite_version: str
    mean: float
    ci_low: float
    ci_high: float
    items: tuple[ItemScore, ...]
    reused: bool
    seconds: float
    verifier_errors: int = 0
    held_out_loss: float | None = None
    run: str = ""


def score(
    params: Params,
    policy: str,
    digest: str | None,
    suite: str,
    key: str,
    *,
    reuse: bool = True,
    take: str = "",
) -> Score:
    """Score `policy`'s revision `digest` (64 hex characters; None is the base): `scores` of one."""
    return next(scores(params, [(policy, digest)], suite, key, reuse=reuse, take=take))


def scores(
    params: Params,
    revisions: Sequence[tuple[str, str | None]],
    suite: str,
    key: str,
    *,
    reuse: bool = True,
    take: str = "",
) -> Iterator[Score]:
    """Yield the score of each (policy, digest) on a suite, greedily; the engine is asked for all at once.

    Uses the engine's /v1/completions with `key`, an API key of scope score or admin. With `reuse`, scores
    that the ledger has for this content are returned; another `take` of it has rows of its own. Raises
    `NotFound` for an unknown suite, and, when all others are scored, `ServiceError` where the engine does not
    answer for a revision and `ConfigError` where the verifier disagrees with itself.
    """
    started, opened = time.monotonic(), load_suite(suite, params.suites_dir)
    refuse_unlisted("verifier", opened.rule.get("verifier", ""), params.python_modules)
    opened, base = in_force(params, opened)
    # The ids of its rows derive from the digest.
    opened = replace(opened, digest=opened.digest + take)
    known = [recorded(params, base, *one, opened) if reuse else () for one in revisions]
    missing = [one for one, items in zip(revisions, known, strict=True) if not items]
    asked, refused = ask_engine(params, missing, opened, key), []
    for (policy, digest), items in zip(revisions, known, strict=True):
        errors, each_s = 0, None
        if not (reused := bool(items)):
            try:
                items, errors = next(asked)()
                emit_scores(params, base, policy, digest, opened, items)
            except (ServiceError, ConfigError) as error:
                refused.append(error)
                continue
            each_s = (time.monotonic() - started) / len(missing)
        # Also of scores that are known: a run may have ended between the two.
        emit_estimates(params, base, policy, digest, opened, items, each_s)
        values, seconds = [item.score for item in items], time.monotonic() - started
        low, high = interval(values)
        run = _row_id(params, base, policy, digest, opened, ALL)
        yield Score(
            policy, digest, base, opened.name, opened.version, fmean(values), low, high, items, reused,
            seconds, errors, _loss(opened, items), run,
        )  # fmt: skip
    if refused:
        raise type(refused[0])(" ".join(dict.fromkeys(map(str, refused))))


def compare(params: Params, score: Score, other: Score) -> None:
    """Emit the difference of a revision's score to another's, or to the base's; idempotent."""
    row = _estimate(params, score.base, score.policy, score.digest, score.suite, score.suite_version)
    mine, theirs = ([item.score for item in each.items] for each in (score, other))
    emit_difference(params, replace(row, against=other.digest or BASE), mine, theirs, score.run + other.run)


def _estimate(
    params: Params, base: str, policy: str, digest: str | None, suite: str, version: str,
    seconds: float | None = None,
) -> Estimate:  # fmt: skip
    """Return what the estimates of a revision share; its figures are filled in by `tasks.estimates`."""
    # The base belongs to no policy.
    owner = policy if digest else None
    return Estimate(
        owner, digest, base, suite, version, "suite", mean=0.0, low=0.0, high=0.0, items=0, seconds=seconds,
        config_hash=engine_hash(params),
    )  # fmt: skip


def _loss(suite: Suite, items: tuple[ItemScore, ...]) -> float | None:
    """Return the mean loss of all answers' tokens, by their geometric mean probabilities."""
    if suite.rule.get("verifier") != "likelihood":
        return None
    pairs = list(zip(suite.items, items, strict=True))
    return -sum(one.tokens * log(scored.score) for one, scored in pairs) / sum(one.tokens for one, _ in pairs)


def in_force(params: Params, suite: Suite) -> tuple[Suite, str]:
    """Return the suite as the ledger names it for the base that the engine serves, and that base's digest."""
    with EngineClient(params.url("engine")) as engine:
        marker = engine.marker()
    base = str(marker["base"])
    return on_base(params, suite, base, marker.get("text_digest")), base


def on_base(params: Params, suite: Suite, base: str, text: str | None) -> Suite:
    """Return the suite as the ledger names it for a base that answers with the text digest `text`.

    Where the digest in force is not the base's first, it is part of the version: scores of different versions
    are never compared. Raises `ServiceError` for another `text` than that in force; None: it is not known.
    """
    known = text_digests(params.paths, base)
    if known and text not in (None, known[-1]):
        raise ServiceError(
            f"The answers are of the base's text files with the digest {text}, and those with {known[-1]} "
            "are in force. Restart the engine, or run `dvc repro` for scores that it has made."
        )
    if not known or known[-1] == known[0]:
        return suite
    return replace(suite, version=f"{suite.version}+{known[-1][:12]}")


def recorded(
    params: Params, base: str, policy: str, digest: str | None, suite: Suite
) -> tuple[ItemScore, ...]:
    """Return the ledger's rows for this content in the suite's order; empty unless every item has one."""
    if not params.paths.ledger_snapshot.is_file():
        return ()
    wanted = {_row_id(params, base, policy, digest, suite, item.id): item.id for item in suite.items}
    with open_snapshot(params.paths.ledger_snapshot) as connection:
        rows = connection.execute(RECORDED, [base, suite.name, digest]).fetchall()
    scores = {
        wanted[row]: ItemScore(wanted[row], value, answer) for row, value, answer in rows if row in wanted
    }
    return tuple(scores[item.id] for item in suite.items) if len(scores) == len(suite.items) else ()


def ask_engine(
    params: Params,
    revisions: Sequence[tuple[str, str | None]],
    suite: Suite,
    key: str,
    numbers: Sequence[int] | None = None,
) -> Iterator[Callable[[], tuple[tuple[ItemScore, ...], int]]]:
    """Ask for the answers of revisions to a suite's items, or to those with these `numbers`, in their order.

    Yields a function for each revision that waits for its items and the count of the verifier's failures. One
    revision's items go in batches of the engine's; of several each has a part of a batch, so that the engine
    computes rows of several adapters at once.
    """
    import requests
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    root = params.suites_dir
    manager = TaskManager(include_path=root, include_defaults=False, metadata={"root": str(root)})
    workers = max(1, min(len(revisions), TOGETHER))
    # One request fills the engine's largest batch; several keep a second one waiting, which its queue takes.
    batch = params.engine.max_num_seqs * (1 if workers == 1 else 2) // workers
    is_read = suite.rule.get("verifier") in LIKELIHOODS

    def ask(model: str, asked: Any, tasks: Any) -> tuple[tuple[ItemScore, ...], int]:
        failed: Counter[str] = Counter()
        token = faults.set(failed)
        try:
            # Not `simple_evaluate`: it seeds the process's random states and inspects the machine.
            results = evaluate(
                asked,
                tasks,
                samples=None if numbers is None else {suite.name: list(numbers)},
                bootstrap_iters=0,
                log_samples=True,
            )
        except requests.RequestException as error:
            said = f"{error} {error.response.text[:300]}" if error.response is not None else str(error)
            raise ServiceError(f"The engine did not score {model} on {suite.name}: {said}") from None
        finally:
            faults.reset(token)
        samples = sorted(results["samples"][suite.name], key=lambda sample: sample["doc_id"])
        items = [ItemScore(it["doc"]["id"], float(it["reward"]), _answer(it["resps"])) for it in samples]
        if not failed:
            _refuse_unsteady(suite, items)
        return tuple(items), failed.total()

    if not is_read:
        # Before the threads, so that they share one process of it.
        verifier_of(json.dumps(dict(suite.rule)))
    pool = ThreadPoolExecutor(workers)
    try:
        waiting = []
        for policy, digest in revisions:
            # The engine serves a base from a directory under the directory's name.
            model = served_name(policy, digest) if digest else Path(params.base.name).name
            asked = _completions(params, model, key, max(2, batch), is_read)
            waiting.append(pool.submit(ask, model, asked, manager.load([suite.name])))
        yield from (one.result for one in waiting)
    except BaseException:
        # Also where nobody asks for the rest.
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _refuse_unsteady(suite: Suite, items: Sequence[ItemScore]) -> None:
    """Raise `ConfigError` where a person's function scores one of the first answers otherwise again."""
    if not suite.rule.get("verifier", "").startswith("python:"):
        return
    asked = {item.id: item for item in suite.items}
    verifier = verifier_of(json.dumps(dict(suite.rule)))
    for scored in items[:JUDGED_TWICE]:
        item = asked[scored.item]
        again = verifier.judge([(Problem(suite.task, item.question, item.answer), scored.answer)])
        if not again.errors and again.scores[0] != scored.score:
            raise ConfigError(
                f"The verifier {verifier.kind} disagrees with itself: the answer {scored.answer[:80]!r} to "
                f"the item {item.id} scored {scored.score:g}, and then {again.scores[0]:g}. Let it depend on "
                "what it is given alone."
            )


def _answer(responses: list[list[Any]]) -> str:
    """Return the generated answer; of a log-probability there is none."""
    answer = responses[0][0]
    return answer if isinstance(answer, str) else ""


def _completions(params: Params, model: str, key: str, batch: int, with_tokens: bool) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    asked = LocalCompletionsAPI(
        base_url=f"{params.url('engine')}/v1/completions",
        model=model,
        # Frozen prompts are sent as text, so only the engine's tokenizer is involved.
        tokenizer_backend="None",
        max_length=params.engine.max_model_len,
        # A request at a time: the order is fixed, and no event loop is needed.
        batch_size=batch,
        header={"Authorization": f"Bearer {key}", "x-graftwork-purpose": "score"},
    )
    if with_tokens:
        # lm-eval would load the tokenizer by `AutoTokenizer`, which takes four seconds, and move white space
        # from a prompt's end to the answer: other tokens than those that were learned.
        tokenizer = tokenizer_of(ensure_base(params.base, params.paths).path)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        asked.tokenizer, asked.tokenizer_backend, asked.tokenized_requests = tokenizer, "huggingface", True
        asked._encode_pair = lambda prompt, answer: (encode(prompt), encode(answer))
        asked.loglikelihood = partial(asked.loglikelihood, disable_tqdm=True)
    return asked


def emit_scores(
    params: Params, base: str, policy: str, digest: str | None, suite: Suite, items: Sequence[ItemScore],
    *, is_part: bool = False,
) -> None:  # fmt: skip
    """Emit scores to the ledger through the spool. Idempotent: a row's id derives from its content.

    Of a part of the items, which were chosen, they are `readings`. Raises `ConfigError` for a score that is
    no number; nothing is emitted then.
    """
    run = {} if is_part else {"run": _row_id(params, base, policy, digest, suite, ALL)}
    if no_number := [item.item for item in items if not isfinite(item.score)]:
        raise ConfigError(
            f"The score of the item {no_number[0]} of {suite.name} is no number. No item is recorded."
        )
    asked = {item.id: item for item in suite.items}
    with closing(open_spool(params, "score")) as spool:
        for item in items:
            spool.emit(
                "readings" if is_part else "scores",
                id=_row_id(params, base, policy, digest, suite, item.item),
                code_version=code_version(),
                config_hash=engine_hash(params),
                policy=policy if digest else None,
                digest=digest,
                base=base,
                suite=suite.name,
                suite_version=suite.version,
                item=item.item,
                score=item.score,
                answer=item.answer,
                # The base's rows outlive a policy that is purged, so they hold nothing of its data.
                question=asked[item.item].question if digest else None,
                segment=asked[item.item].segment or None,
                **run,
            )


def emit_estimates(
    params: Params, base: str, policy: str, digest: str | None, suite: Suite, items: Sequence[ItemScore],
    seconds: float | None = None,
) -> None:  # fmt: skip
    """Emit what the scores of all items say, of the suite and of its task; idempotent."""
    row = _estimate(params, base, policy, digest, suite.name, suite.version, seconds)
    segments = {item.id: item.segment for item in suite.items}
    scores, run = [item.score for item in items], _row_id(params, base, policy, digest, suite, ALL)
    emit_means(params, row, scores, [segments[item.item] for item in items], run)


def engine_hash(params: Params) -> str:
    """Return the hash of the engine's settings that answers may depend on: scores of others are not mixed."""
    return content_hash(params.engine.answering())


def _row_id(params: Params, base: str, policy: str, digest: str | None, suite: Suite, item: str) -> str:
    # The base's rows name no policy: all policies with the same suite share them.
    subject = f"{policy}@{digest}" if digest else "base"
    made = f"{suite.name}/{suite.version}/{suite.digest}/{engine_hash(params)}"
    return str(uuid.uuid5(NAMES, f"{base}/{subject}/{made}/{item}"))
