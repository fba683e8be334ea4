"""The GRPO loop, on the client's side: sample groups, score them, send gradients, hand the adapter over.

Everything that must survive this process is in the trainer's session: started again, the loop goes on from
the session's step. A line of training goes on from the policy's champion while task and contract stay the
same; with another contract it begins at the base.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_fixed

from engine.adapters.families import BaseShapes
from engine.adapters.manifests import stored_manifest
from engine.config import DIGEST12, Params, Paths, PolicyConfig, content_hash
from engine.errors import Conflict, NotFound, ServiceError
from engine.gpu import cuda_bytes
from engine.quality.spool import Spool
from engine.training.client import TrainerClient
from engine.training.problems import Problem, check_task, stream
from engine.training.protocol import (
    AdamParams,
    Datum,
    EncodedText,
    Exported,
    ModelInput,
    SessionInfo,
    TensorData,
)
from engine.training.rollouts import Sample, Sampling, sample_groups
from engine.training.verifiers import Verifier

# About 300 tokens with short answers: in bfloat16 a probe of 100 refuses right mixtures of experts.
PROBE_PROMPTS = 24
STEP_ATTEMPTS = 3
# A session whose writer was killed is free again after the trainer's lease.
TAKE_OVER_S = 40.0

# Settings that may change while a line of training goes on.
NOT_OF_A_LINE = {"steps", "suite", "snapshot_ttl_s", "scheduled", "max_age_s", "drift_after_s", "owner"}

OnStep = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Trained:
    """What a training run brought; `curve` has one row of the ledger's `train_steps` for each step."""

    policy: str
    session: str
    digest: str
    directory: Path
    step: int
    seconds: float
    curve: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Line:
    """A line of training: its session's name, the revision where it starts, its seed, and where LoRA sits."""

    session: str
    parent: str | None
    seed: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """What every step of one training run needs."""

    params: Params
    policy: str
    config: PolicyConfig
    key: str
    line: Line
    client: TrainerClient
    tokenizer: Any
    spool: Spool
    verifier: Verifier

    def prompt_ids(self, question: str) -> list[int]:
        """Return a question's token ids as the policy asks it: template, system prompt, examples."""
        from engine.base import prompt_ids

        return prompt_ids(self.tokenizer, question, self.config.system, self.config.few_shot)


def train(
    params: Params, policy: str, config: PolicyConfig, key: str, on_step: OnStep | None = None
) -> Trained:
    """Train a policy by GRPO up to `config.steps`, and export its revision with an effect probe.

    Does nothing twice: a line of training that has all its steps is only exported again. `on_step` gets
    each new step's row. Raises `ServiceError` when trainer or engine stay away.
    """
    check_task(config.task)
    began = time.monotonic()
    run = prepare(params, policy, config, key)
    try:
        session = open_session(run)
        while session.step < config.steps:
            session = next_step(run, session)
            if on_step:
                on_step(session.history[-1])
        exported = export_revision(run, session)
    finally:
        run.client.close()
        run.spool.close()
        run.verifier.close()
    assert exported.directory is not None
    seconds = time.monotonic() - began
    return Trained(
        policy, session.session, exported.digest, exported.directory, exported.step, seconds, session.history
    )


def prepare(params: Params, policy: str, config: PolicyConfig, key: str) -> Run:
    from transformers import AutoTokenizer

    from engine.base import ensure_base
    from engine.training.grpo import loss_of

    # One of the policy's own that cannot be loaded must not cost a rollout.
    loss_of(config.loss)
    base = ensure_base(params.base, params.paths)
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    targets = BaseShapes.read(base.path).targets_on(cuda_bytes() is not None)
    line = line_of(params.paths, policy, config, targets)
    spool = Spool(params.paths.spool, f"train-{policy}")
    client = TrainerClient(params.url("trainer"))
    return Run(params, policy, config, key, line, client, tokenizer, spool, Verifier(config))


