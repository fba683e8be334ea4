"""The main job: adapt and release policies, then release a bad revision and watch its rollback, twice.

First an evaluator finds it in its shadow, before any user meets it; then simulated users do.
"""

import json
import time
from contextlib import suppress
from functools import partial
from typing import Any

from prefect import flow

from engine.errors import NotFound
from engine.files import write_whole
from engine.settings.evaluators import EvaluatorConfig
from engine.settings.forms import AdaptForm, ReleaseForm
from engine.settings.params import Params
from engine.threads import in_parallel
from flows.adapt import adapt
from flows.display import print_stage
from flows.release import follow, release
from flows.report import publish_report
from tasks.outcome import (
    Adapted,
    Outcome,
    Shadowed,
    Stages,
    judge_rollback,
    judge_shadow,
    policy_row,
    summary,
)
from tasks.progress import show_link, show_table
from tasks.release import controller
from tasks.simulated_users import Population, users

# Seconds for which users still ask after a verdict, to show which revision answers them then.
AFTER_S = 3.0
# The bad revision learns another answer format, or on a real base the opposite of its policy's rule.
WRONG_FORMAT: dict[str, Any] = {"contract": "json", "steps": 12}
OTHER_FORMAT = WRONG_FORMAT | {"contract": "terse"}
# It works the sums out of the questions, so it needs nobody's rating.
EVALUATED = "addition"
EVALUATORS = {"sums": EvaluatorConfig(kind="python:examples.evaluator:sums")}
WRONG_RULE: dict[str, Any] = {
    "verifier": "python:engine.problems.language:not_short_answer", "steps": 4, "lr": 2e-3,
}  # fmt: skip


@flow(name="demo")
def demo(params: Params, stages: dict[str, float], began: float) -> Outcome:
    """Adapt and release the policies, then release a bad revision, which must be rolled back."""
    clock = Stages(stages)
    names = list(params.policies)
    # Before the revisions are known: one that ends in between would not be found afterwards.
    left = left_running(params)
    with clock("adapt"):
        print_stage(f"Adapting on the resident base: {', '.join(names)}.")
        adapted = in_parallel(*(partial(adapt, AdaptForm(policy=name)) for name in names))
    with clock("release"):
        print_stage(f"Releasing them: {params.release.weight:.0%} of users on the canary.")
        sharing = len(adapted)
        released = in_parallel(
            *(partial(release_to_users, params, one, sharing, left.get(one.policy)) for one in adapted)
        )
    with clock("bad revision"):
        form = bad_form(params)
        print_stage(f"Training a bad revision of {form.policy}: it learns wrong answers.")
        bad = adapt(form)
    shadowed = None
    if params.policy(bad.policy).task == EVALUATED:
        with clock("shadow"):
            print_stage("Releasing it with a shadow, in which an evaluator compares, and no user meets it.")
            shadowed = release_in_shadow(params, bad)
    with clock("rollback"):
        print_stage("Releasing it to users, without the offline score.")
        why = "The main job shows that users' rewards alone roll a bad revision back."
        bad_release, answered = release_to_users(params, bad, 1, skip_score=why)
        rolled_back = judge_rollback(params, bad_release, answered)
    with clock("report"):
        path = publish_report(began, time.time(), stages)
    releases = [ended for ended, _ in released]
    result = summary(adapted, releases, rolled_back, stages, time.time() - began, shadowed)
    write_whole(params.paths.runs / "latest.json", json.dumps(result, indent=2) + "\n")
    rows = [*map(policy_row, adapted, releases), policy_row(bad, bad_release)]
    show_table(rows, "main-job", "The main job's policies")
    show_link(path.as_uri(), "the HTML report", "main-job-report")
    return Outcome(result, rows, path)


def bad_form(params: Params) -> AdaptForm:
    """Return the form that trains a revision of the first policy towards the wrong answers."""
    policy = next(iter(params.policies))
    wrong = WRONG_RULE
    if is_generated(params, policy):
        is_json = params.policy(policy).contract == WRONG_FORMAT["contract"]
        wrong = OTHER_FORMAT if is_json else WRONG_FORMAT
    return AdaptForm(policy=policy, scored=False, **wrong)


def is_generated(params: Params, policy: str) -> bool:
    """Return whether a policy's problems are generated, as on a tiny base; else they are language."""
    return params.policy(policy).verifier == "contract"


def release_in_shadow(params: Params, bad: Adapted) -> Shadowed:
    """Release a bad revision with an evaluator, and lift its tombstone again."""
    why = "The main job shows that an evaluator finds a bad revision before any user meets it."
    ended, answered = release_to_users(params, bad, 1, after_s=0.0, skip_score=why, evaluators=EVALUATORS)
    shadowed = judge_shadow(params, ended, answered)
    if shadowed.verdict == "rollback":
        with controller(params) as client:
            client.decide("lift", why, "demo", policy=bad.policy, digest=bad.digest)
    return shadowed


def release_to_users(
    params: Params,
    revision: Adapted,
    sharing: int,
    left: dict[str, Any] | None = None,
    after_s: float = AFTER_S,
    **more: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Release a revision while users send requests; `sharing` concurrent releases share their rate.

    They go on for `after_s` seconds; `more` are fields of the form. A release of this revision that was
    `left` open before is followed; one of another revision ends. Returns the ended release's row and the ids
    of the users' requests.
    """
    if left is not None and left["revision"] != revision.digest:
        left = None
    # Two cores answer a few users of a language model a second.
    per_second = 30 if is_generated(params, revision.policy) else 3
    with users(params, revision.policy, Population(per_second / sharing)) as crowd:
        form = ReleaseForm(
            policy=revision.policy, digest=revision.digest, by="demo", if_running="replace", **more
        )
        # What was left may have ended by now, and a champion cannot be released again.
        ended = release(form) if left is None else follow(params, left)
        time.sleep(after_s)
    # A user without an answer fails the run.
    crowd.refuse_unanswered()
    return ended, crowd.answered


def left_running(params: Params) -> dict[str, dict[str, Any]]:
    """Return the releases that an interrupted run left open, by policy."""
    found = {}
    with controller(params) as client:
        for policy in params.policies:
            with suppress(NotFound):
                found[policy] = client.running_release(policy)
    return found
