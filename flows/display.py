"""Terminal output: services, training progress and tables, on one console for the process.

Without a terminal the same functions print plain lines.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from engine.settings.params import Params
from engine.training.service.train_step import TrainStep
from tasks.outcome import Outcome, Stages
from tasks.progress import told_reward

console = Console(highlight=False)
if not console.is_terminal:
    # A log file has no width; wide enough that tables are not cut.
    console = Console(highlight=False, width=160)
PLAIN_LINES = 10
steps = Progress(
    TextColumn("  {task.description:<12}", table_column=Column(no_wrap=True, max_width=22)),
    BarColumn(bar_width=10),
    MofNCompleteColumn(),
    TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
    console=console,
)


@contextlib.contextmanager
def live() -> Iterator[None]:
    """Show progress bars for all training runs in the block; finished bars stay on the screen."""
    with steps:
        yield
    for task in steps.task_ids:
        steps.remove_task(task)


def base_builder(params: Params, stages: Stages) -> Callable[[], object]:
    """Return a function that builds the base with a progress bar, if it is not built yet."""
    from engine.base.resident import ensure_base

    def build() -> object:
        bar = steps.add_task("base", total=None, note="", visible=False)

        def progress(step: int, total: int, loss: float) -> None:
            steps.start()
            steps.update(bar, completed=step, total=total, note=f"loss {loss:.3f}", visible=True)

        try:
            with stages("base"):
                return ensure_base(params.base, params.paths, progress)
        finally:
            if steps.live.is_started:
                steps.stop()
            steps.remove_task(bar)

    return build


def training_bar(policy: str, total: int) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that shows one training step, given its row of the ledger's `train_steps`.

    In a terminal each policy has a progress bar. Elsewhere it prints lines: the first step, the last, and
    about `PLAIN_LINES` between.
    """
    if not console.is_terminal:
        return _training_lines(policy, total)
    # Hidden until the first step: a session that had finished before shows no bar.
    bar = steps.add_task(policy, total=total, note="", visible=False)

    def show(row: Mapping[str, Any]) -> None:
        steps.update(bar, completed=row["step"], note=step_note(row), visible=True)

    return show


def _training_lines(policy: str, total: int) -> Callable[[Mapping[str, Any]], None]:
    every, shown = -(-total // PLAIN_LINES), False

    def show(row: Mapping[str, Any]) -> None:
        nonlocal shown
        if not shown or row["step"] % every == 0 or row["step"] == total:
            shown = True
            console.print(f"  {policy:<12} step {row['step']} of {total}  {step_note(row)}")

    return show


def step_note(row: Mapping[str, Any]) -> str:
    """Return a training step in about 60 characters: reward, importance ratio, speed, staleness, seconds."""
    step = TrainStep.of(row)
    parts = [told_reward(row)]
    if step.importance_ratio is not None:
        parts.append(f"ratio {step.importance_ratio:.5f}")
    if step.tokens_per_s is not None:
        parts.append(f"{step.tokens_per_s:,.0f} tokens/s")
    if step.staleness:
        parts.append(f"stale {step.staleness:.2g}")
    return "  ".join([*parts, f"{sum(step.phases.values()):.1f} s"])


def print_service(name: str, state: str) -> None:
    """Print a service's name and state."""
    console.print(f"  {name:<12}{state}")


def print_stage(sentence: str) -> None:
    """Print what a stage does, in bold."""
    console.print(f"[bold]{sentence}[/bold]")


def print_addresses(params: Params) -> None:
    """Print the URLs of the web pages."""
    for name, what in (("prefect", "flow runs"), ("mlflow", "registry"), ("controller", "releases")):
        console.print(f"  {name:<12}{params.url(name)}  ({what})")


def print_status(states: Sequence[Any]) -> None:
    """Print the services' states as a table."""
    table = Table("service", "state", "address", "pid", "seconds")
    for state in states:
        pid = str(state.pid) if state.pid else ""
        table.add_row(state.name, state.state, state.url, pid, f"{state.seconds:.0f}")
    console.print(table)


def print_keys(keys: Sequence[Any]) -> None:
    """Print API keys as a table, each by the first digits of its hash."""
    table = Table("hash", "owner", "scope", "state")
    for key in keys:
        table.add_row(key.hash[:12], key.owner, key.scope, "revoked" if key.revoked_at else "active")
    console.print(table)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same columns as a table."""
    if not rows:
        console.print("None.")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def print_links(links: Sequence[Any]) -> None:
    """Print the links of a chain, each with its sentence; an unknown link is dim."""
    table = Table.grid(Column(style="bold", no_wrap=True), Column(), padding=(0, 2))
    for link in links:
        says = Text(link.says) if link.known else Text(f"not known: {link.says}", style="dim")
        table.add_row(link.name, says)
    console.print(table)


def print_row(row: Mapping[str, Any]) -> None:
    """Print one row, a column on each line."""
    width = max(len(name) for name in row)
    for name, value in row.items():
        console.print(f"  {name:<{width}}  {value}")


def print_outcome(params: Params, outcome: Outcome) -> None:
    """Print the main job's table, its stages, and the pages with more."""
    columns = list(dict.fromkeys(name for row in outcome.rows for name in row))
    table = Table(*columns)
    for row in outcome.rows:
        table.add_row(*(str(row.get(name, "–")) for name in columns))
    console.print(table)
    stages = {**outcome.summary["stages"], "whole job": outcome.summary["seconds"]}
    console.print("  ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items()))
    bad = outcome.summary["bad_revision"]
    console.print(
        f"The bad revision: {bad['verdict']} {bad['seconds_to_rollback']} s after its first user. "
        f"Requests that it answered afterwards: {bad['requests_after']}."
    )
    console.print(f"Report: {outcome.report}")
    given = "" if params.source else f" --params {params.paths.root / 'params.json'}"
    console.print(f"To browse runs, versions and releases, run `graftwork up{given}` and open:")
    print_addresses(params)