def line_of(paths: Paths, policy: str, config: PolicyConfig, targets: Sequence[str]) -> Line:
    """Return the line of training that these settings continue; `targets` are all that can be served.

    Settings, champion and the releases that it has withstood name the line, so that a run that was killed
    finds it again, while a policy whose revision was promoted or refused since gets a new line with a
    seed of its own.
    """
    champion, refused = _standing(paths, policy)
    settings = config.model_dump(mode="json", exclude=NOT_OF_A_LINE, exclude_defaults=True)
    if config.data_digest:
        # The data by its content: where the file lies must not change what is drawn.
        settings["task"] = config.data_digest
    name = content_hash([settings, champion, refused])
    targets = config.targets or tuple(targets)
    seed = int(name[:8], 16) >> 1 if champion or refused else config.seed
    parent = champion if champion and _continues(paths, policy, champion, config, targets) else None
    return Line(f"{policy}-{name[:DIGEST12]}", parent, seed, targets)


def _standing(paths: Paths, policy: str) -> tuple[str | None, int]:
    """Return the champion and how many releases were refused in its favour."""
    from engine.adapters.catalog import Catalog

    catalog = Catalog(paths.catalog_url)
    try:
        champion = catalog.route(policy).champion
    except NotFound:
        return None, 0
    else:
        ended = [release for release in catalog.releases(policy) if release.baseline == champion]
        return champion, sum(release.state in ("held", "rolled_back") for release in ended)
    finally:
        catalog.close()


def _continues(
    paths: Paths, policy: str, champion: str, config: PolicyConfig, targets: Sequence[str]
) -> bool:
    manifest = stored_manifest(paths.revision(policy, champion))
    if not manifest or sorted(manifest["targets"]) != sorted(targets):
        return False
    before, now = manifest["config"], config.model_dump(mode="json")
    # New data of the same policy is learned on top of its champion.
    same = ("contract", "verifier", "system", "few_shot", "rank")
    names = same if config.data_digest else ("task", *same)
    return all(before.get(name, now[name]) == now[name] for name in names)


def open_session(run: Run) -> SessionInfo:
    """Open the line's session, or go on with it; gradients of a step that broke off are dropped."""
    config, known = run.config, run.params.policy(run.policy)
    retrying = Retrying(
        retry=retry_if_exception_type(Conflict),
        stop=stop_after_delay(TAKE_OVER_S),
        wait=wait_fixed(2),
        reraise=True,
    )
    return retrying(
        run.client.create_session,
        run.line.session,
        run.policy,
        rank=config.rank,
        alpha=config.alpha,
        targets=run.line.targets,
        seed=run.line.seed,
        parent=run.line.parent,
        holder=f"{socket.gethostname()}:{os.getpid()}",
        config={**config.model_dump(mode="json"), "session": run.line.session, "line_seed": run.line.seed},
        policy_config=known.model_dump(mode="json"),
        owner=known.owner,
        snapshot_ttl_s=config.snapshot_ttl_s,
    )


def next_step(run: Run, session: SessionInfo) -> SessionInfo:
    """Return the session after its next step, repeating the step when trainer or engine broke off."""
    retrying = Retrying(
        retry=retry_if_exception_type(ServiceError),
        stop=stop_after_attempt(STEP_ATTEMPTS),
        wait=wait_fixed(1),
        reraise=True,
    )
    for attempt in retrying:
        with attempt:
            first = attempt.retry_state.attempt_number == 1
            now = session if first else open_session(run)
            # The step may have been stored just before its answer was lost.
            return now if now.step > session.step else grpo_step(run, now)
    raise AssertionError("tenacity raises before this")


