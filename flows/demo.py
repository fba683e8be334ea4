"""The main job: adapt and release policies, then release a bad revision and watch its rollback, twice.

First an evaluator finds it in its shadow, before any user meets it; then users do. Simulated users send
unseen problems through the `openai` client and report their verifier's reward. To the release code they are
ordinary users.
"""

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

from prefect import flow

from engine.base.prompts import messages_of
from engine.errors import ServiceError
from engine.files import write_whole
from engine.settings.evaluators import EvaluatorConfig
from engine.settings.forms import AdaptForm, ReleaseForm
from engine.settings.own_functions import refuse_unlisted
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.threads import background, in_parallel
from flows.adapt import adapt
from flows.display import print_stage
from flows.release import release
from flows.report import publish_report
from tasks.outcome import (
    Adapted,
    Outcome,
    Shadowed,
    Stages,
    judge_rollback,
    judge_shadow,
    local_key,
    policy_row,
    summary,
)
from tasks.progress import show_link, show_table
from tasks.release import controller

# Seconds for which users still ask after a verdict, to show which revision answers them then.
AFTER_S = 3.0
# The most users that wait for an answer at the same time, and that start a release.
PATIENT = 64
MOST_USERS = 4000
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
    with clock("adapt"):
        print_stage(f"Adapting on the resident base: {', '.join(names)}.")
        adapted = in_parallel(*(partial(adapt, AdaptForm(policy=name)) for name in names))
    with clock("release"):
        print_stage(f"Releasing them: {params.release.weight:.0%} of users on the canary.")
        released = in_parallel(*(partial(release_to_users, params, one, len(adapted)) for one in adapted))
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
    params: Params, revision: Adapted, sharing: int, after_s: float = AFTER_S, **more: Any
) -> tuple[dict[str, Any], list[str]]:
    """Release a revision while users send requests; `sharing` concurrent releases share their rate.

    They go on for `after_s` seconds; `more` are fields of the form. Returns the ended release's row and the
    ids of the users' requests.
    """
    hold_others(params, revision)
    # Two cores answer a few users of a language model a second.
    per_second = 30 if is_generated(params, revision.policy) else 3
    with users(params, revision.policy, per_second / sharing) as answered:
        form = ReleaseForm(policy=revision.policy, digest=revision.digest, by="demo", **more)
        ended = release(form)
        time.sleep(after_s)
    return ended, answered


def hold_others(params: Params, revision: Adapted) -> None:
    """End a release that an interrupted run left open, since a policy has one release at a time."""
    from engine.catalog.opening import open_catalog

    with open_catalog(params.paths) as catalog, controller(params) as client:
        for other in catalog.releases.all(revision.policy, open_only=True):
            if other.revision != revision.digest:
                client.hold(other.id, "A later run of the main job began.")


@contextlib.contextmanager
def users(params: Params, policy: str, per_second: float) -> Iterator[list[str]]:
    """Run users who ask a policy and rate its answers until the block ends; gives their requests' ids.

    Raises `ServiceError` when a user got no answer.
    """
    leave, answered = threading.Event(), list[str]()
    crowd = background(lambda: asyncio.run(come_in(params, policy, per_second, leave, answered)))
    try:
        yield answered
    finally:
        leave.set()
    # A user without an answer fails the run.
    crowd.result()


async def come_in(
    params: Params, policy: str, per_second: float, leave: threading.Event, answered: list[str]
) -> None:
    """Start a user every 1/`per_second` seconds, each with a problem of the `user` split."""
    from openai import AsyncOpenAI

    from engine.problems.procedural import stream
    from engine.problems.verifiers import Verifier

    config = params.policy(policy)
    problems = stream(config.task, "user", seed=uuid.uuid4().int % 2**31)
    waiting, crowd = asyncio.Semaphore(PATIENT), []
    url = f"{params.url('engine')}/v1"
    asking = AsyncOpenAI(base_url=url, api_key=local_key(params), max_retries=8)
    refuse_unlisted("verifier", config.verifier, params.python_modules)
    with Verifier(config) as verifier:
        async with asking as client:
            following = time.monotonic()
            for _, (_, problem) in zip(range(MOST_USERS), problems, strict=False):
                if leave.is_set():
                    break
                await waiting.acquire()
                user = asyncio.create_task(ask(client, policy, config, verifier, problem))
                user.add_done_callback(lambda _: waiting.release())
                crowd.append(user)
                following = max(following + 1 / per_second, time.monotonic() - 1)
                await asyncio.sleep(max(0.0, following - time.monotonic()))
            answered += await asyncio.gather(*crowd)


async def ask(client: Any, policy: str, config: PolicyConfig, verifier: Any, problem: Any) -> str:
    """Be one user: ask as in training, judge the answer, send the reward; return the request's id."""
    from openai import APIError

    try:
        answer = await client.chat.completions.create(
            model=policy,
            messages=messages_of(problem.asked, config.system, config.few_shot),
            max_tokens=config.max_tokens,
            temperature=0,
            user=f"user-{uuid.uuid4()}",
        )
        (rated,) = verifier.judge([(problem, answer.choices[0].message.content or "")]).scores
        await client.post("/feedback", body={"request_id": answer.id, "reward": rated}, cast_to=object)
    except APIError as error:
        raise ServiceError(f"A user of {policy!r} got no answer: {error}") from None
    return str(answer.id)
