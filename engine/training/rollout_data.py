"""The data of a training step: problems of the line's stream, groups that the engine samples, their rewards.

A step's samples follow from the line, the step and the revision that samples, so they can be drawn again.
With staleness k, a step's samples are drawn from the revision of k steps before, while the steps in between
still train.
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
    """The revision that samples: the step it was exported at, and its digest; None is the base."""

    step: int
    digest: str | None


@dataclass(frozen=True)
class Source:
    """The source of a line's samples: its problems and the engine that answers them.

    With `replays` the samples include the experts that the engine chose for each token.
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
        """Return a question's token ids under the policy's template, system prompt and examples."""
        return prompt_ids(self.tokenizer, question, self.config.system, self.config.few_shot)

    def problems(self, position: int) -> tuple[list[Problem], int]:
        """Return the problems of one step and the position where the next step's begin."""
        drawn = stream(self.config.task, "train", self.line.seed, position)
        numbered = list(islice(drawn, self.config.groups))
        return [problem for _, problem in numbered], numbered[-1][0] + 1


@dataclass(frozen=True)
class Drawn:
    """One step's samples, the revision that drew them, the next step's data position, and the seconds."""

    sampler: Sampler
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    groups: Sequence[Sequence[Sample]]
    position: int
    seconds: float

    def row(self) -> dict[str, Any]:
        """Return the columns of `TrainStep` that follow from the answers."""
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
    """Sample a group for each problem from the sampler's revision."""
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
    """Background sampling for the next step and, with staleness, for steps after it.

    When the run ends early, the engine finishes the requests that it has.
    """

    def __init__(self, source: Source):
        self.source = source
        self._draws: dict[int, Future[Drawn]] = {}
        self._ends: dict[int, int] = {}

    def begin(self, step: int, position: int, sampler: Sampler) -> None:
        """Start sampling for a step unless it has started; `position` is where the step's data begins.

        A later step's data begins where the data of the step before it ends.
        """
        if step not in self._draws:
            problems, end = self.source.problems(self._ends.get(step - 1, position))
            self._ends[step] = end
            self._draws[step] = background(partial(draw, self.source, step, sampler, problems, end))

    def take(self, step: int) -> Drawn:
        """Wait for a step's samples. A failed draw raises its error and can be started again."""
        return self._draws.pop(step).result()


@dataclass(frozen=True)
class Judged:
    """Rewards of each group, None for a group that the verifier failed on, and failures by name."""

    rewards: Sequence[Sequence[float] | None]
    errors: Counter[str]

    @property
    def sound(self) -> list[Sequence[float]]:
        """Return the rewards of the groups without a verifier failure."""
        return [rewards for rewards in self.rewards if rewards is not None]

    def row(self) -> dict[str, Any]:
        """Return the columns of `TrainStep` that follow from the rewards, None where no group is sound."""
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
    """Score every sample; drop a group when the verifier raises or hangs on one of its answers."""
    rewards: list[Sequence[float] | None] = []
    errors: Counter[str] = Counter()
    for problem, group in zip(drawn.problems, drawn.groups, strict=True):
        verdicts = verifier.judge(((problem, sample.text) for sample in group), whole=True)
        errors += verdicts.errors
        rewards.append(None if verdicts.errors else verdicts.scores)
    return Judged(rewards, errors)


def build_data(drawn: Drawn, judged: Judged, loss: str) -> tuple[list[Datum], int]:
    """Return the samples for the loss with their advantages, and the number of groups that teach.

    When the loss drops groups without spread and no group has any, or when the verifier failed on every
    group, all samples are returned with advantage zero, so that the importance ratio is still measured.
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
    """Return one sample in the trainer's format: all tokens but the last, and values for the next tokens."""
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
