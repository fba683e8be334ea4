"""`graftwork chat`: talk to a policy, a revision or the base in the terminal, alone or side by side."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import GraftworkError
from flows.entry import PARAMS, ParamsFile, enter
from tasks.outcome import local_key

if TYPE_CHECKING:
    from engine.clients.engine import EngineClient
    from tasks.chat import Conversation

app = typer.Typer()
# A cold adapter is loaded first, and a slow machine needs its time for the first token.
TIMEOUT_S = 120.0


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="POLICY, POLICY@DIGEST, or the base's name.")],
    compare: Annotated[bool, typer.Option("--compare", help="Show the base's answers beside.")] = False,
    against: Annotated[
        str | None, typer.Option(help="Show the answers of this policy, revision or base beside.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sample at this temperature; 0 is greedy, as in scores.")
    ] = 0.0,
    params: ParamsFile = PARAMS,
) -> None:
    """Talk to a policy or a revision through the gateway; Ctrl-C stops an answer, Ctrl-D leaves.

    The policy's system prompt and examples come first, in both columns of a comparison. A conversation
    follows one side of a canary.
    """
    settings = enter(params)
    from engine.clients.engine import EngineClient
    from tasks.chat import Conversation, opening_turns

    with EngineClient(settings.url("engine"), local_key(settings), timeout_s=TIMEOUT_S) as engine:
        other = against or (str(engine.marker()["base_name"]) if compare else None)
        names = [model, other] if other else [model]
        for name in names:
            engine.find_model(name)
        turns = opening_turns(settings, model)
        conversations = [Conversation(name, turns) for name in names]
        for question in questions():
            try:
                answer(engine, conversations, question, temperature)
            except KeyboardInterrupt:
                typer.echo("\nStopped. The question and its answer are forgotten.")
            except GraftworkError as error:
                if not sys.stdin.isatty():
                    raise
                typer.secho(f"\n{error}", fg="red", err=True)


def questions() -> Iterator[str]:
    """Yield the lines that are typed, or those of a file or a pipe, until Ctrl-D, Ctrl-C or the end."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            if prompt:
                typer.echo()
            return
        if line.strip():
            yield line


def answer(
    engine: "EngineClient", conversations: "list[Conversation]", question: str, temperature: float
) -> None:
    """Ask each conversation the question, and show the answers as they come."""
    with ExitStack() as opened:
        asked = [opened.enter_context(each.ask(engine, question, temperature)) for each in conversations]
        show([revision for revision, _ in asked], [pieces for _, pieces in asked])


def show(revisions: list[str], answers: list[Iterator[str]]) -> None:
    """Print one answer as it comes, with its revision below, or several side by side.

    Without a terminal each answer is a line that begins with its revision.
    """
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from flows.display import console
    from tasks.chat import in_turns

    texts = [Text() for _ in answers]
    if not console.is_terminal:
        for number, piece in in_turns(answers):
            texts[number].append(piece)
        for revision, text in zip(revisions, texts, strict=True):
            console.print(Text(f"{revision}: ").append_text(text), soft_wrap=True)
    elif len(answers) == 1:
        for piece in answers[0]:
            console.print(Text(piece), end="", soft_wrap=True)
        console.print(Text(f"\n  {revisions[0]}", style="dim"))
    else:
        table = Table(*revisions, box=None, expand=True, pad_edge=False)
        for column in table.columns:
            column.ratio = 1
        table.add_row(*texts)
        with Live(table, console=console, vertical_overflow="visible") as live:
            for number, piece in in_turns(answers):
                texts[number].append(piece)
                live.refresh()
