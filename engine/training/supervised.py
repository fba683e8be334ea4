"""Training on answers as they are written: SFT on example conversations, DPO on pairs of answers.

The steps are those of the GRPO loop without its samples: rows, gradients, optimizer step, record. Up to ten
times a run the session is validated: its held-out loss is the mean loss of rows that are neither trained on
nor scored. It is stored where that is the lowest, and exported as it was there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import ceil, exp, fsum, inf, log1p
from pathlib import Path
from statistics import fmean
from time import monotonic

from engine.base.prompts import answer_ids
from engine.clients.engine import EngineClient
from engine.problems.jsonl import rows_of
from engine.problems.procedural import VALIDATION, Problem, stream
from engine.problems.rows import Message
from engine.settings.losses import LOSS_SETTINGS
from engine.settings.policies import PolicyConfig
from engine.training.rollout_data import Source, answer_datum
from engine.training.run import Run, learning_rate
from engine.training.service.protocol import AdamParams, Datum, SessionInfo
from engine.training.service.train_step import TrainStep

# Validations of a run at most, and the rows that each reads.
VALIDATIONS, VALIDATION_ROWS = 10, 64
BEST, END = "best", "end"
# For the engine's answer to one row, on a slow machine.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Validation:
    """The held-out loss after `step` steps, in nats."""

    step: int
    loss: float


def taught(source: Source, problem: Problem) -> Iterator[Datum]:
    """Yield what is learned of a row: each of the assistant's answers; by DPO the better and the worse one.

    Each answer has the prompt that it has when it is served, and the token that ends it.
    """
    if source.config.method == "dpo":
        prompt = source.prompt_ids(problem.asked)
        for answer in (problem.answer, problem.rejected):
            yield answer_datum(prompt, answer_ids(source.tokenizer, answer))
        return
    turns: Sequence[Message] = problem.messages
    for number, turn in enumerate(turns):
        # A greeting that nobody has asked for has no prompt.
        if turn["role"] == "assistant" and any(one["role"] == "user" for one in turns[:number]):
            yield answer_datum(
                source.prompt_ids(turns[:number]), answer_ids(source.tokenizer, turn["content"])
            )
    yield answer_datum(source.prompt_ids(problem.asked), answer_ids(source.tokenizer, problem.answer))


def supervised_step(run: Run, session: SessionInfo) -> SessionInfo:
    """Take one step: a validation where one is due, rows, gradients, optimizer step, record."""
    config, client, began = run.config, run.client, monotonic()
    loss = validate(run, session) if session.step % validation_interval(config.steps) == 0 else None
    problems, position = run.source.problems(session.position)
    data = [datum for problem in problems for datum in taught(run.source, problem)]
    update = client.forward_backward(session, data, config.loss_fn, run.loss_settings)["metrics"]
    learned = monotonic()
    step = TrainStep(
        policy=run.policy,
        session=session.session,
        step=session.step + 1,
        loss_fn=config.loss_fn,
        held_out_loss=loss,
        **update,
        update_s=learned - began,
        backpressure_s=client.backpressure_s.pop(session.session, 0.0),
        tokens_per_s=update["tokens"] / (learned - began),
    )
    row = asdict(step)
    adam = AdamParams(learning_rate=learning_rate(config, session.step))
    row |= client.optim_step(session, adam, position=position, record=row)
    run.record(row)
    return replace(session, step=row["step"], position=position, history=(*session.history, row))


def validate(run: Run, session: SessionInfo) -> float | None:
    """Return the held-out loss of the session as it is, and store it where it is the best; None without rows.

    It is the mean over tokens in SFT, and over pairs in DPO, in nats.
    """
    problems = held_out_rows(run)
    if not problems:
        return None
    data = [datum for problem in problems for datum in taught(run.source, problem)]
    logprobs = run.client.forward(session, data)
    if run.config.method == "dpo":
        beta = run.loss_settings.get("beta", LOSS_SETTINGS["dpo"]["beta"])
        loss = preference_loss([fsum(row) for row in logprobs], base_sums(run, data), beta)
    else:
        loss = -fmean(value for row in logprobs for value in row)
    if session.step and loss < min((one.loss for one in validations(session) if one.step), default=inf):
        run.client.save_state(session, BEST)
    return loss


def preference_loss(sums: Sequence[float], base: Sequence[float], beta: float) -> float:
    """Return the mean of DPO's loss (arXiv 2305.18290, equation 7) over pairs of a better and a worse answer.

    Both hold the sums of log-probabilities of each answer, the better one first.
    """
    gains = [mine - theirs for mine, theirs in zip(sums, base, strict=True)]
    margins = [beta * (better - worse) for better, worse in zip(gains[0::2], gains[1::2], strict=True)]
    # log(1 + exp(-m)) without overflow.
    return fmean(max(0.0, -margin) + log1p(exp(-abs(margin))) for margin in margins)


def held_out_rows(run: Run) -> list[Problem]:
    """Return the rows that a validation reads, the same ones each time."""
    task = run.config.task
    path = Path(task).with_name(VALIDATION)
    count = min(len(rows_of(path)), VALIDATION_ROWS) if path.is_file() else 0
    return [problem for _, problem in islice(stream(task, "validation", 0), count)]


def base_sums(run: Run, data: Sequence[Datum]) -> list[float]:
    """Return the sum of log-probabilities that the base gives to each answer, from the engine."""
    known = run.base_sums
    with EngineClient(run.source.engine_url, run.source.key, "rollout", TIMEOUT_S) as engine:
        for datum in data[len(known) :]:
            inputs = datum.loss_fn_inputs
            tokens = [*datum.model_input.chunks[0].tokens, int(inputs["target_tokens"].data[-1])]
            answer = int(fsum(inputs["weights"].data))
            known.append(fsum(engine.logprobs(run.source.base_name, tokens)[-answer:]))
    return known


def validation_interval(steps: int) -> int:
    """Return the steps between two validations, each of which costs a part of a step."""
    return max(2, ceil(steps / VALIDATIONS))


def validations(session: SessionInfo) -> list[Validation]:
    """Return the session's validations so far; a row has that before its step."""
    rows = [row for row in session.history if row.get("held_out_loss") is not None]
    return [Validation(row["step"] - 1, row["held_out_loss"]) for row in rows]


def has_stopped(config: PolicyConfig, session: SessionInfo) -> bool:
    """Say whether the last `config.patience` validations were all worse than one before them."""
    losses = [one.loss for one in validations(session)]
    return bool(config.patience and losses) and len(losses) - 1 - losses.index(min(losses)) >= config.patience


@contextmanager
def at_best(run: Run, session: SessionInfo) -> Iterator[SessionInfo]:
    """Give the trained session as it was where its held-out loss was the lowest; with `patience` 0 as it is.

    Afterwards it stands at its end again, so that a run of the same settings finds nothing to train.
    """
    losses = [one.loss for one in validations(session) if one.step]
    if not losses or not run.config.patience:
        yield session
        return
    last = validate(run, session)
    assert last is not None
    if last <= min(losses):
        yield session
        return
    run.client.save_state(session, END)
    yield run.client.load_state(session, BEST)
    run.client.load_state(session, END)
