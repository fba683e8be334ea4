"""The data of a training step: problems of the line's stream, groups that the engine samples, their rewards.

A step's samples follow from the line, the step and the revision that samples, so they can be drawn again.
With staleness k, a step's samples are drawn from the revision of k steps before, while the steps in between
still train.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, islice
from math import ceil
from statistics import fmean, pstdev
from time import monotonic
from typing import Any

from engine.base.prompts import prompt_ids
from engine.catalog.records import served_name
from engine.problems.procedural import Problem, stream
from engine.problems.rows import Asked
from engine.problems.verifiers import Verifier, has_spread
from engine.settings.params import content_hash
from engine.settings.policies import PolicyConfig
from engine.threads import background
from engine.training.line_of_training import Line
from engine.training.sample_groups import Sample, SamplesGroups, Sampling, sample_groups
from engine.training.service.protocol import Datum, EncodedText, InputName, ModelInput, TensorData

# Groups without spread are replaced by this many times `groups` problems at most.
REFILLS = 1
InputValues = Mapping[InputName, Sequence[float]]


@dataclass(frozen=True)
class Sampler:
    """The revision that samples: the step it was exported at, and its digest; None is the base."""

    step: int
    digest: str | None


@dataclass(frozen=True)
class Source:
    """The source of a line's samples: its problems and the engine that answers them.

    With `replays` the samples include the experts that the engine chose for each token. With `engines` a step
    is sampled by all of them once there are several.
    """

    policy: str
    config: PolicyConfig
    line: Line
    tokenizer: Any
    engine_url: str
    key: str
    base_name: str
    replays: bool = False
    engines: SamplesGroups | None = None

    def prompt_ids(self, question: Asked) -> list[int]:
        """Return a question's token ids under the policy's template, system prompt and examples."""
        return prompt_ids(self.tokenizer, question, self.config.system, self.config.few_shot)

    def problems(self, position: int) -> tuple[list[Problem], int]:
        """Return the problems of one step and the position where the next step's begin."""
        return self._problems(self.line.seed, position, self.config.groups)

    def replacements(self, position: int, count: int) -> tuple[list[Problem], int]:
        """Return `count` problems that replace groups without spread, and where the next ones begin.

        They have a stream of their own, so the data positions of later steps do not depend on rewards.
        """
        return self._problems(int(content_hash([self.line.seed, "replacements"])[:7], 16), position, count)

    def _problems(self, seed: int, position: int, count: int) -> tuple[list[Problem], int]:
        numbered = list(islice(stream(self.config.task, "train", seed, position), count))
        return [problem for _, problem in numbered], numbered[-1][0] + 1

    def sample(self, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """Return a group of samples for each prompt, in the prompts' order."""
        if self.engines is not None:
            return self.engines.sample(self.key, model, prompts, sampling)
        return sample_groups(self.engine_url, self.key, model, prompts, sampling)


@dataclass(frozen=True)
class Drawn:
    """One step's samples, the revision that drew them, the next step's data position, and the seconds."""

    sampler: Sampler
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    groups: Sequence[Sequence[Sample]]
    position: int
    seconds: float

    def plus(self, other: "Drawn") -> "Drawn":
        """Return these samples and those of `other`, which replace groups of the same step."""
        return replace(
            self,
            problems=[*self.problems, *other.problems],
            prompts=[*self.prompts, *other.prompts],
            groups=[*self.groups, *other.groups],
            seconds=self.seconds + other.seconds,
        )

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
            "repeated": fmean(repeated_share(sample.tokens) for sample in samples),
        }


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of an answer's 3-grams that it had before, in [0, 1]; 0 without a 3-gram.

    Welleck et al. (arXiv 1908.04319, section 6) call it seq-rep-n, and count 4-grams of longer texts.
    """
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def draw(
    source: Source,
    step: int,
    sampler: Sampler,
    problems: Sequence[Problem],
    position: int,
    replaces: bool = False,
) -> Drawn:
    """Sample a group for each problem from the sampler's revision; `replaces` gives other random numbers."""
    config, clock = source.config, monotonic()
    prompts = [source.prompt_ids(problem.asked) for problem in problems]
    seed = int(content_hash([source.line.seed, step, *(["replaces"] if replaces else [])])[:7], 16)
    sampling = Sampling(config.group_size, config.max_tokens, seed=seed, routed_experts=source.replays)
    model = served_name(source.policy, sampler.digest) if sampler.digest else source.base_name
    groups = source.sample(model, prompts, sampling)
    return Drawn(sampler, problems, prompts, groups, position, monotonic() - clock)


class Ahead:
    """Background sampling for the next step and, with staleness, for steps after it.

    When the run ends early, the engine finishes the requests that it has.
    """

    def __init__(self, source: Source):
        self.source = source
        self.last: Drawn | None = None
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
        self.last = self._draws.pop(step).result()
        return self.last


