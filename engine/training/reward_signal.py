"""Whether the answers of a policy give GRPO anything to learn from: during training, and before it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from engine.errors import ConfigError
from engine.problems.procedural import Problem, render
from engine.problems.verifiers import has_spread
from engine.settings.policies import PolicyConfig
from engine.training.rollout_data import Drawn, Judged
from engine.training.run import Run
from engine.training.service.protocol import SessionInfo

# Answers that an error shows, and how much of a text.
SHOWN, LONGEST = 3, 80
REMEDIES = (
    "Choose another verifier or contract, a reward with grades between 0 and 1 (python:MODULE:FUNC), more "
    "groups or samples in a group, or fine-tune the base on answers first (SFT)."
)


@dataclass(frozen=True)
class TriedGroup:
    """A question, the expected answer, the base's answers and their rewards; None: the verifier failed."""

    question: str
    expected: str
    answers: tuple[str, ...]
    rewards: tuple[float, ...] | None

    @property
    def has_spread(self) -> bool:
        """Say whether the rewards differ, so that the group has a gradient."""
        return self.rewards is not None and has_spread(self.rewards)

    def row(self) -> dict[str, str]:
        """Return the group as a row of a table, with its best answer."""
        rewards = self.rewards or ()
        best = self.answers[rewards.index(max(rewards))] if rewards else self.answers[0]
        return {
            "question": shortened(self.question),
            "expected": shortened(self.expected),
            "best answer": shortened(best),
            "rewards": " ".join(f"{reward:.3g}" for reward in rewards) or "verifier failed",
        }


@dataclass(frozen=True)
class Trial:
    """What the base earns under a policy's verifier, before any training."""

    policy: str
    groups: tuple[TriedGroup, ...]
    faults: Mapping[str, int]

    @staticmethod
    def of(policy: str, config: PolicyConfig, drawn: Drawn, judged: Judged) -> "Trial":
        """Describe sampled and scored groups."""
        groups = zip(drawn.problems, drawn.groups, judged.rewards, strict=True)
        tried = (
            TriedGroup(
                problem.question,
                expected(config, problem),
                tuple(sample.text for sample in samples),
                None if rewards is None else tuple(rewards),
            )
            for problem, samples, rewards in groups
        )
        return Trial(policy, tuple(tried), dict(judged.errors))

    @property
    def can_learn(self) -> bool:
        """Say whether GRPO has a gradient in any group."""
        return any(group.has_spread for group in self.groups)

    @property
    def verdict(self) -> str:
        """Return a sentence that says whether GRPO can learn from these rewards, and what to do if not."""
        rewards = [reward for group in self.groups for reward in group.rewards or ()]
        with_spread = sum(group.has_spread for group in self.groups)
        seen = f"{with_spread} of {len(self.groups)} groups have spread"
        if self.can_learn:
            return f"GRPO can learn: {seen} (mean reward {fmean(rewards):.2f})."
        if not rewards:
            return f"GRPO cannot learn: the verifier failed on every group ({told(self.faults)}). Correct it."
        if min(rewards) == 1:
            return "There is nothing to learn: the base earns the full reward with every answer."
        return f"GRPO cannot learn: {seen} (mean reward {fmean(rewards):.2f}). {REMEDIES}"

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        return {**asdict(self), "can_learn": self.can_learn, "verdict": self.verdict}


def expected(config: PolicyConfig, problem: Problem) -> str:
    """Return the answer that the policy's verifier compares with."""
    return render(config.contract, problem.answer) if config.verifier == "contract" else problem.answer


def refuse_without_signal(run: Run, session: SessionInfo) -> None:
    """Raise `ConfigError` when none of the last `no_signal_steps` steps had a gradient.

    Steps in which every answer earned the full reward do not count: there is nothing left to learn.
    """
    rows = session.history[-run.config.no_signal_steps :]
    if len(rows) < run.config.no_signal_steps or not all(map(is_without_signal, rows)):
        return
    flat = [row["zero_spread"] for row in rows if row["zero_spread"] is not None]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    faults = sum(row["verifier_errors"] or 0 for row in rows)
    seen = "No group could be scored"
    if rewards:
        seen = f"{fmean(flat):.0%} of their groups had no spread, at a mean reward of {fmean(rewards):.2f}"
    failed = f", and the verifier failed on {faults} answers" if faults else ""
    learned = any(row["grad_norm"] for row in session.history)
    keep = f" To export what it learned before, set steps to {session.step}." if learned else ""
    raise ConfigError(
        f"The training of {run.policy!r} stopped after step {session.step}: its last {len(rows)} steps had "
        f"no gradient. {seen}{failed}. {_examples(run)}{REMEDIES} `graftwork policy try {run.policy}` "
        f"shows what the base earns.{keep}"
    )


def is_without_signal(row: Mapping[str, Any]) -> bool:
    """Say whether a step had no gradient because no group had spread, though rewards could be higher."""
    nothing = row.get("groups_kept") == 0 and row.get("grad_norm") == 0
    return nothing and (row.get("reward") is None or bool(row["reward"] < 1))


def _examples(run: Run) -> str:
    drawn = run.ahead.last
    if drawn is None:
        return ""
    pairs = list(zip(drawn.problems, drawn.groups, strict=True))[:SHOWN]
    said = (
        f"{shortened(problem.question)!r} was answered with {shortened(group[0].text)!r}, expected "
        f"{shortened(expected(run.config, problem))!r}"
        for problem, group in pairs
    )
    return f"Answers: {'; '.join(said)}. "


def told(faults: Mapping[str, int]) -> str:
    """Return a verifier's failures as text."""
    return ", ".join(f"{fault}: {count}" for fault, count in faults.items())


def shortened(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
