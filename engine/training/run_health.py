"""Whether a training run goes on: its answers have something to teach, and they do not collapse.

A policy may earn its reward and lose its language. The last steps are compared with the first ones of the
same line, so that a task's own form, such as short answers, raises no warning. One bad step is not a sign:
both sides are means over `WINDOW` steps.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from engine.errors import ConfigError
from engine.problems.procedural import Problem, render
from engine.settings.policies import PolicyConfig
from engine.training.rollout_data import Drawn, repeated_share
from engine.training.run import Run
from engine.training.service.protocol import SessionInfo

# A run ends after this many steps in a row without a gradient.
NO_SIGNAL_STEPS = 3
WINDOW = 3
# Entropy of less than this share of the first steps'.
ENTROPY = 0.6
# Rises of these shares over the first steps'.
REPEATED, TRUNCATED = 0.1, 0.25
# Nats a token: the policy's own tokens are then e times as likely as under the base.
KL = 1.0
Row = Mapping[str, Any]
# Answers that an error shows, and how much of a text.
SHOWN, LONGEST = 3, 80
REMEDIES = (
    "Choose another verifier or contract, a reward with grades between 0 and 1 (python:MODULE:FUNC), more "
    "groups or samples in a group, or fine-tune the base on answers first (SFT)."
)


def signs(rows: Sequence[Row]) -> dict[str, str]:
    """Return what the steps so far show of a collapse, in words by metric; empty before `WINDOW` + 1 steps.

    `rows` are a line's rows of `train_steps`, in order. Metrics that a step lacks are left out.
    """
    if len(rows) <= WINDOW:
        return {}
    symptoms: dict[str, str] = {}
    first, last = _mean(rows[:WINDOW], "entropy"), _mean(rows[-WINDOW:], "entropy")
    if first is not None and last is not None and last < ENTROPY * first:
        symptoms["entropy"] = f"entropy fell from {first:.2f} to {last:.2f} nats a token"
    for name, rise, what in (
        ("repeated", REPEATED, "the share of repeated 3-grams"),
        ("truncated", TRUNCATED, "the share of answers at the token limit"),
    ):
        first, last = _mean(rows[:WINDOW], name), _mean(rows[-WINDOW:], name)
        if first is not None and last is not None and last > first + rise:
            symptoms[name] = f"{what} rose from {first:.0%} to {last:.0%}"
    if (last := _mean(rows[-WINDOW:], "kl")) is not None and last > KL:
        symptoms["kl"] = f"the KL divergence to the base reached {last:.2f} nats a token"
    return symptoms


def _mean(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row.get(name) is not None]
    return fmean(known) if known else None


def warning(rows: Sequence[Row], drawn: Drawn) -> str | None:
    """Return a warning with two of the last step's answers, or None when it shows no sign that is new.

    `rows` end with the last step's, `drawn` are its samples; the answers are those that repeat most.
    """
    earlier = signs(rows[:-1])
    new = [words for name, words in signs(rows).items() if name not in earlier]
    if not new:
        return None
    worst = [max(group, key=lambda sample: repeated_share(sample.tokens)) for group in drawn.groups]
    pairs = sorted(zip(drawn.problems, worst, strict=True), key=lambda pair: -repeated_share(pair[1].tokens))[
        :2
    ]
    answers = "; ".join(
        f"{shortened(problem.question)!r} was answered with {shortened(sample.text)!r}"
        for problem, sample in pairs
    )
    return f"The answers may be collapsing: {', '.join(new)}. {answers}."


def refuse_collapse(run: Run, session: SessionInfo) -> None:
    """Raise `ConfigError` when the policy's `collapse` is `stop` and a step of its line has a warning."""
    warned = [row for row in session.history if row.get("collapse")]
    if run.config.collapse != "stop" or not warned:
        return
    raise ConfigError(
        f"The training of {run.policy!r} stopped after step {session.step}. Step {warned[0]['step']}: "
        f"{warned[0]['collapse']} Lower `lr` or raise `loss_config.kl`, which starts again; to go on from "
        f"here, set `collapse` to warn."
    )


def refuse_without_signal(run: Run, session: SessionInfo) -> None:
    """Raise `ConfigError` when none of the last `NO_SIGNAL_STEPS` steps had a gradient.

    Steps in which every answer earned the full reward do not count: there is nothing left to learn.
    """
    rows = session.history[-NO_SIGNAL_STEPS:]
    if len(rows) < NO_SIGNAL_STEPS or not all(map(is_without_signal, rows)):
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
    examples = (
        f"{shortened(problem.question)!r} was answered with {shortened(group[0].text)!r}, expected "
        f"{shortened(expected(run.config, problem))!r}"
        for problem, group in pairs
    )
    return f"Answers: {'; '.join(examples)}. "


def expected(config: PolicyConfig, problem: Problem) -> str:
    """Return the answer that the policy's verifier compares with."""
    return render(config.contract, problem.answer) if config.verifier == "contract" else problem.answer


def shortened(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
