"""Read-only commands: status, sessions, ls, why, replay, report.

`status` asks the services' supervisor and `sessions` the trainer; the others read the catalog and the
ledger's snapshot, so they also work while nothing runs.
"""

import time
from typing import Annotated, Any

import typer

from engine.services import lifecycle as services
from flows.entry import PARAMS, Json, ParamsFile, enter
from tasks.publish import write_report

app = typer.Typer()
PATIENCE_S = 5.0
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many lines, newest first.")]


@app.command()
def status(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Show each service's state, address and age, running releases, alarms, and runs that found no slot."""
    settings = enter(params)
    from tasks.look import plain, standing
    from tasks.stuck_runs import KeptOutRuns

    states, now = services.status(settings), standing(settings)
    if as_json:
        return print_json({"services": plain(states), **now})
    from flows.display import print_status

    print_status(states)
    for alarm in now["alarms"]:
        say(f"Alarm: {alarm}")
    if now["frozen"]:
        say("Releases are frozen: promotions and canaries are blocked. `graftwork thaw` allows them again.")
    for release in now["releases"]:
        say(f"The release of {release['revision']} is at step {release['step']}. {release['reason']}")
    for one in now["engines"]:
        drains = ", draining" if one["draining"] else ""
        say(f"Engine {one['id']} at {one['url']}: last beat {one['beat_s']:g} s ago{drains}.")
    for notice in now["notices"]:
        say(f"{notice['name']}: {notice['reason']}")
    for row in now["cancelled"]:
        say(str(KeptOutRuns(**row)))


@app.command()
def sessions(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """List the trainer's sessions: step, memory, bytes, last call, holder and queue."""
    settings = enter(params)
    from engine.training.service.client import TrainerClient

    with TrainerClient.of(settings, patience_s=PATIENCE_S) as trainer:
        rows = trainer.sessions()
    if as_json:
        return print_json(rows)
    from flows.display import print_rows
    from tasks.look import shown_session

    print_rows([shown_session(row) for row in rows], fold=("session", "writer"))


@app.command()
def ls(
    policy: Annotated[
        str | None, typer.Argument(help="List this policy's revisions. Default: list the policies.")
    ] = None,
    limit: Limit = 20,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """List policies, or one policy's revisions, with scores, users' rewards and verdicts."""
    settings = enter(params)
    from tasks import look

    fresh = look.as_of(settings)
    if policy is None:
        policies, total = look.policies(settings, limit)
        shown, rows = [look.shown_policy(row) for row in policies], look.plain(policies)
    else:
        revisions, total = look.revisions(settings, policy, limit)
        shown, rows = [look.shown_revision(row, time.time()) for row in revisions], look.plain(revisions)
    if as_json:
        kind = "policies" if policy is None else "revisions"
        return print_json({"as_of": fresh, "total": total, kind: rows})
    from flows.display import print_rows

    print_rows(shown, fold=("policy", "canary", "users"))
    say(f"{len(rows)} of {total} shown; `--limit` shows more." if total > len(rows) else "")
    say(look.note(fresh))


@app.command()
def why(
    subject: Annotated[str, typer.Argument(help="Response id, POLICY@DIGEST, digest or policy.")],
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Explain where an answer or a revision comes from: verdict, scores, run, data, commit."""
    settings = enter(params)
    from tasks import look

    fresh, chain = look.as_of(settings), look.explain(settings, subject)
    if as_json:
        return print_json({"as_of": fresh, **look.plain(chain)})
    from flows.display import print_links

    print_links(chain.links)
    say(look.note(fresh))


@app.command()
def replay(
    release: Annotated[str, typer.Argument(help="Release id; or POLICY, POLICY@DIGEST: its newest.")],
    alpha: Annotated[
        float | None, typer.Option(min=1e-9, max=0.5, help="Level. Default: the release's own.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(min=0, max=1, help="Margin of the reward. Default: the release's own.")
    ] = None,
    as_json: Json = False,
    params: ParamsFile = PARAMS,
) -> None:
    """Judge a release's canary again from the ledger, with another level or margin; changes nothing."""
    settings = enter(params)
    from tasks.replay import replay as judge_again

    found = judge_again(settings, release, alpha, margin)
    if as_json:
        return print_json(found.row())
    judged = f"at level {found.alpha:g} and margin {found.margin:g}"
    units = f"{found.canary_units} canary and {found.baseline_units} baseline units"
    say(f"{found.revision} {judged}: {found.verdict} after {found.seconds:.1f} s, {units}.")
    say(f"  {found.reason}")
    say(f"Recorded: {found.recorded}. {found.recorded_reason}")


@app.command()
def report(as_json: Json = False, params: ParamsFile = PARAMS) -> None:
    """Write the HTML report of everything in the ledger to the state directory, and print its path."""
    settings = enter(params)
    now = time.time()
    path = write_report(settings, settings.paths.runs / "report.html", 0.0, now, {})
    if as_json:
        return print_json({"path": str(path)})
    typer.echo(f"The report is {path}.")


def say(sentence: str) -> None:
    """Print a sentence, unless it is empty."""
    if sentence:
        typer.echo(sentence)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    import json

    typer.echo(json.dumps(value, indent=2))
