"""What a step learns from: problems of the line's stream, groups that the engine samples, their rewards.

A step's samples follow from line, step and the revision that draws them, so that they can be drawn again.
With staleness k a step is drawn under the revision of k steps before, while those steps are still learned:
the draw is under way beside them, under a revision that never changes. Knows nothing of the trainer.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean, pstdev
from time import monotonic
from typing import Any

from engine.base.prompts import prompt_ids
from engine.problems.procedural import Problem, stream
from engine.problems.verifiers import Verifier
from engine.settings.params import PolicyConfig, content_hash, served_name
from engine.threads import background
from engine.training.lineage import Line
from engine.training.rollouts import Sample, Sampling, sample_groups
from engine.training.service.protocol import Datum, EncodedText, ModelInput, TensorData


@dataclass(frozen=True)
class Sampler:
    """The revision that draws: after how many steps it was exported, and its digest; None is the base."""

    step: int
    digest: str | None


@dataclass(frozen=True)
class Source:
    """Where a line's samples come from: its problems, and the engine that answers them.

    With `replays` they come with their tokens' experts.
    """

    policy: str
    config: PolicyConfig
    line: Line
    tokenizer: Any
    engine_url: str
    key: str
    base_name: str
    replays: bool = False

    def prompt_ids(self, question: str) -> list[int]:
        """Return a question's token ids as the policy asks it: template, system prompt, examples."""
        return prompt_ids(self.tokenizer, question, self.config.system, self.config.few_shot)

    def problems(self, position: int) -> tuple[list[Problem], int]:
        """Return the problems of one step and the position of the next one's."""
        drawn = stream(self.config.task, "train", self.line.seed, position)
        numbered = list(islice(drawn, self.config.groups))
        return [problem for _, problem in numbered], numbered[-1][0] + 1


@dataclass(frozen=True)
class Drawn:
    """One step's samples, the revision that drew them, where the next step's data begins, and seconds."""

    sampler: Sampler
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    groups: Sequence[Sequence[Sample]]
    position: int
    seconds: float

    def row(self) -> dict[str, Any]:
        """Return the columns of `TrainStep` that the answers give."""
        samples = [sample for group in self.groups for sample in group]
        lengths = [len(sample.tokens) for sample in samples]
        return {
            "digest": self.sampler.digest,
            "rollout_s": self.seconds,
            "length_mean": fmean(lengths),
            "length_max": max(lengths),
            "truncated": fmean(sample.truncated for sample in samples),
        }


def draw(source: Source, step: int, sampler: Sampler, problems: Sequence[Problem], position: int) -> Drawn:
    """Sample a group for each problem under the sampler's revision."""
    config, clock = source.config, monotonic()
    prompts = [source.prompt_ids(problem.question) for problem in problems]
    seed = int(content_hash([source.line.seed, step])[:7], 16)
    sampling = Sampling(
        config.group_size, config.max_tokens, config.temperature, seed, routed_experts=source.replays
    )
    model = served_name(source.policy, sampler.digest) if sampler.digest else source.base_name
    groups = sample_groups(source.engine_url, source.key, model, prompts, sampling)
    return Drawn(sampler, problems, prompts, groups, position, monotonic() - clock)


class Ahead:
    """The draws under way: of the next step, and with staleness of steps after it.

    Of a run that ends before, the engine finishes what it has, under the revision that it began with.
    """

    def __init__(self, source: Source):
        self.source = source
        self._draws: dict[int, Future[Drawn]] = {}
        self._ends: dict[int, int] = {}

    def begin(self, step: int, position: int, sampler: Sampler) -> None:
        """Begin a step's draw unless it is under way; `position` is where its data begins.

        A draw ahead of the next step begins where the one before it ended.
        """
        if step not in self._draws:
            problems, end = self.source.problems(self._ends.get(step - 1, position))
            self._ends[step] = end
            self._draws[step] = background(partial(draw, self.source, step, sampler, problems, end))

    def take(self, step: int) -> Drawn:
        """Wait for a step's draw. One that failed raises its error, and can be begun again."""
        return self._draws.pop(step).result()


@dataclass(frozen=True)
class Judged:
    """Each group's rewards, None for a group that the verifier failed on, and its failures by name."""

    rewards: Sequence[Sequence[float] | None]
    errors: Counter[str]

    @property
    def sound(self) -> list[Sequence[float]]:
        """Return the rewards of the groups that count."""
        return [rewards for rewards in self.rewards if rewards is not None]

    def row(self) -> dict[str, Any]:
        """Return the columns of `TrainStep` that the rewards give, None where no group counts."""
        sound = self.sound
        every = [reward for rewards in sound for reward in rewards]
        return {
            "reward": fmean(every) if every else None,
            "reward_std": pstdev(every) if every else None,
            "zero_spread": fmean(min(rewards) == max(rewards) for rewards in sound) if sound else None,
            "verifier_errors": self.errors.total(),
            "verifier_faults": dict(self.errors),
        }


def judge(verifier: Verifier, drawn: Drawn) -> Judged:
    """Score every sample; a group with an answer that the verifier raises or hangs on is dropped."""
    rewards: list[Sequence[float] | None] = []
    errors: Counter[str] = Counter()
    for problem, group in zip(drawn.problems, drawn.groups, strict=True):
        verdicts = verifier.judge(((problem, sample.text) for sample in group), whole=True)
        errors += verdicts.errors
        rewards.append(None if verdicts.errors else verdicts.scores)
    return Judged(rewards, errors)


def build_data(drawn: Drawn, judged: Judged, loss: str) -> tuple[list[Datum], int]:
    """Return the samples that the loss is to see, with their advantages, and how many groups teach.

    Where the loss drops the groups that do not teach and none does, every sample comes with advantage zero,
    so that the importance ratio is still measured; also when the verifier failed on every group.
    """
    import torch

    from engine.training.loss.grpo import group_advantages, groups_that_teach, loss_of

    size, rule = len(drawn.groups[0]), loss_of(loss)
    rewards_PG = torch.tensor([[0.0] * size if group is None else group for group in judged.rewards])
    advantages = group_advantages(rewards_PG, rule.by_spread).tolist()
    teaching = groups_that_teach(rewards_PG).tolist()
    sound = [group is not None or not judged.sound for group in judged.rewards]
    used = teaching if rule.drops and any(teaching) else sound
    data = [
        datum(drawn.prompts[p], sample, advantages[p][g])
        for p, group in enumerate(drawn.groups)
        if used[p]
        for g, sample in enumerate(group)
    ]
    return data, sum(teaching)


def datum(prompt: Sequence[int], sample: Sample, advantage: float) -> Datum:
    """Return one sample as the trainer takes it: all tokens but the last, and values for the next ones."""
    tokens = [*prompt, *sample.tokens]
    before, after = len(prompt) - 1, len(sample.tokens)
    inputs = {
        "target_tokens": TensorData(data=[float(token) for token in tokens[1:]], dtype="int64"),
        "weights": TensorData(data=[0.0] * before + [1.0] * after),
        "logprobs": TensorData(data=[0.0] * before + list(sample.logprobs)),
        "advantages": TensorData(data=[0.0] * before + [advantage] * after),
    }
    return Datum(
        model_input=ModelInput(chunks=[EncodedText(tokens=tokens[:-1])]),
        loss_fn_inputs=inputs,
        routed_experts=sample.routed_experts,
    )
