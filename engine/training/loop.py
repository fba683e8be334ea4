"""The training loop of one policy, on the client's side: GRPO's samples or taught answers, gradients, export.

The loop is disposable. All durable state is in the trainer's session, so a restarted run continues from the
session's step. With `staleness` k, a step samples from the revision of k steps before while the steps in
between still train. Each row records the revision that sampled. A restarted run samples again from that
revision, or from the newest one when that revision has expired.
"""

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_fixed

from engine.base.fitting import fitted_policy
from engine.errors import Conflict, NotFound, ServiceError
from engine.problems.procedural import check_task, stream
from engine.settings.params import Params
from engine.settings.policies import TAUGHT, PolicyConfig
from engine.training.rollout_data import Drawn, Sampler, build_data, judge, refill, teaches
from engine.training.run import EnginesOf, Run, learning_rate, prepare
from engine.training.run_health import refuse_collapse, refuse_without_signal, warning
from engine.training.service.protocol import AdamParams, Exported, SessionInfo
from engine.training.service.train_step import TrainStep
from engine.training.supervised import at_best, has_stopped, supervised_step

# About 300 tokens with short answers: in bfloat16 a probe of 100 tokens refuses correct mixtures of experts.
# All other policies wait while the trainer generates them.
PROBE_PROMPTS, PROBE_TOKENS = 24, 24
STEP_ATTEMPTS = 3
# Added to a group's spread, by which its advantages are divided.
EPSILON = 1e-6
# The trainer frees the session of a killed writer when its lease ends.
TAKE_OVER_S = 40.0

OnStep = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Trained:
    """Result of a training run; `curve` holds the row of each step (`train_step.TrainStep`)."""

    policy: str
    session: str
    digest: str
    directory: Path
    step: int
    seconds: float
    curve: tuple[Mapping[str, Any], ...]


def train(
    params: Params,
    policy: str,
    config: PolicyConfig,
    key: str,
    on_step: OnStep | None = None,
    engines_of: EnginesOf | None = None,
) -> Trained:
    """Train a policy up to `config.steps`, and export its revision with an effect probe.

    Idempotent: a line of training that has all its steps is only exported again. `on_step` receives each new
    step's row. `engines_of` gives the engines that sample where there are several. Raises `ServiceError` when
    the trainer or the engine stays unavailable, `ConfigError` when `NO_SIGNAL_STEPS` steps in a row had
    nothing to learn from, or when it is to stop at a collapse.
    """
    check_task(config.task)
    began = monotonic()
    with closing(prepare(params, policy, config, key, engines_of)) as run:
        session = open_session(run)
        is_taught = config.method in TAUGHT
        while session.step < config.steps and not (is_taught and has_stopped(config, session)):
            session = next_step(run, session)
            if on_step:
                on_step(session.history[-1])
            refuse_without_signal(run, session)
            refuse_collapse(run, session)
        with at_best(run, session) if is_taught else nullcontext(session) as best:
            exported = export_revision(run, best)
        run.record_export(exported, session.history)
        run.client.close_session(session)
    assert exported.directory is not None
    seconds = monotonic() - began
    return Trained(
        policy, session.session, exported.digest, exported.directory, exported.step, seconds, session.history
    )


def open_session(run: Run) -> SessionInfo:
    """Open the line's session or continue it; the gradients of an interrupted step are dropped.

    The process that took the last step may have died before it recorded the row, so it is recorded again.
    """
    config, policy_config = run.config, fitted_policy(run.params, run.policy).config
    retrying = Retrying(
        retry=retry_if_exception_type(Conflict),
        stop=stop_after_delay(TAKE_OVER_S),
        wait=wait_fixed(2),
        reraise=True,
    )
    session: SessionInfo = retrying(
        run.client.create_session,
        run.line.session,
        run.policy,
        rank=config.rank,
        alpha=config.alpha,
        targets=run.line.targets,
        seed=run.line.seed,
        parent=run.line.parent,
        parent_policy=run.line.parent_policy,
        holder=run.holder,
        config={**config.model_dump(mode="json"), "session": run.line.session, "line_seed": run.line.seed},
        policy_config=policy_config.model_dump(mode="json"),
        owner=policy_config.owner,
    )
    if session.history:
        run.record(session.history[-1])
    return session


def next_step(run: Run, session: SessionInfo) -> SessionInfo:
    """Return the session after its next step; repeat the step when the trainer or the engine fails.

    Also when the revision that sampled expires before the step's refill: all of it is drawn again.
    """
    take_step = supervised_step if run.config.method in TAUGHT else grpo_step
    retrying = Retrying(
        retry=retry_if_exception_type((ServiceError, NotFound)),
        stop=stop_after_attempt(STEP_ATTEMPTS),
        wait=wait_fixed(1),
        reraise=True,
    )
    for attempt in retrying:
        with attempt:
            first = attempt.retry_state.attempt_number == 1
            now = session if first else open_session(run)
            # The step may have been stored just before its answer was lost.
            return now if now.step > session.step else take_step(run, now)
    raise AssertionError("tenacity raises before this")


