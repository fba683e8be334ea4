"""`graftwork score` and `graftwork repro`: scores by the live engine, and the evaluation of `dvc repro`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.base.fitting import fitted_policy
from engine.catalog.records import served_name, split_served_name
from engine.errors import ConfigError
from engine.services import lifecycle as services
from flows.cli.plan import MEASURE
from flows.entry import PARAMS, Json, ParamsFile, catalog, check, enter, print_done, print_json
from tasks.outcome import local_key, perplexity_row, score_json, score_row

app = typer.Typer()
# A mean score: 4 of 200 items.
TOLERANCE = 0.02


@app.command()
def score(
    revision: Annotated[str, typer.Argument(help="POLICY@DIGEST, or POLICY to score the base.")],
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Score a revision on its policy's suite with the running engine, into the ledger.

    With a bare POLICY, score the base. Where the policy's setting `general` is on, also measure the
    perplexity of base and revision on general text.
    """
    settings = enter(params)
    policy, digest = split_served_name(revision)
    check(settings, [policy])
    services.require_running(settings)
    from flows.display import print_row
    from tasks.score import score as score_items

    full = catalog(params).revisions.get(policy, digest).digest if digest else None
    config, key = fitted_policy(settings, policy).config, local_key(settings)
    scored, general = score_items(settings, policy, full, config.suite, key), []
    if config.general:
        from tasks.general import score_general

        # The gate compares a revision with the base.
        general = [score_general(settings, policy, one, key) for one in dict.fromkeys((None, full))]
    if as_json:
        return print_json(score_json(scored) | {"general": [asdict(one) for one in general]})
    for row in [score_row(scored), *map(perplexity_row, general)]:
        print_row(row)


@app.command(rich_help_panel=MEASURE)
def repro(
    pin: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Write this policy's champion to the settings file, for `dvc repro` to evaluate.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Compare the evaluation with metrics.json and items.jsonl of this directory."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="With --compare: allow this difference of a mean score.")
    ] = TOLERANCE,
    record: Annotated[bool, typer.Option("--record", help="Record the evaluation in the ledger.")] = False,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Say what `dvc repro` evaluates, or use the evaluation that it wrote beside the settings file."""
    settings = enter(params)
    from flows.display import print_rows
    from tasks import evaluation

    if pin:
        settings.policy(pin)
        digest = evaluation.pin_revision(params, pin, catalog(params).routes.get(pin).champion)
        pinned = f"{params} now evaluates {served_name(pin, digest)}; run `dvc repro`."
        print_done(as_json, pinned, policy=pin, digest=digest)
    elif not (record or compare):
        raise ConfigError("Give --pin POLICY, or --record or --compare for the evaluation of `dvc repro`.")
    else:
        here = params.absolute().parent
        ours, done, compared = evaluation.read_evaluation(here), list[str](), list[dict[str, Any]]()
        if compare:
            compared = evaluation.compare(ours, evaluation.read_evaluation(compare), tolerance)
            if not as_json:
                print_rows(compared)
            done.append(f"Every mean score is within the tolerance of {tolerance}.")
        if record:
            rows = evaluation.record(settings, here, ours)
            done.append(f"Sent {rows} scores to the ledger. Scores that it already has are not changed.")
        print_done(as_json, "\n".join(done), compared=compared)