def grpo_step(run: Run, session: SessionInfo) -> SessionInfo:
    """Hand the adapter over, sample and score groups with it, send their gradients, apply them."""
    config = run.config
    handed = None
    if session.step or session.parent:
        handed = run.client.export(session)
    numbered = list(islice(stream(config.task, "train", run.line.seed, session.position), config.groups))
    problems = [problem for _, problem in numbered]
    clock = time.monotonic()
    prompts, groups = sample(run, session, handed.served_name if handed else None, problems)
    rollout_s = time.monotonic() - clock
    clock = time.monotonic()
    judged = run.verifier.judge((p, s.text) for p, g in zip(problems, groups, strict=True) for s in g)
    size = config.group_size
    rewards = [judged.scores[start : start + size] for start in range(0, len(judged.scores), size)]
    data, kept = build_data(prompts, groups, rewards, config.loss)
    reward_s = time.monotonic() - clock
    clock = time.monotonic()
    metrics = run.client.forward_backward(session, data, config.loss, config.loss_sent())["metrics"]
    row = {
        "policy": run.policy,
        "session": session.session,
        "digest": handed.digest if handed else None,
        "reward": sum(map(sum, rewards)) / (len(rewards) * config.group_size),
        **{name: metrics[name] for name in ("importance_ratio", "loss", "tokens")},
        "rollout_s": rollout_s,
        "reward_s": reward_s,
        "update_s": time.monotonic() - clock,
        "handoff_s": handed.seconds if handed else 0.0,
        "groups_kept": kept,
        "kept": kept / len(groups),
        "verifier_errors": judged.errors.total(),
    }
    adam = AdamParams(learning_rate=config.lr)
    position = numbered[-1][0] + 1
    skip = not (kept or config.loss_config.kl)
    done = run.client.optim_step(session, adam, position=position, record=row, skip=skip)
    return _advance(run, session, position, {**row, **done})


def sample(
    run: Run, session: SessionInfo, served: str | None, problems: Sequence[Problem]
) -> tuple[list[list[int]], list[list[Sample]]]:
    """Return each problem's prompt ids and its group, drawn under the session's newest revision."""
    config = run.config
    prompts = [run.prompt_ids(problem.question) for problem in problems]
    seed = int(content_hash([session.session, session.step])[:7], 16)
    sampling = Sampling(config.group_size, config.max_tokens, config.temperature, seed)
    model = served or Path(run.params.base.name).name
    return prompts, sample_groups(run.params.url("engine"), run.key, model, prompts, sampling)


def build_data(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Sample]],
    rewards: Sequence[Sequence[float]],
    loss: str,
) -> tuple[list[Datum], int]:
    """Return the samples that the loss is to see, with their advantages, and how many groups teach.

    Where the loss drops the groups that do not teach and none does, every sample comes with advantage zero,
    so that the importance ratio is still measured.
    """
    import torch

    from engine.training.grpo import group_advantages, groups_that_teach, loss_of

    rewards_PG, rule = torch.tensor(rewards), loss_of(loss)
    advantages = group_advantages(rewards_PG, rule.by_spread).tolist()
    teaching = groups_that_teach(rewards_PG).tolist()
    used = teaching if rule.drops and any(teaching) else [True] * len(groups)
    data = [
        datum(prompts[p], sample, advantages[p][g])
        for p, group in enumerate(groups)
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
    return Datum(model_input=ModelInput(chunks=[EncodedText(tokens=tokens[:-1])]), loss_fn_inputs=inputs)


def _advance(run: Run, session: SessionInfo, position: int, row: Mapping[str, Any]) -> SessionInfo:
    from engine.adapters.revision import code_version

    identity = {"code_version": code_version(), "config_hash": content_hash(run.config)}
    run.spool.emit("train_steps", id=f"{session.session}-{row['step']}", **row, **identity)
    history = (*session.history, row)
    return replace(session, step=row["step"], position=position, history=history)


def export_revision(run: Run, session: SessionInfo) -> Exported:
    """Export the session's adapter as a revision, with an effect probe on questions it never trained on."""
    held_out = islice(stream(run.config.task, "eval", run.line.seed), PROBE_PROMPTS)
    prompts = [run.prompt_ids(problem.question) for _, problem in held_out]
    return run.client.export(session, "revision", probe_prompts=prompts, probe_tokens=run.config.max_tokens)
