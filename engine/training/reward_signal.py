"""Whether the answers of the base give GRPO anything to learn from, before any training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from engine.problems.verifiers import has_spread
from engine.settings.policies import PolicyConfig
from engine.training.rollout_data import Drawn, Judged
from engine.training.run_health import REMEDIES, expected, shortened


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
            faults = fault_text(self.faults)
            return f"GRPO cannot learn: the verifier failed on every group ({faults}). Correct it."
        if min(rewards) == 1:
            return "There is nothing to learn: the base earns the full reward with every answer."
        return f"GRPO cannot learn: {seen} (mean reward {fmean(rewards):.2f}). {REMEDIES}"

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        return {**asdict(self), "can_learn": self.can_learn, "verdict": self.verdict}


def fault_text(faults: Mapping[str, int]) -> str:
    """Return a verifier's failures as text."""
    return ", ".join(f"{fault}: {count}" for fault, count in faults.items())
