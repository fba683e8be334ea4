"""Commands about scores: score on the live engine, and what DVC reproduces."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.base.progress import progress_bar
from engine.errors import ConfigError
from engine.process_reaper import die_with_parent
from engine.settings.params import served_name, split_served_name
from flows.entry import PARAMS, ParamsFile, catalog, check, enter, require_services
from tasks.outcome import local_key, score_row

app = typer.Typer()
Stage = Literal["base", "suites", "adapt", "revision", "evaluate", "report"]


@app.command()
def score(
    revision: Annotated[str | None, typer.Argument(help="POLICY@DIGEST, or POLICY for the base.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Put the evaluation of `dvc repro` into the ledger.")
    ] = False,
    compare: Annotated[
        Path | None, typer.Option(help="Compare it with metrics.json and items.jsonl of this directory.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Allowed difference of a mean score; else evaluate.tolerance.")
    ] = None,
    params: ParamsFile = PARAMS,
) -> None:
    """Score a revision, or with a bare POLICY the base, on the policy's suite.

    With --record or --compare nothing is scored: they take what `dvc repro` has written.
    """
    if revision and not (record or compare):
        score_live(revision, params)
    elif revision or not (record or compare):
        raise ConfigError("Give a revision to score, or --record or --compare for what `dvc repro` wrote.")
    else:
        use_evaluation(record, compare, tolerance, params)


def score_live(revision: str, params: Path) -> None:
    """Score on the running engine, into the ledger."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from tasks.score import score as score_items

    full = catalog(params).revisions.get(policy, digest).digest if digest else None
    print_row(
        score_row(score_items(settings, policy, full, settings.policy(policy).suite, local_key(settings)))
    )


def use_evaluation(record: bool, compare: Path | None, tolerance: float | None, params: Path) -> None:
    """Compare and record the evaluation beside the file of settings."""
    settings = enter(params)
    from flows.display import print_rows
    from tasks import evaluation

    here = params.absolute().parent
    ours = evaluation.read_evaluation(here)
    if compare:
        allowed = settings.evaluate.tolerance if tolerance is None else tolerance
        print_rows(evaluation.compare(ours, evaluation.read_evaluation(compare), allowed))
        typer.echo(f"Both scores are within the tolerance of {allowed}.")
    if record:
        rows = evaluation.record(settings, here, ours)
        typer.echo(
            f"{rows} scores are on their way to the ledger; those that it has already stay as they are."
        )


@app.command()
def pin(policy: str, params: ParamsFile = PARAMS) -> None:
    """Write the policy's champion to params.yaml, for `dvc repro` to evaluate."""
    settings = enter(params)
    settings.policy(policy)
    from tasks.evaluation import pin_revision

    digest = pin_revision(params, policy, catalog(params).routes.get(policy).champion)
    typer.echo(f"{params} now evaluates {served_name(policy, digest)}; run `dvc repro`.")


@app.command(hidden=True)
def stage(name: Stage, params: ParamsFile = PARAMS) -> None:
    """Run one stage of dvc.yaml."""
    settings = enter(params)
    check(settings, [settings.evaluate.policy])
    from flows import display
    from tasks import evaluation, stage_evaluate, stages

    # DVC may be killed; its stage's services must not stay behind.
    die_with_parent(os.getppid())
    if name == "base":
        with progress_bar(settings.base.name) as progress:
            stages.build_base(settings, progress)
    elif name == "suites":
        stages.prepare_suites(settings)
    elif name == "adapt":
        with display.live():
            stages.adapt(settings, display.print_service, display.training_bar)
    elif name == "revision":
        stages.take_revision(settings)
    elif name == "evaluate":
        stage_evaluate.evaluate(settings, display.print_service)
    else:
        evaluation.write_report(params.absolute().parent, stages.files_of(settings).report)
