"""`graftwork simulate`: users who ask a policy and rate its answers, where there are none yet."""

from typing import Annotated

import typer

from flows.entry import PARAMS, Json, ParamsFile, check, enter, print_json
from tasks.outcome import local_key, release_row

app = typer.Typer()


@app.command()
def simulate(
    policy: Annotated[str, typer.Argument(help="Policy to ask.")],
    rate: Annotated[float, typer.Option(min=0.01, max=1000, help="Questions a second.")] = 10.0,
    rated: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the answers that users rate. Default: all; without a verifier of answers, none.",
        ),
    ] = None,
    users: Annotated[
        int, typer.Option(min=1, help="Number of different users; they ask one after another.")
    ] = 1000,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Stop after this time. Default: when a release ends, or at Ctrl-C."),
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Have simulated users ask held-out questions and rate the answers by the policy's verifier.

    With a release of the policy, running or started meanwhile, it ends when that release ends; else at Ctrl-C
    or after --seconds. Exits with an error when a user got no answer.
    """
    settings = enter(params)
    check(settings, [policy])
    from engine.clients.engine import EngineClient
    from flows.display import console, print_row, print_rows, progress_apart
    from tasks.simulated_users import Population, wait_for_release
    from tasks.simulated_users import users as come

    with EngineClient(settings.url("engine"), local_key(settings)) as engine:
        engine.find_model(policy)
    with progress_apart(as_json), console.status("The first users come.") as shown:
        with come(settings, policy, Population(rate, rated, users)) as crowd:
            ended, is_stopped = None, False
            try:
                ended = wait_for_release(settings, crowd, seconds, lambda: shown.update(f"{crowd}."))
            except KeyboardInterrupt:
                # Those who wait still get their answers, and the summary has them.
                is_stopped = True
    if as_json:
        print_json(crowd.to_json(ended))
    else:
        print_rows(crowd.rows(), fold=("revision",))
        typer.echo(f"{crowd}.")
        if ended:
            print_row(release_row(ended))
    crowd.refuse_unanswered()
    if is_stopped:
        raise typer.Exit(130)
