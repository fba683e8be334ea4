"""`graftwork score` and `graftwork repro`: scores by the live engine, and the evaluation of `dvc repro`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.base.fitting import fitted_policy
from engine.base.resident import ensure_base
from engine.catalog.records import served_name, split_served_name
from engine.errors import BaseModelError, ConfigError
from engine.services import lifecycle as services
from engine.settings.params import Params
from flows.cli.plan import MEASURE
from flows.entry import PARAMS, Json, ParamsFile, catalog, check, enter, print_done, print_json
from tasks.outcome import local_key, part_json, part_row, perplexity_row, score_json, score_row

if TYPE_CHECKING:
    from engine.quality.regression import Target
    from tasks.general import Perplexity

app = typer.Typer()
# A mean score: 4 of 200 items.
TOLERANCE = 0.02


@app.command()
def score(
    revisions: Annotated[
        list[str],
        typer.Argument(
            metavar="REVISION...",
            help="POLICY@DIGEST, or POLICY to score the base; several are scored in one pass.",
        ),
    ],
    suite: Annotated[
        str | None, typer.Option(help="Score on this suite. Without it: on that of each policy.")
    ] = None,
    reads: Annotated[
        Literal["all", "suite", "task"],
        typer.Option(
            metavar="all|suite|task",
            help="Read all items, or as many as show whether a revision has fallen below its champion, else "
            "below the base, by release.score_margin: on the suite, or on the task that it is a sample of.",
        ),
    ] = "all",
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Score revisions on a suite with the running engine, into the ledger.

    With a bare POLICY, score the base. Without --suite, where the policy's setting `general` is on, also
    measure the perplexity of base and revision on general text.
    """
    settings = enter(params)
    named = [split_served_name(revision) for revision in revisions]
    check(settings, [policy for policy, digest in named if not (suite and digest)])
    services.require_running(settings)
    from flows.display import print_row
    from tasks.score import scores

    key, rows = local_key(settings), list[dict[str, Any]]()
    with catalog(params) as index:
        full = [(policy, revision_here(settings, index, policy, digest)) for policy, digest in named]
    suites: dict[str, list[tuple[str, str | None]]] = {}
    for policy, digest in dict.fromkeys(full):
        on = suite or fitted_policy(settings, policy).config.suite
        suites.setdefault(on, []).append((policy, digest))
    if reads != "all":
        return _read_parts(settings, suites, reads, key, as_json)
    for name, together in suites.items():
        for scored in scores(settings, together, name, key):
            general = [] if suite else _general(settings, scored.policy, scored.digest, key)
            rows.append(score_json(scored) | {"general": [asdict(one) for one in general]})
            if not as_json:
                for row in [score_row(scored), *map(perplexity_row, general)]:
                    print_row(row)
    if as_json:
        print_json(rows if len(revisions) > 1 else rows[0])


def _read_parts(
    settings: Params,
    suites: dict[str, list[tuple[str, str | None]]],
    target: "Target",
    key: str,
    as_json: bool,
) -> None:
    """Score each revision on a part of its suite beside its champion, else beside the base."""
    from flows.display import print_row
    from tasks.part_score import made_at, score_champion, score_part
    from tasks.score import score as score_all

    named = [(suite, policy, digest) for suite, together in suites.items() for policy, digest in together]
    if bases := [policy for _, policy, digest in named if not digest]:
        raise ConfigError(f"Give POLICY@DIGEST with --reads: {bases[0]!r} alone is the base.")
    rows = list[dict[str, Any]]()
    for suite, policy, digest in named:
        champion = score_champion(settings, policy, str(digest), suite, key)
        baseline = champion or score_all(settings, policy, None, suite, key)
        made = made_at(settings, policy, str(digest))
        part = score_part(settings, policy, str(digest), baseline, key, target, made)
        rows.append(part_json(part))
        if not as_json:
            print_row(part_row(part))
    if as_json:
        print_json(rows if len(rows) > 1 else rows[0])


def _general(settings: Params, policy: str, digest: str | None, key: str) -> "list[Perplexity]":
    """Measure what the gate compares, a revision and the base, where the policy has it measured."""
    if not fitted_policy(settings, policy).config.general:
        return []
    from tasks.general import score_general

    return [score_general(settings, policy, one, key) for one in dict.fromkeys((None, digest))]


def revision_here(settings: Params, index: Any, policy: str, digest: str | None) -> str | None:
    """Return a revision's whole digest; raises `BaseModelError` where it is of another base."""
    if not digest:
        return None
    revision = index.revisions.get(policy, digest)
    if revision.base != ensure_base(settings.base, settings.paths).digest:
        raise BaseModelError(f"{served_name(policy, digest)} is of another base than {settings.base.name!r}.")
    return str(revision.digest)


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
