"""Simulated users: they ask a policy's held-out questions, and rate the answers by its verifier.

To engine and controller they are ordinary users.
"""

import asyncio
import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.base.prompts import messages_of
from engine.errors import ConfigError, GraftworkError, ServiceError
from engine.settings.own_functions import LIKELIHOODS, refuse_unlisted
from engine.settings.params import Params
from engine.settings.policies import PolicyConfig
from engine.threads import background
from tasks.outcome import local_key, release_json
from tasks.release import controller

if TYPE_CHECKING:
    from engine.problems.procedural import Problem
    from engine.problems.verifiers import Verifier

# The most users that wait for an answer at the same time, and for how long one does.
PATIENT, PATIENCE_S = 64, 120.0
LOOK_S = 0.5


@dataclass(frozen=True)
class Population:
    """How users come: questions a second, the share of the answers that they rate, and how many they are.

    Without a share they rate all answers, or none where the policy has no verifier of answers.
    """

    per_second: float
    rated: float | None = None
    users: int = 4000

    def share(self, config: PolicyConfig) -> float:
        """Return the share of the answers that users rate; `ConfigError` where no verifier can."""
        if config.verifier not in LIKELIHOODS:
            return 1.0 if self.rated is None else self.rated
        if self.rated:
            raise ConfigError(
                f"The suite {config.suite!r} is scored by {config.verifier}, without a verifier of answers, "
                "so simulated users cannot rate. Leave --rated out; docs/evaluators.md has releases without "
                "ratings."
            )
        return 0.0


@dataclass
class Tally:
    """What users met of one revision: answers, ratings and the sum of their rewards."""

    answers: int = 0
    ratings: int = 0
    rewards: float = 0.0

    @property
    def reward(self) -> float | None:
        """The mean reward of the rated answers."""
        return round(self.rewards / self.ratings, 4) if self.ratings else None


@dataclass
class Crowd:
    """A policy's users so far: ids of their answers, errors of those without one, a tally by revision.

    They come until `leaving` is set, which also an error of their own does.
    """

    policy: str
    answered: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    revisions: dict[str, Tally] = field(default_factory=dict)
    leaving: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        rated = sum(tally.ratings for tally in self.revisions.values())
        failed = f", {len(self.unanswered)} without an answer" if self.unanswered else ""
        return f"{len(self.answered):,} answers, {rated:,} of them rated{failed}"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each revision that answered."""
        return [
            {"revision": name, "answers": one.answers, "rated": one.ratings, "mean reward": one.reward}
            for name, one in self.revisions.items()
        ]

    def to_json(self, release: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the whole result as JSON values, with the release that ended meanwhile."""
        told = {"answered": len(self.answered), "unanswered": len(self.unanswered), "revisions": self.rows()}
        return {"policy": self.policy, **told, "release": release and release_json(release)}

    def refuse_unanswered(self) -> None:
        """Raise `ServiceError` if a user got no answer."""
        if self.unanswered:
            count = f"{len(self.unanswered)} of {len(self.answered) + len(self.unanswered)}"
            raise ServiceError(f"A user of {self.policy!r} got no answer ({count}): {self.unanswered[0]}")


@contextlib.contextmanager
def users(params: Params, policy: str, population: Population) -> Iterator[Crowd]:
    """Have users ask a policy and rate its answers until the block ends; gives what they met so far.

    At its end those who wait get their answers. Raises `ConfigError` for ratings without a verifier, and the
    verifier's own errors.
    """
    from engine.problems.verifiers import Verifier

    config, crowd = params.policy(policy), Crowd(policy)
    refuse_unlisted("verifier", config.verifier, params.python_modules)
    with Verifier(config) if population.share(config) else contextlib.nullcontext() as verifier:
        coming = background(lambda: asyncio.run(_come_in(params, config, population, verifier, crowd)))
        try:
            yield crowd
        finally:
            crowd.leaving.set()
            coming.result()


async def _come_in(
    params: Params, config: PolicyConfig, population: Population, verifier: "Verifier | None", crowd: Crowd
) -> None:
    """Start a user every 1/`per_second` seconds, each with a problem of the `user` split."""
    from openai import AsyncOpenAI

    from engine.problems.procedural import stream

    seed = uuid.uuid4().int % 2**31
    draw, waiting, following = random.Random(seed), asyncio.Semaphore(PATIENT), time.monotonic()
    asking = AsyncOpenAI(base_url=f"{params.url('engine')}/v1", api_key=local_key(params), max_retries=8)
    try:
        async with asking as client, asyncio.TaskGroup() as present:
            for number, (_, problem) in enumerate(stream(config.task, "user", seed)):
                await waiting.acquire()
                if crowd.leaving.is_set():
                    break
                name = f"user-{seed:x}-{number % population.users}"
                judge = verifier if draw.random() < population.share(config) else None
                user = present.create_task(ask(client, name, config, judge, problem, crowd))
                user.add_done_callback(lambda _: waiting.release())
                following = max(following + 1 / population.per_second, time.monotonic() - 1)
                await asyncio.to_thread(crowd.leaving.wait, max(0.0, following - time.monotonic()))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        crowd.leaving.set()


async def ask(
    client: Any,
    user: str,
    config: PolicyConfig,
    verifier: "Verifier | None",
    problem: "Problem",
    crowd: Crowd,
) -> None:
    """Be one user: ask as in training; with a verifier judge the answer and send the reward."""
    from openai import APIError

    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await client.chat.completions.create(
                model=crowd.policy,
                messages=messages_of(problem.asked, config.system, config.few_shot),
                max_tokens=config.max_tokens,
                temperature=0,
                user=user,
            )
            if verifier:
                (reward,) = verifier.judge([(problem, answer.choices[0].message.content or "")]).scores
                body = {"request_id": answer.id, "reward": reward}
                await client.post("/feedback", body=body, cast_to=object)
    except (APIError, TimeoutError) as error:
        crowd.unanswered.append(str(error) or f"It waited for {PATIENCE_S:g} s.")
        return
    crowd.answered.append(str(answer.id))
    # While a policy has no champion, the base answers under the policy's name.
    tally = crowd.revisions.setdefault(answer.model if "@" in answer.model else "base", Tally())
    tally.answers += 1
    if verifier:
        tally.ratings, tally.rewards = tally.ratings + 1, tally.rewards + reward


def wait_for_release(
    params: Params, crowd: Crowd, seconds: float | None, on_look: Callable[[], object]
) -> dict[str, Any] | None:
    """Wait until the policy's release, which runs or starts meanwhile, has ended, and return its row.

    Returns None after `seconds`, and once the crowd leaves by itself. A controller that does not answer is
    asked again.
    """
    until = time.monotonic() + (float("inf") if seconds is None else seconds)
    release: dict[str, Any] | None = None
    with controller(params, patience_s=0) as client:
        while time.monotonic() < until:
            with contextlib.suppress(GraftworkError):
                release = client.release(release["id"]) if release else client.running_release(crowd.policy)
                if release["state"] != "running":
                    return release
            on_look()
            if crowd.leaving.wait(min(LOOK_S, max(0.0, until - time.monotonic()))):
                break
    return None