def grpo_step(run: Run, session: SessionInfo) -> SessionInfo:
    """Take one step: sample, judge, advantages, gradients, optimizer step, record.

    _P problems, _G samples of one problem.
    """
    import torch

    from engine.training.loss.grpo import loss_of

    config, client, rule, began = run.config, run.client, loss_of(run.config.loss), monotonic()
    verifier = run.verifier
    assert verifier, "GRPO's runs have a verifier"
    # Sample, from the adapter as it is now or, with staleness, as it was.
    handed = client.export(session) if session.step or session.parent else None
    newest, sampling_start = Sampler(session.step, handed.digest if handed else None), monotonic()
    drawn, sampled = samples_of(run, session, newest), monotonic()
    # Judge.
    judged, first_s = judge(verifier, drawn), drawn.seconds
    replaced = session.history[-1].get("replaced", 0) if session.history else 0
    if rule.drops:
        drawn, judged, replaced = refill(run.source, verifier, session.step, drawn, judged, replaced)
    refill_s = drawn.seconds - first_s
    # Advantage: DeepSeekMath (arXiv 2402.03300), section 4.1.2; not by spread: Dr. GRPO (2503.20783), 3.2.
    rewards_PG = torch.tensor(judged.table(len(drawn.groups[0])))
    advantages_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if rule.by_spread:
        advantages_PG /= rewards_PG.std(dim=1, keepdim=True, correction=0) + EPSILON
    # Forward and backward.
    data, scored = build_data(drawn, judged, advantages_PG.tolist(), config), monotonic()
    update = client.forward_backward(
        session, data, config.loss, run.loss_settings, router_replay=run.source.replays
    )["metrics"]
    learned = monotonic()
    # The row of the step. What only a restarted run reads of it is in `FOR_RESTARTS`.
    step = TrainStep(
        policy=run.policy,
        session=session.session,
        step=session.step + 1,
        loss_fn=config.loss,
        staleness=float(session.step - drawn.sampler.step),
        **drawn.row(),
        **judged.row(),
        **update,
        wait_s=sampled - sampling_start + refill_s,
        reward_s=scored - sampled - refill_s,
        update_s=learned - scored,
        handoff_s=handed.seconds if handed else 0.0,
        backpressure_s=client.backpressure_s.pop(session.session, 0.0),
        tokens_per_s=update["tokens"] / (learned - began),
    )
    row = {**asdict(step), "handed": newest.digest, "replaced": replaced}
    row["collapse"] = None if config.collapse == "ignore" else warning((*session.history, row), drawn)
    # Optimizer step, which stores the session with the row; the same row, with the norm, goes to the ledger.
    adam = AdamParams(learning_rate=learning_rate(config, session.step))
    skip = not teaches(judged, config, update["learned_tokens"])
    row |= client.optim_step(session, adam, position=drawn.position, record=row, skip=skip)
    run.record(row)
    return replace(session, step=row["step"], position=drawn.position, history=(*session.history, row))


def samples_of(run: Run, session: SessionInfo, newest: Sampler) -> Drawn:
    """Return the next step's samples; with staleness, start sampling for later steps first."""
    lag = run.config.staleness
    for step in range(session.step, min(session.step + lag + 1, run.config.steps)):
        run.ahead.begin(step, session.position, sampler_of(session, newest, step - lag))
    try:
        return run.ahead.take(session.step)
    except NotFound:
        # The revision that was to sample expired while the run was down.
        run.ahead.begin(session.step, session.position, newest)
        return run.ahead.take(session.step)


def sampler_of(session: SessionInfo, newest: Sampler, step: int) -> Sampler:
    """Return the session's revision after `step` steps; a negative step means its first revision."""
    step = max(step, 0)
    if step >= session.step or "handed" not in session.history[step]:
        return newest
    return Sampler(step, session.history[step]["handed"])


def export_revision(run: Run, session: SessionInfo) -> Exported:
    """Export the session's adapter as a revision with an effect probe on held-out questions."""
    held_out = islice(stream(run.config.task, "eval", run.line.seed), PROBE_PROMPTS)
    prompts = [run.source.prompt_ids(problem.asked) for _, problem in held_out]
    tokens = min(run.config.max_tokens, PROBE_TOKENS)
    return run.client.export(session, "revision", probe_prompts=prompts, probe_tokens=tokens)
