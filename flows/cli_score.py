"""Commands about scores."""

import typer

from engine.config import split_served_name
from flows.entry import PARAMS, ParamsFile, Revision, catalog, check, enter, require_services

app = typer.Typer()


@app.command()
def score(revision: Revision, params: ParamsFile = PARAMS) -> None:
    """Score a revision, or with a bare POLICY the base, on the policy's suite."""
    settings = enter(params)
    policy, digest = split_served_name(revision)
    check(settings, [policy])
    require_services(settings)
    from flows.display import print_row
    from tasks.outcome import local_key, score_row
    from tasks.score import score as score_items

    full = catalog(params).revision(policy, digest).digest if digest else None
    print_row(
        score_row(score_items(settings, policy, full, settings.policy(policy).suite, local_key(settings)))
    )
