"""Commands for scores: score on the live engine, and the stages that `dvc repro` runs."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.base.fitting import fitted_policy
from engine.base.progress import progress_bar
from engine.catalog.records import served_name, split_served_name
from engine.errors import ConfigError
from engine.process_reaper import die_with_parent
from flows.entry import PARAMS, ParamsFile, catalog, check, enter, require_services
from tasks.outcome import local_key, perplexity_row, score_row

app = typer.Typer()
# A mean score: 4 of 200 items.
TOLERANCE = 0.02
Stage = Literal["base", "suites", "adapt", "revision", "evaluate", "report"]


@app.command()
def score(
    revision: Annotated[
        str | None, typer.Argument(help="POLICY@DIGEST, or POLICY to score the base.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record the evaluation of `dvc repro` in the ledger.")
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Compare the evaluation of `dvc repro` with metrics.json and items.jsonl of this directory."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="With --compare: allow this difference of a mean score.")
    ] = TOLERANCE,
    params: ParamsFile = PARAMS,
) -> None:
    """Score a revision on its policy's suite with the running engine, into the ledger.

    With a bare POLICY, score the base. Where the policy's setting `general` is on, also measure the
    perplexity of base and revision on general text. With --record or --compare, nothing is scored: they use
    the evaluation that `dvc repro` wrote.
    """
    if revision and not (record or compare):
        score_live(revision, params)
    elif revision or not (record or compare):
        raise ConfigError(
            "Give a revision to score, or --record or --compare to use the evaluation that `dvc repro` wrote."
        )
    else:
        use_evaluation(record, compare, tolerance, params)


def score_live(revision: str, params: Path) -> None:
    """Score a revision, or the base, on the running engine and record the scores."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from tasks.score import score as score_items

    full = catalog(params).revisions.get(policy, digest).digest if digest else None
    config, key = fitted_policy(settings, policy).config, local_key(settings)
    print_row(score_row(score_items(settings, policy, full, config.suite, key)))
    if config.general:
        from tasks.general import score_general

        # The gate compares a revision with the base.
        for one in dict.fromkeys((None, full)):
            print_row(perplexity_row(score_general(settings, policy, one, key)))


def use_evaluation(record: bool, compare: Path | None, tolerance: float, params: Path) -> None:
    """Compare, record, or both, the evaluation that lies beside the settings file."""
    settings = enter(params)
    from flows.display import print_rows
    from tasks import evaluation

    here = params.absolute().parent
    ours = evaluation.read_evaluation(here)
    if compare:
        print_rows(evaluation.compare(ours, evaluation.read_evaluation(compare), tolerance))
        typer.echo(f"Every mean score is within the tolerance of {tolerance}.")
    if record:
        rows = evaluation.record(settings, here, ours)
        typer.echo(f"Sent {rows} scores to the ledger. Scores that it already has are not changed.")


@app.command()
def pin(
    policy: Annotated[str, typer.Argument(help="Policy whose champion to evaluate.")],
    params: ParamsFile = PARAMS,
) -> None:
    """Write the policy's champion to the settings file, for `dvc repro` to evaluate."""
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

    # The stage's services must end with DVC, also when it is killed.
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
