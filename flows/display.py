"""Terminal output: services, training progress and tables, on one console for the process.

Without a terminal the same functions print plain lines.
"""

import contextlib
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from engine.base.progress import Progress as OnBase
from engine.base.resident import ensure_base
from engine.settings.params import Params
from engine.training.service.train_step import TrainStep
from tasks.outcome import Outcome, Stages
from tasks.progress import told_reward

console = Console(highlight=False)
if not console.is_terminal:
    # A log file has no width; wide enough that tables are not cut.
    console = Console(highlight=False, width=200)
PLAIN_LINES = 10
# How columns of seconds end.
SECONDS = " (s)"
steps = Progress(
    TextColumn("  {task.description:<12}", table_column=Column(no_wrap=True, max_width=22)),
    BarColumn(bar_width=6),
    MofNCompleteColumn(),
    TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
    console=console,
)


@contextlib.contextmanager
def progress_apart(apart: bool) -> Iterator[None]:
    """Show what the block prints on the console on stderr, since the standard output is a command's JSON."""
    console.stderr = apart
    try:
        yield
    finally:
        console.stderr = False


@contextlib.contextmanager
def live() -> Iterator[None]:
    """Show progress bars for all training runs in the block; finished bars stay on the screen."""
    with steps:
        yield
    for task in steps.task_ids:
        steps.remove_task(task)


@contextlib.contextmanager
def base_bar() -> Iterator[OnBase]:
    """Give a function that shows how far a base is made; the bar appears with the first step."""
    bar = steps.add_task("base", total=None, note="", visible=False)

    def progress(step: int, total: int, note: str) -> None:
        steps.start()
        steps.update(bar, completed=step, total=total, note=note, visible=True)

    try:
        yield progress
    finally:
        if steps.live.is_started:
            steps.stop()
        steps.remove_task(bar)


def base_builder(params: Params, stages: Stages) -> Callable[[], object]:
    """Return a function that builds or converts the base with a progress bar, if it is not there yet."""

    def build() -> object:
        with base_bar() as progress, stages("base"):
            return ensure_base(params.base, params.paths, progress)

    return build


def training_bar(policy: str, total: int) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that shows one training step, given its row of the ledger's `train_steps`.

    In a terminal each policy has a progress bar. Elsewhere it prints lines: the first step, the last, and
    about `PLAIN_LINES` between. A warning of a collapse is a line of its own in both.
    """
    if not console.is_terminal:
        return _training_lines(policy, total)
    # Hidden until the first step: a session that had finished before shows no bar.
    bar = steps.add_task(policy, total=total, note="", visible=False)

    def show(row: Mapping[str, Any]) -> None:
        steps.update(bar, completed=row["step"], note=step_note(row), visible=True)
        _print_warning(policy, row)

    return show


def _print_warning(policy: str, row: Mapping[str, Any]) -> None:
    if row.get("collapse"):
        # A model's words are no markup.
        console.print(Text(f"  {policy}, step {row['step']}: {row['collapse']}", style="yellow"))


def _training_lines(policy: str, total: int) -> Callable[[Mapping[str, Any]], None]:
    every, shown = -(-total // PLAIN_LINES), False

    def show(row: Mapping[str, Any]) -> None:
        nonlocal shown
        if not shown or row["step"] % every == 0 or row["step"] == total:
            shown = True
            console.print(f"  {policy:<12} step {row['step']} of {total}  {step_note(row)}")
        _print_warning(policy, row)

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
    console.print("`graftwork login` prints their users and passwords.")


def key_rows(keys: Sequence[Any], now: float) -> list[dict[str, Any]]:
    """Return a row for each key, for people; `now` decides which have expired."""
    return [
        {
            "id": key.id,
            "hash": key.hash[:12],
            "state": "active" if key.is_in_force(now) else "revoked" if key.revoked_at else "expired",
            "tenant": key.owner,
            "roles": " ".join(key.roles),
            "policies": " ".join(key.policies),
            "limits": " ".join(f"{name}={value:g}" for name, value in key.limits.items()),
            "expires": _minute(key.expires_at),
        }
        for key in keys
    ]


def tenant_rows(tenants: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a row for each tenant, for people."""
    return [
        {
            "tenant": tenant.name,
            "limits": " ".join(f"{name}={value:g}" for name, value in tenant.limits.items()),
            "weight": tenant.weight,
            "suspended": _minute(tenant.suspended_at),
            "reason": tenant.suspended_for or "",
        }
        for tenant in tenants
    ]


def _minute(at: float | None) -> str:
    """Return a time (epoch seconds) to the minute, in UTC; of None nothing."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) if at else ""


def print_rows(rows: Sequence[Mapping[str, Any]], fold: Collection[str] = ()) -> None:
    """Print rows of the same columns as a table; a column that is empty in every row is left out.

    Where the terminal is too narrow, cells of the columns `fold` wrap; the others keep to one line.
    """
    if not rows:
        console.print("None.")
        return
    # Brackets in a person's own text are no markup.
    cells = {name: [Text("" if row[name] is None else str(row[name])) for row in rows] for name in rows[0]}
    shown = {name: column for name, column in cells.items() if any(column)}
    table = Table(box=None, pad_edge=False)
    for name in shown:
        table.add_column(name, no_wrap=name not in fold, overflow="fold" if name in fold else "ellipsis")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def print_links(links: Sequence[Any]) -> None:
    """Print the links of a chain, each with a sentence; one of which nothing is known is dim."""
    table = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for link in links:
        says = Text(link.says) if link.known else Text(f"not known: {link.says}", style="dim")
        table.add_row(link.name, says)
    console.print(table)


def print_row(row: Mapping[str, Any]) -> None:
    """Print one line of a table, its columns below each other; sentences wrap, digests and paths do not."""
    width = max(len(name) for name in row)
    hanging = "\n" + " " * (width + 4)
    for name, value in row.items():
        room = max(20, console.width - len(hanging) + 1)
        lines = textwrap.wrap(str(value), room, break_long_words=False, break_on_hyphens=False)
        console.print(Text(f"  {name:<{width}}  {hanging.join(lines)}"), soft_wrap=True)


def print_outcome(params: Params, outcome: Outcome) -> None:
    """Print the main job's table, its stages, and the pages with more."""
    columns = list(dict.fromkeys(name for row in outcome.rows for name in row))
    timed = [name for name in columns if name.endswith(SECONDS)]
    others = [name for name in columns if name not in timed]
    print_rows([{name: row.get(name, "–") for name in others} for row in outcome.rows], fold=("revision",))
    print_row(
        {
            row["revision"]: ", ".join(
                f"{name.removesuffix(SECONDS)} {row[name]} s" for name in timed if name in row
            )
            for row in outcome.rows
        }
    )
    stages = {**outcome.summary["stages"], "whole job": outcome.summary["seconds"]}
    console.print("  ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items()))
    if shadow := outcome.summary.get("shadow"):
        exposed = f"Requests of users that it answered: {shadow['exposed']}."
        console.print(f"The bad revision in its shadow: {shadow['verdict']}. {exposed}")
    bad = outcome.summary["bad_revision"]
    console.print(
        f"The bad revision: {bad['verdict']} {bad['seconds_to_rollback']} s after its first user. "
        f"Requests that it answered afterwards: {bad['requests_after']}."
    )
    console.print(f"Report: {outcome.report}")
    given = "" if params.source else f" --params {params.paths.root / 'params.json'}"
    console.print(f"To browse runs, versions and releases, run `graftwork up{given}` and open:")
    print_addresses(params)
