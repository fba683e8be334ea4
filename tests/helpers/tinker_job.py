"""What a client of the Tinker API and our own client do alike: a job's prompts, rewards and seeds."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Token ids that every base has.
FIRST, LAST = 5, 250


@dataclass(frozen=True)
class Job:
    """Some steps of a client: `prompts` groups of `group` samples each, of up to `max_tokens`.

    `kind` is `steps` or `singles`.
    """

    kind: str
    url: str
    key: str
    base: str
    seed: int
    steps: int
    prompts: int
    group: int
    max_tokens: int
    rank: int = 8
    length: int = 32
    lr: float = 1e-4

    def seed_of(self, step: int, number: int) -> int:
        """Return the seed of a prompt's group."""
        return 1_000_000 * self.seed + 10_000 * step + self.group * number


def prompts_of(job: Job, step: int) -> list[list[int]]:
    """Return a step's prompts, as token ids."""
    draw = random.Random(f"{job.seed} {step}")
    return [[draw.randint(FIRST, LAST) for _ in range(job.length)] for _ in range(job.prompts)]


def advantages(samples: Sequence[Sequence[int]]) -> list[float]:
    """Return an advantage for each sample, which only its tokens decide; a sum of them is far from 0."""
    return [sum(tokens) % 7 / 7 for tokens in samples]