@dataclass(frozen=True)
class Judged:
    """Rewards of each group, None for a group that the verifier failed on, and failures by name."""

    rewards: Sequence[Sequence[float] | None]
    errors: Counter[str]

    @property
    def sound(self) -> list[Sequence[float]]:
        """Return the rewards of the groups without a verifier failure."""
        return [rewards for rewards in self.rewards if rewards is not None]

    @property
    def teaching(self) -> list[bool]:
        """Say for each group whether its samples differ in reward; without spread all advantages are zero."""
        return [rewards is not None and has_spread(rewards) for rewards in self.rewards]

    def table(self, size: int) -> list[Sequence[float]]:
        """Return the rewards of each group; a group that the verifier failed on has `size` zeros."""
        return [[0.0] * size if rewards is None else rewards for rewards in self.rewards]

    def plus(self, other: "Judged") -> "Judged":
        """Return these rewards and those of `other`."""
        return Judged([*self.rewards, *other.rewards], self.errors + other.errors)

    def row(self) -> dict[str, Any]:
        """Return the columns of `TrainStep` that follow from the rewards, None where no group is sound."""
        sound = self.sound
        every = [reward for rewards in sound for reward in rewards]
        return {
            "reward": fmean(every) if every else None,
            "reward_std": pstdev(every) if every else None,
            "zero_spread": fmean(not has_spread(rewards) for rewards in sound) if sound else None,
            "groups_kept": sum(self.teaching),
            "kept": fmean(self.teaching),
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


def refill(
    source: Source, verifier: Verifier, step: int, drawn: Drawn, judged: Judged, position: int
) -> tuple[Drawn, Judged, int]:
    """Replace groups without spread, as far as `REFILLS` allows: DAPO's dynamic sampling.

    DAPO (arXiv 2503.14476, section 3.2) samples until the batch is full. Here one more request asks for as
    many problems as should fill it by the share of groups that teach, at most `REFILLS` batches. Returns the
    step's samples and rewards with those of the replacements, and the next position of their stream.
    """
    config, teaching = source.config, sum(judged.teaching)
    missing, most = config.groups - teaching, REFILLS * config.groups
    count = min(most, ceil(missing * len(judged.rewards) / teaching)) if teaching else most
    if missing <= 0 or not count:
        return drawn, judged, position
    problems, position = source.replacements(position, count)
    more = draw(source, step, drawn.sampler, problems, drawn.position, replaces=True)
    return drawn.plus(more), judged.plus(judge(verifier, more)), position


def build_data(
    drawn: Drawn, judged: Judged, advantages: Sequence[Sequence[float]], config: PolicyConfig
) -> list[Datum]:
    """Return the samples for the loss with their advantages, which are 0 in a group that does not teach.

    The mean of equal rewards differs from them by its rounding, and Adam would make a whole step of that.

    A loss that drops groups without spread gets the first `config.groups` that have some. When no group has
    any, only a KL term or a custom loss teaches. For other losses one group is returned: enough to measure
    the importance ratio, without a pass over the whole batch; `teaches` skips the step.
    """
    from engine.training.loss.grpo import loss_of

    teaching = list(compress(range(len(drawn.groups)), judged.teaching))
    sound = [p for p, group in enumerate(judged.rewards) if group is not None or not judged.sound]
    if not teaching and not learns_without_spread(config):
        used = sound[:1]
    else:
        used = teaching[: config.groups] if loss_of(config.loss).drops and teaching else sound
    return [
        datum(drawn.prompts[p], sample, advantages[p][g] if judged.teaching[p] else 0.0)
        for p in used
        for g, sample in enumerate(drawn.groups[p])
    ]


def learns_without_spread(config: PolicyConfig) -> bool:
    """Say whether a step without spread is to move the adapter: for a KL term or a custom loss."""
    return config.loss_config.kl > 0 or config.loss.startswith("python:")


def teaches(judged: Judged, config: PolicyConfig, learned_tokens: int) -> bool:
    """Say whether a step is to move the adapter; Adam would take one even without a gradient.

    Tokens learned without spread, such as by the penalty of `dro` on the gap to the sampler, do not count.
    """
    asks = any(judged.teaching) or (bool(judged.sound) and learns_without_spread(config))
    return asks and learned_tokens > 0


def datum(prompt: Sequence[int], sample: Sample, advantage: float) -> Datum:
    """Return one sample in the trainer's format: all tokens but the last, and values for the next tokens."""
    advantages = [advantage] * len(sample.tokens)
    values: InputValues = {"logprobs": sample.logprobs, "advantages": advantages}
    return answer_datum(prompt, sample.tokens, values, sample.routed_experts)


def answer_datum(
    prompt: Sequence[int],
    answer: Sequence[int],
    values: InputValues | None = None,
    routed_experts: str | None = None,
) -> Datum:
    """Return a prompt and its answer in the trainer's format; only the answer's tokens have a loss.

    `values` are further loss inputs, with a value for each token of the answer.
    """
    tokens = [*prompt, *answer]
    of_answer: InputValues = {"weights": [1.0] * len(answer), **(values or {})}
    before = [0.0] * (len(prompt) - 1)
    inputs = {name: TensorData(data=[*before, *each]) for name, each in of_answer.items()}
    inputs["target_tokens"] = TensorData(data=[float(token) for token in tokens[1:]], dtype="int64")
    model_input = ModelInput(chunks=[EncodedText(tokens=tokens[:-1])])
    return Datum(model_input=model_input, loss_fn_inputs=inputs, routed_experts=routed_experts)
